"""The block-pool view: vLLM's verbs over one manager."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_cache.adapters.vllm.manager import KVCacheBlocks, hash_request_tokens
from fastdeploy_cache.errors import CommitError, PromptTooLongError, RequestError
from tests.rigs.simulated_client import SimulatedClient
from tests.rigs.vllm_engine import SIZE, asks, ids, serve, start, view

DOCUMENT = Path(__file__).parents[3] / "docs/adapters/vllm.md"


# -- what requests share


@pytest.mark.parametrize(
    "theirs",
    [{"cache_salt": "a"}, {"lora_name": "a"}, {"lora_request": SimpleNamespace(lora_name="a", lora_path="/x")}, {},
     {"lora_request": SimpleNamespace(lora_name="a", lora_path="/y")}, {"cache_salt": "a", "lora_name": "a"},
     {"mm_positions": [{"offset": 1, "length": 2}], "mm_hashes": ["a"]},
     {"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=1, length=2), identifier="b")]}],
)  # fmt: skip
def test_only_what_is_alike_is_shared(theirs: dict[str, Any]) -> None:
    """Salts, LoRA adapters (by name and path) and images part prompts, also where all are called `a`."""
    others = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_name": "a"}, {"lora_name": "b"},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/x")},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/y")}, {"cache_salt": "a", "lora_name": "a"},
        {"mm_positions": [SimpleNamespace(offset=1, length=2)], "mm_hashes": ["a"]},
        {"mm_positions": [SimpleNamespace(offset=1, length=2)], "mm_hashes": ["b"]},
    ]  # fmt: skip
    kv, tokens, hits = view(40), [*range(9)], []
    serve(kv, asks("first", tokens, **theirs))
    for i, ours in enumerate(others):
        request = asks(f"r{i}", tokens, **ours)
        hits.append(kv.get_computed_blocks(request)[1])
        kv.free(request)
    assert sorted(hits) == [0] * 9 + [8]
    assert kv.manager.stats().num_requests == 0
    kv.manager.close()


def test_a_hit_may_end_inside_an_image() -> None:
    """Block by block, as vLLM's: the engine computes an image's rest."""
    kv, image = view(), {"mm_positions": [{"offset": 2, "length": 5}], "mm_hashes": ["cat"]}
    serve(kv, asks("a", [*range(9)], **image))
    assert kv.get_computed_blocks(asks("b", [*range(7), 90, 91], **image))[1] == 4
    assert kv.get_computed_blocks(asks("c", [*range(9)], **{**image, "mm_hashes": ["dog"]}))[1] == 0
    kv.manager.close()


@pytest.mark.parametrize(
    "wrong",
    [{"cache_salt": 7}, {"prompt_token_ids": None}, {"mm_positions": [{"offset": 0, "length": 1}]}],
)
def test_requests_that_have_no_name_are_refused(wrong: dict[str, Any]) -> None:
    """A salt that is no text, embeddings, an image without a hash: `RequestError`, and nothing is held."""
    kv, request = view(), asks("a", [1, 2, 3])
    for name, value in wrong.items():
        setattr(request, name, value)
    with pytest.raises(RequestError):
        kv.get_computed_blocks(request)
    kv.free(request)
    kv.manager.close()


# -- the verbs


def test_a_prefix_is_found_when_it_is_computed_and_not_before() -> None:
    """Slots publish nothing; the next slots do, and so does `free`. One token is left to compute, and so its block."""
    kv, tokens = view(), [*range(8)]
    first, second = asks("a", tokens), asks("b", tokens)
    blocks, _ = kv.get_computed_blocks(first)
    assert kv.allocate_slots(first, 4, blocks) is not None
    assert kv.get_computed_blocks(second) == ([], 0), "the step is still under way"
    first.num_computed_tokens = 4
    new = kv.allocate_slots(first, 4)
    assert new is not None and ids(new) == [1] and kv.get_block_ids("a") == ([0, 1],)
    blocks, num_computed = kv.get_computed_blocks(second)
    assert (ids(blocks), num_computed) == ([0], 4) and blocks[0].ref_cnt == 2 and not blocks[0].is_null
    assert blocks.get_block_ids() == ([0],) and blocks.blocks == (blocks,)
    first.num_computed_tokens = 8
    kv.free(first)
    assert blocks[0].ref_cnt == 1
    assert kv.get_computed_blocks(second)[1] == 4
    assert kv.get_computed_blocks(asks("c", [*tokens, 9]))[1] == 8
    kv.manager.close()


def test_an_engine_that_schedules_ahead_publishes_by_itself() -> None:
    """Then `num_computed_tokens` is no promise: only `cache_blocks` counts."""
    kv, request = view(schedules_ahead=True), asks("a", [*range(9)])
    start(kv, request)
    request.all_token_ids.append(1)
    assert kv.allocate_slots(request, 1) == []
    assert kv.get_computed_blocks(asks("b", [*range(9)]))[1] == 0
    kv.cache_blocks(request, 4)
    assert kv.get_computed_blocks(asks("c", [*range(9)]))[1] == 4
    kv.free(request)
    assert serve(kv, asks("d", [*range(9)])) == 4
    kv.manager.close()


def test_a_request_that_does_not_fit_leaves_nothing_behind() -> None:
    """Neither its hit nor slots are held; a request that runs keeps what it has. Both may try again."""
    kv = view(4)
    serve(kv, asks("old", [*range(9)]))
    running = asks("a", [50] * 8)
    start(kv, running)
    waiting = asks("b", [*range(16)])
    blocks, num_computed = kv.get_computed_blocks(waiting)
    assert num_computed == 8 and kv.manager.stats().gpu.num_protected == 2
    assert kv.allocate_slots(waiting, 8, blocks) is None
    stats = kv.manager.stats()
    assert (stats.num_requests, stats.gpu.num_protected, kv.get_num_free_blocks()) == (1, 0, 2)
    assert kv.get_blocks("b") == [] and [block.ref_cnt for block in blocks] == [0, 0]
    running.all_token_ids += [1] * 9
    before = ids(kv.get_blocks("a"))
    assert kv.allocate_slots(running, 9) is None and ids(kv.get_blocks("a")) == before
    kv.free(running)
    blocks, num_computed = kv.get_computed_blocks(waiting)
    assert num_computed == 8 and len(kv.allocate_slots(waiting, 8, blocks) or []) == 2
    kv.manager.close()


def test_what_a_waiting_request_has_found_is_no_claim() -> None:
    """A request with slots takes the room; the one that waits is told so, not given blocks that are gone."""
    kv = view(4)
    serve(kv, asks("old", [*range(9)]))
    running, waiting = asks("a", [50] * 8), asks("b", [*range(9)])
    start(kv, running)
    blocks, _ = kv.get_computed_blocks(waiting)
    assert len(kv.allocate_slots(running, 8) or []) == 2
    assert kv.allocate_slots(waiting, 1, blocks) is None
    assert kv.get_computed_blocks(waiting) == ([], 0)
    kv.manager.close()


def test_a_prefix_that_is_not_wanted_is_computed_alone() -> None:
    """As for log-probabilities of prompts: no hit, no shared block, nothing published twice or under a wrong place."""
    kv, tokens = view(), [*range(9)]
    serve(kv, asks("old", tokens))
    request = asks("a", tokens, skip_reading_prefix_cache=True)
    assert kv.get_computed_blocks(request) == ([], 0)
    slots = kv.allocate_slots(request, 9, KVCacheBlocks())
    assert slots is not None and ids(slots) == [2, 3, 4]
    request.num_computed_tokens = 9
    kv.free(request)
    assert kv.manager.stats().gpu.num_cached == 2 and serve(kv, asks("b", tokens)) == 8
    fresh = asks("c", [90] * 9, skip_reading_prefix_cache=True)
    assert kv.allocate_slots(fresh, 9) is not None  # nothing cached to part from: it is cached as any other
    fresh.num_computed_tokens = 9
    kv.free(fresh)
    assert serve(kv, asks("d", [90] * 9)) == 8
    kv.manager.close()


def test_a_request_is_looked_up_as_it_is_now() -> None:
    """After a refusal alone it may read what is cached; a name that is used again stands for its new tokens."""
    kv, tokens = view(4), [*range(9)]
    serve(kv, asks("old", tokens))
    other, request = asks("other", [70] * 8), asks("a", tokens)
    start(kv, other)
    assert kv.allocate_slots(request, 9) is None, "three blocks of its own do not fit"
    assert kv.get_computed_blocks(request)[1] == 8
    assert kv.get_computed_blocks(asks("a", [*range(4), 90, 91]))[1] == 4
    kv.manager.close()


def test_wrong_calls_are_refused_and_change_nothing() -> None:
    """Other computed blocks, a look-up with slots, a prompt that can never fit, more computed than held."""
    kv = view()
    serve(kv, asks("old", [*range(9)]))
    request = asks("a", [*range(9)])
    blocks, _ = kv.get_computed_blocks(request)
    with pytest.raises(RequestError, match="give all 2"):
        kv.allocate_slots(request, 1, blocks[:1])
    assert kv.allocate_slots(request, 1, blocks) is not None
    with pytest.raises(RequestError, match="first slots"):
        kv.allocate_slots(request, 1, blocks)
    with pytest.raises(RequestError, match="has slots"):
        kv.get_computed_blocks(request)
    with pytest.raises(PromptTooLongError):
        kv.get_computed_blocks(asks("b", [1] * 40))
    request.all_token_ids += [1] * 9
    request.num_computed_tokens = 18
    with pytest.raises(CommitError):
        kv.free(request)
    assert kv.manager.stats().num_requests == 0 and kv.get_num_free_blocks() == 8
    kv.free(request)
    kv.manager.close()


def test_slots_for_drafts_are_counted_and_not_published() -> None:
    """Lookahead slots need blocks; what is computed beyond the request's tokens is no part of it."""
    kv, request = view(), asks("a", [*range(7)])
    blocks, _ = kv.get_computed_blocks(request)
    assert len(kv.allocate_slots(request, 7, blocks, num_lookahead_tokens=2) or []) == 3
    request.num_computed_tokens = 9  # two drafts, not accepted
    kv.free(request)
    assert kv.manager.stats().gpu.num_cached == 1
    kv.manager.close()


