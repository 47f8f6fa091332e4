"""What is copied to the CPU tier, and when: the three write policies."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import KVLayout
from fastdeploy_cache.books.run import CPU, Run
from fastdeploy_cache.config import WRITE_POLICIES
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.movement import copy_down
from fastdeploy_cache.movement.copy_down import MIN_STORE_BLOCKS
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import CacheModel

A, B, C, D = ([base + i for i in range(400)] for base in (1000, 2000, 3000, 4000))
Block = tuple[int, ...]  # the first tokens of the runs down to it, and its place in the last one


def blocks_of(run: Run, start: int, end: int) -> set[Block]:
    names = [int.from_bytes(upper.tokens[:4], "little") for upper in run.path()]
    return {(*names, block) for block in range(start, end)}


def copied(model: CacheModel) -> set[Block]:
    """The blocks that have a copy in the CPU tier."""
    return {b for run in model.cache._books.tree.runs() for b in blocks_of(run, run.cpu_start, run.cpu_end)}


def in_cold_zone(model: CacheModel) -> set[Block]:
    """The blocks on the GPU of the runs that write_back copies from now."""
    copy_down = model.cache._movement.copy_down
    num_blocks = copy_down._num_reserve - model.cache.stats().gpu.num_free
    zone, _ = copy_down._cold_zone(num_blocks) if num_blocks > 0 else (set(), [])
    return {b for run in zone for b in blocks_of(run, 0, run.num_gpu)}


def look_ahead(model: CacheModel) -> None:
    """What every few moved blocks lead to."""
    with model.cache._books:
        model.cache._movement.copy_down.look_ahead()


def write_back(policy: str = "lru", num_gpu: int = 40, num_cpu: int = 100, **settings: object) -> CacheModel:
    """Block size 1; a quarter of the GPU pool is to be free or copied."""
    model = CacheModel(1, num_gpu, num_cpu, policy=policy, write_policy="write_back", clock=lambda: 0.0, **settings)
    assert model.cache.config.cpu_write_high_water == settings.get("cpu_write_high_water", 0.75)
    return model


def traffic(model: CacheModel, choose: random.Random, num_requests: int) -> None:
    """Prompts that share beginnings, half of them repeated; some copies land late."""
    for _ in range(num_requests):
        text = choose.choice((A, B, C, D))
        tokens = text[: choose.randint(1, 16)] + [choose.randint(0, 2) for _ in range(choose.choice((0, 0, 2, 5)))]
        model.serve(tokens, stays=False, patient=choose.random() < 0.5)
        model.land(None, choose.randint(0, 2))


# -- write_through


def test_write_through_copies_the_rest_at_release_and_batches_at_commit() -> None:
    """A decoding request starts a task for each 64 new blocks, not for each block; its release copies the others."""
    model = CacheModel(1, 200, 200)
    live = model.must_match(A[:150])
    assert model.allocate(live, 150)
    model.compute(live, MIN_STORE_BLOCKS - 1)
    assert not model.client.tasks
    model.compute(live, MIN_STORE_BLOCKS)
    model.compute(live, 2 * MIN_STORE_BLOCKS - 1)
    assert [len(task.source_ids) for task in model.client.tasks] == [64]
    model.compute(live, 2 * MIN_STORE_BLOCKS + 2)
    model.compute(live, 150)
    model.release(live)
    assert [len(task.source_ids) for task in model.client.tasks] == [64, 66, 20]
    model.client.land_all()
    assert model.cache.stats().cpu.num_cached == 150
    model.finish()


def test_write_through_copies_a_failed_beginning_again() -> None:
    """The first of two stores fails: the next use of the prompt copies what is missing in front of the copies."""
    n = MIN_STORE_BLOCKS
    model = CacheModel(1, 300, 300)
    live = model.must_match(A[: 2 * n])
    assert model.allocate(live, 2 * n)
    model.compute(live, n)
    model.compute(live, 2 * n)
    model.client.land("rank 0 died")
    model.client.land()
    model.release(live)
    model.serve_and_copy(A[: 2 * n])
    assert model.cache.stats().cpu.num_cached == 2 * n


# -- write_through_selective


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("min_uses", [1, 2, 4])
def test_selective_copies_from_the_nth_use_on(policy: str, min_uses: int) -> None:
    """Not one use earlier; a preempted request that comes back is no second use."""
    model = CacheModel(1, 60, 60, policy=policy, write_policy="write_through_selective", cpu_write_min_uses=min_uses)
    for use in range(1, min_uses + 2):
        model.serve(A[:20], stays=False, patient=True)
        assert sum(len(task.source_ids) for task in model.client.tasks) == (20 if use == min_uses else 0)
        model.client.land_all()
    live = model.must_match(B[:9])
    assert model.allocate(live, 9)
    model.compute(live, 9)
    model.release(live)
    model.client.land_all()
    num_copied = model.cache.stats().cpu.num_cached
    model.cache.match(live.request)
    model.cache.allocate(live.request, 1)
    model.cache.release(live.request)
    assert model.cache.stats().cpu.num_cached == num_copied
    assert not model.client.tasks
    model.finish()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_selective_copies_a_prefix_that_several_requests_share(policy: str) -> None:
    """Two prompts part after 8 blocks: these were used twice and are copied, the two ends were used once."""
    model = CacheModel(1, 60, 60, policy=policy, write_policy="write_through_selective")
    model.serve_and_copy(A[:8] + B[:7])
    assert not copied(model)
    model.serve_and_copy(A[:8] + C[:6])
    assert copied(model) == {(A[0], block) for block in range(8)}
    model.serve_and_copy(A[:8] + B[:7])
    assert copied(model) == {(A[0], block) for block in range(8)} | {(A[0], B[0], block) for block in range(7)}
    model.finish()


# -- write_back


def coldest_first(policy: str, *prompts: list[int]) -> list[list[int]]:
    """In the order in which to serve them, so that the first one is the coldest."""
    return list(prompts[::-1] if policy in {"mru", "filo"} else prompts)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_write_back_copies_nothing_while_there_is_room(policy: str) -> None:
    """As long as the reserve, a quarter of the pool, is free; then the coldest prompt, whole: its end is worth nothing
    without its beginning."""
    model = write_back(policy)
    for tokens in coldest_first(policy, A[:20], B[:10]):
        model.serve(tokens, stays=False, patient=True)
    look_ahead(model)
    assert (model.cache.stats().gpu.num_free, len(model.client.tasks)) == (10, 0)
    live = model.must_match(C[:4])
    assert model.allocate(live, 4)
    model.client.land_all()
    assert copied(model) == {(A[0], block) for block in range(20)}
    model.finish()


@pytest.mark.parametrize("num_gpu", [60, 90, 100])
def test_prompts_larger_than_the_reserve_are_copied_whole_and_hit(num_gpu: int) -> None:
    """Twelve prompts in turn, each larger than the reserve: in the second round every one hits the CPU tier."""
    model = CacheModel(1, num_gpu, 400, write_policy="write_back")
    prompts = [[1000 * number + i for i in range(30)] for number in range(12)]
    for _ in range(2):
        before = model.num_loaded_tokens
        for tokens in prompts:
            model.serve_and_copy(tokens)
    assert model.num_loaded_tokens - before >= 29 * 11
    model.finish()


def test_write_back_copies_no_more_than_the_reserve_is_short_of() -> None:
    """A second look while the first one's blocks are on their way finds no more: the next prompt stays uncopied."""
    model = write_back()
    for tokens in (A[:20], B[:10], C[:4]):
        model.serve(tokens, stays=False, patient=True)
    model.client.land_all()
    assert {token for token, _ in copied(model)} == {A[0]}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_write_back_copies_the_coldest_ends_ahead(policy: str) -> None:
    """A burst as large as the reserve then drops clean blocks only, and they hit later, with their content."""
    model = write_back(policy)
    model.serve_and_copy(*coldest_first(policy, A[:20], B[:20]))
    assert {(A[0], block) for block in range(10, 20)} <= copied(model)
    burst = model.must_match(C[:10])
    assert model.allocate(burst, 10)
    assert model.cache.stats().gpu.num_evicted_by_kind == (10, 0)
    model.client.land_all()
    model.release(burst)
    again = model.must_match(A[:21])
    assert (again.match.num_gpu_tokens, again.match.num_coming_tokens) == (10, 10)
    model.client.land_all()
    assert len(model.settle(again)) == 20
    model.finish()


