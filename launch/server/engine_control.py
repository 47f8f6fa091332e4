"""The engine and its cache stopped and started together: the order of things, in one place."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.life_cycle import LifeCycleStatus, TierName


class EngineControl:
    """One method for each verb; one call at a time, each within about `timeout_seconds` in all.

    After every call, whether it was done or failed, the engine steps exactly when its cache is running. Where KV goes,
    all generations give theirs back first and compute it again later: no answer is computed on KV that has gone.

    Every method raises:
        LaunchError: the engine's present step did not end in time.
        CacheError: what the cache's verb of the same name raises, such as `LifeCycleError`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._cache = engine, engine.cache

    @property
    def status(self) -> str:
        """The cache's, such as "running" or "asleep"."""
        return self._cache.life.status.value

    def pause(self, timeout_seconds: float) -> None:
        """Answers stand still and new ones wait; what is cached stays."""
        self._do(timeout_seconds, self._cache.life.pause)

    def resume(self, timeout_seconds: float) -> None:
        """The reverse of `pause`."""
        self._do(timeout_seconds, self._cache.life.resume)

    def sleep(self, timeout_seconds: float, tiers: Collection[TierName]) -> None:
        """Give back the memory of these tiers."""
        self._do(timeout_seconds, partial(self._cache.life.sleep, tiers=tiers), forgets=True)

    def wake(self, timeout_seconds: float) -> None:
        """The reverse of `sleep`; then it runs."""
        self._do(timeout_seconds, self._cache.life.wake)

    def clear(self, timeout_seconds: float) -> None:
        """Forget what is cached; then it is as before."""
        self._do(timeout_seconds, self._cache.life.clear, forgets=True)

    def update_weights(self, timeout_seconds: float, weights_id: str | None) -> None:
        """What is cached was computed with other weights: forget it; then it is as before."""
        self._do(timeout_seconds, partial(self._cache.life.update_weights, weights_id), forgets=True)

    def _do(self, timeout_seconds: float, verb: Callable[[float], object], *, forgets: bool = False) -> None:
        """Hold the engine between two of its steps meanwhile."""
        deadline = time.monotonic() + timeout_seconds
        if not self._engine.pause(timeout_seconds):
            raise LaunchError(f"the engine's step was not over within {timeout_seconds} s; try again with more time")
        try:
            if forgets:
                self._engine.preempt_all()
            verb(max(0.0, deadline - time.monotonic()))
        finally:
            if self._cache.life.status is LifeCycleStatus.RUNNING:
                self._engine.resume()
