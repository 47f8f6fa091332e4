"""How many calls something makes: the same number each time, on any machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def counted(call: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and how many calls of Python and of C it makes, its own included.

    The garbage collector waits meanwhile: what it finalises is somebody else's, and comes at any time.
    """
    found, (num_python, num_c) = counted_apart(call)
    return found, num_python + num_c


def counted_apart(call: Callable[[], T]) -> tuple[T, tuple[int, int]]:
    """The same, calls of Python and of C apart."""
    nums = {"call": 0, "c_call": 0}

    def note(frame: object, event: str, argument: object) -> None:
        if event in nums:
            nums[event] += 1

    was_on = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        found = call()
    finally:
        sys.setprofile(None)
        if was_on:
            gc.enable()
    return found, (nums["call"], nums["c_call"])
