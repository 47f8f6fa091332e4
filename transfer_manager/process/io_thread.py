"""The I/O thread of the rank processes: it owns every socket, process and task in flight."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from fastdeploy_cache.errors import CodecError, IPCError, LayoutError, QueueDisconnectedError
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.task_queue import Poller, TaskQueue, Wakeup, new_context
from fastdeploy_cache.transfer_manager.client import OnKVLost, OnResult
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.child import RankProcess
from fastdeploy_cache.transfer_manager.process.flights import Flight, Flights, failed
from fastdeploy_cache.transfer_manager.process.supervisor import EXIT_REFUSED, Phase, RankSupervisor
from fastdeploy_cache.transfer_manager.rank.kv import RankKV
from fastdeploy_cache.transfer_manager.rank.rank_signal import NUM_SLOTS, RankSignal
from fastdeploy_cache.transfer_manager.task import (
    DoneMessage,
    FromRank,
    Lane,
    RankResult,
    ReadyMessage,
    StopMessage,
    TaskMessage,
    TransferResult,
    TransferTask,
)

logger = event_log(__name__)


class ProcessMemory(Protocol):
    """What a process and its engine share, as far as the engine's thread is concerned."""

    signal: RankSignal


def _ignore_ready() -> None:
    """For who asks `all_ready` instead."""


def ignore_failing(task: TransferTask) -> None:
    """For tasks that end soon anyway."""


