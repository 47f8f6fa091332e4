"""Checkpoints in storage: found by their boundary, read last, and held until then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.storage.prefetch import StoragePrefetch
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.storage.base import Blocks
from fastdeploy_cache.transfer_manager.storage.keys import IMAGE_STOP, page_names
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.held_store import stored_in
from tests.rigs.hybrid_requests import BOTH, FULL, ONLY_STATE, ONLY_WINDOW, TEXT, computed, started
from tests.rigs.stored_rows import LONG, ask, names_of, new_cache, no_memory, written_objects


@pytest.fixture
def objects() -> dict[str, bytes]:
    """What a cache has written that served TEXT and LONG."""
    return written_objects()


def test_a_restart_finds_the_deepest_checkpoint(objects: dict[str, bytes]) -> None:
    """Full KV up to its boundary and its image, and no more than these."""
    cache = new_cache()
    with stored_in(cache, objects) as store:
        request, match = ask(cache, LONG)
        match = match.poll()
        assert (match.num_tokens, match.num_storage_tokens) == (28, 28)
        assert [(table.first_block, len(table.block_ids)) for table in match.tables] == [(6, 1), (5, 2)]
        kinds = [task.kind for task in store.log if task.kind in (TaskKind.LOOKUP, TaskKind.PREFETCH)]
        assert kinds == [TaskKind.LOOKUP, TaskKind.PREFETCH, TaskKind.PREFETCH]
        cache.release(request)
        cache.check_invariants()
        told = cache.stats().storage
        assert told is not None and (told.num_fetched_checkpoints, told.num_fetched_blocks) == (1, 7)
        request, match = ask(cache, TEXT, "other")
        assert match.poll().num_tokens == 16
        cache.release(request)


def test_bytes_are_those_that_were_written() -> None:
    """Of the full block, the state and each unit of the window, through the store and back."""
    kept: dict[str, bytes] = {}
    written: list[bytes] = []
    for life in range(2):
        cache = new_cache()
        with stored_in(cache, kept):
            views = cache.ranks.kv_views(0)
            if life == 0:
                for layer, parts in enumerate(views):
                    for number, view in enumerate(parts.values()):
                        for unit in range(len(view)):
                            view[unit] = 1000 * layer + 100 * number + unit + 1
                request = computed(cache, "text")
                match = None
            else:
                request, match = ask(cache, TEXT)
                match = match.poll()
                assert match.num_tokens == 16
            active = cache._requests.active(request)
            assert active.rows is not None
            ids = [list(active.block_ids[:4]), active.rows.tables[0].tolist(), active.rows.tables[1].tolist()]
            if match is None:  # what the checkpoint at 16 tokens has
                checkpoint = active.rows.used[-1]
                assert cache._books.rows is not None
                state, window = cache._books.rows.checkpoints.unit_ids(checkpoint)
                ids = [ids[0], state.tolist(), window.tolist()]
            found = [
                view[unit].tobytes()
                for parts, of in zip(views, ids, strict=True)
                for view in parts.values()
                for unit in of
            ]
            written.append(b"".join(found))
            cache.release(request)
    assert written[0] == written[1]


@pytest.mark.parametrize("what", ["blocks", "image"])
@pytest.mark.parametrize("how", ["gone", "cut short", "one bit turned"])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_not_whole_is_a_miss_for_exactly_that(
    objects: dict[str, bytes], what: str, how: str, place: int
) -> None:
    """The request goes on at the checkpoint in front of it, as does the next. Nothing is left of what came in vain."""
    cache = new_cache()
    with stored_in(cache, objects) as store:
        request, _ = ask(cache, LONG)
        cache.release(request)
        blocks, image = [names_of(task) for task in store.log if task.kind is TaskKind.PREFETCH]
    name = (blocks if what == "blocks" else image)[place]
    key = store.space.key(name)
    whole = objects.pop(key)
    if how != "gone":
        objects[key] = whole[:-1] if how == "cut short" else whole[:-1] + bytes([whole[-1] ^ 1])
    is_in_front = what == "blocks" and place == 0
    for number in range(2):
        cache = new_cache()
        with stored_in(cache, objects):
            request, match = ask(cache, LONG, str(number))
            match = match.poll()
            assert (match.ready, match.num_tokens) == (True, 0 if is_in_front else 16)
            cache.check_invariants()
            cache.release(request)
            cache.check_invariants()
            assert not cache.storage.held.pins
    assert key not in objects


def test_what_has_come_is_held_until_its_checkpoint_has(objects: dict[str, bytes]) -> None:
    """Without a checkpoint behind it, it is dead KV. The image comes last, and the match grows when it is there."""
    cache = new_cache()
    with stored_in(cache, objects) as store:
        store.holds = {TaskKind.PREFETCH}
        request, match = ask(cache, LONG)
        assert (match.num_tokens, match.ready) == (0, False) and match.num_coming_tokens > 0
        blocks = store.step()
        cache.check_invariants()
        assert len(blocks.destination_ids) == 7 and len(store.tasks) == 1, "then its image"
        assert match.poll().num_tokens == 0 and len(cache.storage.held.pins) == 1
        store.go()
        match = match.poll()
        assert (match.ready, match.num_tokens) == (True, 28)
        assert not any(cache.storage.held)
        cache.release(request)


@pytest.mark.parametrize("fails", ["the blocks", "the image"])
@pytest.mark.parametrize("is_matched", [True, False])
def test_a_read_that_fails_leaves_nothing(objects: dict[str, bytes], fails: str, is_matched: bool) -> None:
    """Neither blocks that nobody can use nor a pin; the request computes its prompt."""
    cache = new_cache()
    with stored_in(cache, objects) as store:
        store.holds = {TaskKind.PREFETCH}
        request = Request(request_id="again", prompt_token_ids=LONG)
        cache.prefetch(request)
        match = cache.match(request) if is_matched else None
        if fails == "the image":
            store.step()
        store.go("the disk is gone")
        cache.check_invariants()
        assert not cache.storage.held.pins and cache.stats().cpu.num_cached == 0
        if match is not None:
            match = match.poll()
            assert (match.ready, match.num_tokens) == (True, 0)
            cache.release(request)


@pytest.mark.parametrize("end", ["release", "reset", "detach", "take what is there"])
def test_who_does_not_wait_leaves_nothing_behind(objects: dict[str, bytes], end: str) -> None:
    """Whatever ends a prefetch in its midst, no pin and no dead KV stays."""
    cache = new_cache()
    with stored_in(cache, objects) as store:
        store.holds = {TaskKind.PREFETCH}
        request, _ = ask(cache, LONG)
        store.step()
        if end == "reset":
            cache.reset()
        elif end == "detach":
            cache.storage.detach()
        elif end == "take what is there":
            assert len(cache.rows.allocate(request, 8).block_ids) == 8
        else:
            cache.release(request)
        cache.check_invariants()
        store.go()
        cache.check_invariants()
        if end != "release":
            cache.release(request)
        assert not any(cache.storage.held)


def test_a_match_keeps_what_it_had_where_the_deeper_one_does_not_come(objects: dict[str, bytes]) -> None:
    """TEXT is on the GPU; of LONG the image is lost on its way. The match stays at 16 tokens."""
    cache = new_cache()
    with stored_in(cache, objects) as store:
        cache.release(computed(cache, "text"))
        store.holds = {TaskKind.PREFETCH}
        request, match = ask(cache, LONG)
        assert (match.num_tokens, match.ready) == (16, False)
        store.step()
        store.go("lost")
        match = match.poll()
        assert (match.ready, match.num_tokens, match.num_gpu_tokens) == (True, 16, 16)
        assert [(table.first_block, len(table.block_ids)) for table in match.tables] == [(3, 1), (2, 2)]
        cache.check_invariants()
        cache.release(request)
        request, match = ask(cache, LONG, "once more")
        match = match.poll()
        assert (match.num_tokens, match.num_gpu_tokens, match.num_storage_tokens) == (28, 16, 12)
        cache.release(request)


@pytest.mark.parametrize("other", ["weights", "dtype", "reach", "block_size", "order"])
def test_images_of_another_model_are_not_found(objects: dict[str, bytes], other: str) -> None:
    """Other names, so other objects."""
    layout, weights_id, fields = BOTH, "w", dict[str, Any]()
    if other == "weights":
        weights_id = "v"
    elif other == "block_size":
        fields = {"block_size": 2, "num_gpu_units": (6, 24), "num_cpu_blocks": 120}
    else:
        full, state, window = BOTH.groups
        order = (full, state, window) if other != "order" else (full, window, state)  # in which an image is packed
        changed = {"dtype": {"dtype": "float32"}, "reach": {"reach_tokens": 7}}.get(other, dict[str, Any]())
        layout = KVLayout(
            num_layers=3,
            num_kv_heads=1,
            head_dim=4,
            groups=tuple(dataclasses.replace(each, **changed) if each is window else each for each in order),
        )
    cache = new_cache(layout, **fields)
    with stored_in(cache, objects, weights_id):
        request, match = ask(cache, LONG)
        assert (match.poll().ready, match.poll().num_tokens) == (True, 0)
        cache.release(request)


@pytest.mark.parametrize("layout", [ONLY_STATE, ONLY_WINDOW], ids=["state", "window"])
def test_each_kind_of_row(layout: KVLayout) -> None:
    """A model with states alone, and one with windows alone."""
    objects: dict[str, bytes] = {}
    for life in range(2):
        cache = new_cache(layout)
        with stored_in(cache, objects):
            request, match = ask(cache, TEXT)
            assert match.poll().num_tokens == 16 * life
            if life == 0:
                new = cache.rows.allocate(request, 5)
                if layout is ONLY_STATE:
                    cache.rows.snapshot(request, 16, new.tables[0].block_ids)
                cache.commit(request, 16)
                cache.commit(request, 18)
            cache.release(request)


def test_more_than_may_be_held_is_not_fetched(objects: dict[str, bytes]) -> None:
    """What is read of a prompt stays until its image has come, so all of it has to fit at once."""
    cache = new_cache(max_prefetch_share=0.1)
    with stored_in(cache, objects) as store:
        request, match = ask(cache, LONG)
        assert (match.poll().ready, match.poll().num_tokens) == (True, 0)
        assert not [task for task in store.log if task.kind is TaskKind.PREFETCH]
        cache.release(request)


def test_a_window_of_one_token_reads_nothing_of_earlier_blocks() -> None:
    """Full KV alone is enough, and no image is asked for."""
    window = KVGroup(kind="window", reach_tokens=1, layers=(1,))
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, groups=(FULL, window))
    objects: dict[str, bytes] = {}
    for life in range(2):
        with stored_in(new_cache(layout), objects) as store:
            request, match = ask(store.cache, TEXT)
            assert match.poll().num_tokens == 16 * life
            if life == 0:
                store.cache.rows.allocate(request, 5)
                store.cache.commit(request, 18)
            store.cache.release(request)


def test_blocks_that_cannot_be_held_go_again(
    objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without memory for a pin the prefetch ends, and leaves no dead KV."""
    cache = new_cache()
    with stored_in(cache, objects, may_fail=True) as store:
        store.holds = {TaskKind.PREFETCH}
        request, match = ask(cache, LONG)
        with monkeypatch.context() as patched:
            tree = cache._books.tree
            calls = iter([no_memory, tree.move_pin, tree.move_pin, tree.move_pin])

            def move_pin(*given: Any) -> Any:
                return next(calls)(*given)

            patched.setattr(tree, "move_pin", move_pin)
            store.step()
        cache.check_invariants()
        assert (match.poll().ready, match.poll().num_tokens) == (True, 0)
        cache.release(request)
        caplog.clear()