def test_a_parent_that_is_warmer_than_other_leaves_is_not_copied_before_them() -> None:
    """The beginning of the coldest prompt was used again alone: the next coldest prompt is copied instead of it."""
    model = write_back(num_gpu=80)
    model.serve_and_copy(A[:20], B[:20], A[:10], C[:20])
    live = model.must_match(D[:36])
    for num_blocks in (10, 6, 16):
        assert model.allocate(live, num_blocks)
        model.client.land_all()
    assert model.cache.stats().gpu.num_evicted_by_kind[1] == 0


def test_what_was_not_copied_in_time_is_dropped_and_counted() -> None:
    """The ranks' queue is full: the burst drops blocks without a copy, in the books and in the metrics."""
    model = write_back()
    model.client.max_tasks[TaskKind.SWAP_OUT] = 0
    model.serve_and_copy(A[:20], B[:20])
    live = model.must_match(C[:10])
    assert model.allocate(live, 10)
    stats = model.cache.stats()
    assert stats.gpu.num_evicted_by_kind == (0, 10)
    assert stats.num_refused_transfers["swap_out"] > 0
    samples = {
        (sample.labels["tier"], sample.labels["kind"]): sample.value
        for family in model.cache.metrics.collect()
        for sample in family.samples
        if sample.name == "fastdeploy_cache_evicted_blocks_total"
    }
    assert samples == {("gpu", "dropped"): 10, ("gpu", "copy_kept"): 0, ("cpu", "dropped"): 0, ("cpu", "copy_kept"): 0}
    assert model.must_match(A[:21]).match.num_tokens == 10
    model.finish()


