"""Snapshots of states, and windows that slide: what a running request holds is bounded, whatever becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.tier_loss import drop_gpu
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.request import Image
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, rows_of
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.hybrid_requests import (
    BOTH,
    FULL,
    ONLY_STATE,
    ONLY_WINDOW,
    TEXT,
    computed,
    decode,
    manager,
    started,
)


def num_held(cache: PrefixCacheManager, request: Request) -> list[int]:
    rows = cache._requests.active(request).rows
    assert rows is not None
    return [len(own) for own in rows.own]


def lose_gpu(cache: PrefixCacheManager) -> None:
    with cache._books:
        drop_gpu(cache._books.tree)


@pytest.mark.parametrize("forget", [PrefixCacheManager.reset, lose_gpu], ids=["reset", "loss"])
@pytest.mark.parametrize("state", ["pending", "newest"])
def test_windows_slide_after_all_is_forgotten(forget: Callable[[PrefixCacheManager], object], state: str) -> None:
    """A snapshot that nobody would find is given up, and a request alone has enough in the least pools."""
    with manager(num_gpu_units=(2, 6), num_gpu_blocks=64) as cache:
        request, new = started(cache, "a", TEXT[:6])
        cache.commit(request, 6)
        request.append_output([1, 2])
        assert cache.rows.snapshot(request, 8, new.tables[0].block_ids) is not None
        if state == "newest":
            cache.commit(request, 8)
        forget(cache)
        decode(cache, request, 60)
        assert num_held(cache, request) == [1, 2]
        cache.release(request)
        cache.check_invariants()


@pytest.mark.parametrize("layout", [BOTH, ONLY_STATE])
def test_the_least_pools_keep_the_newest_states(layout: KVLayout) -> None:
    """A snapshot that finds no slot takes that of the one before: the next turn goes on at the last."""
    units = (2, 6) if layout is BOTH else (2,)
    with manager(layout, num_gpu_units=units, num_gpu_blocks=64) as cache:
        request, new = started(cache, "a", TEXT[:6])
        cache.commit(request, 6)
        assert decode(cache, request, 60, new.tables[0].block_ids[0]) == list(range(8, 61, 4))
        cache.check_invariants()
        tokens = request.token_ids(0, 60).tolist()
        cache.release(request)
        match = cache.match(Request(request_id="b", prompt_token_ids=[*tokens, 1]))
        assert match.num_tokens == 60
        cache.check_invariants()


def test_states_of_which_no_newer_come_are_a_checkpoint_a_block_later() -> None:
    """Windows slide on behind them: the request holds no more than before, and others find them at once."""
    with manager(num_gpu_units=(4, 6), num_gpu_blocks=64) as cache:
        request, new = started(cache, "a", TEXT[:6])
        cache.commit(request, 6)
        request.append_output([6, 7])
        assert cache.rows.snapshot(request, 8, new.tables[0].block_ids) is not None
        cache.commit(request, 8)
        decode(cache, request, 40)
        assert num_held(cache, request) == [1, 2]
        assert cache.match(Request(request_id="b", prompt_token_ids=[*TEXT[:8], 9])).num_tokens == 8
        cache.release(request)
        cache.check_invariants()


@pytest.mark.parametrize("layout", [ONLY_WINDOW, BOTH])
def test_a_step_needs_no_more_than_the_least_pools(layout: KVLayout) -> None:
    """It gets its blocks before it commits: that is what a request is said to need."""
    units = (6,) if layout is ONLY_WINDOW else (2, 6)
    with manager(layout, num_gpu_units=units, num_gpu_blocks=64) as cache:
        request, _ = started(cache, "a", TEXT[:4])
        for number in range(4, 80):
            (new,) = cache.rows.step([(request, [1], number)])
            assert not isinstance(new, Exception)
        cache.release(request)
        cache.check_invariants()


@pytest.mark.parametrize("reach", [5, 6, 8, 9, 12, 16, 20, 33])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_one_request_comes_to_its_end_in_the_least_pools(kind: Any, reach: int) -> None:
    """Token by token, from nothing and from a hit, with a checkpoint of its own behind its prompt."""
    group = KVGroup(kind=kind, reach_tokens=reach, layers=(1,))
    (row,) = rows_of((FULL, group), 4)[1:]
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, groups=(FULL, group))
    with manager(layout, num_gpu_units=(row.num_least_units,), num_gpu_blocks=256) as cache:
        tokens = [1]
        for name in ("first", "second", "third"):
            match = cache.match(request := Request(request_id=name, prompt_token_ids=tokens))
            assert name == "first" or match.num_tokens > len(tokens) - 8
            for number in range(match.num_tokens + 1, len(tokens) + 1):
                if number > len(cache._requests.active(request).block_ids) * 4:
                    cache.rows.allocate(request, 1)
                cache.commit(request, number)
            decode(cache, request, len(tokens) + 100)
            tokens = [*request.token_ids(0, request.num_tokens).tolist(), 1]
            cache.release(request)
        cache.check_invariants()


@pytest.mark.parametrize("fields", [{"enable_prefix_caching": False}, {"cache_outputs": False}])
def test_no_snapshot_of_what_is_never_cached(fields: dict[str, Any]) -> None:
    """The request writes on where it did, and nothing is kept for it."""
    with manager(num_gpu_units=(2, 6), num_gpu_blocks=64, **fields) as cache:
        request, new = started(cache, "a", TEXT[:6])
        cache.commit(request, 6)
        assert decode(cache, request, 60, new.tables[0].block_ids[0]) == []
        assert num_held(cache, request) == [1, 2]
        cache.release(request)
        cache.check_invariants()


def test_other_tokens_than_those_of_a_draft_have_a_snapshot() -> None:
    """The one of the rejected tokens goes; of the same tokens there is one only."""
    with manager() as cache:
        request, new = started(cache, "a", TEXT[:14])
        cache.commit(request, 14)
        request.append_output([7, 7])
        (slot,) = cache.rows.snapshot(request, 16, new.tables[0].block_ids) or ()
        with pytest.raises(RequestError, match="at 16 tokens, of which there is one"):
            cache.rows.snapshot(request, 16, [slot])
        request.cut_output(14)
        request.append_output([8, 8])
        assert cache.rows.snapshot(request, 16, [slot]) is not None
        cache.commit(request, 16)
        cache.release(request)
        assert cache.match(Request(request_id="b", prompt_token_ids=[*TEXT[:14], 8, 8, 1])).num_tokens == 16
        cache.check_invariants()


def test_no_snapshot_below_what_was_matched() -> None:
    """The request has not computed that: what is in its slot is something else."""
    with manager() as cache:
        cache.release(computed(cache, "a"))
        request, new = started(cache, "b")
        with pytest.raises(RequestError, match="at 8 tokens; 16 are committed or cached"):
            cache.rows.snapshot(request, 8, new.tables[0].block_ids)
        cache.release(request)
        cache.check_invariants()


@pytest.mark.parametrize("slots", [None, 5, [None], [0.0], [[0]], "0", iter(["x"])])
def test_slots_that_are_none(slots: Any) -> None:
    """Refused at the call; any list of whole numbers will do."""
    with manager() as cache:
        request, new = started(cache, "a")
        with pytest.raises(RequestError, match="give whole numbers, one of each row of states"):
            cache.rows.snapshot(request, 16, slots)
        assert cache.rows.snapshot(request, 16, iter(new.tables[0].block_ids)) is not None  # type: ignore[arg-type]
        cache.commit(request, 18)
        cache.release(request)
        cache.check_invariants()


def test_the_match_stays_what_it_was() -> None:
    """Also when the request has units of its own, and has written them; of lost memory nothing is shown."""
    with manager() as cache:
        cache.release(computed(cache, "a"))
        match = cache.match(request := Request(request_id="b", prompt_token_ids=[*TEXT, 1, 2, 3, 4]))
        assert match.num_tokens == 16 and all(table.block_ids for table in match.tables)
        cache.rows.allocate(request, 2)
        assert match.poll().tables == match.tables
        cache.commit(request, 22)
        assert match.poll().tables == match.tables and match.poll().num_tokens == 16
        lose_gpu(cache)
        assert [table.block_ids for table in match.poll().tables] == [[], []]
        cache.release(request)


@pytest.mark.parametrize("layout", [ONLY_WINDOW, BOTH])
def test_a_prompt_whose_last_block_ends_in_an_image_hits(layout: KVLayout) -> None:
    """The checkpoint is made in front of the image, where the same prompt may go on."""
    image = Image(offset=9, length=9, hash=b"one")
    with manager(layout, num_gpu_blocks=64) as cache:
        hits = []
        for number in range(3):
            request = Request(request_id=f"r{number}", prompt_token_ids=list(range(20)), images=[image])
            match = cache.match(request)
            hits.append(match.num_tokens)
            new = cache.rows.allocate(request, 5 - match.num_tokens // 4)
            assert match.checkpoint_tokens == ((8,) if not number else ())
            if layout is BOTH and not number:
                cache.commit(request, 4)
                cache.rows.snapshot(request, 8, new.tables[0].block_ids)
            cache.commit(request, 8)
            cache.commit(request, 20)
            cache.release(request)
        assert hits == [0, 8, 8]


def test_a_preempted_request_is_one_use() -> None:
    """Its checkpoint counts as its run does, however often it comes back."""
    with manager() as cache:
        request = computed(cache, "a")
        for _ in range(3):
            cache.release(request)
            cache.match(request)
            cache.rows.allocate(request, 1)
            cache.commit(request, 18)
        cache.release(request)
        runs = [run for run in cache._books.tree.runs() if run.checkpoint is not None]
        assert [run.num_uses for run in runs] == [run.checkpoint.num_uses for run in runs if run.checkpoint] == [1]


def test_a_prompt_without_a_checkpoint_is_told_why() -> None:
    """While all of it is cached, and after it was freed: nothing was evicted, and no image is to blame."""
    with manager() as cache:
        request, _ = started(cache, "a", TEXT[:17])
        cache.commit(request, 17)
        for name in ("while it runs", "when it has gone"):
            match = cache.match(again := Request(request_id=name, prompt_token_ids=TEXT[:17]))
            words = str(match.explain())
            assert "16 tokens were missed (unanchored)" in words and "evicted" not in words and "image" not in words
            cache.release(again)
            if name == "while it runs":
                cache.release(request)
        cache.release(computed(cache, "b", TEXT[:17]))
        for first in range(100, 220, 20):
            cache.release(computed(cache, f"other {first}", list(range(first, first + 17))))
        evicted = cache.match(Request(request_id="c", prompt_token_ids=TEXT[:17]))
        assert "16 tokens were missed (evicted)" in str(evicted.explain())


class Full(list[Any]):
    """A list that gets no memory to grow."""

    def append(self, item: object) -> None:
        raise MemoryError


@pytest.mark.parametrize("name", ["anchors", "used"])
@pytest.mark.parametrize("layout", [ONLY_WINDOW, BOTH])
def test_a_checkpoint_that_cannot_be_noted_takes_no_units(layout: KVLayout, name: str) -> None:
    """Its units are the request's still, which reads them: nobody else gets them, and the release frees them."""
    with manager(layout, num_gpu_blocks=64) as cache:
        request, new = started(cache, "a")
        rows = cache._requests.active(request).rows
        assert rows is not None
        if layout is BOTH:
            cache.rows.snapshot(request, 16, new.tables[0].block_ids)
        setattr(rows, name, Full())
        cache.commit(request, 18)
        assert cache._books.mishaps.counts["checkpoint"] == 1
        assert all(set(table) <= own for table, own in zip(rows.tables, rows.own, strict=True))
        cache.check_invariants()
        cache.release(request)
        cache.check_invariants()
