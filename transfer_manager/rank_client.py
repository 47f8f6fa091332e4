"""The client to rank processes: one I/O thread owns every socket, process and task in flight."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ipc.codec import decode, encode
from ipc.errors import CodecError, IPCError, QueueDisconnectedError
from ipc.task_queue import Poller, TaskQueue, Wakeup, new_context
from transfer_manager.client import OnResult, RankStatus
from transfer_manager.config import TransferConfig
from transfer_manager.errors import RankStartError
from transfer_manager.layout import RankLayout
from transfer_manager.rank_memory import KVViews, create_rank_memory
from transfer_manager.rank_process import RankProcess
from transfer_manager.supervisor import Phase, RankSupervisor
from transfer_manager.task import (
    DoneMessage,
    FromRank,
    PartSetup,
    RankResult,
    RankSetup,
    ReadyMessage,
    StopMessage,
    SwapMessage,
    TransferResult,
    TransferTask,
    pack_ids,
)

logger = logging.getLogger(__name__)

# A rank skips tasks whose deadline has passed, so one that runs answers soon after; one that does not is stuck.
_ANSWER_GRACE_SECONDS = 0.5


@dataclass
class _InFlight:
    task: TransferTask
    waiting: set[int]
    results: list[RankResult] = field(default_factory=list)


class RankClient:
    """See `transfer_manager.client.TransferClient`.

    The I/O thread spawns the ranks, so that its end (which is the client's, or the engine's) is theirs. It never takes
    a lock of the caller except inside `on_result`. The memory is taken by the constructor and given up by `stop`.
    """

    def __init__(self, config: TransferConfig, layout: RankLayout, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self._config = config
        self._layout = layout
        self._num_blocks = (num_gpu_blocks, num_cpu_blocks)
        self._memory = create_rank_memory(config.tp_size, layout, num_gpu_blocks, num_cpu_blocks)
        self._ranks: list[RankSupervisor] = []
        self._lock = threading.Lock()  # guards _open, _num_tasks and _outbox
        self._open = False
        self._num_tasks = 0
        self._outbox: deque[TransferTask] = deque()
        self._all_ready = threading.Event()
        self._stopping = False
        self._stop_lock = threading.Lock()
        self._started = threading.Event()
        self._start_failure: str | None = None
        self._in_flight: dict[int, _InFlight] = {}
        self._wakeup = Wakeup()
        self._poller = Poller()
        self._thread: threading.Thread | None = None

    # -- any thread

    def start(self, on_result: OnResult) -> None:
        self._on_result = on_result
        config = self._config
        self._context = new_context()
        for rank in range(config.tp_size):
            supervisor = RankSupervisor(rank, config, self._memory[rank].signal, self._new_queue, self._spawn)
            self._ranks.append(supervisor)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="transfer-io", daemon=True)
        self._thread.start()
        # the thread ends the start itself at its deadline and then needs time to reap
        try:
            self._started.wait(config.start_timeout_seconds + config.stop_timeout_seconds + 5)
        except BaseException:  # Ctrl-C: nobody will get to call stop
            self.stop()
            raise
        if self._start_failure is not None or not self._open or not self._started.is_set():
            self.stop()
            raise RankStartError(self._start_failure or "the ranks did not start within their deadline")

    def submit(self, task: TransferTask) -> None:
        with self._lock:
            accepted = self.available
            if accepted:
                self._num_tasks += 1
                self._outbox.append(task)
        if accepted:
            self._wakeup.set()
        else:
            self._on_result(_failed(task, range(self._config.tp_size), "the ranks cannot take a task now"))

    @property
    def available(self) -> bool:
        return self._open and self._all_ready.is_set() and self._num_tasks < self._config.max_tasks_in_flight

    def wait_ready(self, timeout_seconds: float) -> bool:
        return self._all_ready.wait(timeout_seconds)

    def statuses(self) -> list[RankStatus]:
        return [
            RankStatus(
                rank=r.rank,
                up=r.phase is Phase.READY,
                num_restarts=r.num_restarts,
                pid=process.pid if (process := r.process) is not None else None,
            )
            for r in self._ranks
        ]

    def kv_views(self, rank: int) -> KVViews:
        return self._memory[rank].kv_views()

    def stop(self) -> None:
        self._stopping = True
        self._wakeup.set()
        with self._stop_lock:  # of two callers the second waits for the first
            if self._thread is not None:
                self._thread.join(self._config.stop_timeout_seconds + 10)
                if self._thread.is_alive():
                    logger.error("event=io_thread_stuck action=leave_it_what_it_uses")  # in the caller's callback
                    return
                self._thread = None
            self._wakeup.close()
            for memory in self._memory:
                memory.close()

    # -- the I/O thread

    def _run(self) -> None:
        try:
            self._poller.register(self._wakeup.fd, self._wakeup)
            for rank in self._ranks:
                rank.tick(time.monotonic())
                self._watch(rank)
            while not self._stopping:
                self._turn()
        finally:  # also when an invariant broke: callers must get their answers and no rank may stay
            self._shut_down()

    def _turn(self) -> None:
        for key in self._poller.wait(self._next_timeout()):
            if key is self._wakeup:
                self._wakeup.clear()
            elif isinstance(key, RankSupervisor):
                self._receive(key)
        now = time.monotonic()
        self._reap(now)
        self._kill_stuck(now)
        for rank in self._ranks:
            if rank.phase in (Phase.DOWN, Phase.OFF) and not self._started.is_set():
                self._fail_start(rank)
            else:
                had_process = rank.process is not None
                rank.tick(now)
                if not had_process:
                    self._watch(rank)
        if all(rank.phase is Phase.READY for rank in self._ranks):
            self._all_ready.set()
            self._started.set()
        self._send()

    def _next_timeout(self) -> float:
        now = time.monotonic()
        waits = [rank.next_tick(now) for rank in self._ranks]
        waits += [
            flight.task.deadline + _ANSWER_GRACE_SECONDS - now
            for flight in self._in_flight.values()
            if not all(self._ranks[rank].dying for rank in flight.waiting)  # those end when they are reaped
        ]
        return max(0.0, min(waits))

    def _watch(self, rank: RankSupervisor) -> None:
        if rank.process is not None and rank.queue is not None:
            self._poller.register(rank.queue, rank)
            self._poller.register(rank.process.pidfd, rank.rank)

    def _receive(self, rank: RankSupervisor) -> None:
        while rank.queue is not None and (data := rank.queue.get()) is not None:
            try:
                message: FromRank = decode(data, FromRank)
            except CodecError as error:
                rank.kill(f"it sent what is no message: {error}")
                return
            if message.incarnation != rank.incarnation:
                continue
            if isinstance(message, ReadyMessage):
                rank.note_ready(time.monotonic())
            else:
                self._note_done(rank.rank, message)

    def _note_done(self, rank: int, done: DoneMessage) -> None:
        flight = self._in_flight.get(done.task_id)
        if flight is not None:
            self._answer(
                flight, RankResult(rank=rank, num_bytes=done.num_bytes, seconds=done.seconds, error=done.error)
            )

    def _answer(self, flight: _InFlight, result: RankResult) -> None:
        """Note one rank's answer; with the last one the task ends."""
        if result.rank not in flight.waiting:
            return
        flight.waiting.discard(result.rank)
        flight.results.append(result)
        if not flight.waiting:
            self._in_flight.pop(flight.task.task_id, None)
            self._finish(TransferResult(task=flight.task, ranks=tuple(flight.results)))

    def _finish(self, result: TransferResult) -> None:
        with self._lock:
            self._num_tasks -= 1
        try:
            self._on_result(result)
        except Exception:  # the caller's books are broken: end in order, so that every other task gets its answer
            logger.exception("event=callback_failed task_id=%d action=stop", result.task.task_id)
            self._stopping = True

    def _reap(self, now: float) -> None:
        """A reaped rank writes no more: only now may its tasks end and their destinations be given out again."""
        for rank in self._ranks:
            process, queue = rank.process, rank.queue
            if process is None or queue is None or process.reap() is None:
                continue
            self._receive(rank)  # answers that it sent before it died count
            self._poller.unregister(queue)
            self._poller.unregister(process.pidfd)
            self._all_ready.clear()
            rank.reap(now)
            for flight in list(self._in_flight.values()):
                self._answer(flight, RankResult(rank=rank.rank, error=rank.last_failure.splitlines()[0]))

    def _kill_stuck(self, now: float) -> None:
        for flight in self._in_flight.values():
            if now > flight.task.deadline + _ANSWER_GRACE_SECONDS:
                for rank in flight.waiting:
                    self._ranks[rank].kill(f"task {flight.task.task_id} passed its deadline")

    def _fail_start(self, rank: RankSupervisor) -> None:
        self._start_failure = f"start of {self._config.tp_size} ranks failed: {rank.last_failure}"
        self._stopping = True

    def _send(self) -> None:
        for task in self._take_outbox():
            if not self._all_ready.is_set():
                self._finish(_failed(task, range(self._config.tp_size), "a rank is down"))
                continue
            flight = _InFlight(task=task, waiting={rank.rank for rank in self._ranks})
            self._in_flight[task.task_id] = flight
            for rank in self._ranks:
                assert rank.queue is not None
                try:
                    rank.queue.put(encode(_message(task, rank.incarnation)))
                except IPCError as error:
                    if isinstance(error, QueueDisconnectedError):  # alive or not, it can never be reached again
                        rank.kill("its queue is disconnected")
                    self._answer(flight, RankResult(rank=rank.rank, error=str(error)))

    def _take_outbox(self) -> Iterator[TransferTask]:
        while True:
            with self._lock:
                if not self._outbox:
                    return
                task = self._outbox.popleft()
            yield task

    def _shut_down(self) -> None:
        with self._lock:
            self._open = False
        self._all_ready.clear()
        self._ask_to_stop()
        self._wait_until_reaped(time.monotonic() + self._config.stop_timeout_seconds)
        for rank in self._ranks:
            rank.kill("it did not stop when asked")
        self._wait_until_reaped(time.monotonic() + 5)
        for task in self._take_outbox():
            self._finish(_failed(task, range(self._config.tp_size), "the client has stopped"))
        self._context.destroy(linger=0)
        self._started.set()

    def _ask_to_stop(self) -> None:
        for rank in self._ranks:
            starting = rank.phase is Phase.STARTING
            rank.retire()
            if rank.queue is None:
                continue
            try:
                if starting:
                    rank.kill("the engine stops before it was ready")
                else:
                    rank.queue.put(encode(StopMessage()))
            except IPCError:
                rank.kill("it cannot be asked to stop")

    def _wait_until_reaped(self, deadline: float) -> None:
        while any(rank.process is not None for rank in self._ranks):
            now = time.monotonic()
            if now >= deadline:
                return
            for key in self._poller.wait(deadline - now):
                if key is self._wakeup:
                    self._wakeup.clear()
                elif isinstance(key, RankSupervisor):
                    self._receive(key)
            self._reap(time.monotonic())

    # -- how a rank comes to be

    def _new_queue(self) -> TaskQueue:
        return TaskQueue(self._context, self._config.max_tasks_in_flight)

    def _spawn(self, rank: int, incarnation: int, queue_address: str) -> RankProcess:
        memory = self._memory[rank]
        num_gpu_blocks, num_cpu_blocks = self._num_blocks
        setup = RankSetup(
            rank=rank,
            incarnation=incarnation,
            engine_pid=os.getpid(),
            queue_address=queue_address,
            device=self._config.device,
            device_id=self._config.device_id(rank),
            num_layers=self._layout.num_layers,
            parts=tuple(PartSetup(p.name, p.shape, p.dtype) for p in self._layout.parts),
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            kv_fd=memory.kv.fd,
            cpu_fd=memory.cpu.fd,
            signal_fd=memory.signal_array.fd,
            heartbeat_seconds=self._config.heartbeat_seconds,
            max_tasks_in_flight=self._config.max_tasks_in_flight,
        )
        return RankProcess(setup, self._config)


def _message(task: TransferTask, incarnation: int) -> SwapMessage:
    return SwapMessage(
        task_id=task.task_id,
        incarnation=incarnation,
        direction=task.direction,
        source_ids=pack_ids(task.source_ids),
        destination_ids=pack_ids(task.destination_ids),
        deadline=task.deadline,
    )


def _failed(task: TransferTask, ranks: range, error: str) -> TransferResult:
    return TransferResult(task=task, ranks=tuple(RankResult(rank=rank, error=error) for rank in ranks))
