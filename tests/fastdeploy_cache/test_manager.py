"""The verbs, one promise at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import (
    ClosedError,
    CommitError,
    OutOfBlocksError,
    PromptTooLongError,
    RequestError,
    UnknownRequestError,
)
from tests.rigs.cache_model import CacheModel

A, B, C = ([base + i for i in range(100)] for base in (1000, 2000, 3000))


def request(name: str, tokens: list[int], namespace: str = "") -> Request:
    return Request(request_id=name, prompt_token_ids=tokens, namespace=namespace)


def test_a_whole_prompt_hit_leaves_one_token_to_compute() -> None:
    """At a block border the last block is computed again; inside a block, all full ones hit."""
    model = CacheModel(4, 20, 0)
    model.serve(A[:16], stays=False, patient=True)
    for length, hit in ((16, 12), (17, 16), (15, 12), (4, 0), (5, 4), (1, 0)):
        live = model.match(A[:length])
        assert live is not None
        assert live.match.num_tokens == live.match.num_gpu_tokens == hit
        model.release(live)
    model.finish()


def test_namespaces_never_meet() -> None:
    """The same tokens under another namespace are another prefix."""
    model = CacheModel(4, 20, 0)
    model.serve(A[:16], stays=False, patient=True)
    other = model.match(A[:16], namespace="lora")
    assert other is not None
    assert other.match.num_tokens == 0
    model.finish()


def test_prompts_that_part_inside_a_run_share_what_is_equal() -> None:
    """Matching cuts nothing; the first block that differs does, at the border where the prompts part."""
    model = CacheModel(4, 40, 0)
    model.serve(A[:40], stays=False, patient=True)
    fork = model.match(A[:20] + B[:20])
    assert fork is not None
    assert fork.match.num_tokens == 20
    assert [run.num_blocks for run in model.cache._books.tree.runs()] == [10]
    assert model.allocate(fork, 5)
    model.compute(fork, 40)
    assert [run.num_blocks for run in model.cache._books.tree.runs()] == [5, 5, 5]
    model.finish()


def test_a_pin_inside_a_run_holds_no_more_than_what_matched() -> None:
    """The rest of the run can be evicted at once, down to the pin and no further."""
    model = CacheModel(4, 10, 0)
    model.serve(A[:40], stays=False, patient=True)
    fork = model.match(A[:12] + B[:28])
    assert fork is not None
    assert model.cache.stats().gpu.num_protected == 3
    assert not model.allocate(fork, 8)
    assert model.allocate(fork, 7)
    assert [run.num_blocks for run in model.cache._books.tree.runs()] == [3]
    model.finish()


def test_least_recently_used_goes_first_and_exactly_the_shortfall() -> None:
    """Of two prompts the older loses its tail, no more blocks than asked for; its head still hits."""
    model = CacheModel(4, 12, 0)
    model.serve(A[:24], stays=False, patient=True)
    model.serve(B[:20], stays=False, patient=True)
    model.serve(C[:12], stays=False, patient=True)
    assert model.cache.stats().gpu.num_cached == 12
    found = {}
    for name, tokens in (("A", A), ("B", B)):
        live = model.match(tokens[:25])
        assert live is not None
        found[name] = live.match.num_tokens
        model.release(live)
    assert found == {"A": 16, "B": 20}
    model.finish()


def test_growing_does_not_move_the_end_under_another_request() -> None:
    """Two requests pinned to the same end go different ways; each one's table stays right."""
    model = CacheModel(4, 40, 0)
    model.serve(A[:16], stays=False, patient=True)
    first, second = model.match(A[:17]), model.match(A[:16] + B[:9])
    third = model.match(A[:40])
    assert first is not None
    assert second is not None
    assert third is not None
    for live in (third, second):
        assert model.allocate(live, -(-live.request.num_tokens // 4) - 4)
        model.compute(live, live.request.num_tokens)
        model.check()
    first.request.append_output(A[17:30])
    assert model.allocate(first, 4)
    model.compute(first, 30)
    model.check()
    model.finish()


def test_growing_behind_a_run_that_two_requests_are_pinned_to() -> None:
    """One of them goes on; the other one's pin still ends where its blocks end."""
    model = CacheModel(4, 40, 0)
    model.serve(A[:16], stays=False, patient=True)
    first, second = model.match(A[:17]), model.match(A[:40])
    assert first is not None
    assert second is not None
    assert model.allocate(second, 6)
    model.compute(second, 40)
    model.check()
    model.finish()


def test_growing_behind_a_run_that_another_request_has_just_made() -> None:
    """Both computed the same prompt; the longer one's blocks go behind the other's run, not into it."""
    model = CacheModel(4, 40, 0)
    first, second = model.match(A[:20]), model.match(A[:28])
    for live in (first, second):
        assert live is not None
        assert model.allocate(live, live.request.num_tokens // 4)
        model.compute(live, live.request.num_tokens)
        model.check()
    model.finish()


def test_two_that_compute_the_same_keep_one_copy() -> None:
    """The second one's blocks stay its own and go home with it."""
    model = CacheModel(4, 40, 0)
    first, second = model.match(A[:20]), model.match(A[:20])
    for live in (first, second):
        assert live is not None
        assert model.allocate(live, 5)
        model.compute(live, 20)
    assert model.cache.stats().gpu.num_cached == 5
    model.finish()
    assert model.cache.stats().gpu.num_free == 35


def test_reset_forgets_but_does_not_pull_blocks_from_under_a_request() -> None:
    """Pinned blocks stay owned until released; what an older request commits is not published."""
    model = CacheModel(4, 20, 0)
    model.serve(A[:16], stays=False, patient=True)
    live = model.match(A[:33])
    assert live is not None
    model.reset()
    assert model.cache.stats().gpu.num_protected == 4
    assert model.allocate(live, 5)
    model.compute(live, 33)
    fresh = model.match(A[:33])
    assert fresh is not None
    assert fresh.match.num_tokens == 0
    model.finish()
    assert model.cache.stats().gpu.num_free == 20


def test_without_prefix_caching_every_verb_works_and_nothing_hits() -> None:
    """The switch for comparison runs."""
    config = CacheConfig(block_size=4, num_gpu_blocks=8, transfer_client="inline", enable_prefix_caching=False)
    with PrefixCacheManager(config) as cache:
        for name in "ab":
            live = request(name, A[:16])
            assert cache.match(live).wait().block_ids == []
            assert cache.allocate(live, 4) == [0, 1, 2, 3]
            cache.commit(live, 16)
            cache.release(live)
        assert cache.stats().gpu.num_free == 8
        assert cache.stats().hit_rates["token"] == 0
        cache.check_invariants()


def test_what_is_refused_changes_nothing() -> None:
    """Each mistake of an engine is a typed error that names the value; the books are as before."""
    config = CacheConfig(block_size=4, num_gpu_blocks=8, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        live, stranger = request("live", A[:16]), request("stranger", A[:16])
        cache.match(live)
        cache.allocate(live, 2)
        before = cache.stats()
        mistakes = [
            (PromptTooLongError, "33 tokens, 9 blocks", lambda: cache.match(request("long", A[:33]))),
            (RequestError, "matched already", lambda: cache.match(live)),
            (RequestError, "matched already", lambda: cache.match(request("live", B[:4]))),
            (UnknownRequestError, "'stranger'", lambda: cache.release(stranger)),
            (UnknownRequestError, "'stranger'", lambda: cache.allocate(stranger, 1)),
            (UnknownRequestError, "'stranger'", lambda: cache.commit(stranger, 1)),
            (UnknownRequestError, "'live'", lambda: cache.release(request("live", A[:16]))),
            (RequestError, "-1 blocks", lambda: cache.allocate(live, -1)),
            (OutOfBlocksError, "1 block is missing", lambda: cache.allocate(live, 7)),
            (CommitError, "9 tokens", lambda: cache.commit(live, 9)),
            (CommitError, "17 tokens", lambda: cache.commit(live, 17)),
            (CommitError, "-1 tokens", lambda: cache.commit(live, -1)),
        ]
        for error, words, mistake in mistakes:
            with pytest.raises(error, match=words):
                mistake()
        assert cache.stats() == before
        cache.check_invariants()
        cache.release(live)
    with pytest.raises(ClosedError):
        cache.match(live)


def test_a_request_counts_once_in_the_hit_rate() -> None:
    """Not while it cannot be admitted, and not again after preemption."""
    config = CacheConfig(block_size=4, num_gpu_blocks=8, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        live = request("a", A[:16])
        for _ in range(3):
            cache.match(live)
            cache.release(live)
        assert cache.metrics.hit_rates()["request"] == 0
        for _ in range(2):
            match = cache.match(live)
            cache.allocate(live, 4 - len(match.block_ids))
            cache.commit(live, 16)
            cache.release(live)
        assert cache.stats().hit_rates["token"] == 0, "the preempted request's own blocks are no hit"


def test_forks_that_eviction_emptied_are_merged_away() -> None:
    """After many prompts that parted from one, and went, that one is whole again; its last block is not looked at."""
    model = CacheModel(1, 80, 0)
    for fork in range(3, 60):
        model.serve(A[:fork] + B[:10], stays=False, patient=True)
    model.serve(A[:70], stays=False, patient=True)
    model.serve(C[:9], stays=False, patient=True)
    model.serve(A[:70], stays=False, patient=True)
    model.check()
    lone = [run for run in model.cache._books.tree.runs() if len(run.children) == 1]
    assert len(lone) <= 1
    model.finish()


def test_namespaces_that_leave_nothing_are_forgotten() -> None:
    """Tenant salts come from outside: thousands of them must not stay in memory."""
    model = CacheModel(4, 8, 0)
    for tenant in range(1000):
        live = model.match(A[:9], namespace=f"tenant-{tenant}")
        assert live is not None
        assert model.allocate(live, 3)
        model.compute(live, 9)
        model.release(live)
    assert len(model.cache._books.tree.roots) < 150
    model.finish()


def test_a_count_that_is_no_integer_changes_nothing() -> None:
    """Half a block is an error of ours before anything moves."""
    model = CacheModel(4, 8, 0)
    live = model.match(A[:9])
    assert live is not None
    for call in (model.cache.allocate, model.cache.commit):
        with pytest.raises(RequestError, match=r"is .*; give a whole number"):
            call(live.request, 1.5)  # type: ignore[arg-type]
    model.check()
    model.finish()


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 100, 1023, 1024])
def test_any_block_size(block_size: int) -> None:
    """Prompts that end one token before, at and behind block borders hit all full blocks but the last token's."""
    cache = PrefixCacheManager(CacheConfig(block_size=block_size, num_gpu_blocks=40, transfer_client="inline"))
    tokens = [i * i % 1013 for i in range(5 * block_size + 1)]
    for i, length in enumerate((3 * block_size, 3 * block_size + 1, 3 * block_size - 1, 5 * block_size + 1)):
        request = Request(request_id=str(i), prompt_token_ids=tokens[:length])
        match = cache.match(request)
        num_cached = 0 if i == 0 else (3 * block_size + (i > 1)) // block_size
        assert match.num_tokens == min(num_cached, (length - 1) // block_size) * block_size
        cache.allocate(request, -(-length // block_size) - len(match.block_ids))
        cache.commit(request, length)
        cache.release(request)
        cache.check_invariants()
    cache.close()


@pytest.mark.parametrize(
    "verb",
    [
        lambda cache, given: cache.match(given),
        lambda cache, given: cache.prefetch(given),
        lambda cache, given: cache.end_prefetch(given),
        lambda cache, given: cache.allocate(given, 1),
        lambda cache, given: cache.confirm(given, arrived=True),
        lambda cache, given: cache.commit(given, 1),
        lambda cache, given: cache.write_to_storage(given),
        lambda cache, given: cache.release(given),
    ],
)
def test_what_is_no_request_is_told_so(verb: Callable[[PrefixCacheManager, object], object]) -> None:
    """A mapping in the place of a request: one of our errors, and nothing has happened."""
    with PrefixCacheManager(CacheConfig(num_gpu_blocks=4, transfer_client="inline")) as cache:
        before = cache.stats()
        with pytest.raises(
            RequestError, match=r"a dict was given in the place of a request; make a fastdeploy_cache\."
        ):
            verb(cache, {"request_id": "a"})
        assert cache.stats() == before
