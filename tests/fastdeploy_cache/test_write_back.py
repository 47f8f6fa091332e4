"""`write_back`, the default: copies at once while the CPU tier has room, then ahead of eviction."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import KVLayout, Request
from fastdeploy_cache.books.evicting import evict_tail
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.movement import copy_down
from fastdeploy_cache.movement.copy_down import MIN_STORE_BLOCKS
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import CacheModel
from tests.rigs.write_policies import A, B, C, D, copied, in_cold_zone, look_ahead, no_copies, traffic, write_back

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16")


def coldest_first(policy: str, *prompts: list[int]) -> list[list[int]]:
    """In the order in which to serve them, so that the first one is the coldest."""
    return list(prompts[::-1] if policy in {"mru", "filo"} else prompts)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_burst_keeps_what_fits(policy: str) -> None:
    """Ten prompts, one after the other without a pause, over a pool that holds two: as long as the CPU tier has free
    blocks all are copied at once, an allocation waits for room rather than dropping what has no copy, and all hit."""
    model = write_back(policy, num_cpu=200)
    prompts = [[1000 * number + i for i in range(20)] for number in range(10)]
    for tokens in prompts:
        live = model.must_match(tokens)
        while not model.allocate(live, 20):
            model.client.land()
        model.compute(live, 20)
        model.release(live)
    assert model.cache.stats().gpu.num_evicted_by_kind[1] == 0
    model.client.land_all()
    for tokens in prompts:
        assert model.cache.blocks.lookup(Request(request_id="", prompt_token_ids=tokens)).num_blocks == 20
    model.finish()


def test_what_is_released_is_copied_in_batches() -> None:
    """A pool of 160 blocks has batches of 10: four requests are one task, of what is still there. The first was cut in
    two meanwhile, by a prompt that goes another way, and the second was evicted."""
    model = write_back(num_gpu=160)
    for tokens in (A[:4], B[:1]):
        model.serve(tokens, stays=False, patient=True)
        assert not model.client.tasks
    model.serve([*A[:2], 7, 8], stays=False, patient=True)
    assert not model.client.tasks
    books = model.cache._books
    with books:
        gone = next(run for run in books.tree.runs() if run.tokens[:4] == B[0].to_bytes(4, "little"))
        evict_tail(books.tree.residency, gone, GPU, 1)
    model.serve(C[:4], stays=False, patient=True)
    assert [len(task.source_ids) for task in model.client.tasks] == [10]
    model.client.land_all()
    assert {first for first, *_ in copied(model)} == {A[0], C[0]} and len(copied(model)) == 10
    model.finish()


def test_what_is_committed_is_copied_while_its_request_runs() -> None:
    """So its blocks can be had at once when it goes: a prompt that needs the whole pool is not refused."""
    model = write_back()
    live = model.must_match(A[:20])
    assert model.allocate(live, 20)
    model.compute(live, 20)
    assert [len(task.source_ids) for task in model.client.tasks] == [20]
    model.client.land_all()
    model.release(live)
    assert not model.client.tasks
    other = model.must_match(B[:40])
    assert model.allocate(other, 40)
    assert copied(model) == {(A[0], block) for block in range(20)}
    model.finish()


def test_what_is_on_its_way_is_not_gathered_again() -> None:
    """A request that goes while its ten blocks are on their way fills no batch of ten, which has three others yet."""
    model = write_back(num_gpu=160)
    running = []
    for tokens in (A[:10], B[:3]):
        running.append(model.must_match(tokens))
        assert model.allocate(running[-1], len(tokens))
        model.compute(running[-1], len(tokens))
    for live in running:
        model.release(live)
    assert [len(task.source_ids) for task in model.client.tasks] == [10]
    model.client.land_all()
    model.finish()


@pytest.mark.parametrize("piece", [3, 4, 8, 9, 10, 16, 57])
def test_prefill_in_pieces_is_copied_whole(piece: int) -> None:
    """A prompt of 57 blocks over batches of ten: what is committed in pieces is counted as it grows, and the rest, less
    than a batch, is copied when the request goes."""
    model = write_back(num_gpu=160)
    live = model.must_match(A[:57])
    assert model.allocate(live, 57)
    for end in (*range(piece, 57, piece), 57):
        model.compute(live, end)
        model.client.land_all()
    assert piece < 4 or len(copied(model)) > 57 - 10 - piece
    model.release(live)
    model.client.land_all()
    assert copied(model) == {(A[0], block) for block in range(57)}
    model.finish()


@pytest.mark.parametrize("how", ["paused", "a rank is down"])
def test_what_could_not_be_copied_is_copied_later(how: str) -> None:
    """Prompts that are released meanwhile are copied as soon as copies may be started again."""
    model = write_back(num_gpu=160)
    mover = model.cache._movement
    with model.cache._books:
        mover.be_quiet(how == "paused")
    model.client.up = how == "paused"
    model.serve(A[:20], stays=False, patient=True)
    assert not model.client.tasks
    with model.cache._books:
        mover.be_quiet(False)
    assert bool(model.client.tasks) == (how == "paused")
    model.client.up = True
    model.serve(B[:1], stays=False, patient=True)
    model.client.land_all()
    assert {(A[0], block) for block in range(20)} <= copied(model)
    model.finish()


def test_what_can_never_be_copied_is_not_kept_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is down for long: released prompts that have gone again cost no memory."""
    monkeypatch.setattr(copy_down, "_MAX_YOUNG", 5)
    model = write_back(num_gpu=160)
    model.client.up = False
    for start in range(0, 8000, 400):
        model.serve([start + i for i in range(20)], stays=False, patient=True)
        assert len(model.cache._movement.copy_down._young) <= 5
    model.client.up = True
    model.finish()


