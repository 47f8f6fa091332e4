"""Engines whose store is in trouble: what they serve meanwhile, and how they come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from fastdeploy_cache import CacheConfig, PrefixCacheManager, StorageConfig
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine
from tests.rigs.storage_engine import SECONDS, drained, fetched
from tests.rigs.troubled_store import Orders

Eventually = Callable[..., None]
NUM_TOKENS = 6 * BLOCK_SIZE


def metric(cache: PrefixCacheManager, name: str, **labels: str) -> int:
    """As Prometheus would see it."""
    registry = CollectorRegistry()
    registry.register(cache.metrics)
    value = registry.get_sample_value(f"fastdeploy_cache_{name}", {"dp": "0"} | labels)
    assert value is not None, name
    return int(value)


def breaker(cache: PrefixCacheManager, operation: str) -> int:
    return metric(cache, "storage_breaker_state", operation=operation)


def prompt(number: int) -> list[int]:
    """Six full blocks and a token; no two have a prefix in common."""
    return list(range(1000 * number, 1000 * number + NUM_TOKENS + 1))


def stored(config: CacheConfig, *numbers: int) -> None:
    """An engine has served these prompts and has ended: they are durable."""
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, config.transfer.tp_size)
        for number in numbers:
            engine.serve(prompt(number))
            drained(cache)


class InTrouble:
    """An engine that meets new prompts while its store is in trouble."""

    def __init__(self, cache: PrefixCacheManager, eventually: Eventually) -> None:
        self.cache, self.eventually = cache, eventually
        self.engine = Engine(cache, cache.config.transfer.tp_size)
        self._next = 100

    def serve(self) -> list[int]:
        """A prompt that nobody has seen; returns it."""
        self._next += 1
        self.engine.serve(prompt(self._next))
        return prompt(self._next)

    def serve_until(self, condition: Callable[[], object]) -> None:
        """Traffic is what the store's state moves by."""

        def look() -> object:
            self.serve()
            return condition()

        self.eventually(look, SECONDS)

    def goes_on(self) -> None:
        """Every verb works, and what is computed is found again on the GPU."""
        for _ in range(4):
            tokens = self.serve()
            assert self.engine.serve(tokens).num_gpu_tokens == NUM_TOKENS
            self.cache.check_invariants()

    def finds(self, tokens: list[int]) -> bool:
        """Whether storage has the whole prompt, with the right bytes, when it is forgotten here."""
        self.cache.reset()
        return fetched(self.cache, self.engine, tokens)[0] == NUM_TOKENS

    def comes_back(self, tokens: list[int] | None = None) -> None:
        """A prompt, by default a new one, is written and found; nothing is left alone any more."""
        assert self.cache.wait_for_transfers(SECONDS)
        asked = tokens or self.serve()

        def writes_and_finds() -> bool:
            self.engine.serve(asked)
            return self.finds(asked)

        self.eventually(writes_and_finds, SECONDS)
        self.eventually(lambda: (breaker(self.cache, "read"), breaker(self.cache, "write")) == (0, 0))
        self.cache.check_invariants()


def spoiled(tmp_path: Path, **settings: float) -> tuple[StorageConfig, Orders]:
    """A file store on a disk that does as it is told."""
    storage = StorageConfig(
        kind="tests.rigs.troubled_store:TroubledStore",
        weights_id="w1",
        breaker_seconds=0.05,
        options={name: str(tmp_path / name) for name in ("folder", "orders", "record")},
    )
    return dataclasses.replace(storage, **settings), Orders(tmp_path / "orders")  # type: ignore[arg-type]
