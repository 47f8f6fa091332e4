"""The verbs of a hybrid model: what they show, what they refuse, and that what is refused changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from fastdeploy_cache import PrefixCacheManager, Request, TransferConfig
from fastdeploy_cache.books.checkpoints import all_checkpoints
from fastdeploy_cache.errors import LayoutError, OutOfBlocksError, RequestError, UnknownRequestError
from fastdeploy_cache.requests.tables import RowTable
from tests.rigs.hybrid_requests import (
    ONLY_WINDOW,
    TEXT,
    UNIFORM,
    ask,
    computed,
    manager,
    picture,
)


@pytest.fixture
def cache() -> Iterator[PrefixCacheManager]:
    with manager() as made:
        yield made
        made.check_invariants()


def test_a_second_request_goes_on_at_the_checkpoint(cache: PrefixCacheManager) -> None:
    """It is shown full blocks up to there, the state in front, and the window; and where a piece should end."""
    first = ask(cache, "a")
    new = cache.rows.allocate(first, 5)
    assert [len(table.block_ids) for table in new.tables] == [1, 5] and len(new.block_ids) == 5
    (fresh,) = cache.rows.snapshot(first, 16, new.tables[0].block_ids) or ()
    assert fresh not in new.tables[0].block_ids
    cache.commit(first, 18)
    cache.release(first)
    match = cache.match(second := Request(request_id="b", prompt_token_ids=[*TEXT, 1, 2, 3, 4]))
    assert match.num_tokens == match.num_gpu_tokens == 16 and match.block_ids == new.block_ids[:4]
    assert (
        match.tables
        == (
            RowTable(3, new.tables[0].block_ids),  # the state at the end of block 3
            RowTable(2, new.tables[1].block_ids[2:4]),  # tokens 11 to 15
        )
    )
    assert match.checkpoint_tokens == (20,)
    assert cache.prefetch(Request(request_id="c", prompt_token_ids=TEXT)).num_gpu_tokens == 16
    cache.release(second)


def test_a_prompt_that_parts_has_a_stop_where_it_does(cache: PrefixCacheManager) -> None:
    """No checkpoint lies there: the second request computes all again, and makes one; the third goes on there."""
    cache.release(computed(cache, "a"))
    parted = [*TEXT[:8], 7, 7, 7, 7, 7]
    match = cache.match(second := Request(request_id="b", prompt_token_ids=parted))
    assert match.num_tokens == 0 and match.checkpoint_tokens == (8, 12)
    new = cache.rows.allocate(second, 4)
    slots = new.tables[0].block_ids
    slots = list(cache.rows.snapshot(second, 8, slots) or ())
    cache.commit(second, 8)
    cache.commit(second, 13)
    cache.release(second)
    third = Request(request_id="c", prompt_token_ids=[*TEXT[:8], 9, 9])
    assert cache.match(third).num_tokens == 8
    cache.release(third)


def test_windows_need_no_snapshot() -> None:
    """Checkpoints are made at the last block of a prompt, at regular stops, and at the end of the output."""
    with manager(ONLY_WINDOW, checkpoint_every_tokens=8) as cache:
        request = ask(cache, "a")
        cache.rows.allocate(request, 5)
        cache.commit(request, 18)
        request.append_output([5, 6, 7, 8, 9, 10, 11])
        cache.rows.allocate(request, 2)
        cache.commit(request, 24)
        cache.release(request)
        ended = [*request_tokens(request), 1]
        for tokens, found in ((TEXT, 16), ([*TEXT[:9], 0], 8), ([*TEXT[:13], 0], 8), (ended, 24)):
            match = cache.match(other := Request(request_id="b", prompt_token_ids=tokens))
            assert match.num_tokens == found, tokens
            cache.release(other)
        with pytest.raises(RequestError, match="the model has no states"):
            cache.rows.snapshot(ask(cache, "c"), 16, [])
        cache.check_invariants()


def request_tokens(request: Request) -> list[int]:
    return request.token_ids(0, request.num_tokens).tolist()


def test_of_output_the_newest_snapshot_counts(cache: PrefixCacheManager) -> None:
    """The one before goes home when the next is committed; at the release the newest becomes a checkpoint."""
    request = computed(cache, "a")
    num_free = cache._books.rows.checkpoints.pools[0].pool.num_free  # type: ignore[union-attr]
    slot = cache._requests.active(request).rows.tables[0][-1]  # type: ignore[union-attr]
    for end in (20, 24, 28):
        request.append_output([end] * (end - request.num_tokens))
        cache.rows.allocate(request, 1 if end > 20 else 0)
        (slot,) = cache.rows.snapshot(request, end, [slot]) or ()
        cache.commit(request, end)
    assert cache._books.rows.checkpoints.pools[0].pool.num_free == num_free - 1  # type: ignore[union-attr]
    cache.release(request)
    again = Request(request_id="b", prompt_token_ids=[*request_tokens(request), 3])
    assert cache.match(again).num_tokens == 28
    cache.release(again)


def test_a_snapshot_of_a_rejected_draft_is_none(cache: PrefixCacheManager) -> None:
    """Its states are of tokens that were not accepted: others take their place before the commit."""
    request = computed(cache, "a")
    slot = cache._requests.active(request).rows.tables[0][-1]  # type: ignore[union-attr]
    request.append_output([90, 91])
    assert cache.rows.snapshot(request, 20, [slot])
    request.cut_output(18)
    request.append_output([92, 93])
    cache.commit(request, 20)
    cache.release(request)
    found = Request(request_id="b", prompt_token_ids=[*TEXT, 92, 93, 1])
    assert cache.match(found).num_tokens == 16
    cache.release(found)


@pytest.mark.parametrize(
    ("num_tokens", "slots", "words"),
    [
        (17, "own", "at 17 tokens; take it where a block of 4 tokens ends"),
        (0, "own", "at 0 tokens; take it where a block of 4 tokens ends"),
        (-4, "own", "at -4 tokens; take it where"),
        (
            12,
            "own",
            "at 12 tokens; 18 are committed or cached, and 20 are there and have blocks: take it",
        ),
        (24, "own", "at 24 tokens; 18 are committed or cached, and 20 are there and have blocks"),
        (20, "other", "give the slots that it writes, one of each row of states"),
        (20, "none", "give the slots that it writes, one of each row of states"),
        (20, "twice", "give the slots that it writes, one of each row of states"),
    ],
)
def test_snapshots_that_are_refused(cache: PrefixCacheManager, num_tokens: int, slots: str, words: str) -> None:
    """A place that ends no block or is not computed, and slots of somebody else; nothing changes."""
    request, other = computed(cache, "a"), computed(cache, "b", [50, *TEXT])
    request.append_output([1, 2])
    own = cache._requests.active(request).rows.tables[0].tolist()  # type: ignore[union-attr]
    theirs = cache._requests.active(other).rows.tables[0].tolist()  # type: ignore[union-attr]
    before = picture(cache)
    given = {"own": own, "other": theirs, "none": [], "twice": own * 2}[slots]
    with pytest.raises(RequestError, match=re.escape(words)):
        cache.rows.snapshot(request, num_tokens, given)
    assert picture(cache) == before
    cache.release(request)
    cache.release(other)


def test_a_snapshot_twice_and_after_release(cache: PrefixCacheManager) -> None:
    """The second of the same tokens is refused, and so is one of a request that has gone."""
    request = computed(cache, "a")
    request.append_output([1, 2])
    slot = cache._requests.active(request).rows.tables[0].tolist()  # type: ignore[union-attr]
    fresh = cache.rows.snapshot(request, 20, slot)
    assert fresh
    with pytest.raises(RequestError, match="at 20 tokens, of which there is one"):
        cache.rows.snapshot(request, 20, fresh)
    cache.release(request)
    with pytest.raises(UnknownRequestError):
        cache.rows.snapshot(request, 20, fresh)


def test_a_shown_state_is_not_the_requests_to_give(cache: PrefixCacheManager) -> None:
    """What a match shows is read and never written: it is refused as a snapshot's slot."""
    cache.release(computed(cache, "a"))
    match = cache.match(request := Request(request_id="b", prompt_token_ids=[*TEXT, 1, 2, 3]))
    with pytest.raises(RequestError, match=r"16 are committed|its blocks hold|give the slots"):
        cache.rows.snapshot(request, 16, match.tables[0].block_ids)
    cache.release(request)