def test_a_full_tier_is_not_copied_into_at_release() -> None:
    """Nothing is evicted for a copy at release: what the tier holds may be worth more than what is released."""
    model = write_back(num_cpu=20)
    model.serve_and_copy(A[:20])
    model.serve(B[:9], stays=False, patient=True)
    assert not model.client.tasks and {token for token, _ in copied(model)} == {A[0]}
    model.finish()


def told_losses(caplog: pytest.LogCaptureFixture, *, is_up: bool = True, **settings: object) -> list[str]:
    """What the log says while twenty blocks after twenty are lost."""
    model = write_back(**settings)  # type: ignore[arg-type]
    model.client.up = is_up
    with no_copies(model):
        for start in range(0, 4000, 100):
            model.serve([start + i for i in range(20)], stays=False, patient=True)
    return [line for record in caplog.records if "event=blocks_lost" in (line := record.getMessage())]


def test_what_a_burst_loses_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Each time that the number of blocks that were evicted before they were copied has doubled; with the remedy."""
    lines = told_losses(caplog, layout=LAYOUT, num_cpu=4000)
    assert 3 <= len(lines) <= 8 and all("cpu_write_policy" in line for line in lines)


def test_what_has_no_room_is_told_to_need_room(caplog: pytest.LogCaptureFixture) -> None:
    """Where the CPU tier could not take what was lost, copying sooner would only make it lose what it has."""
    lines = told_losses(caplog, layout=LAYOUT, num_cpu=10)
    assert lines and not any("cpu_write_policy" in line for line in lines)
    assert all("reason=cpu_tier_full" in line and "num_cpu_blocks or" in line for line in lines)


@pytest.mark.parametrize("num_cpu", [10, 4000])
def test_what_is_lost_while_a_rank_is_down_is_told_to_need_the_ranks(
    caplog: pytest.LogCaptureFixture, num_cpu: int
) -> None:
    """Nothing can be copied then, however large the CPU tier is, and however early it is tried: neither is advised."""
    lines = told_losses(caplog, is_up=False, layout=LAYOUT, num_cpu=num_cpu)
    assert lines and all("reason=ranks_not_up" in line and "rank" in line.partition("remedy")[2] for line in lines)
    assert not any("num_cpu_blocks or" in line or "cpu_write" in line for line in lines)


def test_a_simulation_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Without a layout no bytes move, so there is nothing to lose."""
    assert told_losses(caplog) == []


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_write_back_looks_ahead_when_the_reserve_is_short(policy: str) -> None:
    """Nothing as long as the reserve, a quarter of the pool, is free; then the coldest prompt, whole: its end is worth
    nothing without its beginning."""
    model = write_back(policy)
    with no_copies(model):
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
    with no_copies(model):
        for tokens in (A[:20], B[:10], C[:4]):
            model.serve(tokens, stays=False, patient=True)
    for _ in range(2):
        look_ahead(model)
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
    assert copied(model) == {(A[0], block) for block in range(10)}
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
    assert copied(model) == {(A[0], block) for block in range(4)}
    model.finish()


def test_bytes_in_flight_are_capped() -> None:
    """Blocks of 64 MiB: four at a time, though the reserve is ten; the others follow as these land."""
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    model = CacheModel(512, 40, 100, write_policy="write_back", layout=layout)
    assert model.cache.config.block_bytes() == 64 * 2**20
    with no_copies(model):
        for i in range(4):
            model.serve([i] * 5120, stays=False, patient=False)
    look_ahead(model)
    most = 0
    while model.client.tasks:
        most = max(most, sum(len(task.source_ids) for task in model.client.tasks))
        model.client.land()
    assert most == 4
    assert model.cache.stats().cpu.num_cached >= 10
    model.finish()


def test_a_long_run_is_copied_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of 64 blocks, if blocks are large, from the end on: its copies are always one piece that ends with it, and
    hit whole."""
    monkeypatch.setattr(copy_down, "_PIECE_TOKENS", 0)
    model = write_back(num_gpu=320, num_cpu=400, cpu_write_high_water=0.0)
    with no_copies(model):
        model.serve(A[:300], stays=False, patient=False)
    look_ahead(model)
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
