"""The engine and its cache stopped and started together: the order of things, in one place."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

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
        with self._still(timeout_seconds) as deadline:
            self._cache.life.pause(_left(deadline))

    def resume(self, timeout_seconds: float) -> None:
        """The reverse of `pause`."""
        with self._still(timeout_seconds) as deadline:
            self._cache.life.resume(_left(deadline))

    def sleep(self, timeout_seconds: float, tiers: Collection[TierName]) -> None:
        """Give back the memory of these tiers."""
        with self._still(timeout_seconds) as deadline:
            self._engine.preempt_all()
            self._cache.life.sleep(_left(deadline), tiers=tiers)

    def wake(self, timeout_seconds: float) -> None:
        """The reverse of `sleep`; then it runs."""
        with self._still(timeout_seconds) as deadline:
            self._cache.life.wake(_left(deadline))

    def clear(self, timeout_seconds: float) -> None:
        """Forget what is cached; then it is as before."""
        with self._still(timeout_seconds) as deadline:
            self._engine.preempt_all()
            self._cache.life.clear(_left(deadline))

    def update_weights(self, timeout_seconds: float, weights_id: str | None) -> None:
        """What is cached was computed with other weights: forget it; then it is as before."""
        with self._still(timeout_seconds) as deadline:
            self._engine.preempt_all()
            self._cache.life.update_weights(weights_id, _left(deadline))

    @contextmanager
    def _still(self, timeout_seconds: float) -> Iterator[float]:
        """Hold the engine between two of its steps; gives the deadline."""
        deadline = time.monotonic() + timeout_seconds
        if not self._engine.pause(timeout_seconds):
            raise LaunchError(f"the engine's step was not over within {timeout_seconds} s; try again with more time")
        try:
            yield deadline
        finally:
            if self._cache.life.status is LifeCycleStatus.RUNNING:
                self._engine.resume()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
