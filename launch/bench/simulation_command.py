"""The benchmark of the simulation: steps of stories beside steps of a bare loop of the same scheduler."""

from __future__ import annotations

from pathlib import Path

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.launch.bench.report import Figure, Report, at_least
from fastdeploy_cache.launch.faults.scheduler import Pace, Scheduler
from fastdeploy_cache.launch.faults.search import Search, search
from fastdeploy_cache.launch.faults.simulation import on_one_core

_NUM_ACTORS, _BARE_STEPS = 6, 200_000
_LEAST_STEPS_A_SECOND = 5000
_PER_STEPS = 1000
_COUNTED = ("verbs", "answers", "messages", "file calls", "blocks compared", "checks")


class _Alive:
    """The process of actors that do nothing."""

    is_dead = is_stopped = False


def bench_simulation(json_file: Path | None, num_steps: int, seed: int) -> bool:
    """Run stories up to so many steps, and the bare loop; whether the promise was kept."""
    with Report(json_file, page="docs/trust.md") as report:
        bare = Figure("bare loop", _bare_steps_a_second(), "steps/s")
        so_far = _stories(num_steps, seed)
        rate = so_far.num_steps / so_far.seconds
        promise = at_least("steps of stories in a second", _LEAST_STEPS_A_SECOND)
        report.line(
            f"{so_far.num_stories} stories from seed {seed}, {so_far.num_steps} steps, one core",
            bare,
            Figure("stories", rate, "steps/s", promise=promise),
        )
        report.line(
            f"In {_PER_STEPS} steps",
            *(Figure(name, so_far.counts[name] * _PER_STEPS / so_far.num_steps) for name in _COUNTED),
            Figure("faults", so_far.num_faults * _PER_STEPS / so_far.num_steps),
        )
        return report.end()


def _stories(num_steps: int, seed: int) -> Search:
    for so_far in search(first_seed=seed):
        if so_far.num_steps >= num_steps:
            return so_far
    raise AssertionError("a search never ends by itself")


def _bare_steps_a_second() -> float:
    """Actors that only step, each time to another one."""
    with on_one_core():
        scheduler = Scheduler(0, Pace(stay=0.0, put_aside=0.0, step_seconds=1e-6))

        def run() -> None:
            while scheduler.num_steps < _BARE_STEPS:
                scheduler.step("lock")

        for number in range(_NUM_ACTORS):
            scheduler.start(_Alive(), run, f"actor {number}")
        started = SYSTEM_CLOCK.now()
        scheduler.run(lambda: False)
        return scheduler.num_steps / (SYSTEM_CLOCK.now() - started)
