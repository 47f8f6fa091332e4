"""What an operator sees of a hybrid model: checkpoints in `top`, `tree` and `pins`, units and counts in the metrics."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
from rich.console import Console

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.launch.operating.text import pins_table, prefix_tree, top_table
from tests.rigs.hybrid_requests import ONLY_WINDOW, TEXT, computed, manager, started


@pytest.fixture
def cache() -> Iterator[PrefixCacheManager]:
    """One prompt of 18 tokens, with a checkpoint behind 16."""
    with manager() as made:
        made.release(computed(made, "text"))
        yield made
        made.check_invariants()


def shown(what: object) -> str:
    told = io.StringIO()
    Console(width=150, file=told).print(what)
    return told.getvalue()


def test_prefixes_say_where_requests_go_on(cache: PrefixCacheManager) -> None:
    """In values and in the texts of the commands; a model whose layers keep everything has no such column."""
    (prefix,) = cache.insight.top()
    assert prefix.checkpoint_tokens == (16,)
    tree = cache.insight.tree()
    assert ", checkpoint at 16" in shown(prefix_tree(tree.as_dict()))
    assert "last check-" in shown(top_table([prefix.as_dict()]))
    assert "last check-" not in shown(top_table([prefix.as_dict() | {"checkpoint_tokens": ()}]))
    many = prefix.as_dict() | {"checkpoint_tokens": tuple(range(4, 24, 4)), "children": []}
    text = shown(prefix_tree({"num_shown": 1, "block_size": 4, "children": [many], "num_left_out": 0}))
    assert ", checkpoints at 12, 16, 20 and 2 before" in text


def test_a_pin_says_where_a_request_goes_on(cache: PrefixCacheManager) -> None:
    """It keeps the deepest checkpoint within its prefix."""
    pin = cache.control.pin(TEXT, 60.0)
    assert (pin.num_tokens, pin.checkpoint_tokens) == (16, 16)
    assert "goes" in shown(pins_table([vars(pin)]))
    cache.control.unpin(pin.name)


def test_a_pin_of_what_nobody_could_use_is_refused(cache: PrefixCacheManager) -> None:
    """It says where the next checkpoint lies, and pins nothing."""
    with pytest.raises(ControlError, match=r"within these 8 tokens, so no request.* lies behind 16 tokens\. Nothing"):
        cache.control.pin(TEXT[:10], 60.0)
    assert cache.control.pins() == []


def test_units_and_checkpoints_are_counted(cache: PrefixCacheManager) -> None:
    """Each unit in one state; made, refused and evicted ones; in each tier as many as there are."""
    stats = cache.stats()
    assert [row.name for row in stats.rows] == ["state", "window 6"]
    for row in stats.rows:
        assert sum(row.by_state().values()) == row.num_units and row.by_state()["evictable"] > 0
    assert (stats.checkpoints.num_in, stats.checkpoints.num_made, stats.checkpoints.num_refused) == ((1, 0), 1, 0)
    for number in range(20):
        cache.release(computed(cache, f"other {number}", [100 + number] * 18))
    stats = cache.stats()
    assert stats.checkpoints.num_made == 21
    assert sum(stats.checkpoints.num_evicted[0]) + stats.checkpoints.num_in[0] == 21


def test_a_snapshot_without_a_slot_is_counted_as_refused() -> None:
    """And the request goes on."""
    with manager(num_gpu_units=(3, 12)) as cache:
        first = computed(cache, "first")
        second, new = started(cache, "second", [7] * 10)
        assert cache.stats().checkpoints.num_refused == 0
        assert cache.rows.snapshot(second, 4, new.tables[0].block_ids) is None
        assert cache.stats().checkpoints.num_refused == 1
        cache.commit(second, 10)
        for request in (first, second):
            cache.release(request)


def test_pages_of_checkpoints_are_blocks_of_the_cpu_tier() -> None:
    """Every block of it is in one state: those of images can be evicted, or are pinned."""
    with manager(num_cpu_blocks=40, cpu_write_policy="write_through") as cache:
        cache.release(computed(cache, "text"))
        cpu = cache.stats().cpu
        assert sum(cpu.by_state().values()) == cpu.num_blocks
        assert cpu.num_cached == 7, "four blocks and three pages"


def test_what_knows_no_rows_says_that_it_is_off() -> None:
    """No process estimates other sizes, and the page says why."""
    with manager() as cache:
        cache.release(computed(cache, "a"))
        assert cache.insight.what_if() == []
        assert not cache._seen.start_what_if().is_on
        pages = cache._seen.start_page(cache.insight, lambda: "running")
        needs = json.loads(pages["/data.json"].content())["needs"]
        assert "in rows beside its full KV is not estimated" in needs["what_if_off"]


def test_callers_are_told_at_which_boundary_a_prefix_ends() -> None:
    """Of a look-up and of a pin, which holds that checkpoint; and why a prompt of a caller's own was missed."""
    with manager(ONLY_WINDOW) as cache:
        request = Request(request_id="first", prompt_token_ids=TEXT)
        cache.match(request)
        cache.rows.allocate(request, 5)
        cache.commit(request, 16)
        asked = Request(request_id="asked", prompt_token_ids=[*TEXT[:12], 99])
        assert cache.blocks.lookup(asked).num_checkpoint_blocks == 0
        assert cache.blocks.lookup(request).num_checkpoint_blocks == 4
        pinned = cache.blocks.pin(request)
        assert (pinned.num_blocks, pinned.num_checkpoint_blocks) == (4, 4)
        cache.release(request)
        cache.blocks.count_request(asked, (0, 0, 0))
        assert cache.explain("asked").missed_tokens()[Cause.UNANCHORED] == 12
        cache.blocks.unpin(pinned)
        cache.check_invariants()