def test_a_checkpoint_that_gets_no_room_on_the_gpu_is_missed_for_that(objects: dict[str, bytes]) -> None:
    """It has come to the CPU tier, and blocks of its prompt were found: each missed token has one cause."""
    cache = new_cache(num_gpu_units=(6, 24))
    with stored_in(cache, objects) as store:
        other, _ = started(cache, "other", [*LONG[:12], *[9] * 44])  # has 14 of 16 blocks
        cache.commit(other, 12)
        store.holds = {TaskKind.PREFETCH}
        request, match = ask(cache, LONG)
        store.go()
        assert (match.poll().ready, match.poll().num_tokens) == (True, 0)
        cache.rows.allocate(request, 1)
        assert cache.explain("again").missed_tokens()[Cause.ROOM] == 28
        cache.check_invariants()
        cache.release(request)
        cache.release(other)


@pytest.mark.parametrize("has_find", [True, False])
def test_a_look_up_asks_for_the_deepest_boundaries_in_one_go(monkeypatch: pytest.MonkeyPatch, has_find: bool) -> None:
    """At most 256 of them; a store that has no `find` is asked for one after the other, from the deepest on."""
    cache = new_cache(num_gpu_blocks=400, num_gpu_units=(6, 420), num_cpu_blocks=400)
    asked: list[int] = []
    with stored_in(cache, {}) as store:
        prompt, inner = list(range(1202)), store._executor._store
        request = Request(request_id="long", prompt_token_ids=prompt)
        hashes = b"".join(page_names(bytes(32), 300))
        there = {hashes[i : i + 32] for i in range(0, len(hashes), 32)}
        kept = page_names(hashes[32 * 99 : 32 * 100], 1)[0]  # an image behind 100 blocks

        def find(names: list[bytes]) -> list[bool]:
            asked.append(len(names))
            return [name == kept for name in names]

        def count_leading(blocks: Blocks) -> int:
            if len(blocks.hashes) == 1 and not has_find:
                asked.append(1)
                return int(blocks.hashes[0] == kept)
            return [*(each in there for each in blocks.hashes), False].index(False)

        monkeypatch.setattr(inner, "find", find if has_find else None)
        monkeypatch.setattr(inner, "count_leading", count_leading)
        task = cache.storage._tier.reads._new_task(  # type: ignore[union-attr]
            TaskKind.LOOKUP, prefetch_of(cache, request, hashes), 0, 300, None
        )
        num_found = store._executor._do(task).num_blocks
    assert num_found == 100
    assert asked == ([256] if has_find else [1] * 201)


def prefetch_of(cache: PrefixCacheManager, request: Request, hashes: bytes) -> StoragePrefetch:
    """One with these names."""
    prefetch = cache.storage.new_prefetch(request, request.keys(4), range(300), bytes(32), 0)
    prefetch.hashes, prefetch.stops = hashes, bytes([IMAGE_STOP]) * 300
    return prefetch
