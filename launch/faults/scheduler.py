"""One seed decides who goes next: threads of many simulated processes, of which one runs at a time.

Each actor is a real thread that waits for its baton. It gives the baton away only where it steps (at a lock, a wait, a
message, a file call): there the scheduler draws who goes on, and faults may happen. Time is a number; it grows a little
with each step, and jumps to the next deadline when everybody waits. So a run follows from its seed alone.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

FOREVER: Final = float("inf")
_STEPS_ASIDE = (10, 50, 200)
_HUNG_SECONDS = 60.0  # of the real clock, for one actor to come to its next step


class ProcessDiedError(BaseException):
    """Raised in each thread of a simulated process that is dead, at each of its calls: it goes on nowhere."""


class StuckError(AssertionError):
    """Everybody waits, and nobody's time comes; or an actor has not come to its next step."""


class ActorProcess(Protocol):
    """Whose threads actors are."""

    is_dead: bool
    is_stopped: bool


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a run is scheduled; drawn from its seed.

    Attributes:
        stay: how probable it is that an actor which could go on does.
        put_aside: how probable it is that one that gives way does so for many steps, as a thread does whose processor
            is given to others: some orders need one that stands still between two lines while others run far.
        step_seconds: by how much time grows with each step.
    """

    stay: float
    put_aside: float
    step_seconds: float


class Waiters:
    """Who waits for something to change; what changes it calls `wake`."""

    __slots__ = ("_actors",)

    def __init__(self) -> None:
        self._actors: dict[Actor, None] = {}

    def add(self, actor: Actor) -> None:
        """It waits from now on."""
        self._actors[actor] = None

    def remove(self, actor: Actor) -> None:
        """It waits no more."""
        self._actors.pop(actor, None)

    def wake(self) -> None:
        """Let all of them look again."""
        for actor in self._actors:
            actor.wake()


class Actor:
    """A thread of a simulated process."""

    def __init__(self, scheduler: Scheduler, process: ActorProcess, call: Callable[[], object], name: str) -> None:
        self.scheduler, self.process, self.name = scheduler, process, name
        self.number = scheduler.new_number()
        self.is_runnable, self.has_ended, self.is_dying = False, False, False
        self.may_fail = False  # see `FailingLines`
        self.num_waits = 0  # an alarm of an earlier wait is none of this one's
        self.held_until = 0.0  # a slow thread: it does not run before
        self.aside_until = 0  # likewise, as a number of steps, and not where nobody else can run
        self.on_end: list[Callable[[], None]] = []
        self._call: Callable[[], object] | None = call
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread = threading.Thread(target=self._run, name=f"simulated {name}", daemon=True)

    def wake(self) -> None:
        """It may go on."""
        if not self.is_runnable and not self.has_ended:
            self.is_runnable = True
            self.scheduler.runnable.append(self)

    def wake_from(self, number: int) -> None:
        """It may go on, if it is in that wait still."""
        if self.num_waits == number:
            self.wake()

    def _run(self) -> None:
        self.baton.acquire()
        call, self._call = self._call, None
        try:
            if not self.is_dying:
                assert call is not None
                self.scheduler.resumed(self)
                call()
        except ProcessDiedError:
            pass
        except BaseException as error:
            self.scheduler.note_failure(self, error)
        finally:
            del call
            self.scheduler.end_current(self)


class Scheduler:
    """Actors, their time, and the chance that decides between them."""

    def __init__(self, seed: int, pace: Pace) -> None:
        self.chance = random.Random(seed)  # noqa: S311 (nothing is kept secret)
        self.pace = pace
        self.now = 1000.0
        self.num_steps = 0
        self.kinds: Counter[str] = Counter()
        self.runnable: list[Actor] = []
        self.current: Actor | None = None
        self.failures: list[tuple[str, BaseException]] = []
        self.inject: Callable[[], None] = lambda: None  # called when `next_fault` is reached
        self.next_fault = -1
        self.resumed: Callable[[Actor], None] = lambda _: None  # called by an actor that goes on after others
        self.is_over = False
        self.trace = 0  # a digest of who went when: two runs of a seed have the same
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._num_actors = self._num_alarms = 0
        self._living: dict[Actor, None] = {}
        self._main = threading.Lock()
        self._main.acquire()
        self._reaper: Actor | None = None  # who waits for dying actors to end

    # -- actors

    def new_number(self) -> int:
        """A number for the next actor."""
        self._num_actors += 1
        return self._num_actors

    def start(self, process: ActorProcess, call: Callable[[], object], name: str) -> Actor:
        """A new actor, which goes on when its turn comes."""
        actor = Actor(self, process, call, name)
        self._living[actor] = None
        actor.thread.start()
        actor.wake()
        return actor

    @property
    def living(self) -> Iterable[Actor]:
        """Those that have not ended."""
        return self._living

    def note_failure(self, actor: Actor, error: BaseException) -> None:
        """Something was raised that nobody caught; what a dead one raises while it is unwound, nobody has seen."""
        if actor.is_dying:
            return
        self.failures.append((actor.name, error))
        self.is_over = True

    def forget(self) -> None:
        """All have ended: what they have left behind goes, too."""
        self._alarms.clear()
        self.failures.clear()

    def run(self, until: Callable[[], bool]) -> None:
        """Called by the thread that has built it: let actors go on until that holds, all have ended, or one has failed.

        Raises:
            StuckError: they cannot.
        """
        self.is_over, self._until = False, until
        first = self._next()
        if first is None:
            return
        self.current = first
        first.baton.release()
        try:
            self._wait_for_main()
        except KeyboardInterrupt:  # whoever goes on now stops at its next step
            self.is_over = True
            self._wait_for_main()
            raise

    def _wait_for_main(self) -> None:
        num_steps = -1
        while not self._main.acquire(timeout=_HUNG_SECONDS):
            if num_steps == self.num_steps:
                raise StuckError(f"{self.current and self.current.name} does not come to its next step")
            num_steps = self.num_steps

    def end_current(self, actor: Actor) -> None:
        """Its thread ends here: whoever is next goes on."""
        actor.has_ended, actor.is_runnable = True, False
        self._living.pop(actor, None)
        if not actor.is_dying:
            for call in actor.on_end:
                call()
        actor.on_end.clear()
        if self._reaper is not None and actor.is_dying:
            reaper, self._reaper = self._reaper, None
            self.current = reaper if reaper is not _MAIN else None
            (self._main if reaper is _MAIN else reaper.baton).release()
            return
        self._leave()

    def _leave(self) -> None:
        """Give the baton to the next; to the main thread where it is over."""
        following = None if self.is_over or self._until() else self._next()
        self.current = following
        (self._main if following is None else following.baton).release()

    def unwind(self, actors: Iterable[Actor]) -> None:
        """These are dead: each raises `ProcessDiedError` where it stands, and its thread ends, before this returns."""
        for actor in list(actors):
            actor.is_dying = True
            if actor is self.current or actor.has_ended:
                continue
            if actor.is_runnable:
                self.runnable.remove(actor)
                actor.is_runnable = False
            me = self.current
            self._reaper, self.current = me if me is not None else _MAIN, actor
            actor.baton.release()
            (self._main if me is None else me.baton).acquire()

    # -- steps

    def check_alive(self) -> None:
        """Raise `ProcessDiedError` where the current actor's process is dead."""
        if self.current is not None and self.current.is_dying:
            raise ProcessDiedError

    def step(self, kind: str) -> None:
        """The current actor is about to do something that others can see: another one may go first."""
        me = self.current
        if me is None:
            return
        if me.is_dying:
            raise ProcessDiedError
        self.num_steps += 1
        self.kinds[kind] += 1
        self.now += self.pace.step_seconds
        if self.num_steps == self.next_fault:
            self.inject()
            if me.is_dying:
                raise ProcessDiedError
        if self.chance.random() >= self.pace.stay or me.process.is_stopped or me.held_until > self.now:
            if self.chance.random() < self.pace.put_aside:
                me.aside_until = self.num_steps + self.chance.choice(_STEPS_ASIDE)
            me.wake()
            self._switch(me)

    def wait(self, sources: Iterable[Waiters], is_ready: Callable[[], Any], deadline: float, kind: str) -> Any:
        """Let others go on until `is_ready` gives something, which a wake of one of the sources makes it look at again;
        what it gave, or the last, false, answer when the time is over. One step, or more."""
        self.step(kind)
        me = self.current
        assert me is not None, "a wait outside the simulation"
        while not (found := is_ready()):
            if self.now >= deadline:
                return found
            me.num_waits += 1
            if deadline < FOREVER:
                self.call_at(deadline, partial(me.wake_from, me.num_waits))
            for source in sources:
                source.add(me)
            try:
                self._switch(me)
            finally:
                me.num_waits += 1
                for source in sources:
                    source.remove(me)
        return found

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Make this call, which takes no step, when that time has come."""
        self._num_alarms += 1
        heapq.heappush(self._alarms, (when, self._num_alarms, call))

    def _switch(self, me: Actor) -> None:
        """Another one goes on; returns when this one is drawn again."""
        following = None if self.is_over or self._until() else self._next()
        if me.is_dying and following is not me:  # an alarm has killed it meanwhile: it ends first
            if me.is_runnable:
                self.runnable.remove(me)
                me.is_runnable = False
            if following is not None:
                following.wake()
            raise ProcessDiedError
        if following is not me:
            self.current = following
            (self._main if following is None else following.baton).release()
            me.baton.acquire()
            self.resumed(me)
        if me.is_dying:
            raise ProcessDiedError

    def _next(self) -> Actor | None:
        """Who goes on: drawn from those that can. Where nobody can, time goes on to the next alarm."""
        while True:
            while self._alarms and self._alarms[0][0] <= self.now:
                heapq.heappop(self._alarms)[2]()
            ready = [a for a in self.runnable if not a.process.is_stopped and a.held_until <= self.now]
            if ready:
                ready = [a for a in ready if a.aside_until <= self.num_steps] or ready
                actor = ready[int(self.chance.random() * len(ready))]
                self.runnable.remove(actor)
                actor.is_runnable = False
                self.trace = (self.trace * 1000003 ^ actor.number ^ self.num_steps << 20) & (2**64 - 1)
                return actor
            if not self._alarms:
                if self._living:
                    who = ", ".join(actor.name for actor in self._living)
                    self.failures.append(("scheduler", StuckError(f"everybody waits, and nothing will come: {who}")))
                return None
            self.now = max(self.now, self._alarms[0][0])


class _Nobody:
    """The main thread, where an actor would be."""


_MAIN: Any = _Nobody()
