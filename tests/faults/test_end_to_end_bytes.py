"""Bytes go down, are overwritten on the GPU, come up again and are the same, through the whole of the cache."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import PrefixCacheManager
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine, new_config

pytestmark = pytest.mark.processes

PROMPT = list(range(100, 100 + 6 * BLOCK_SIZE + 1))


@pytest.mark.parametrize("tp_size", [1, 3])
def test_bytes_come_back_from_the_cpu_tier(tp_size: int) -> None:
    """A prefix whose GPU blocks others have overwritten is loaded again: every layer, part and rank is the same."""
    with PrefixCacheManager(new_config(tp_size, num_gpu=8, num_cpu=40)) as cache:
        engine = Engine(cache, tp_size)
        engine.serve(PROMPT)
        for other in range(3):  # each fills the whole GPU pool
            engine.serve([1000 * other + i for i in range(8 * BLOCK_SIZE)])
        request, match = engine.match(PROMPT)
        assert match.num_cpu_tokens == 6 * BLOCK_SIZE and match.num_gpu_tokens == 0
        cache.check_invariants()
        cache.release(request)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_bytes_come_back_to_a_scattered_block_table(tp_size: int) -> None:
    """Loaded into ids in no order, beside blocks that others hold: the right bytes, and the others' are untouched."""
    with PrefixCacheManager(new_config(tp_size, num_gpu=16, num_cpu=60)) as cache:
        engine = Engine(cache, tp_size)
        engine.serve(PROMPT)
        for other in range(3):
            engine.serve([1000 * other + i for i in range(16 * BLOCK_SIZE)])
        held = []
        for number in range(8):  # singles; every other one goes home, so that free ids lie apart
            tokens = [9000 + number] * BLOCK_SIZE
            request, match = engine.match(tokens)
            table = match.block_ids + cache.allocate(request, 2)
            engine.compute(tokens, table, 0)
            held.append((request, tokens, table))
        for request, _, _ in held[::2]:
            cache.release(request)
        kept = held[1::2]
        request, match = engine.match(PROMPT)
        assert match.num_cpu_tokens == 6 * BLOCK_SIZE
        ids = match.block_ids
        assert ids != list(range(ids[0], ids[0] + 6)), "the table is scattered"
        for other_request, tokens, table in kept:
            engine.check(tokens, table[:1])
            assert not set(table) & set(ids)
            cache.release(other_request)
        cache.release(request)
        cache.check_invariants()


def test_random_traffic_never_reads_a_wrong_byte() -> None:
    """Branching prompts over full tiers with real ranks: every readable block is compared, and the CPU tier hits."""
    choose, num_from_cpu = random.Random(7), 0
    texts = [[(13 * i * i + 5 * text * (i // 8)) % 97 for i in range(48)] for text in range(5)]
    with PrefixCacheManager(new_config(2, num_gpu=14, num_cpu=40)) as cache:
        engine = Engine(cache, 2)
        for _ in range(120):
            tokens = choose.choice(texts)[: choose.randint(1, 48)] + [choose.randint(0, 9)] * choose.choice([0, 0, 5])
            num_from_cpu += engine.serve(tokens).num_cpu_tokens
            cache.check_invariants()
        assert num_from_cpu > 200
