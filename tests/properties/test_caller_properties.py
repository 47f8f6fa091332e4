"""Random verbs without a request among those of requests and changes of life, against the simple model."""

from __future__ import annotations

from fastdeploy_cache.life_cycle import LifeCycleStatus
from tests.rigs.caller_walk import STEPS, Caller, new_caller, take_step


def walk(seed: int, num_steps: int) -> Caller:
    """One random story."""
    caller = new_caller(seed)
    model, choose = caller.model, caller.choose
    for _ in range(num_steps):
        take_step(caller, choose.choices(list(STEPS), list(STEPS.values()))[0])
    if model.cache.life.status is LifeCycleStatus.ASLEEP:
        model.client.land_all()
        model.client.auto = True
        model.cache.life.wake()
    model.client.auto = False
    caller.finish()
    model.finish()
    return caller


def test_random_walks_of_callers() -> None:
    """150 stories: no wrong byte, no block lost or given twice, no book that does not add up; everything happens."""
    total: dict[str, int] = {}
    for seed in range(150):
        for name, count in walk(seed, 150).num_moved.items():
            total[name] = total.get(name, 0) + count
    assert all(count > 60 for count in total.values()), total