def test_after_a_reset_there_is_no_checkpoint(cache: PrefixCacheManager) -> None:
    """A request from before goes on, and what it computes is nobody's: its snapshots are none."""
    request = ask(cache, "a")
    new = cache.rows.allocate(request, 5)
    cache.reset()
    assert cache.rows.snapshot(request, 16, new.tables[0].block_ids) is None
    cache.commit(request, 18)
    cache.release(request)
    again = Request(request_id="b", prompt_token_ids=TEXT)
    assert cache.match(again).num_tokens == 0
    cache.release(again)


def test_a_row_that_is_short_is_named() -> None:
    """All rows or none: the error says which one lacks how many, and nothing is taken of any."""
    with manager(num_gpu_units=(2, 6), num_gpu_blocks=16) as cache:
        request = ask(cache, "a")
        before = picture(cache)
        words = "2 units of the row 'window 6' are missing; allocate fewer blocks at once, or commit what is computed"
        with pytest.raises(OutOfBlocksError, match=words) as error:
            cache.rows.allocate(request, 8)
        assert (error.value.row, error.value.missing) == ("window 6", 2) and picture(cache) == before
        cache.rows.allocate(request, 6)
        others = [ask(cache, "b", [1, 2]), ask(cache, "c", [3, 4])]
        with pytest.raises(OutOfBlocksError) as error:
            cache.rows.allocate(others[0], 1)
        assert error.value.row == "window 6"
        for each in (request, *others):
            cache.release(each)
        cache.check_invariants()


