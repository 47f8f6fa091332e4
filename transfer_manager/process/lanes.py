"""A process of a rank: takes tasks from its lanes, answers each, ends with the engine. What a task is, others know."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

from fastdeploy_cache.errors import IPCError, PeerRefusedError, StorageRefusedError, TransferError
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.task_queue import RankQueue
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.process.supervisor import EXIT_REFUSED
from fastdeploy_cache.transfer_manager.rank.rank_signal import RankSignal, RankState
from fastdeploy_cache.transfer_manager.task import (
    DoneMessage,
    Lane,
    ProcessSetup,
    ReadyMessage,
    StopMessage,
    TaskMessage,
    ToRank,
)

logger = logging.getLogger(__name__)

EXIT_ENGINE_GONE = 4
_PR_SET_PDEATHSIG = 1
S = TypeVar("S", bound=ProcessSetup)
_SETUP_FD = struct.Struct("<i")


def memory_of(setup: ProcessSetup) -> int:
    """Engine side: a descriptor of memory with the set-up, which the process inherits.

    Through a pipe, one that is larger than the pipe would hold the engine's thread until the process reads.
    """
    data = memoryview(encode(setup))
    fd = os.memfd_create("setup", os.MFD_CLOEXEC)
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def say_setup(pipe: BinaryIO, setup_fd: int) -> None:
    """Engine side: tell a process where its set-up is, by its standard input, which stays open while the engine
    lives. A few bytes always fit into a new pipe."""
    pipe.write(_SETUP_FD.pack(setup_fd))
    pipe.flush()


def read_setup(lifeline: int, setup_type: type[S]) -> S:
    """Process side of `say_setup`."""
    (setup_fd,) = _SETUP_FD.unpack(_read_exactly(lifeline, _SETUP_FD.size))
    with os.fdopen(setup_fd, "rb") as memory:
        memory.seek(0)
        setup: S = decode(memory.read(), setup_type)
    return setup


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = os.read(fd, num_bytes - len(data))
        if not piece:
            os._exit(EXIT_ENGINE_GONE)
        data += piece
    return data


def end_with_engine(engine_pid: int, fd: int) -> None:
    """End this process when the engine does, by two independent ways.

    The kernel kills it when the engine thread that spawned it ends, which reaches even a stopped process. Its spawner
    has arranged that already (`RankProcess`), where it could. It reads end of file when the last copy of the engine's
    pipe end is gone, which also covers an engine that died before the first way was set up.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("event=no_parent_death_signal errno=%d", ctypes.get_errno())
    if os.getppid() != engine_pid:
        os._exit(EXIT_ENGINE_GONE)

    def watch() -> None:
        while os.read(fd, 1):  # the bare descriptor: a buffered reader's lock would block the interpreter's own end
            pass
        os._exit(EXIT_ENGINE_GONE)  # not sys.exit: the main thread may be inside a copy or asleep on the queue

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


class Moved(NamedTuple):
    """What a task came to. `seconds`: of the part that counts, where that is not all of it."""

    num_bytes: int
    num_blocks: int = 0
    seconds: float | None = None
    counts: dict[str, int] | None = None


class Executor(Protocol):
    """Does the tasks of a process; one of each lane at a time."""

    new_kv: KVHandle | None  # KV arrays that it has made
    needs_token_ids: bool

    @property
    def is_lost(self) -> bool:
        """It can do nothing any more: the process has to be replaced."""
        ...

    def bind_thread(self) -> None:
        """Called once by the thread of each lane."""
        ...

    def do(self, task: TaskMessage) -> Moved:
        """One task; whatever it raises is that task's failure."""
        ...

    def close(self) -> None:
        """After the last task."""
        ...