def test_the_copy_of_a_block_that_is_back_on_the_gpu_is_kept() -> None:
    """Its next eviction needs no copying."""
    model = write_back()
    model.serve_and_copy(A[:20], B[:20], C[:10])
    ends = {(A[0], block) for block in range(10, 20)}
    model.serve_and_copy(A[:21])
    assert model.cache.stats().num_swapped_in_blocks == 10
    assert copied(model) >= ends
    model.serve_and_copy(B[:10], C[:9])
    before = model.cache.stats()
    burst = model.must_match(D[:15])
    assert model.allocate(burst, 15)
    after = model.cache.stats()
    assert after.gpu.num_evicted_by_kind[0] - before.gpu.num_evicted_by_kind[0] == 15
    assert copied(model) >= ends
    model.finish()


def test_a_copy_goes_when_its_room_is_needed_for_something_warmer() -> None:
    """A small CPU tier: the copies of the first prompt make way for those of what was used after it."""
    model = write_back(num_cpu=10)
    model.serve_and_copy(A[:20], B[:20], C[:10])
    assert copied(model) == {(A[0], block) for block in range(10, 20)}
    for tokens in (A[:21], B[:30], C[:30], D[:30], B[:30]):
        model.serve_and_copy(tokens)
    assert len(copied(model)) == 10
    assert not any(block[0] == A[0] for block in copied(model))
    model.finish()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize(("seed", "num_requests"), [(1, 60), (2, 60), (3, 60), (4, 900)])
def test_copying_comes_to_rest_and_trades_no_copy_for_another(policy: str, seed: int, num_requests: int) -> None:
    """A full CPU tier and nothing to do: each store only adds copies to the cold zone, and there is a last one."""
    model = write_back(policy, num_cpu=12)
    traffic(model, random.Random(seed), num_requests)
    num_tasks, num_idle = 0, 0
    while num_idle < 3:
        num_idle = 0 if model.client.tasks else num_idle + 1
        if not model.client.tasks:
            look_ahead(model)
            continue
        before = copied(model) & in_cold_zone(model)
        model.client.land()
        assert before <= copied(model), "a copy of the cold zone was evicted"
        num_tasks += 1
        assert num_tasks <= 2 * model.num_gpu, "copying goes on and on"
    assert model.cache.stats().cpu.num_free == 0 or not in_cold_zone(model) - copied(model)
    model.finish()


