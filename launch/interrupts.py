"""Ctrl-C: a command ends with one line and status 130, and what it has started ends with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_IMPORT_SECONDS = 0.02
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


@contextmanager
def noted() -> Iterator[Callable[[], None]]:
    """Ctrl-C, SIGTERM or the end of the terminal only leaves a note while this lasts. The function that is given raises
    KeyboardInterrupt if there is one.

    For work in the midst of which the exception would be lost: what is raised while a weak reference or a finaliser is
    called back is swallowed, and it may be raised in a thread that belongs to somebody else.
    """
    notes: list[int] = []
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def note(number: int, _: FrameType | None) -> None:
        notes.append(number)
        if number == signal.SIGHUP:  # there is nobody to read any more, and a write would fail
            with open(os.devnull, "wb") as nowhere:
                for descriptor in terminals:
                    os.dup2(nowhere.fileno(), descriptor)

    def look() -> None:
        if notes:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, note)
    try:
        yield look
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not set from Python, and cannot be from there
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise it where it reaches the command: some modules swallow whatever is raised while they are being imported, as
    NumPy's compiled ones do. So an import goes on until it has ended, and is looked for again a moment later."""
    del number
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _is_importing(frame):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _IMPORT_SECONDS)
        return
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
