"""The bytes of the GPU are gone: what stays findable, and what must never be found again."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request, TransferConfig
from fastdeploy_cache.errors import ClosedError, ConfigError
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.request import Image
from tests.rigs.cache_model import CacheModel
from tests.rigs.write_policies import no_copies

A, B, C, D = ([base + i for i in range(100)] for base in (1000, 2000, 3000, 4000))


def found(model: CacheModel, tokens: list[int], namespace: str = "", images: list[Image] | None = None) -> int:
    """Tokens that a request gets from the CPU tier; their content is compared."""
    live = model.must_match(tokens, namespace, images or [])
    assert live.match.num_tokens == 0, "something is on the GPU"
    model.client.land_all()
    num_blocks = len(model.settle(live))
    model.release(live)
    return num_blocks * model.size


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_has_copies_from_its_start_is_found_again(policy: str) -> None:
    """Also in the eviction policy's books: it can be loaded, used and evicted as before."""
    model = CacheModel(4, 24, 60, policy=policy)
    model.serve_and_copy(A[:40], B[:20])
    model.kv_lost()
    model.check()
    stats = model.cache.stats()
    assert (stats.gpu.num_cached, stats.gpu.num_free, stats.cpu.num_cached) == (0, 24, 15)
    assert found(model, A[:41]) == 40
    for tokens in (B[:21], C[:80], D[:80], [*C[:40], *D[:40]]):
        model.serve_and_copy(tokens)
        model.check()
    model.finish()


def test_what_has_no_copies_is_forgotten() -> None:
    """A prompt that was never copied, and the end of one that was copied in part."""
    model = CacheModel(1, 60, 60)
    model.serve_and_copy(A[:10])
    model.client.up = False
    model.serve(A[:20], stays=False, patient=True)
    model.serve(B[:10], stays=False, patient=True)
    model.client.up = True
    model.kv_lost()
    model.check()
    assert model.cache.stats().cpu.num_cached == 10
    assert found(model, B[:11]) == 0
    assert found(model, A[:21]) == 10
    model.finish()


def test_copies_of_an_end_alone_go() -> None:
    """A small tier holds the end of a prompt only: without its beginning it is of no use, and its blocks are free."""
    model = CacheModel(1, 40, 6, write_policy="write_back")
    with no_copies(model):  # else the release would copy the beginning into the free tier
        model.serve_and_copy(A[:20])
    model.serve_and_copy(B[:20])
    assert model.cache.stats().cpu.num_cached > 0
    model.kv_lost()
    model.check()
    assert model.cache.stats().cpu.num_free == 6
    assert found(model, A[:21]) == 0
    model.finish()


def test_split_runs_images_and_namespaces_are_kept_apart() -> None:
    """Prompts that part, the same tokens with another image, and in another namespace."""
    model, cat, dog = CacheModel(4, 60, 100), [Image(10, 4, b"cat")], [Image(10, 4, b"dog")]
    model.serve_and_copy(A[:20] + B[:12], A[:20] + C[:12], A[:20])
    for images in (cat, dog):
        model.serve(A[:32], stays=False, patient=True, images=images)
    live = model.must_match(A[:32], "lora")
    assert model.allocate(live, 8)
    model.compute(live, 32)
    model.release(live)
    model.client.land_all()
    model.kv_lost()
    model.check()
    assert found(model, A[:20] + B[:13]) == 32
    model.kv_lost()
    assert found(model, A[:20] + C[:13]) == 32
    for namespace, images in (("lora", []), ("", cat), ("", dog)):
        model.kv_lost()
        model.check()
        assert found(model, A[:33], namespace, images) == 32
    model.kv_lost()
    assert found(model, A[:33], "", [Image(10, 4, b"cow")]) == 8
    model.kv_lost()
    assert found(model, A[:33], "another") == 0
    model.finish()


@pytest.mark.parametrize("copied", [True, False])
def test_running_requests_publish_nothing_and_their_blocks_go_home(copied: bool) -> None:
    """Matched, computed in part, or private only: nothing of them is found, everything is free at the end."""
    model = CacheModel(4, 24, 60)
    if copied:
        model.serve_and_copy(A[:20])
    running, fresh = model.must_match(A[:40]), model.must_match(B[:20])
    assert model.allocate(running, 10 - len(model.settle(running)))
    assert model.allocate(fresh, 5)
    model.compute(running, 32)
    model.kv_lost()
    model.check()
    for live, num_tokens in ((running, 40), (fresh, 20)):
        model.compute(live, num_tokens)
        model.check()
        model.release(live)
    assert not model.client.tasks
    gpu = model.cache.stats().gpu
    assert (gpu.num_free, gpu.num_private, gpu.num_cached) == (24, 0, 0)
    assert found(model, A[:41]) == (20 if copied else 0)
    assert found(model, B[:21]) == 0
    model.finish()