def test_verbs_of_other_models_are_told(cache: PrefixCacheManager) -> None:
    """Each says which verb instead, and changes nothing."""
    request = ask(cache, "a")
    before = picture(cache)
    with pytest.raises(RequestError, match=r"this model has several; use `rows\.allocate`"):
        cache.allocate(request, 1)
    with pytest.raises(RequestError, match=r"this model has several; use `rows\.step`"):
        cache.step([(request, [], 0)])
    with pytest.raises(RequestError, match="give 0 or more"):
        cache.rows.allocate(request, -1)
    with pytest.raises(RequestError):
        cache.rows.allocate(request, "2")  # type: ignore[arg-type]
    assert picture(cache) == before
    cache.release(request)
    words = "all layers of this model keep everything; use `allocate` and `step`"
    with manager(UNIFORM) as uniform:
        other = ask(uniform, "a")
        with pytest.raises(RequestError, match=words):
            uniform.rows.allocate(other, 1)
        with pytest.raises(RequestError, match=words):
            uniform.rows.step([])
        with pytest.raises(RequestError, match=words):
            uniform.rows.snapshot(other, 4, [])
        uniform.release(other)


def test_a_step_gives_blocks_of_all_rows(cache: PrefixCacheManager) -> None:
    """Tokens are appended, blocks of each row allocated, and what is computed is committed; an error is an answer."""
    request = computed(cache, "a")
    (none,) = cache.rows.step([(request, [5], 18)])
    (new,) = cache.rows.step([(request, [6, 7], 19)])
    assert none == ([], (RowTable(5, []), RowTable(5, [])))
    assert len(new.block_ids) == 1 and [len(t.block_ids) for t in new.tables] == [0, 1]  # type: ignore[union-attr]
    (refused,) = cache.rows.step([(request, [], 3)])
    assert isinstance(refused, Exception)
    cache.release(request)


@pytest.mark.parametrize("verb", ["insert", "hand_over", "evict_runs", "drop", "copy", "load"])
def test_verbs_over_blocks_of_one_row_are_refused(cache: PrefixCacheManager, verb: str) -> None:
    """They know no units: each says so, and the blocks are their caller's still."""
    request, blocks = ask(cache, "a", TEXT[:8]), cache.blocks
    ids = blocks.allocate(2)
    calls: dict[str, Callable[[], object]] = {
        "insert": lambda: blocks.insert(request, ids, pin=True),
        "hand_over": lambda: blocks.hand_over(request, ids),
        "evict_runs": lambda: blocks.evict_runs(1),
        "drop": lambda: blocks.drop(b""),
        "copy": lambda: blocks.copies.copy(ids[:1], ids[1:]),
        "load": lambda: blocks.copies.load(request),
    }
    before = picture(cache)
    with pytest.raises(RequestError, match=rf"blocks\.(copies\.)?{verb} moves blocks of one row, and this model has"):
        calls[verb]()
    assert picture(cache) == before
    blocks.free(ids)
    cache.release(request)


def test_what_is_asked_for_ahead_is_not_the_coldest() -> None:
    """A prefetch makes the checkpoint of its prompt as warm as its full blocks are."""
    with manager(num_gpu_units=(3, 9), num_gpu_blocks=64) as cache:
        for name, first in (("a", 100), ("b", 200)):
            cache.release(computed(cache, name, list(range(first, first + 18))))
        cache.prefetch(Request(request_id="ahead", prompt_token_ids=list(range(100, 118))))
        cache.release(computed(cache, "c", list(range(300, 318))))
        hits = [cache.match(Request(request_id=f"again {first}", prompt_token_ids=list(range(first, first + 18))))
                for first in (100, 200)]  # fmt: skip
        assert [hit.num_tokens for hit in hits] == [16, 0]


def test_without_prefix_caching_all_verbs_work() -> None:
    """Nothing is found, and no checkpoint is made."""
    with manager(enable_prefix_caching=False) as cache:
        for name in ("a", "b"):
            request = computed(cache, name)
            cache.release(request)
            assert cache.stats().gpu.num_cached == 0
        cache.check_invariants()


