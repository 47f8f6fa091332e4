"""The block pool as vLLM's shape shows it; random engines over it."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_cache import Request
from fastdeploy_cache.adapters.vllm.manager import hash_request_tokens
from fastdeploy_cache.errors import BlockOwnerError
from fastdeploy_cache.policies import EVICTION_POLICIES
from tests.rigs.call_counts import counted
from tests.rigs.simulated_client import SimulatedClient
from tests.rigs.vllm_engine import SIZE, Engine, asks, ids, serve, start, view


def test_slots_one_by_one_are_what_one_step_for_all_gives() -> None:
    """`allocate_slots` of each decoding request, and `step` for all of them: the same blocks, evictions and tree."""
    kv, choose = view(24), random.Random(5)
    other, native, tables = view(24).manager, dict[str, Request](), dict[str, list[int]]()
    for name in ("idle", "also idle", "a", "b", "c"):
        tokens = [choose.randint(0, 1)] * 3 + [choose.randint(0, 9) for _ in range(12)]
        request = asks(name, tokens)
        native[name] = Request(request_id=name, prompt_token_ids=tokens)
        start(kv, request)
        blocks = other.match(native[name]).block_ids
        tables[name] = blocks + other.allocate(native[name], -(-len(tokens) // SIZE) - len(blocks))
        if "idle" in name:
            kv.free(request)
            other.commit(native[name], len(tokens))
            other.release(native.pop(name))
            del tables[name]
    running = [kv._served[name].request for name in native]
    for _ in range(17):
        for request in running:
            request.all_token_ids.append(choose.randint(0, 9))  # type: ignore[attr-defined]
            assert kv.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1  # type: ignore[misc]
        steps = [(native[r.request_id], r.all_token_ids[-1:], len(r.all_token_ids) - 1) for r in running]
        for name, new in zip(native, other.step(steps), strict=True):
            assert isinstance(new, list)
            tables[name] += new
        assert {name: kv.get_block_ids(name)[0] for name in tables} == tables
        seen = [[(v.token_ids.tolist(), v.block_ids) for v in m.blocks.view.runs()] for m in (kv.manager, other)]
        assert seen[0] == seen[1]
    assert kv.manager.stats().gpu.num_free == 0, "nothing was evicted"
    kv.manager.close()
    other.close()


def test_the_pool_shows_references_and_hashes() -> None:
    """One object per block; its count is of requests, its hash of what is cached there now."""
    kv, tokens = view(16), [*range(9)]
    requests = [asks(name, tokens) for name in "abc"]
    for request in requests:
        start(kv, request)
    kv.cache_blocks(requests[0], 8)
    hashes = hash_request_tokens(SIZE, tokens)
    pool = kv.block_pool
    assert [block.block_hash for block in pool.blocks[:3]] == [*hashes, None]
    assert [pool.get_cached_block(h) for h in hashes] == pool.blocks[:2]
    late = asks("d", tokens)
    start(kv, late)
    assert [block.ref_cnt for block in kv.get_blocks("d")] == [2, 2, 1]
    for request in (*requests, late):
        kv.free(request)
    assert not any(block.ref_cnt for block in pool.blocks) and pool.get_usage() == 0
    assert kv.reset_prefix_cache() and pool.get_cached_block(hashes[0].hash_value) is None
    assert pool.blocks[0].block_hash is None
    kv.manager.close()


def test_a_second_copy_and_the_cached_one_are_both_in_use() -> None:
    """As the page says: two requests compute the same two blocks, and after the first is freed the second still pins
    the cached copies beside its own, which `ref_cnt` does not count. When it is freed all are free."""
    kv, pair = view(24), [asks(name, [*range(9)]) for name in "ab"]
    for request in pair:
        assert start(kv, request) == 0
    for request in pair:
        kv.cache_blocks(request, 8)
    [first, second] = [ids(kv.get_blocks(name)) for name in "ab"]
    assert not {*first} & {*second} and kv.block_pool.get_num_free_blocks() == 24 - 6
    kv.free(pair[0])
    free = ids(kv.block_pool.free_block_queue.get_all_free_blocks())
    assert kv.block_pool.get_num_free_blocks() == len(free) == 24 - 3 - 2
    assert not {*first[:2], *second} & {*free} and first[2] in free
    assert [block.ref_cnt for block in kv.block_pool.blocks_of(first)] == [0, 0, 0]
    kv.free(pair[1])
    assert kv.block_pool.get_num_free_blocks() == 24
    kv.manager.close()


def test_blocks_of_the_pool_belong_to_their_taker() -> None:
    """Taken blocks are in nobody's way twice; only they can be given back, and once."""
    kv = view(4)
    pool = kv.block_pool
    taken = pool.get_new_blocks(3)
    assert [block.ref_cnt for block in taken] == [1, 1, 1] and kv.usage == 0.75
    with pytest.raises(ValueError, match="cannot get 2 blocks"):
        pool.get_new_blocks(2)
    request = asks("a", [1, 2, 3])
    start(kv, request)
    for wrong in ([*taken, *kv.get_blocks("a")], [taken[0], taken[0]]):
        with pytest.raises(BlockOwnerError):
            pool.free_blocks(wrong)
    assert [block.ref_cnt for block in pool.blocks] == [1, 1, 1, 1]
    pool.free_blocks(taken)
    kv.free(request)
    assert pool.free_block_queue.num_free_blocks == 4
    kv.manager.close()


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    """Free ids first, then the oldest request's last block, and what two share after what either has alone."""
    kv = view(9)
    serve(kv, asks("a", [*range(8), *[20] * 4]))
    serve(kv, asks("b", [*range(8), *[30] * 4]))
    serve(kv, asks("c", [*[40] * 8]))
    queue = kv.block_pool.free_block_queue
    assert ids(queue.get_all_free_blocks()) == [6, 7, 8, 2, 3, 1, 0, 5, 4]
    start(kv, asks("d", [*range(9)]))
    assert ids(queue.get_all_free_blocks()) == [7, 8, 2, 3, 5, 4] and queue.num_free_blocks == 6
    kv.manager.close()