class LaneServer:
    """A thread for each lane works; a timer thread beats, so that a long task does not look like death.

    Each lane has its own connection, so that a task changes threads nowhere on its way.
    """

    def __init__(self, setup: ProcessSetup, signal_: RankSignal, executor: Executor) -> None:
        self._setup, self._signal, self._executor = setup, signal_, executor

    def run(self) -> None:
        """Serve tasks until told to stop."""
        start_heartbeat(self._signal, self._setup.heartbeat_seconds)
        self._signal.state = RankState.READY
        out = threading.Thread(target=self._serve_lane, args=(Lane.OUT,), name="lane-out")
        out.start()
        self._serve_lane(Lane.IN)
        self._signal.state = RankState.STOPPING
        out.join()
        self._executor.close()
        logger.info("event=stopped rank=%d", self._setup.rank)

    def _serve_lane(self, lane: Lane) -> None:
        setup, executor = self._setup, self._executor
        try:
            executor.bind_thread()
            queue = RankQueue(setup.queue_address, setup.max_tasks_in_flight, lane)
            queue.put(encode(ReadyMessage(setup.incarnation, lane, executor.new_kv, executor.needs_token_ids)))
            logger.info("event=ready rank=%d incarnation=%d lane=%s", setup.rank, setup.incarnation, lane.name)
            while True:
                message: ToRank = decode(queue.get(), ToRank)
                if isinstance(message, StopMessage):
                    break
                self._signal.set_busy(lane, True)
                done = self._serve(message)
                if executor.is_lost:  # unanswered: its blocks are free once this process is reaped
                    raise SystemExit("what this process works on is lost to it; a new one begins afresh")
                self._signal.set_busy(lane, False)
                queue.put(encode(done))
            queue.close()
        except BaseException:
            logger.exception("event=lane_failed lane=%s", lane.name)
            os._exit(1)  # one lane without the other serves nobody: the engine sees the death and starts anew

    def _serve(self, task: TaskMessage) -> DoneMessage:
        started = time.monotonic()
        moved, error = Moved(0), self._refusal(task, started)
        was_tried = error is None
        if was_tried:
            try:
                moved = self._executor.do(task)
            except Exception as failure:  # the task boundary: any failure is this task's, never the process's
                logger.exception("event=task_failed task_id=%d", task.task_id)
                error = f"{type(failure).__name__}: {failure}"
        if error is not None and task.kind.shows_layers:
            self._signal.set_failed(task.task_id)
        seconds = time.monotonic() - started if moved.seconds is None else moved.seconds
        logger.debug("event=task task_id=%d %s seconds=%.6f error=%s", task.task_id, moved, seconds, error)
        return DoneMessage(
            task_id=task.task_id,
            incarnation=task.incarnation,
            num_bytes=moved.num_bytes,
            num_blocks=moved.num_blocks,
            seconds=seconds,
            error=error,
            was_tried=was_tried,
            counts=moved.counts,
        )

    def _refusal(self, task: TaskMessage, now: float) -> str | None:
        if task.incarnation != self._setup.incarnation:
            return f"task is for incarnation {task.incarnation}, this is {self._setup.incarnation}"
        if self._signal.is_cancelled(task.task_id):
            return "cancelled before the rank began"
        return "deadline passed before the rank began" if now > task.deadline else None


def start_heartbeat(signal_: RankSignal, heartbeat_seconds: float) -> None:
    """A thread that shows that this process lives, whatever the others do."""
    timer = threading.Event()

    def beat() -> None:
        while not timer.wait(heartbeat_seconds):
            signal_.beat()

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class Server(Protocol):
    """What a process does all its life."""

    def run(self) -> None:
        """Until told to stop."""
        ...


def serve_process(setup_type: type[S], open_server: Callable[[S, RankSignal], Server]) -> int:
    """A process's main: set-up from standard input, log to standard error; returns the exit status.

    `open_server` gets the set-up and the process's signal words.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine decides when ranks end
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    lifeline = sys.stdin.fileno()
    setup = read_setup(lifeline, setup_type)
    end_with_engine(setup.engine_pid, lifeline)
    try:
        server = open_server(setup, RankSignal(SharedArray(setup.signal_fd, RankSignal.NUM_BYTES)))
    except (TransferError, IPCError) as error:  # what is missing, for the engine's message: no traceback
        logger.error("event=cannot_start rank=%d reason=%s", setup.rank, error)
        return EXIT_REFUSED if isinstance(error, (StorageRefusedError, PeerRefusedError)) else 1
    server.run()
    return 0


def open_cpu_blocks(fd: int, num_blocks: int, block_bytes: int) -> SharedArray:
    """The rank's CPU blocks, which are never initialised by those who attach.

    Raises:
        IPCError: they are fewer than that.
    """
    cpu = SharedArray(fd, os.fstat(fd).st_size)
    if cpu.num_bytes < num_blocks * block_bytes:
        raise IPCError(f"the CPU blocks have {cpu.num_bytes} bytes, too few for {num_blocks} blocks")
    return cpu
