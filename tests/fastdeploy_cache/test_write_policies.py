"""What is copied to the CPU tier, and when: `write_through`, `write_through_selective`, and what all policies share."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.config.cache import WRITE_POLICIES
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.movement import copy_down
from fastdeploy_cache.movement.copy_down import MIN_STORE_BLOCKS
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import CacheModel
from tests.rigs.write_policies import A, B, C, D, copied, look_ahead, traffic, write_back

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
    model.check()
    assert model.cache.stats().cpu.num_cached == 1
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


def test_a_turn_that_goes_on_a_long_prompt_is_gathered() -> None:
    """Only the rest of what was copied at its own commit is a task by itself: three blocks behind thirty of an earlier
    request wait for a batch of ten, however long the prompt is in all."""
    model = write_back(num_gpu=160)
    model.serve_and_copy(A[:30])
    live = model.must_match(A[:33])
    assert model.allocate(live, 33 - len(live.match.block_ids))
    model.compute(live, 33)
    model.release(live)
    assert not model.client.tasks
    model.finish()


# -- write_back


def test_what_began_is_remembered_anew_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts that began to be copied at their commit than are remembered, none of which has been released: only
    the last few are, and what was forgotten is copied all the same, with the next batch."""
    monkeypatch.setattr(copy_down, "_MAX_YOUNG", 3)
    model = write_back(num_gpu=400, num_cpu=400)
    lives = []
    for first in range(8):
        live = model.must_match([first] * 40)
        assert model.allocate(live, 40)
        model.compute(live, 39)
        model.client.land_all()
        lives.append(live)
        assert 1 <= len(model.cache._movement.copy_down._begun) <= 3
    for live in lives:
        model.compute(live, 40)
        model.release(live)
    look_ahead(model)
    model.client.land_all()
    assert {text for text, _ in copied(model)} == set(range(8))
    model.finish()
