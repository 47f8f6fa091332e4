"""Locks, events and threads of the simulated machine, with the faces of those of `threading`, `queue` and
`concurrent.futures`."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from fastdeploy_cache.launch.faults.scheduler import FOREVER, Actor, Scheduler, Waiters


class Lock:
    """See `threading.Lock`; where it is `is_reentrant`, `threading.RLock`."""

    def __init__(self, scheduler: Scheduler, *, is_reentrant: bool = False) -> None:
        self._scheduler, self._waiters = scheduler, Waiters()
        self._is_reentrant, self._depth = is_reentrant, 0
        self._owner: Actor | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """A step. Outside the simulation nobody holds it."""
        scheduler = self._scheduler
        me = scheduler.current
        if self._depth and self._owner is me and self._is_reentrant:
            self._depth += 1
            return True
        if not blocking:
            scheduler.step("lock")
        elif self._depth or me is not None:
            deadline = FOREVER if timeout < 0 else scheduler.now + timeout
            scheduler.step("lock")
            if self._depth and not scheduler.wait((self._waiters,), lambda: not self._depth, deadline, "wait"):
                return False
        if self._depth:
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        """A step, before it: who looks for the lock then finds it taken still. Whoever waits may have it."""
        self._scheduler.step("lock")
        if not self._depth:
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._waiters.wake()

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedEvent:
    """See `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._waiters, self._is_set = scheduler, Waiters(), False

    def is_set(self) -> bool:
        """No step: nobody can tell when it was looked at."""
        return self._is_set

    def set(self) -> None:
        """Wake those who wait."""
        self._scheduler.check_alive()
        self._is_set = True
        self._waiters.wake()

    def clear(self) -> None:
        """The reverse."""
        self._scheduler.check_alive()
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """A step, or more."""
        if self._scheduler.current is None:
            return self._is_set
        deadline = FOREVER if timeout is None else self._scheduler.now + timeout
        return bool(self._scheduler.wait((self._waiters,), self.is_set, deadline, "wait"))


class Condition:
    """See `threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler, self._lock = scheduler, lock or Lock(scheduler, is_reentrant=True)
        self._sleeping: deque[SimulatedEvent] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait_for(self, is_true: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until that holds, which is asked under the lock; its last answer."""
        deadline = FOREVER if timeout is None else self._scheduler.now + timeout
        while not (found := is_true()) and self._scheduler.now < deadline:
            mine = SimulatedEvent(self._scheduler)
            self._sleeping.append(mine)
            self._lock.release()
            try:
                mine.wait(deadline - self._scheduler.now)
            finally:
                if mine in self._sleeping:
                    self._sleeping.remove(mine)
                self._lock.acquire()
        return found

    def notify(self, n: int = 1) -> None:
        """Wake the first `n`."""
        for _ in range(min(n, len(self._sleeping))):
            self._sleeping.popleft().set()

    def notify_all(self) -> None:
        """Wake all."""
        self.notify(len(self._sleeping))


class Semaphore:
    """See `threading.Semaphore`."""

    def __init__(self, scheduler: Scheduler, value: int = 1) -> None:
        self._scheduler, self._waiters, self._value = scheduler, Waiters(), value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """A step, or more."""
        if not blocking:
            timeout = 0.0
        deadline = FOREVER if timeout is None else self._scheduler.now + timeout
        if not self._scheduler.wait((self._waiters,), lambda: self._value > 0, deadline, "wait"):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        """Give places back."""
        self._value += n
        self._waiters.wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """See `threading.Thread`: an actor of the process that starts it."""

    def __init__(  # noqa: PLR0917 (as `threading.Thread` has them)
        self,
        threads: Threads,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._threads, self._target, self.name, self.daemon = threads, target, name, daemon
        self._arguments, self._keywords = tuple(args), dict(kwargs or {})
        self._actor: Actor | None = None
        self._ended = Waiters()

    def start(self, *, is_ours: bool = False) -> None:
        """A step. Raises `RuntimeError` where the process may have no thread more; threads of a story are not asked."""
        scheduler = self._threads.scheduler
        scheduler.step("thread")
        parent = scheduler.current
        assert parent is not None
        if not is_ours:
            self._threads.check_room()
        self._actor = scheduler.start(parent.process, self.run, f"{_place(parent)}{self.name}")
        self._actor.may_fail = not is_ours
        self._actor.on_end.append(self._note_end)
        self._threads.by_actor[self._actor] = self
        self._threads.on_start(self._actor)

    def run(self) -> None:
        """What it does."""
        target, arguments, keywords = self._target, self._arguments, self._keywords
        self._target, self._arguments, self._keywords = None, (), {}
        if target is not None:
            target(*arguments, **keywords)

    def _note_end(self) -> None:
        assert self._actor is not None
        self._threads.by_actor.pop(self._actor, None)
        self._ended.wake()

    def is_alive(self) -> bool:
        """Whether it has begun, and not ended."""
        return self._actor is not None and not self._actor.has_ended

    def join(self, timeout: float | None = None) -> None:
        """A step, or more."""
        scheduler = self._threads.scheduler
        deadline = FOREVER if timeout is None else scheduler.now + max(0.0, timeout)
        if scheduler.current is not None:
            scheduler.wait((self._ended,), lambda: not self.is_alive(), deadline, "wait")


class Timer:
    """See `threading.Timer`."""

    def __init__(self, threads: Threads, interval: float, function: Callable[[], object]) -> None:
        self._interval, self._function = interval, function
        self._cancelled = SimulatedEvent(threads.scheduler)
        thread = Thread(threads, self._run, "timer")
        self.start, self.join, self.daemon = thread.start, thread.join, True

    def cancel(self) -> None:
        """Do not call, if it has not begun."""
        self._cancelled.set()

    def _run(self) -> None:
        if not self._cancelled.wait(self._interval):
            self._function()


class Queue:
    """See `queue.SimpleQueue`; where it `is_stack`, `queue.LifoQueue`."""

    def __init__(self, scheduler: Scheduler, *, is_stack: bool = False) -> None:
        self._scheduler, self._waiters, self._is_stack = scheduler, Waiters(), is_stack
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add one."""
        self._scheduler.check_alive()
        self._items.append(item)
        self._waiters.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take one; raises `queue.Empty`."""
        if not block:
            timeout = 0.0
        deadline = FOREVER if timeout is None else self._scheduler.now + timeout
        if not self._scheduler.wait((self._waiters,), lambda: bool(self._items), deadline, "wait"):
            raise queue.Empty
        return self._items.pop() if self._is_stack else self._items.popleft()

    def get_nowait(self) -> Any:
        """Take one; raises `queue.Empty`."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._items


class _Future:
    """See `concurrent.futures.Future`."""

    def __init__(self, threads: Threads, call: Callable[[], Any]) -> None:
        self._call, self._ended, self._has_begun = call, SimulatedEvent(threads.scheduler), False
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        try:
            self._value = self._call()
        except Exception as error:
            self._error = error
        self._ended.set()

    def cancel(self) -> bool:
        if self._has_begun:
            return False
        self._has_begun = True
        self._ended.set()
        return True

    def result(self, timeout: float | None = None) -> Any:
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class CallPool:
    """See `concurrent.futures.ThreadPoolExecutor`: a thread for each call, which ends with it."""

    def __init__(self, threads: Threads, max_workers: int = 1, thread_name_prefix: str = "pool") -> None:
        self._threads, self._name = threads, thread_name_prefix

    def submit(self, call: Callable[..., Any], *arguments: Any) -> _Future:
        """Have it called."""
        future = _Future(self._threads, lambda: call(*arguments))
        Thread(self._threads, target=future.run, name=self._name).start()
        return future

    def shutdown(self, wait: bool = True) -> None:
        """Each call ends by itself."""


def wait_for_all(futures: Iterable[_Future]) -> None:
    """See `concurrent.futures.wait`."""
    for future in futures:
        future._ended.wait()


class Threads:
    """Makes threads, and refuses them where a process may have none."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.by_actor: dict[Actor, Thread] = {}
        self.check_room: Callable[[], None] = lambda: None  # raises where there is no room for a thread
        self.on_start: Callable[[Actor], None] = lambda _: None

    def current(self) -> Thread | Actor | None:
        """See `threading.current_thread`; the main thread of a process is no `Thread` here."""
        actor = self.scheduler.current
        return self.by_actor.get(actor, actor) if actor is not None else None

    def namespaces(self) -> dict[str, SimpleNamespace]:
        """The modules whose place they take, by name."""
        scheduler = self.scheduler

        def with_threads(kind: Any) -> Callable[..., Any]:
            return lambda *arguments, **keywords: kind(self, *arguments, **keywords)

        def with_scheduler(kind: Any, **more: Any) -> Callable[..., Any]:
            return lambda *arguments, **keywords: kind(scheduler, *arguments, **keywords, **more)

        return {
            "threading": SimpleNamespace(
                Lock=with_scheduler(Lock),
                RLock=with_scheduler(Lock, is_reentrant=True),
                Event=with_scheduler(SimulatedEvent),
                Condition=with_scheduler(Condition),
                Semaphore=with_scheduler(Semaphore),
                BoundedSemaphore=with_scheduler(Semaphore),
                Thread=with_threads(Thread),
                Timer=with_threads(Timer),
                current_thread=self.current,
            ),
            "queue": SimpleNamespace(
                Empty=queue.Empty,
                SimpleQueue=with_scheduler(Queue),
                LifoQueue=with_scheduler(Queue, is_stack=True),
            ),
            "concurrent.futures": SimpleNamespace(ThreadPoolExecutor=with_threads(CallPool), wait=wait_for_all),
        }


def _place(parent: Actor) -> str:
    """What the names of a process's threads begin with."""
    return f"{parent.name.partition('/')[0]}/"
