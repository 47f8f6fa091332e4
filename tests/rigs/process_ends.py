"""Processes by number: which there are, and when they have ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient

SECONDS = 30.0


def pids(client: TransferClient) -> list[int]:
    """The pid of every rank, all of which are up."""
    found = [status.pid for status in client.statuses()]
    assert all(found)
    return [pid for pid in found if pid is not None]


@contextlib.contextmanager
def watched(pid: int) -> Iterator[int]:
    """A pid descriptor: it stays with this very process, whoever gets its number later."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def is_gone(pidfd: int) -> bool:
    """Reaped: not even a zombie is left."""
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False


def wait_exit(pidfd: int, seconds: float = SECONDS) -> bool:
    """Wait for the process to end (it may still be a zombie)."""
    return bool(select.select([pidfd], [], [], seconds)[0])
