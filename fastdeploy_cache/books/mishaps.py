"""Steps that a verb takes along and must not fail by: what they raise is counted, logged, and over."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.metrics.picture import STEPS

logger = event_log(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def call_user(call: Callable[[], object]) -> None:
    """Run a user's callback; what it raises is the user's, and must not end the thread that all transfers need.

    That holds for what is no `Exception`, too, such as `asyncio.CancelledError` and `SystemExit`, but for an interrupt
    of the main thread, whose it is.
    """
    try:
        call()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        logger.exception("event=user_callback_failed")


class Mishaps:
    """How often each of `STEPS` has failed since the start. Any thread, most of them under the manager's lock.

    None of these is expected: a policy, a client or a clock of somebody else's making, or a fault of our own. Each
    costs what the step was about: a copy that is not made, a prefetch that brings nothing, an eviction by `lru`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(STEPS, 0))
        self._lock = threading.Lock()

    def note(self, step: str) -> None:
        """Call it while the exception is being handled. A step that fails each time is logged ever more rarely."""
        self.count(step, "see the traceback")

    def count(self, step: str, reason: str) -> None:
        """A step has failed for a reason that is, or is not, an exception that is being handled."""
        with self._lock:
            self.counts[step] += 1
            num_failures = self.counts[step]
        if num_failures & (num_failures - 1) == 0:
            what = "event=step_failed step=%s num_failures=%d reason=%r"
            with contextlib.suppress(MemoryError):
                logger.error(what, step, num_failures, reason, exc_info=sys.exception())

    def ask(self, step: str, call: Callable[[], T], otherwise: T) -> T:
        """What a call returns; where it raises, that is noted as `step` and the answer is `otherwise`."""
        try:
            return call()
        except Exception:  # whatever it is: the verb goes on without the step
            self.note(step)
            return otherwise

    def contain(self, step: str, call: Callable[[], object]) -> bool:
        """Make a call for what it does; False where it has raised, which is noted as `step`."""
        return self.ask(step, lambda: (call(), True)[1], otherwise=False)


class _Room(Protocol):
    """What has steps that may fail."""

    @property
    def mishaps(self) -> Mishaps: ...


R = TypeVar("R", bound=_Room)


def contained(step: str, otherwise: T) -> Callable[[Callable[Concatenate[R, P], T]], Callable[Concatenate[R, P], T]]:
    """A method whose failure is noted as `step` and whose caller gets `otherwise`."""

    def contain(method: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
        @functools.wraps(method)
        def run(self: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return self.mishaps.ask(step, lambda: method(self, *args, **kwargs), otherwise)

        return run

    return contain