def test_a_preempted_request_goes_on_from_what_it_had() -> None:
    """Its blocks stay cached; it is no second request in the hit rates."""
    kv, request = view(), asks("a", [*range(9)], num_preemptions=0)
    start(kv, request)
    request.all_token_ids += [5, 6, 7, 8]
    assert kv.allocate_slots(request, 4) is not None
    request.num_computed_tokens = 12
    kv.free(request)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert kv.get_computed_blocks(request)[1] == 12
    assert start(kv, request) == 12
    assert kv.manager.stats().hit_rates["token"] == 0.0
    kv.free(request)
    kv.manager.close()


# -- tiers


def test_what_is_below_is_loaded_before_it_is_reported() -> None:
    """A CPU-tier hit is on the GPU when `get_computed_blocks` returns, as far as its time allows."""
    for seconds, hit in ((1.0, 8), (0, 0)):
        kv = view(4, 16, load_timeout_seconds=seconds)
        serve(kv, asks("a", [*range(9)]))
        first, _ = hash_request_tokens(SIZE, [*range(9)])
        assert kv.block_pool.get_cached_block(first) is not None
        serve(kv, asks("b", [50] * 16))  # takes all four blocks
        assert kv.block_pool.get_cached_block(first) is None, "it is in the CPU tier only"
        client = kv.manager._movement.client
        assert isinstance(client, SimulatedClient)
        client.auto = seconds > 0  # else the load is still on its way
        request = asks("c", [*range(9)])
        assert kv.get_computed_blocks(request)[1] == hit
        kv.free(request)
        client.land_all()
        kv.manager.check_invariants()
        kv.manager.close()