@pytest.mark.parametrize("error", [None, "rank 0 died"])
def test_a_store_from_the_lost_gpu_never_becomes_visible(error: str | None) -> None:
    """It may still end well, with whatever the new arrays hold; its CPU blocks go home."""
    model = CacheModel(4, 24, 60)
    model.serve(A[:40], stays=False, patient=True)
    assert len(model.client.tasks) == 1
    model.kv_lost()
    model.check()
    model.client.land(error)
    model.check()
    assert (model.cache.stats().cpu.num_free, model.cache.stats().cpu.num_in_flight) == (60, 0)
    assert found(model, A[:41]) == 0
    model.finish()


@pytest.mark.parametrize("error", [None, "rank 0 died"])
def test_a_load_into_the_lost_gpu_never_becomes_visible(error: str | None) -> None:
    """Its destinations go home when it has ended, not before; a new match loads again."""
    model = CacheModel(4, 24, 60)
    model.serve_and_copy(A[:40], B[:96])
    live = model.must_match(A[:41])
    coming = set(live.match.coming_block_ids)
    assert coming
    model.kv_lost()
    model.check()
    other = model.must_match(C[:4])
    assert model.allocate(other, model.cache.stats().gpu.num_free)
    assert not set(other.table or ()) & coming
    model.release(other)
    model.client.land(error)
    model.check()
    assert live.match.wait(0).num_coming_tokens == 0
    model.release(live)
    assert model.cache.stats().gpu.num_free == 24
    assert found(model, A[:41]) == 40
    model.finish()


def test_a_second_loss() -> None:
    """Before anything has come back, and with a load of the time between the two in flight."""
    model = CacheModel(4, 24, 60)
    model.serve_and_copy(A[:40])
    model.kv_lost()
    model.kv_lost()
    model.check()
    between = model.must_match(A[:41])
    assert between.match.num_coming_tokens == 40
    model.kv_lost()
    model.client.land_all()
    model.check()
    model.release(between)
    assert model.cache.stats().gpu.num_cached == 0
    assert found(model, A[:41]) == 40
    model.finish()


@pytest.mark.parametrize("rank", [-1, 1, 7])
def test_a_rank_that_does_not_exist(rank: int) -> None:
    """Nothing is forgotten for it."""
    model = CacheModel(4, 24, 60)
    model.serve_and_copy(A[:40])
    with pytest.raises(ConfigError, match="there is no rank"):
        model.cache.ranks.kv_lost(rank)
    assert model.must_match(A[:41]).match.num_gpu_tokens == 40
    model.finish()


def test_a_match_of_before_the_loss_shows_nothing_any_more() -> None:
    """Settled or not, polled or waited for: no block of the lost GPU is offered, and the step is not confirmed."""
    model = CacheModel(4, 20, 40)
    model.serve_and_copy(A[:40])
    live = model.must_match(A[:41])
    assert live.match.num_tokens == 40
    model.kv_lost()
    assert (live.match.poll().num_tokens, live.match.wait(0).block_ids) == (0, [])
    assert not model.cache.confirm(live.request, 0, arrived=True)
    model.finish()


_OF_A_WORKER = CacheConfig(
    block_size=4,
    num_gpu_blocks=8,
    transfer_client="inline",
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=4),
    transfer=TransferConfig(kv_owner="worker"),
)


def _new_arrays() -> dict[str, np.ndarray]:
    return {name: np.zeros((8, 4, 1, 4), np.float16) for name in ("key", "value")}


def test_a_closed_cache_takes_no_arrays() -> None:
    """A worker that comes too late hears why, and need not try again."""
    with PrefixCacheManager(_OF_A_WORKER) as cache:
        pass
    with pytest.raises(ClosedError):
        cache.ranks.attach_kv(0, [_new_arrays()])


def test_what_was_computed_while_the_arrays_were_missing_is_never_found() -> None:
    """A request that was matched between the loss and the new arrays publishes nothing that outlives their coming."""
    with PrefixCacheManager(_OF_A_WORKER) as cache:
        early = Request(request_id="early", prompt_token_ids=A[:16])
        cache.match(early)
        cache.allocate(early, 4)
        cache.commit(early, 16)
        cache.ranks.attach_kv(0, [_new_arrays()])
        again = Request(request_id="again", prompt_token_ids=A[:16])
        assert cache.match(again).num_tokens == 0
        cache.commit(early, 16)
        cache.release(early)
        cache.release(again)
        assert cache.prefetch(again).num_gpu_tokens == 0
        cache.check_invariants()
