"""Ctrl-C: a command ends with one line and status 130, and what it has started ends with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 130  # of a command that was interrupted: 128 and the number of SIGINT, as shells have it


def interrupt_once() -> None:
    """Let the first SIGINT raise KeyboardInterrupt, and ignore further ones.

    What a command has started is ended at deadlines. A second Ctrl-C in the midst of that would leave processes and
    folders behind, and a traceback. Where SIGINT is ignored, as in the background of a shell's script, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that are started in here never hear of Ctrl-C, which reaches a whole group: whoever started them ends
    them. They inherit that SIGINT is blocked; here it comes when this is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