class RankIO:
    """`run` is the thread; `lock` guards what others touch: `open`, `num_tasks`, `outbox` and `changed_kv`.

    It spawns the ranks, so that its end (which is the client's, or the engine's) is theirs. It never takes a lock of
    the caller except inside its callbacks.
    """

    def __init__(
        self,
        config: TransferConfig,
        *,
        spawn: Callable[[int, int, str], RankProcess],
        memory: Sequence[ProcessMemory],
        kv: list[RankKV],
        on_result: OnResult,
        on_kv_lost: OnKVLost,
        on_ready: Callable[[], None] = _ignore_ready,
        on_failing: Callable[[TransferTask], None] = ignore_failing,
        optional: bool = False,
        in_order: bool = True,
        process_name: str = "transfer",
    ) -> None:
        """`spawn(rank, incarnation, queue address)` starts a process. Those that are `optional` may come later: then a
        failed start ends nothing, but for one that refuses its settings. `on_ready` is called each time that all have
        become ready, `on_failing` when a rank has failed a task that others still work on."""
        self._config, self._optional = config, optional
        self.memory, self.kv = memory, kv
        self.needs_token_ids = False
        self.num_failed_callbacks = 0
        self._on_result, self._on_kv_lost, self._on_ready = on_result, on_kv_lost, on_ready
        self._on_failing = on_failing
        self._context = new_context()
        self.ranks = [
            RankSupervisor(rank, config, each.signal, self._new_queue, spawn, process_name=process_name)
            for rank, each in enumerate(memory)
        ]
        self.lock = threading.Lock()
        self.open = True
        self.num_tasks = [0, 0]  # by lane
        self.outbox: deque[TransferTask] = deque()
        self.changed_kv: set[int] = set()  # ranks whose KV arrays have come or gone
        self.all_ready = threading.Event()
        self.stopping = False
        self.started = threading.Event()
        self.start_failure: str | None = None
        self.wakeup = Wakeup()
        self._busy_slots: set[int] = set()  # progress words of loads in flight
        self._flights = Flights(in_order=in_order)
        self._stuck: dict[int, int] = {}  # rank -> the task that it is being killed for
        self._poller = Poller()
        for rank in self.ranks:
            rank.parked = config.owner_of_kv == "worker"  # until its worker has attached the KV arrays
        if config.owner_of_kv == "worker":
            self.started.set()

    def take_slot(self, task: TransferTask) -> bool:
        """Under the lock, before a load is sent: its progress word, unless a load that shares it is in flight."""
        if task.kind.shows_layers:
            slot = task.task_id % NUM_SLOTS
            if slot in self._busy_slots:
                return False
            self._busy_slots.add(slot)
            for memory in self.memory:
                memory.signal.set_begun(task.task_id)
        return True

    def refused(self, task: TransferTask, error: str) -> TransferResult:
        """The end of a task that was accepted and that no rank has got: they write its progress never."""
        if task.kind.shows_layers:
            for memory in self.memory:
                memory.signal.set_failed(task.task_id)
        return failed(task, self._config.tp_size, error)

    def run(self) -> None:
        """The thread: until `stopping` is set; then ranks end and every task is answered."""
        try:
            self._poller.register(self.wakeup.fd, self.wakeup)
            for rank in self.ranks:
                rank.tick(time.monotonic())
                self._watch(rank)
            while not self.stopping:
                self._turn()
        finally:  # also when an invariant broke: callers must get their answers and no rank may stay
            self._shut_down()

    def _turn(self) -> None:
        died = False
        for key in self._poller.wait(self._next_timeout()):
            if key is self.wakeup:
                self.wakeup.clear()
            elif isinstance(key, RankSupervisor):
                self._receive(key)
            else:  # the number of a rank whose process has ended
                died = True
        now = time.monotonic()
        if self.changed_kv:
            self._follow_kv()
        self._send()  # before the housekeeping: tasks do not wait for it
        if died:
            self._reap(now)
        self._kill_stuck(now)
        for rank in self.ranks:
            failed_start = rank.phase in (Phase.DOWN, Phase.OFF) and not self.started.is_set()
            if failed_start and (not self._optional or rank.exit_code == EXIT_REFUSED):
                self._fail_start(rank)
            else:
                had_process = rank.process is not None
                rank.tick(now)
                if not had_process:
                    self._watch(rank)
        self._note_all_ready()

    def _note_all_ready(self) -> None:
        with self.lock:
            is_ready = not self.changed_kv and all(rank.is_usable for rank in self.ranks)
            is_new = is_ready and not self.all_ready.is_set()
            if is_new:
                self.all_ready.set()
                self.started.set()
        if is_new:
            self._call_back(self._on_ready)

    def _follow_kv(self) -> None:
        """Start ranks whose KV arrays have come; end those whose arrays are gone, so that nothing writes there."""
        with self.lock:
            changed, self.changed_kv = self.changed_kv, set()
        for number in changed:
            rank, kv = self.ranks[number], self.kv[number]
            kv.sweep()
            rank.parked = kv.handle is None
            lost, kv.lost = kv.lost, False
            if lost or rank.parked:
                self.all_ready.clear()
                rank.kill("its KV arrays are gone", blamed=False)

    def _next_timeout(self) -> float:
        now = time.monotonic()
        waits = [rank.next_tick(now) for rank in self.ranks]
        owed = self._flights.stuck_at() if self._flights.all() else {}
        # those of a rank that is dying end when it is reaped
        waits += [at - now for (rank, _), (at, _) in owed.items() if not self.ranks[rank].dying]
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
                self._note_ready(rank, message)
            else:
                self._note_done(rank.rank, message)

    def _note_ready(self, rank: RankSupervisor, ready: ReadyMessage) -> None:
        kv = self.kv[rank.rank]
        self.needs_token_ids |= ready.needs_token_ids
        if ready.kv is not None and kv.handle is None:  # its own arrays; the other lane tells them, too
            try:
                kv.take(ready.kv)
                if rank.num_restarts:  # what was computed since the old ones died is nowhere
                    self._call_back(lambda: self._on_kv_lost(rank.rank))
            except (IPCError, LayoutError) as error:
                rank.kill(f"its KV arrays cannot be taken: {error}")
                return
        rank.note_ready(ready.lane, time.monotonic())
        if rank.phase is Phase.READY:
            kv.end_attaching()

    def _note_done(self, rank: int, done: DoneMessage) -> None:
        flight = self._flights.get(done.task_id)
        if flight is not None:
            result = RankResult(
                rank=rank,
                num_bytes=done.num_bytes,
                num_blocks=done.num_blocks,
                seconds=done.seconds,
                error=done.error,
                was_tried=done.was_tried,
                counts=done.counts,
                peer=done.peer,
            )
            self._answer(flight, result)

    def _answer(self, flight: Flight, answer: RankResult) -> None:
        """Note one rank's answer; with the last one the task ends."""
        result = self._flights.answer(flight, answer, time.monotonic())
        if result is not None:
            self._finish(result)
        elif answer.error is not None and sum(each.error is not None for each in flight.results) == 1:
            self._call_back(lambda: self._on_failing(flight.task))

    def _fail(self, flight: Flight, rank: int, error: str, *, was_tried: bool = False) -> None:
        """A rank is gone or never got the task: now the engine may write its words, and its waiters hear of it."""
        if not self.ranks[rank].is_usable:  # first: who hears of it and waits for the ranks must not find them ready
            self.all_ready.clear()
        if flight.task.kind.shows_layers:
            self.memory[rank].signal.set_failed(flight.task.task_id)
        self._answer(flight, RankResult(rank=rank, error=error, was_tried=was_tried))

    def _finish(self, result: TransferResult) -> None:
        with self.lock:
            self.num_tasks[result.task.kind.lane] -= 1
            if result.task.kind.shows_layers:
                self._busy_slots.discard(result.task.task_id % NUM_SLOTS)
        self._call_back(lambda: self._on_result(result))

    def _call_back(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # it costs what this call was about: the other tasks need this thread
            self.num_failed_callbacks += 1
            logger.exception("event=callback_failed num_failures=%d", self.num_failed_callbacks)

    def _reap(self, now: float) -> None:
        """A reaped rank writes no more: only now may its tasks end and their destinations be given out again."""
        for rank in self.ranks:
            process, queue = rank.process, rank.queue
            if process is None or queue is None or process.reap() is None:
                continue
            self._receive(rank)  # answers that it sent before it died count
            self._poller.unregister(queue)
            self._poller.unregister(process.pidfd)
            self.all_ready.clear()
            blamed = rank.blamed
            rank.reap(now)
            self._note_death(rank, blamed)

    def _note_death(self, rank: RankSupervisor, blamed: bool) -> None:
        failure = rank.last_failure
        stuck = self._stuck.pop(rank.rank, None)
        tried = {stuck} if stuck is not None else self._flights.working_on(rank.rank)
        for flight in self._flights.of_rank(rank.rank):
            self._fail(flight, rank.rank, failure.splitlines()[0], was_tried=flight.task.task_id in tried)
        kv = self.kv[rank.rank]
        if blamed:
            kv.end_attaching(failure)
        if self._config.owner_of_kv == "transfer" and kv.handle is not None:
            kv.drop()
            kv.sweep()
            self._call_back(lambda: self._on_kv_lost(rank.rank))

    def _kill_stuck(self, now: float) -> None:
        for (rank, _), (at, task_id) in self._flights.stuck_at().items():
            if now > at:
                self._stuck.setdefault(rank, task_id)
                self.ranks[rank].kill(f"task {task_id} passed its deadline")

    def _fail_start(self, rank: RankSupervisor) -> None:
        self.start_failure = f"start of {self._config.tp_size} ranks failed: {rank.last_failure}"
        self.stopping = True

    def _send(self) -> None:
        for task in self._take_outbox():
            ranks = self.ranks
            if not self.all_ready.is_set():
                ranks = [] if task.kind.needs_all_ranks else [rank for rank in ranks if rank.is_usable]
                if not ranks:
                    self._finish(self.refused(task, "a rank is down"))
                    continue
            flight = self._flights.add(task, [rank.rank for rank in ranks])
            for rank in ranks:
                assert rank.queue is not None
                try:
                    rank.queue.put(encode(TaskMessage.of(task, rank.incarnation)), task.kind.lane)
                except IPCError as error:
                    if isinstance(error, QueueDisconnectedError):  # alive or not, it can never be reached again
                        rank.kill("its queue is disconnected")
                    self._fail(flight, rank.rank, str(error))

    def _take_outbox(self) -> Iterator[TransferTask]:
        while True:
            with self.lock:
                if not self.outbox:
                    return
                task = self.outbox.popleft()
            yield task

    def _shut_down(self) -> None:
        with self.lock:
            self.open = False
        self.all_ready.clear()
        self._ask_to_stop()
        self._wait_until_reaped(time.monotonic() + self._config.stop_timeout_seconds)
        for rank in self.ranks:
            rank.kill("it did not stop when asked")
        self._wait_until_reaped(time.monotonic() + 5)
        for task in self._take_outbox():
            self._finish(self.refused(task, "the client has stopped"))
        self._context.destroy(linger=0)
        for kv in self.kv:
            kv.end_attaching("the ranks have been stopped")
        self.started.set()

    def _ask_to_stop(self) -> None:
        """A rank stops when it has done what came before: of that, what it has not begun and nobody will use is
        cancelled. Seconds of queued copies would else stand before the stop, and it would be killed for being late."""
        for flight in self._flights.all():
            if not flight.task.kind.outlives_engine:
                for number in flight.waiting:
                    self.memory[number].signal.cancel(flight.task.task_id)
        for rank in self.ranks:
            starting = rank.phase is Phase.STARTING
            rank.retire()
            if rank.queue is None:
                continue
            try:
                if starting:
                    rank.kill("the engine stops before it was ready")
                else:
                    for lane in Lane:
                        rank.queue.put(encode(StopMessage()), lane)
            except IPCError:
                rank.kill("it cannot be asked to stop")

    def _wait_until_reaped(self, deadline: float) -> None:
        while any(rank.process is not None for rank in self.ranks):
            now = time.monotonic()
            if now >= deadline:
                return
            for key in self._poller.wait(deadline - now):
                if key is self.wakeup:
                    self.wakeup.clear()
                elif isinstance(key, RankSupervisor):
                    self._receive(key)
            self._reap(time.monotonic())

    # -- how a rank comes to be

    def _new_queue(self) -> TaskQueue:
        return TaskQueue(self._context, self._config.max_tasks_in_flight)