def test_a_queued_request_may_be_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prefetch` counts what is cached, and a request that goes without a match leaves nothing."""
    kv = view()
    serve(kv, asks("a", [*range(9)]))
    request, ended = asks("b", [*range(9)]), []
    found = kv.prefetch(request)
    assert (found.num_gpu_tokens, found.num_missing_tokens, found.ready) == (8, 1, True)
    monkeypatch.setattr(kv.manager, "end_prefetch", lambda native: ended.append(native.request_id))
    kv.free(request)
    kv.free(request)
    assert ended == ["b"] and kv.manager.stats().num_requests == 0
    kv.manager.close()


# -- reset


def test_a_reset_is_refused_while_blocks_are_in_use(caplog: pytest.LogCaptureFixture) -> None:
    """By a request with slots, or taken from the pool; what a waiting one has found is no use."""
    kv, request = view(), asks("a", [*range(9)])
    start(kv, request)
    with caplog.at_level(logging.WARNING):
        assert not kv.reset_prefix_cache()
    assert "reset_refused num_requests=1" in caplog.text
    kv.free(request)
    taken = kv.block_pool.get_new_blocks(1)
    assert not kv.reset_prefix_cache()
    kv.block_pool.free_blocks(taken)
    waiting = asks("b", [*range(9)])
    blocks, num_computed = kv.get_computed_blocks(waiting)
    assert num_computed == 8 and kv.reset_prefix_cache()
    assert kv.allocate_slots(waiting, 1, blocks) is None
    assert kv.get_computed_blocks(waiting) == ([], 0) and kv.get_num_free_blocks() == 8
    kv.manager.close()


# -- document


@pytest.mark.processes
def test_nothing_of_vllm_is_needed() -> None:
    """The view imports neither vLLM nor a framework, whatever its own name is."""
    code = "import sys, fastdeploy_cache.adapters.vllm.manager; print({'vllm', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.processes
def test_the_sample_prints_what_it_says() -> None:
    """The sample of docs/adapters/vllm.md runs as it stands."""
    (sample,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", sample], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == re.findall(r"^# (.*)", sample, re.MULTILINE)
