"""The rank's process: attach, say ready, copy what the queue asks for, end with the engine."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import struct
import sys
import threading
import time
from typing import BinaryIO

from ipc.codec import decode, encode
from ipc.shared_array import SharedArray
from ipc.task_queue import RankQueue
from transfer_manager.device.base import Device
from transfer_manager.device.cpu import CpuDevice
from transfer_manager.layout import KVPart, RankLayout
from transfer_manager.rank_signal import RankSignal, RankState
from transfer_manager.task import (
    Direction,
    DoneMessage,
    RankSetup,
    ReadyMessage,
    StopMessage,
    SwapMessage,
    ToRank,
    unpack_ids,
)

logger = logging.getLogger(__name__)

EXIT_ENGINE_GONE = 4
_PR_SET_PDEATHSIG = 1
_SETUP_HEADER = struct.Struct("<I")


def write_setup(pipe: BinaryIO, setup: RankSetup) -> None:
    """Engine side: send the set-up down a rank's standard input, which stays open as long as the engine lives."""
    data = encode(setup)
    pipe.write(_SETUP_HEADER.pack(len(data)) + data)
    pipe.flush()


def read_setup(fd: int) -> RankSetup:
    """Rank side of `write_setup`."""
    (num_bytes,) = _SETUP_HEADER.unpack(_read_exactly(fd, _SETUP_HEADER.size))
    setup: RankSetup = decode(_read_exactly(fd, num_bytes), RankSetup)
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

    The kernel kills it when the engine thread that spawned it ends, which reaches even a stopped process. It reads end
    of file when the last copy of the engine's pipe end is gone, which also covers an engine that died before the
    first way was set up.
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


class Worker:
    """One rank. The main thread copies; a timer thread beats, so that a long copy does not look like death."""

    def __init__(self, setup: RankSetup) -> None:
        """Attach to the engine's segments; the KV arrays and CPU blocks are never initialised here.

        Raises:
            IPCError: a segment is smaller than the set-up says.
        """
        self._setup = setup
        layout = RankLayout(
            num_layers=setup.num_layers, parts=tuple(KVPart(p.name, p.shape, p.dtype) for p in setup.parts)
        )
        self._signal = RankSignal(SharedArray(setup.signal_fd, RankSignal.NUM_BYTES))
        kv = SharedArray(setup.kv_fd, setup.num_gpu_blocks * layout.block_bytes)
        cpu = SharedArray(setup.cpu_fd, setup.num_cpu_blocks * layout.block_bytes)
        self._device: Device = CpuDevice(layout, kv, cpu, setup.num_gpu_blocks, setup.num_cpu_blocks)
        self._queue = RankQueue(setup.queue_address, setup.max_tasks_in_flight)

    def run(self) -> None:
        """Serve tasks until told to stop."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        self._signal.state = RankState.READY
        self._queue.put(encode(ReadyMessage(self._setup.incarnation)))
        logger.info("event=ready rank=%d incarnation=%d", self._setup.rank, self._setup.incarnation)
        while True:
            message: ToRank = decode(self._queue.get(), ToRank)
            if isinstance(message, StopMessage):
                break
            self._signal.num_tasks_in_flight = 1
            done = self._serve(message)
            self._signal.num_tasks_in_flight = 0
            self._queue.put(encode(done))
        self._signal.state = RankState.STOPPING
        self._queue.close()
        logger.info("event=stopped rank=%d", self._setup.rank)

    def _serve(self, task: SwapMessage) -> DoneMessage:
        started = time.monotonic()
        num_bytes, error = 0, None
        if task.incarnation != self._setup.incarnation:
            error = f"task is for incarnation {task.incarnation}, this is {self._setup.incarnation}"
        elif started > task.deadline:
            error = "deadline passed before the rank began"
        else:
            try:
                num_bytes = self._swap(task)
            except Exception as failure:  # the task boundary: any failure is this task's, never the rank's
                logger.exception("event=task_failed task_id=%d", task.task_id)
                error = f"{type(failure).__name__}: {failure}"
        seconds = time.monotonic() - started
        logger.debug("event=task task_id=%d bytes=%d seconds=%.6f error=%s", task.task_id, num_bytes, seconds, error)
        return DoneMessage(task.task_id, task.incarnation, num_bytes, seconds, error)

    def _swap(self, task: SwapMessage) -> int:
        def on_layer(num_layers: int) -> None:
            if task.direction is Direction.SWAP_IN:
                self._signal.set_layers_done(task.task_id, num_layers)

        return self._device.copy(
            task.direction, unpack_ids(task.source_ids), unpack_ids(task.destination_ids), on_layer
        )

    def _beat(self) -> None:
        timer = threading.Event()
        while not timer.wait(self._setup.heartbeat_seconds):
            self._signal.beat()


def main() -> int:
    """The process's entry: set-up from standard input, log to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine decides when ranks end
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    lifeline = sys.stdin.fileno()
    setup = read_setup(lifeline)
    end_with_engine(setup.engine_pid, lifeline)
    Worker(setup).run()
    return 0