def test_the_copy_of_a_cold_block_is_not_evicted_for_its_neighbour() -> None:
    """A tier of 4 blocks holds the 4 coldest, and that is all: no look ahead starts another task."""
    model = write_back(num_cpu=4)
    model.serve_and_copy(A[:20], B[:20])
    for _ in range(5):
        look_ahead(model)
        assert not model.client.tasks
    assert copied(model) == {(A[0], block) for block in range(16, 20)}
    model.finish()


def test_bytes_in_flight_are_capped() -> None:
    """Blocks of 64 MiB: four at a time, though the reserve is ten; the others follow as these land."""
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    model = CacheModel(512, 40, 100, write_policy="write_back", layout=layout)
    assert model.cache.config.block_bytes() == 64 * 2**20
    for i in range(4):
        model.serve([i] * 5120, stays=False, patient=False)
    most = 0
    while model.client.tasks:
        most = max(most, sum(len(task.source_ids) for task in model.client.tasks))
        model.client.land()
    assert most == 4
    assert model.cache.stats().cpu.num_cached >= 10
    model.finish()


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_a_failed_store_is_not_tried_in_a_loop(write_policy: str) -> None:
    """Its end starts nothing; later traffic tries again."""
    model = CacheModel(1, 40, 100, write_policy=write_policy, cpu_write_min_uses=1)
    model.serve(A[:20], stays=False, patient=False)
    model.serve(B[:20], stays=False, patient=False)
    num_tasks = len(model.client.tasks)
    assert num_tasks
    model.land("rank 0 died", num_tasks)
    assert not model.client.tasks
    assert not copied(model)
    model.serve_and_copy(A[:20], C[:6])
    assert copied(model)
    model.finish()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_a_cpu_tier_of_one_block(policy: str, write_policy: str) -> None:
    """Random traffic over it serves no wrong byte, and it does hold a block."""
    model = CacheModel(1, 30, 1, policy=policy, write_policy=write_policy)
    traffic(model, random.Random(5), 100)
    model.client.land_all()
    model.cache.check_invariants()
    assert model.cache.stats().cpu.num_cached == 1
    model.finish()


def test_a_long_run_is_copied_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of 64 blocks, if blocks are large, from the end on: its copies are always one piece that ends with it, and
    hit whole."""
    monkeypatch.setattr(copy_down, "_PIECE_TOKENS", 0)
    model = write_back(num_gpu=320, num_cpu=400, cpu_write_high_water=0.0)
    model.serve(A[:300], stays=False, patient=False)
    starts = []
    while model.client.tasks:
        assert len(model.client.tasks[0].source_ids) <= MIN_STORE_BLOCKS
        model.client.land()
        (run,) = model.cache._books.tree.runs()
        assert run.cpu_end == 300
        starts.append(run.cpu_start)
    assert starts == sorted(starts, reverse=True)
    assert starts[0] == 300 - MIN_STORE_BLOCKS
    live = model.must_match(B[:250])
    assert model.allocate(live, 250)
    assert model.cache.stats().gpu.num_evicted_by_kind == (230, 0)
    model.release(live)
    again = model.must_match(A[:301])
    assert (again.match.num_tokens, again.match.num_coming_tokens) == (70, 230)
    model.client.land_all()
    assert len(model.settle(again)) == 300
    model.finish()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_a_refusal_is_exact_while_stores_are_in_flight(policy: str, seed: int) -> None:
    """What is said to be missing is, what is said to be coming comes, and nothing was waited for."""
    model, choose = write_back(policy), random.Random(seed)
    for text in (A, B, C, D):
        model.serve(text[: choose.randint(8, 14)], stays=choose.random() < 0.3, patient=False)
    live = model.must_match([5000 + i for i in range(40)])
    assert any(task.kind is TaskKind.SWAP_OUT for task in model.client.tasks)
    with pytest.raises(OutOfBlocksError) as refused:
        model.cache.allocate(live.request, 40)
    missing, coming = refused.value.missing, refused.value.coming
    assert coming > 0
    assert not model.allocate(live, 40)
    model.client.land_all()
    assert model.cache._books.tree.residency.num_available(CPU) > 0
    if missing > coming:
        with pytest.raises(OutOfBlocksError) as refused:
            model.cache.allocate(live.request, 40)
        assert (refused.value.missing, refused.value.coming) == (missing - coming, 0)
    else:
        assert model.allocate(live, 40)
    model.finish()