def test_a_hit_takes_its_blocks_out_of_the_queue_without_a_walk() -> None:
    """However many other blocks are free, finding and holding a prefix makes the same calls: removal is O(1)."""

    def num_calls(num_others: int) -> int:
        kv = view(1000)
        for i in range(num_others):
            serve(kv, asks(f"r{i}", [100 + i] * 9))
        serve(kv, asks("old", [*range(9)]))
        request = asks("a", [*range(9)])
        (blocks, _), count = counted(lambda: kv.get_computed_blocks(request))
        queue = kv.block_pool.free_block_queue
        assert len(blocks) == 2 and queue.num_free_blocks == 998
        assert not {*ids(blocks)} & {*ids(queue.get_all_free_blocks())}
        kv.manager.close()
        return count

    assert num_calls(4) == num_calls(300)


@pytest.mark.parametrize("recompute", [False, True], ids=["whole block", "last token"])
@pytest.mark.parametrize("is_on_gpu", [True, False], ids=["on the GPU", "in the CPU tier"])
@pytest.mark.parametrize("num_tokens", range(SIZE, 3 * SIZE + 1))
def test_a_cached_prompt_uses_no_more_blocks_than_in_vllm(num_tokens: int, is_on_gpu: bool, recompute: bool) -> None:
    """There, a prompt takes as many blocks as it fills, cached whole or not: a pool of just these serves it again."""
    num_blocks = -(-num_tokens // SIZE)
    kv = view(num_blocks, 16, config={"recompute_last_token": recompute})
    client = kv.manager._movement.client
    assert isinstance(client, SimulatedClient)
    serve(kv, asks("a", [*range(num_tokens)]))
    client.land_all()
    if not is_on_gpu:
        kv.manager.blocks.evict(num_blocks)
    request = asks("b", [*range(num_tokens)])
    blocks, num_computed = kv.get_computed_blocks(request)
    new = kv.allocate_slots(request, num_tokens - num_computed, blocks)
    assert new is not None and len(blocks) + len(new) == num_blocks, "vLLM would serve it"
    kv.free(request)
    client.land_all()
    kv.manager.check_invariants()
    kv.manager.close()


# -- random engines


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    num_gpu=st.integers(6, 24),
    num_cpu=st.sampled_from([0, 8, 60]),
    policy=st.sampled_from(["lru", *EVICTION_POLICIES]),
    recompute=st.booleans(),
    schedules_ahead=st.booleans(),
)
def test_random_engines(
    seed: int, num_gpu: int, num_cpu: int, policy: str, recompute: bool, schedules_ahead: bool
) -> None:
    """Hits, growth, preemption, refusals, failed loads, resets: no wrong KV is read, and all books add up each time."""
    config = {"eviction_policy": policy, "recompute_last_token": recompute}
    kv = view(num_gpu, num_cpu, config=config, load_timeout_seconds=0, schedules_ahead=schedules_ahead)
    engine = Engine(kv, random.Random(seed), schedules_ahead=schedules_ahead)
    for _ in range(150):
        engine.walk()
        engine.check()
    engine.finish()
    if policy == "lru" and not num_cpu:
        order = ids(kv.block_pool.free_block_queue.get_all_free_blocks())
        assert [kv.manager.blocks.allocate(1)[0] for _ in order] == order, (
            "the queue is not the order in which blocks go"
        )
    kv.manager.close()


def test_random_engines_get_everywhere() -> None:
    """The walks above are worth something: each of what they are about happens often."""
    seen: dict[str, int] = {}
    for seed in range(20):
        kv = view(16, 40, load_timeout_seconds=0)
        engine = Engine(kv, random.Random(seed), schedules_ahead=False)
        for _ in range(400):
            engine.walk()
        engine.finish()
        kv.manager.close()
        for name, count in engine.seen.items():
            seen[name] = seen.get(name, 0) + count
    names = ("hit", "loaded", "refused", "refused while running", "let go", "preempted", "alone", "reset", "image hit")
    assert all(seen.get(name, 0) > 20 for name in names), seen
