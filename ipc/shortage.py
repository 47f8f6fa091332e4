"""What the system refuses for want of descriptors, threads or memory: it may have them again a moment later."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterator

from fastdeploy_cache.ipc.event_log import event_log

logger = event_log(__name__)

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
_FIRST_SECONDS = 0.1
_FEWEST_FILES = 4
_LONGEST_REST_SECONDS = 1.0  # who connects waits for it
# Of a connection that is not there any more, or that a firewall refuses: accept(2) tells of errors on its way, too.
_GONE = {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN}
_GONE |= {errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENONET}
LONGEST_SECONDS = 10.0
EXIT_SHORT = 5  # of a process that could not start for such a want
# The last line of a log, where an interpreter or the loader of programs was short before a line of ours ran.
SHORT_END = re.compile(r"MemoryError|BlockingIOError: |OSError: \[Errno (12|23|24|105)\]|.*: Error (12|23|24)$")


def is_shortage(error: BaseException) -> bool:
    """Whether that is why it was refused: by the error itself, or by one that it was raised from."""
    return not _SHORTAGES.isdisjoint(_numbers(error))


def _numbers(error: BaseException | None) -> Iterator[int]:
    """What the system has said. Threads, memory and the loader of libraries say it without a number."""
    while error is not None:
        if isinstance(error, ImportError):
            yield from (number for number in sorted(_SHORTAGES) if os.strerror(number) in str(error))
        elif isinstance(error, MemoryError):
            yield errno.ENOMEM
        elif isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            yield errno.EAGAIN
        elif (number := getattr(error, "errno", None)) is not None:  # ZeroMQ's errors are none of the system's
            yield number
        error = error.__cause__ if error.__cause__ is not error else None


def limit_of(error: BaseException) -> str:
    """Which limit was met, the value seen, and what to do."""
    number = next((number for number in _numbers(error) if number in _SHORTAGES), None)
    if number == errno.ENFILE:
        return "this machine has no more open files (fs.file-max); end what holds them, or raise it"
    if number == errno.EAGAIN:
        processes = _in_words(resource.getrlimit(resource.RLIMIT_NPROC)[0])
        limit = f"this user may have {processes} processes and threads (RLIMIT_NPROC), and a container fewer (pids.max)"
        return f"{limit}; end some, or raise the limit"
    if number in (errno.ENOMEM, errno.ENOBUFS):
        return "this machine, or its container (memory.max), has no memory for it; give it more, or use less"
    soft, hard = map(_in_words, resource.getrlimit(resource.RLIMIT_NOFILE))
    limit = f"this process may have {soft} open files (RLIMIT_NOFILE, the soft limit; the hard one is {hard})"
    return f"{limit}; raise it with `ulimit -n` before the start, or close some"


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

    @property
    def is_tried(self) -> bool:
        """Whether there has been a pause."""
        return self._next > _FIRST_SECONDS

    def reset(self) -> None:
        """It has been granted: the next pause is the shortest again."""
        self._next = _FIRST_SECONDS


class AcceptRests:
    """What a loop that accepts connections does where it has no descriptor for one: it says so once, rests between two
    tries, and says once that it is over. Who connects waits meanwhile. One thread at a time."""

    def __init__(self, where: str) -> None:
        """`where` it listens, for the log."""
        self._where, self._patience, self._is_short = where, Patience(), False

    def met(self, error: OSError) -> float:
        """How long to rest after this error of `accept`; raises it where waiting does not help."""
        if error.errno in _GONE:
            return 0.0
        if not is_shortage(error):
            raise error
        if not self._is_short:
            self._is_short = True
            logger.warning("event=cannot_accept where=%s error=%r limit=%r", self._where, str(error), limit_of(error))
        return min(self._patience.pause_seconds(), _LONGEST_REST_SECONDS)

    def over(self) -> None:
        """A connection has been accepted."""
        if self._is_short:
            self._is_short = False
            self._patience.reset()
            logger.warning("event=accepts_again where=%s", self._where)


def raise_open_files() -> None:
    """Let this process have as many open files as the system allows it.

    For programs of ours, at their start. A process that embeds us keeps its limit: it may use `select`, which knows
    only the first 1024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system that says more than it allows: then it stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def share_of_files(share: float, most: int) -> int:
    """How many connections a server may hold: a share of the open files that this process may have, and `most` at most.

    The shares of all servers of a process leave a third of its files for its children, its stores and its logs.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(_FEWEST_FILES, min(most, int(soft * share)))
