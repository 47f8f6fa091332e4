"""What the system refuses for want of descriptors, threads or memory: it may have them again a moment later."""

from __future__ import annotations

import errno
import resource

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
_FIRST_SECONDS = 0.1
LONGEST_SECONDS = 10.0


def is_shortage(error: BaseException | None) -> bool:
    """Whether that is why it was refused: by the error itself, or by one that it was raised from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            return True
        error = error.__cause__
    return False


def limit_of(error: BaseException | None) -> str:
    """Which limit was met, the value seen, and what to do."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    number = error.errno if error is not None else None
    if number == errno.ENFILE:
        return "this machine has no more open files (fs.file-max); end what holds them, or raise it"
    if number == errno.EAGAIN:
        processes = _in_words(resource.getrlimit(resource.RLIMIT_NPROC)[0])
        return (
            f"this user may have {processes} processes and threads (RLIMIT_NPROC), and a container fewer (pids.max); "
            "end some, or raise the limit"
        )
    if number in (errno.ENOMEM, errno.ENOBUFS):
        return "this machine, or its container (memory.max), has no memory for it; give it more, or use less"
    soft, hard = map(_in_words, resource.getrlimit(resource.RLIMIT_NOFILE))
    return (
        f"this process may have {soft} open files (RLIMIT_NOFILE, the soft limit; the hard one is {hard}); raise it "
        "with `ulimit -n` before the start, or close some"
    )


def _in_words(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


class Patience:
    """How long to wait between two tries: longer each time, and ten seconds at most. Pure; one thread at a time."""

    def __init__(self) -> None:
        self._next = _FIRST_SECONDS

    def pause_seconds(self) -> float:
        """The pause after one more try that was refused."""
        pause, self._next = self._next, min(2 * self._next, LONGEST_SECONDS)
        return pause

    def reset(self) -> None:
        """It has been granted: the next pause is the shortest again."""
        self._next = _FIRST_SECONDS
