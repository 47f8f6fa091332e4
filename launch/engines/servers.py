"""A server of another project in a process of its own: its log in a file, up when it says so, ended at a deadline."""

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
from fastdeploy_cache.launch.engines.stages import end_group, tail
from fastdeploy_cache.launch.shm_files import engine_files_removed

_STOP_SECONDS = 30.0


@contextmanager
def running(
    command: Sequence[str],
    *,
    ready: bytes,
    log: Path,
    environment: Mapping[str, str],
    start_seconds: float,
) -> Iterator[int]:
    """Start a server, and wait until a line of its output has `ready` in it; yields its pid. SIGTERM ends it.

    Raises:
        LaunchError: it has not come up in time, or has ended; the end of its log is in the message.
    """
    with engine_files_removed():
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        came: queue.SimpleQueue[bool] = queue.SimpleQueue()
        given = (process, ready, log, came)
        drain = threading.Thread(target=_drain, args=given, name=f"log of {command[0]}", daemon=True)
        drain.start()
        try:
            if not _is_up(came, start_seconds):
                raise LaunchError(f"{log.stem} has not come up in {start_seconds:.0f} s, or has ended:\n{tail(log)}")
            yield process.pid
        finally:
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


def _is_up(came: queue.SimpleQueue[bool], seconds: float) -> bool:
    try:
        return came.get(timeout=seconds)
    except queue.Empty:
        return False


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
