"""A server of another project in a process of its own: its log in a file, up when it says so, ended when it hangs."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.engines.progress import LIMITS, StageLimits, StageProgress
from fastdeploy_cache.launch.engines.stages import end_group, told
from fastdeploy_cache.launch.shm_files import engine_files_removed

_STOP_SECONDS = 30.0


class WatchedServer(threading.Thread):
    """A process that serves, and a thread that ends it at a limit."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, limits: StageLimits) -> None:
        super().__init__(name=f"watch over {log.stem}", daemon=True)
        self.pid, self.reached = process.pid, ""  # `reached`: the limit at which it was ended, in words
        self._process, self._log, self._limits = process, log, limits
        self._is_left_alone = threading.Event()
        self.came: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: it is up; False: it has ended

    def run(self) -> None:
        """Look at it until it is left alone, or has ended."""
        progress = StageProgress(self.pid, self._log, self._limits)
        while not self._is_left_alone.wait(progress.next_look_seconds) and self._process.poll() is None:
            self.reached = progress.limit_reached()
            if self.reached:
                end_group(self._process)
                self.came.put(False)
                return

    def leave_alone(self) -> None:
        """No limit counts any more."""
        self._is_left_alone.set()


@contextmanager
def running(
    command: Sequence[str],
    *,
    ready: bytes,
    log: Path,
    environment: Mapping[str, str],
    limits: StageLimits = LIMITS,
    is_idle: bool = False,
) -> Iterator[WatchedServer]:
    """Start a server, and wait until a line of its output has `ready` in it. SIGTERM ends it behind the block.

    At a limit it is killed; `reached` of what is yielded then says so. `is_idle`: it may have nothing to do once it is
    up, so that no limit counts from then on.

    Raises:
        LaunchError: it has reached a limit, or has ended, before it was up; where its log lies and how that ends is in
            the message.
    """
    with engine_files_removed():
        log.touch()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        server = WatchedServer(process, log, limits)
        drain = threading.Thread(target=_drain, args=(process, ready, log, server.came), name="its log", daemon=True)
        drain.start()
        server.start()
        try:
            if not server.came.get(timeout=limits.hard_seconds + _STOP_SECONDS):
                raise LaunchError(told(server.reached or "has ended at its start", log))
            if is_idle:
                server.leave_alone()
            yield server
        finally:
            server.leave_alone()
            server.join(_STOP_SECONDS)  # a process that has been reaped must not be ended by its number
            process.send_signal(signal.SIGTERM)
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)
            finally:
                end_group(process)
            drain.join(_STOP_SECONDS)


def words_of(options: Mapping[str, object]) -> list[str]:
    """Options and their values as a command's arguments."""
    return [str(word) for pair in options.items() for word in pair]


def _drain(process: subprocess.Popen[bytes], ready: bytes, log: Path, came: queue.SimpleQueue[bool]) -> None:
    """Keep its pipe empty. Say True when it is up, and False when it has ended."""
    assert process.stdout is not None
    with log.open("wb") as out:
        for line in process.stdout:
            out.write(line)
            out.flush()
            if ready in line:
                came.put(True)
    came.put(False)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