def boundaries(cache: PrefixCacheManager) -> list[int]:
    return sorted(checkpoint.boundary for checkpoint in all_checkpoints(cache._books.tree))


def test_a_path_keeps_so_many_inner_checkpoints() -> None:
    """Of more the oldest goes; one at which prompts part stays, and so does the last."""
    with manager(ONLY_WINDOW, checkpoint_every_tokens=4, checkpoints_per_path=2) as cache:
        cache.release(piecewise(cache, "a", TEXT))
        assert boundaries(cache) == [2, 3, 4]
        cache.release(piecewise(cache, "b", [*TEXT[:8], *range(60, 74)]))
        assert boundaries(cache) == [2, 3, 3, 4, 4, 5]  # at block 2 prompts part by now
        cache.check_invariants()


def piecewise(cache: PrefixCacheManager, name: str, tokens: list[int]) -> Request:
    """A prompt of a model without states, computed block by block."""
    request = Request(request_id=name, prompt_token_ids=tokens)
    match = cache.match(request)
    for end in (*range(match.num_tokens + 4, len(tokens), 4), len(tokens)):
        cache.rows.allocate(request, 1)
        cache.commit(request, end)
    return request


def test_another_policy_ranks_checkpoints_too() -> None:
    """What was ranked by the one before goes first, in its order; then by the new one."""
    with manager(ONLY_WINDOW, num_gpu_units=(12,)) as cache:
        for name in range(4):
            cache.release(piecewise(cache, str(name), [name] * 9))
        cache.control.set_policy("fifo")
        rows = cache._books.rows
        assert rows is not None and rows.checkpoints.policy.name == "fifo"
        cache.check_invariants()
        cache.release(piecewise(cache, "more", [9] * 25))
        last = Request(request_id="3 again", prompt_token_ids=[3] * 9)
        assert cache.match(last).num_tokens == 8
        cache.release(last)
        cache.check_invariants()


def test_arrays_of_each_row(cache: PrefixCacheManager) -> None:
    """Each layer has as many blocks or units as its row, and what is written in one is read in no other."""
    views = cache.ranks.kv_views(0)
    (window, state) = (cache._books.rows.checkpoints.pools[n].pool.num_blocks for n in (1, 0))  # type: ignore[union-attr]
    assert [views[0]["key"].shape, views[1]["s"].shape, views[2]["value"].shape] == [
        (16, 4, 1, 4), (state, 4), (window, 4, 1, 4),
    ]  # fmt: skip
    arrays = [array for layer in views for array in layer.values()]
    for number, array in enumerate(arrays):
        array[:] = number + 1
    assert [float(array.min()) for array in arrays] == [float(array.max()) for array in arrays] == [1, 2, 3, 4, 5]


def test_a_workers_arrays_have_the_units_of_their_row() -> None:
    """Fewer are refused, with layer and row; so are arrays of another shape."""
    with manager(transfer=TransferConfig(kv_owner="worker")) as cache:
        layout = cache.config.rank_layout()
        assert layout is not None
        numbers = [layout.num_layer_blocks(layer, 16) for layer in range(3)]
        arrays = [
            {part.name: np.zeros((number, *part.storage_shape), part.storage_dtype) for part in layout.parts_of(layer)}
            for layer, number in enumerate(numbers)
        ]
        cache.ranks.attach_kv(0, arrays)
        short = {name: array[:-1] for name, array in arrays[2].items()}
        with pytest.raises(LayoutError, match=r"layer 2 key has .* units of the row 'window 6'; the GPU pool needs"):
            cache.ranks.attach_kv(0, [*arrays[:2], short])
        with pytest.raises(LayoutError, match="layer 1 s is"):
            cache.ranks.attach_kv(0, [arrays[0], {"s": np.zeros((numbers[1], 5), np.float32)}, arrays[2]])


def test_a_turn_after_a_reset_removes_half_as_many_runs() -> None:
    """Each has a checkpoint and units, too: a verb would hold the lock for twice as long."""
    with manager(ONLY_WINDOW, num_gpu_blocks=3000, num_gpu_units=(3000,)) as cache:
        for number in range(1000):
            request = ask(cache, str(number), [number] * 5)
            cache.rows.allocate(request, 2)
            cache.commit(request, 5)
            cache.release(request)
        cache.reset()
        left = []
        for _ in range(4):
            with cache._books:
                pass
            left.append(len(list(cache._books.tree.runs())))
        assert [before - after for before, after in pairwise(left)] == [32, 32, 32]
