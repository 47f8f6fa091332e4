"""The main of every process of a rank: set-up, log, signs of life, and an end with the engine."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from fastdeploy_cache.errors import IPCError, PeerRefusedError, StorageRefusedError, TransferError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.log_lines import set_up_log
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shortage import is_shortage, raise_open_files
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup, read_setup
from fastdeploy_cache.transfer_manager.process.wire import EXIT_ENGINE_GONE, EXIT_REFUSED
from fastdeploy_cache.transfer_manager.process.words import RankSignal

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
S = TypeVar("S", bound=ProcessSetup)


class ProcessServer(Protocol):
    """What a process does all its life."""

    def run(self) -> None:
        """Work until told to stop."""
        ...


def serve_process(setup_type: type[S], open_server: Callable[[S, RankSignal], ProcessServer]) -> int:
    """A process's main: set-up from standard input, log to standard error; returns the exit status.

    `open_server` gets the set-up and the process's signal words. What it lacks for a moment only is raised.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine decides when ranks end
    raise_open_files()
    lifeline = sys.stdin.fileno()
    setup = read_setup(lifeline, setup_type)
    try:
        set_up_log()
        end_with_engine(setup.engine_pid, lifeline)
        signal_words = RankSignal(SharedArray(setup.signal_fd, RankSignal.NUM_BYTES))
        server = open_server(setup, signal_words)
    except (TransferError, IPCError) as error:  # what is missing, for the engine's message: no traceback
        if is_shortage(error):
            raise
        logger.error("event=cannot_start rank=%d reason=%s", setup.rank, error)  # `supervisor` looks for this
        return EXIT_REFUSED if isinstance(error, (StorageRefusedError, PeerRefusedError)) else 1
    start_heartbeat(signal_words, setup.heartbeat_seconds)
    server.run()
    return 0


def end_with_engine(engine_pid: int, fd: int) -> None:
    """End this process when the engine does, by two independent ways.

    The kernel kills it when the engine thread that spawned it ends, which reaches even a stopped process. Its spawner
    has arranged that already (`ChildProcess`), where it could. It reads end of file when the last copy of the engine's
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


def start_heartbeat(signal_: RankSignal, heartbeat_seconds: float) -> None:
    """A thread that shows that this process lives, whatever the others do."""
    timer = SYSTEM_CLOCK.event()

    def beat() -> None:
        while not timer.wait(heartbeat_seconds):
            signal_.beat()

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
