"""Storage that is slow while it reads CPU blocks, CPU tiers of a few blocks, and an engine that does not wait."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import StorageConfig
from fastdeploy_cache.books.evicting import evict
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import Tier
from fastdeploy_cache.config.cache import WRITE_POLICIES
from fastdeploy_cache.policies import EVICTION_POLICIES
from tests.rigs.cache_model import CacheModel
from tests.rigs.simulated_storage import SimulatedStorage

STORE = StorageConfig(kind="tests.rigs.memory_storage:MemoryStorage", weights_id="w1")
TEXTS = [[(5 * i * i + text) % 7 for i in range(40)] for text in range(5)]
NUM_STEPS = 250


@pytest.fixture(autouse=True)
def evictions_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of `evict` asks for what can go, and as much is free afterwards."""

    def checked(self: Residency, tier: Tier, num_blocks: int) -> None:
        num_free = self.pools[tier].num_free
        assert num_blocks <= self.num_available(tier) - num_free, "asked to evict more than can go"
        evict(self, tier, num_blocks)
        assert self.pools[tier].num_free == num_free + max(0, num_blocks), "evicted more or less than was asked"

    for room in ("books.books", "callers.blocks", "books.evicting"):
        monkeypatch.setattr(f"fastdeploy_cache.{room}.evict", checked)


@pytest.mark.parametrize("storage_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_is_slow_while_it_reads(seed: int, write_policy: str, storage_policy: str) -> None:
    """No verb fails, nothing is evicted that was not asked for, and no wrong byte is served."""
    choose = random.Random(seed)
    num_cpu = choose.randint(2, 9)
    model = CacheModel(
        choose.choice((1, 2)),
        choose.randint(10, 20),
        num_cpu,
        policy=choose.choice(EVICTION_POLICIES),
        write_policy=write_policy,
        storage_write_policy=storage_policy,
        storage_write_min_uses=1,
        cpu_write_min_uses=1,
    )
    store = SimulatedStorage(model.client)
    model.cache.storage.attach(STORE, client=store)
    for _ in range(NUM_STEPS):
        text = choose.choice(TEXTS)[: choose.randint(1, 20)]
        model.serve([*text, choose.randint(0, 3)], stays=choose.random() < 0.1, patient=choose.random() < 0.2)
        if len(model.live) > 2 or choose.random() < 0.2:
            for live in list(model.live):
                model.release(live)
        model.land(choose.choice((None, None, None, "failed")), choose.randint(0, 4))
        if store.tasks and choose.random() < 0.1:
            store.land()
        model.check()
    while store.tasks or model.client.tasks:
        store.land_all()
        model.client.land_all()
    model.finish()
