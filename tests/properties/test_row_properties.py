"""Random walks over the books of hybrid models: the tree finds what memory has, and each planted fault is found."""

from __future__ import annotations

import os

import pytest

from fastdeploy_cache.policies.eviction import RANKING_POLICIES
from tests.properties.planted_rows import PLANTED
from tests.rigs.row_bench import MODELS
from tests.rigs.row_walk import walked
from tests.simulation.planting import Planted, in_place

NUM_STEPS = 400
NUM_CASES = int(os.environ.get("FASTDEPLOY_CACHE_ROW_CASES", "20000"))  # in all; `.ci/night` asks for a million


@pytest.mark.parametrize("policy", RANKING_POLICIES)
def test_the_tree_finds_what_memory_has(policy: str) -> None:
    """After each step a prompt is looked for: the deepest boundary at which it can go on, and the deepest on the GPU,
    are those of an oracle that knows no tree. All owners, pins, pages, orders and ends of leaves are recounted."""
    seed = num_cases = num_hits = num_loads = 0
    while num_cases < NUM_CASES / len(RANKING_POLICIES):
        model = list(MODELS)[seed % len(MODELS)]
        walk = walked(seed * len(RANKING_POLICIES) + list(RANKING_POLICIES).index(policy), model, policy, NUM_STEPS)
        bench = walk.bench
        num_cases, num_hits = num_cases + bench.num_cases, num_hits + bench.num_hits
        num_loads += bench.num_loads
        seed += 1
    assert num_hits > num_cases / 4 and num_loads > 0


def _found(planted: Planted) -> str | None:
    """What walks say of a fault, or nothing."""
    with in_place(planted):
        for seed in range(400):
            model, policy = list(MODELS)[seed % len(MODELS)], list(RANKING_POLICIES)[seed // 5 % len(RANKING_POLICIES)]
            try:
                walked(seed, model, policy, NUM_STEPS, scarcity=0.02)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_each_planted_fault_is_found(planted: Planted) -> None:
    """By a difference from memory, or by a promise that is broken."""
    assert _found(planted) is not None, "no walk has found it"


def test_walks_without_memory_are_whole() -> None:
    """Memory that runs out while units are taken leaves nothing half done."""
    num_published = 0
    for seed in range(40):
        walk = walked(seed, list(MODELS)[seed % len(MODELS)], "lru", NUM_STEPS, scarcity=0.05)
        num_published += walk.bench.counts.get("published", 0)
    assert num_published > 400
