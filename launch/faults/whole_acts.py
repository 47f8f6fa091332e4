"""What a user does with the cache as a whole, and with other instances: what is refused there is no fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import (
    ConfigError,
    LifeCycleError,
    NotEnoughMemoryError,
    RequestError,
    StorageError,
)
from fastdeploy_cache.launch.faults.stage import GivenUpError, Home, StoryStage
from fastdeploy_cache.launch.faults.story import Act

_LIFE_SECONDS = 30.0
_STOP_SECONDS = 25.0  # storage's processes have to end, or are killed; and its thread
_CLOSE_SECONDS = 90.0
_WAKES, _WAKE_SECONDS = 20, 3.0
_AT_ONCE = 2  # one in so many changes of weights
_TIERS: tuple[tuple[Literal["gpu", "cpu"], ...], ...] = (("gpu",), ("cpu",), ("gpu", "cpu"))


T = TypeVar("T")


class Caller(Protocol):
    """A user, as far as these acts know one."""

    engine: Home
    world: StoryStage
    cache: PrefixCacheManager
    running: Any

    def call(self, verb: str, call: Callable[[], T], limit_seconds: float = 0.0) -> T:
        """Call a verb, which has to come back in time."""
        ...

    def leave_all(self) -> None:
        """Let everything go."""
        ...

    def admit(self, act: Act) -> None:
        """Match a prompt, and compute it."""
        ...


class WholeActs:
    """What one user may do so."""

    def __init__(self, user: Caller) -> None:
        self._user, self._cache = user, user.cache
        self._sleep_seconds = user.world.host.sleep
        self.acts: Mapping[str, Callable[[Act], None]] = {
            "reset": self._reset, "clear": self._clear, "pause": self._pause, "sleep": self._sleep,
            "weights": self._weights, "detach": self._detach, "flush": self._flush, "check": self._check,
            "see": self._see, "pin": self._pin, "rest": self._rest, "worker": self._worker,
            "close": self._close,
        }  # fmt: skip

    def _reset(self, _: Act) -> None:
        first_step = self._user.world.host.num_steps
        self._user.call("reset", self._cache.reset)
        self._user.engine.committed.forget(first_step)

    # -- life

    def _life(self, verb: str, call: Callable[..., object], *arguments: Any, **more: Any) -> bool:
        """Whether it was done."""
        limit = _LIFE_SECONDS + _STOP_SECONDS
        try:
            self._user.call(verb, lambda: call(*arguments, timeout_seconds=_LIFE_SECONDS, **more), limit)
        except LifeCycleError:
            return False
        return True

    def _clear(self, _: Act) -> None:
        first_step = self._user.world.host.num_steps
        if self._life("clear", self._cache.life.clear):
            self._user.engine.committed.forget(first_step)

    def _pause(self, act: Act) -> None:
        if self._life("pause", self._cache.life.pause):
            self._sleep_seconds(0.001 * act.first)
            self._life("resume", self._cache.life.resume)

    def _sleep(self, act: Act) -> None:
        first_step, tiers = self._user.world.host.num_steps, _TIERS[act.first % len(_TIERS)]
        if self._life("sleep", self._cache.life.sleep, tiers=tiers) and len(tiers) == len(_TIERS[-1]):
            self._user.engine.committed.forget(first_step)
        self._sleep_seconds(0.001 * act.second)
        for _ in range(_WAKES):
            if self._cache.life.status.value != "asleep":
                return
            try:
                self._life("wake", self._cache.life.wake)
            except NotEnoughMemoryError:
                self._sleep_seconds(_WAKE_SECONDS)

    def _weights(self, act: Act) -> None:
        """New weights: alone, as an engine changes them between its steps; or at once, whatever is on its way."""
        engine, cache, weights_id = self._user.engine, self._cache, f"weights-{self._user.engine.weights + 1}"
        if len(engine.users) > 1:
            return
        self._user.leave_all()
        is_named = engine.settings.has_peers or cache.storage.settings is not None
        try:
            if is_named and act.second % _AT_ONCE == 0:
                self._user.call("reset", lambda: cache.reset(weights_id=weights_id), _LIFE_SECONDS + _STOP_SECONDS)
                is_done = True
            else:
                is_done = self._life("update_weights", cache.life.update_weights, weights_id)
        except StorageError:  # the weights are the new ones, without a store
            is_done = True
        engine.weights += is_done

    def _worker(self, act: Act) -> None:
        """The worker of a rank dies, and another one comes with arrays of its own; meanwhile the others compute."""
        engine, rank = self._user.engine, act.first % self._user.engine.settings.tp_size

        def compute() -> None:
            with suppress(GivenUpError):
                self._user.admit(act)

        if engine.workers is not None:
            engine.workers.replace(rank, self._user.call, compute if act.third % 2 else lambda: None)

    # -- storage

    def _detach(self, act: Act) -> None:
        storage, config = self._cache.storage, self._user.engine.config().storage
        assert config is not None
        self._user.call("detach", storage.detach, _STOP_SECONDS)
        self._sleep_seconds(0.001 * act.first)
        try:
            self._user.call("attach", lambda: storage.attach(config), _STOP_SECONDS)
        except (ConfigError, StorageError):  # another user was first; the folder is still being let go; a shortage
            return

    def _flush(self, act: Act) -> None:
        seconds = (0.01, 1.0, 10.0)[act.first % 3]
        self._user.call("flush", lambda: self._cache.storage.flush(seconds), seconds)

    # -- looks, and others

    def _check(self, _: Act) -> None:
        self._user.engine.check(self._cache, [])

    def _see(self, _: Act) -> None:
        self._user.call("stats", self._cache.stats)
        self._user.call("examine", self._cache.examine)
        for explanation in self._user.call("explain", lambda: self._cache.explain_last(4)):
            explained = explanation.num_hit_tokens + sum(explanation.missed_tokens().values())
            if explained != explanation.num_tokens:
                self._user.world.find("a miss without a cause", str(explanation))

    def _pin(self, act: Act) -> None:
        """A caller's pin, for a moment."""
        running = self._user.running
        if not running:
            return
        request = running[act.first % len(running)].request
        try:
            pinned = self._user.call("pin", lambda: self._cache.blocks.pin(request))
        except RequestError:
            return
        self._sleep_seconds(0.0005 * act.second)
        self._user.call("unpin", lambda: self._cache.blocks.unpin(pinned))

    def _rest(self, act: Act) -> None:
        """What has died comes back, and what was given up is tried again, while nobody asks for anything."""
        seconds = (0.01, 0.3, 3.0)[act.first % 3]
        self._user.call("wait_for_transfers", lambda: self._cache.wait_for_transfers(seconds), seconds)
        self._sleep_seconds((0.0, 0.0, 0.1, 0.0, 1.0, 0.0, 8.0, 0.0)[act.third % 8])

    def _close(self, _: Act) -> None:
        """An end in order, whatever other users are doing; the engine begins anew."""
        self._user.call("close", self._cache.close, _CLOSE_SECONDS)
        self._user.world.counts["closed by users"] += 1
