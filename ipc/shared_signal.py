"""State words in shared memory with a wait that sleeps in the kernel.

A signal carries state (last value wins, one writer for each word); events go through `fastdeploy_cache.ipc.task_queue`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable

import numpy as np

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.shared_array import SharedArray

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_MAX_WAITERS = 2**31 - 1
_MASK = 2**32 - 1


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class SharedSignal:
    """`num_words` unsigned 32-bit words over a shared segment.

    A word has one writing process; any thread of any process that maps the segment may read it or wait on it. A store
    of an aligned 32-bit word is atomic on the supported machines, so a reader sees an old or a new value, never a mix.

    Source: futex(2); the words are shared between processes, so the private flag is not used.
    """

    def __init__(self, array: SharedArray, num_words: int) -> None:
        if platform.machine() not in _SYS_FUTEX:
            raise IPCError(f"no futex call known for machine {platform.machine()!r}; known: {sorted(_SYS_FUTEX)}")
        self._words = array.view(np.uint32, (num_words,))
        self._address = self._words.ctypes.data
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._number = _SYS_FUTEX[platform.machine()]

    def get(self, word: int) -> int:
        """The word's value now."""
        return int(self._words[word])

    def store(self, word: int, value: int) -> None:
        """Store `value` in a word that nobody waits on. A waiter would not be woken, and sleep until its deadline."""
        self._words[word] = value & _MASK

    def set(self, word: int, value: int) -> None:
        """Store `value` (its low 32 bits) and wake every waiter.

        The store comes before the wake: a waiter that read the old value either sees the kernel refuse its sleep
        (the word no longer holds what it read) or is asleep already and is woken.
        """
        # Woken first, a waiter would look, find the old value, and sleep on, and nobody would wake it again.
        self._words[word] = value & _MASK
        self._futex(word, _FUTEX_WAKE, _MAX_WAITERS, None)

    def wait(self, word: int, until: Callable[[int], bool], timeout_seconds: float) -> int | None:
        """Sleep until `until(value)` holds; the value, or None when the time is over first."""
        deadline = SYSTEM_CLOCK.now() + timeout_seconds
        # Each sleep is on the value that was looked at. Set between the look and the sleep, the word holds another one,
        # and the kernel, which compares under its own lock, lets nobody sleep: no wake-up falls into that gap. A wake
        # may also come for nothing (a signal, or a value that decides nothing), so the look is repeated after each.
        while not until(value := self.get(word)):
            remaining = deadline - SYSTEM_CLOCK.now()
            if remaining <= 0:
                return None
            seconds = int(remaining)
            timeout = _Timespec(seconds, int((remaining - seconds) * 1e9))
            self._futex(word, _FUTEX_WAIT, value, timeout)
        return value

    def _futex(self, word: int, operation: int, value: int, timeout: _Timespec | None) -> None:
        at, asked = ctypes.c_void_p(self._address + 4 * word), (ctypes.c_int(operation), ctypes.c_uint32(value))
        until = ctypes.byref(timeout) if timeout is not None else None
        result = self._syscall(ctypes.c_long(self._number), at, *asked, until, None, ctypes.c_uint32(0))
        # EAGAIN: the word changed first; EINTR: a signal came; ETIMEDOUT: the caller looks at its deadline
        if result < 0 and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise IPCError(f"futex call failed: {os.strerror(code)}")
