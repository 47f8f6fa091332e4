"""A simulated machine, as engines and their users see it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

from fastdeploy_cache.launch.faults.failing_lines import NoMoreMemoryError
from fastdeploy_cache.launch.faults.simulation import Simulation
from fastdeploy_cache.launch.faults.threads import Lock, Thread


class SimulatedHost:
    """See `Host`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._scheduler = simulation, simulation.scheduler
        self.now, self.sleep = simulation.now, simulation.sleep

    @property
    def chance(self) -> random.Random:
        """See `Host`."""
        return self._scheduler.chance

    @property
    def num_steps(self) -> int:
        """See `Host`."""
        return self._scheduler.num_steps

    @property
    def step_seconds(self) -> float:
        """See `Host`."""
        return self._scheduler.pace.step_seconds

    def new_lock(self) -> Lock:
        """See `Host`."""
        return Lock(self._scheduler)

    def new_guard(self) -> contextlib.AbstractContextManager[object]:
        """See `Host`."""
        return contextlib.nullcontext()

    def start_thread(self, name: str, run: Callable[..., object], *arguments: object) -> Thread:
        """See `Host`."""
        thread = Thread(self._simulation.threads, run, name, arguments)
        thread.start(is_ours=True)
        return thread

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """See `Host`."""
        actor, lines = self._scheduler.current, self._simulation.failing_lines
        assert actor is not None
        actor.may_fail = True
        lines.follow(True)
        try:
            yield
        finally:
            actor.may_fail = False
            lines.follow(False)

    def is_planted(self, error: BaseException) -> bool:
        """See `Host`."""
        return isinstance(error, NoMoreMemoryError)

    @property
    def num_planted(self) -> int:
        """See `Host`."""
        return self._simulation.failing_lines.raised.total()

    def left_behind(self) -> dict[str, list[str]]:
        """See `Host`."""
        machine = self._simulation.machine
        mine = machine.process
        assert mine is not None
        left = {
            "processes": [child.name for child in machine.processes.values() if child.parent is mine],
            "descriptors": [f"{fd}: {type(file).__name__}" for fd, file in mine.descriptors.items() if fd > 2],
            "threads": [actor.name for actor in mine.actors if not actor.name.endswith("/main")],
        }
        return {what: names for what, names in left.items() if names}
