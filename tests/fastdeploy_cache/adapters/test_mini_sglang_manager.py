"""mini-sglang's cache manager: pages for requests, what is freed when, the notebook's example."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.adapters.mini_sglang.manager import (
    CacheManager,
    create_page_table,
    get_mha_cache_per_page,
    get_num_pages_for_kv_cache,
    print_radix_tree,
)
from fastdeploy_cache.adapters.mini_sglang.radix_cache import RadixCacheHandle, RadixPrefixCache, new_manager
from fastdeploy_cache.errors import BlockOwnerError, ConfigError, OutOfBlocksError, RequestError

NOTHING = RadixCacheHandle(0, [], None)


@dataclass(eq=False)
class Request:
    """A request of an engine."""

    table_idx: int
    input_ids: list[int]
    device_len: int = 0
    cached_len: int = 0
    cache_handle: RadixCacheHandle = field(default=NOTHING)


def new_caches(num_pages: int, page_size: int = 1, **settings: Any) -> CacheManager:
    cache = RadixPrefixCache(new_manager(num_pages, page_size, **settings))
    return CacheManager(cache, create_page_table(4, 32))


@pytest.fixture(name="caches")
def fixture_caches(request: pytest.FixtureRequest) -> Iterator[CacheManager]:
    """Of 16 pages of a token, or as `request.param` says."""
    caches = new_caches(*getattr(request, "param", (16, 1)))
    yield caches
    caches.prefix_cache.manager.check_invariants()
    caches.prefix_cache.manager.close()


def admit(caches: CacheManager, request: Request) -> None:
    """What a scheduler does with a waiting request."""
    handle = caches.match_req(request).cuda_handle
    caches.lock(handle)
    request.cache_handle, request.cached_len = handle, handle.cached_len
    request.device_len = len(request.input_ids)
    caches.page_table[request.table_idx, : handle.cached_len] = handle.get_matched_indices()
    try:
        caches.allocate_paged([request])
    except OutOfBlocksError:
        caches.unlock(handle)
        raise


def step(caches: CacheManager, request: Request, token: int) -> None:
    """Compute what it has, sample a token, and take a page for that."""
    request.cached_len = request.device_len
    request.input_ids.append(token)
    request.device_len += 1
    caches.allocate_paged([request])


def finish(caches: CacheManager, request: Request) -> None:
    request.cached_len = request.device_len
    caches.cache_req(request, finished=True)


def serve(caches: CacheManager, tokens: list[int]) -> None:
    request = Request(3, tokens)
    admit(caches, request)
    finish(caches, request)


def row(caches: CacheManager, request: Request) -> list[int]:
    return [int(slot) for slot in caches.page_table[request.table_idx, : request.cached_len]]


# -- the notebook


def test_the_notebooks_sizes() -> None:
    """Bytes of a page and how many fit."""
    page_bytes = get_mha_cache_per_page(256, 8, 1)
    assert page_bytes == 8192.0 and isinstance(page_bytes, float)
    assert get_mha_cache_per_page(256, 8, 4, 16, 2, 1) == 8192 * 4 * 16 / 2 / 2
    assert get_num_pages_for_kv_cache(4 * 2**30, page_bytes) == 524288
    assert get_num_pages_for_kv_cache(2000 * 1024, page_bytes) == 250
    assert get_num_pages_for_kv_cache(2000 * 1024 + 8191, page_bytes) == 250
    table = create_page_table(2, 8)
    assert table.dtype == np.int32 and table.shape == (2, 8) and not table.any()


@pytest.mark.parametrize("caches", [(250, 1)], indirect=True)
def test_the_notebooks_example(caches: CacheManager) -> None:
    """Two requests of 6 tokens that share 4: what is available, the tree, and what evicting 3 frees, one by one."""
    assert caches.available_size == 250
    first = [1, 3, 6, 7, 9, 77]
    slots = caches.allocate(6)
    assert caches.available_size == 244
    caches.lock(NOTHING)
    caches.free_and_cache_finished_req(NOTHING, first, slots)
    assert caches.available_size == 250 and caches.prefix_cache.size_info == (6, 0)

    second = Request(0, [1, 3, 6, 7, 87, 66])
    handle = caches.match_req(second).cuda_handle
    assert handle.cached_len == 4 and handle.get_matched_indices().tolist() == [0, 1, 2, 3]
    caches.lock(handle)
    assert caches.prefix_cache.size_info == (2, 4) and caches.available_size == 246
    own = caches.allocate(2)
    assert caches.available_size == 244
    caches.free_and_cache_finished_req(handle, second.input_ids, [*handle.get_matched_indices(), *own])
    assert caches.available_size == 250 and caches.prefix_cache.size_info == (8, 0)
    assert print_radix_tree(caches.prefix_cache, show_ref_count=False) == (
        "[R] root\n  [1, 3, 6, 7] slots [0, 1, 2, 3]\n    [L] [9, 77] slots [4, 5]\n    [L] [87, 66] slots [6, 7]"
    )
    assert caches.prefix_cache.evict(3).tolist() == [4, 5, 6, 7]
    caches.free([4, 5, 6, 7])
    caches.check_integrity()


@pytest.mark.parametrize("caches", [(250, 1)], indirect=True)
def test_the_notebooks_order_of_freed_slots(caches: CacheManager) -> None:
    """Slots 4, 7, 5, 6: the oldest leaf first, in each from root to tail, although their requests ran side by side."""
    serve(caches, [1, 3, 6, 7])
    one, other = Request(0, [1, 3, 6, 7, 9]), Request(1, [1, 3, 6, 7, 87, 66])
    admit(caches, one)
    admit(caches, other)
    step(caches, one, 77)
    finish(caches, one)
    finish(caches, other)
    assert caches.available_size == 250
    text = print_radix_tree(caches.prefix_cache, show_ref_count=False)
    assert text.splitlines()[1:] == [
        "  [1, 3, 6, 7] slots [0, 1, 2, 3]",
        "    [L] [9, 77] slots [4, 7]",
        "    [L] [87, 66] slots [5, 6]",
    ]
    assert caches.prefix_cache.evict(3).tolist() == [4, 7, 5, 6]


def test_the_tree_as_text(caches: CacheManager, capsys: pytest.CaptureFixture[str]) -> None:
    """Locks count for the nodes above, too; long lists are clipped, and deep trees are cut."""
    serve(caches, [100, 200])
    serve(caches, [100, 200, 300])
    serve(caches, [100, 200, 300, *range(100, 110)])
    handle = caches.prefix_cache.match_prefix([100, 200, 300]).cuda_handle
    caches.lock(handle)
    text = print_radix_tree(caches.prefix_cache, 2, show_timestamp=True)
    assert capsys.readouterr().out == text + "\n"
    assert text.splitlines() == [
        "[R] root",
        "  [100, 200] slots [0, 1] ref 1 time 6",
        "    [300] slots [2] ref 1 time 6",
        "      ...",
    ]
    last = print_radix_tree(caches.prefix_cache).splitlines()[-1]
    assert last == "      [L] [100, 101, 102, 103, 104, 1... slots [3, 4, 5, 6, 7, 8, 9, 10, 1... ref 0"
    caches.reset()
    assert print_radix_tree(caches.prefix_cache) == "[R] root"


# -- pages


@pytest.mark.parametrize("caches", [(8, 4)], indirect=True)
def test_pages_are_written_for_a_batch(caches: CacheManager) -> None:
    """Each request gets whole pages behind those that it has; what fits the last one needs none."""
    one, two = Request(0, [1] * 5, device_len=5), Request(2, [2] * 3, device_len=3)
    caches.allocate_paged([one, two])
    assert caches.page_table[0, :8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert caches.page_table[2, :4].tolist() == [8, 9, 10, 11] and caches.available_size == 20
    one.cached_len, one.device_len = 5, 8
    two.cached_len, two.device_len = 3, 5
    caches.allocate_paged([one, two])
    assert caches.page_table[0, 8:].tolist() == [0] * 24 and caches.page_table[2, 4:8].tolist() == [12, 13, 14, 15]
    caches.check_integrity(num_held_pages=4)


def test_match_leaves_a_token_to_compute(caches: CacheManager) -> None:
    """A prompt that is cached whole is matched up to its last token; one without tokens is refused."""
    serve(caches, [1, 2, 3])
    assert caches.match_req(Request(0, [1, 2, 3])).cuda_handle.cached_len == 2
    assert caches.match_req(Request(0, [1])).cuda_handle.cached_len == 0
    with pytest.raises(RequestError, match="without tokens"):
        caches.match_req(Request(0, []))


def test_a_refused_request_leaves_nothing_behind(caches: CacheManager) -> None:
    """No room for a batch: no page, no lock, no entry of the table, and nothing was evicted."""
    serve(caches, [1, 2, 3, 4])
    running = Request(0, [1, 2, 9, 9, 9])
    admit(caches, running)
    before = print_radix_tree(caches.prefix_cache), caches.prefix_cache.size_info, caches.available_size
    table = caches.page_table.copy()
    table[2, :2] = [0, 1]  # a match is written before there is room, and means nothing until there is
    with pytest.raises(OutOfBlocksError, match="3 blocks are missing"):
        admit(caches, Request(2, [1, 2, *range(50, 64)]))
    with pytest.raises(OutOfBlocksError):
        caches.allocate_paged([Request(1, [8] * 5, device_len=5), Request(3, [8] * 9, device_len=9)])
    for wrong in (Request(4, [1], device_len=1), Request(0, [1], device_len=33), Request(0, [1], 1, 2)):
        with pytest.raises(RequestError, match="page table"):
            caches.allocate_paged([Request(1, [8], device_len=1), wrong])
    assert (print_radix_tree(caches.prefix_cache), caches.prefix_cache.size_info, caches.available_size) == before
    assert np.array_equal(caches.page_table, table)
    caches.check_integrity(num_held_pages=3)


def test_allocation_evicts_just_what_is_missing(caches: CacheManager) -> None:
    """Ends of the oldest nodes go, not whole ones, and nothing that is locked."""
    serve(caches, list(range(8)))
    serve(caches, list(range(20, 26)))
    caches.lock(caches.prefix_cache.match_prefix([0, 1]).cuda_handle)
    assert caches.allocate(4).tolist() == [6, 7, 14, 15]
    assert caches.prefix_cache.size_info == (10, 2)
    with pytest.raises(OutOfBlocksError):
        caches.allocate(11)


def test_the_table_is_written_in_place() -> None:
    """The engine's own table is used, and one that cannot be is refused."""
    with new_manager(4) as manager:
        table = create_page_table(2, 4)
        CacheManager(RadixPrefixCache(manager), table).allocate_paged([Request(1, [1, 2], device_len=2)])
        assert table.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
        for wrong in (np.zeros((2, 4), np.int64), np.zeros(4, np.int32)):
            with pytest.raises(ConfigError, match="create_page_table"):
                CacheManager(RadixPrefixCache(manager), wrong)


# -- requests


def test_duplicates_are_replaced_before_they_are_freed(caches: CacheManager) -> None:
    """Two requests compute the same prompt: the later one's table names no page that was freed."""
    one, two = Request(0, [1, 2, 3, 4]), Request(1, [1, 2, 3, 4])
    admit(caches, one)
    admit(caches, two)
    one.cached_len = two.cached_len = 4
    caches.cache_req(one, finished=False)
    caches.cache_req(two, finished=False)
    assert row(caches, one) == row(caches, two) == [0, 1, 2, 3]
    assert caches.prefix_cache.size_info == (0, 4) and caches.available_size == 12
    assert caches.allocate(4).tolist() == [4, 5, 6, 7]  # what `two` had: nobody reads it
    finish(caches, one)
    assert caches.prefix_cache.size_info == (0, 4)  # `two` still holds it
    finish(caches, two)
    assert caches.prefix_cache.size_info == (4, 0)
    caches.check_integrity(num_held_pages=4)


@pytest.mark.parametrize("caches", [(8, 4)], indirect=True)
def test_a_part_of_a_page_is_freed_when_finished(caches: CacheManager) -> None:
    """A chunk's last page stays the request's while it runs; its end is given back with it."""
    request = Request(0, list(range(10)))
    admit(caches, request)
    request.cached_len, request.device_len = 6, 6
    caches.cache_req(request, finished=False)
    assert request.cache_handle.cached_len == 4 and caches.prefix_cache.size_info == (0, 4)
    caches.check_integrity(num_held_pages=2)
    request.device_len = 10
    finish(caches, request)
    assert caches.prefix_cache.size_info == (8, 0)
    caches.check_integrity()


@pytest.mark.parametrize("was_cached", [False, True])
def test_a_request_outlives_a_reset(caches: CacheManager, was_cached: bool) -> None:
    """What it holds stays as it is, is not cached any more, and goes home at its end."""
    serve(caches, [1, 2])
    request = Request(0, [1, 2, 3, 4])
    admit(caches, request)
    request.cached_len = 4
    if was_cached:
        caches.cache_req(request, finished=False)
    caches.reset()
    serve(caches, [1, 2])  # cached again, elsewhere
    caches.cache_req(request, finished=False)
    assert row(caches, request) == [0, 1, 2, 3]
    assert caches.prefix_cache.match_prefix([1, 2, 3]).cuda_handle.get_matched_indices().tolist() == [4, 5]
    finish(caches, request)
    assert caches.prefix_cache.size_info == (2, 0) and caches.available_size == 16
    caches.check_integrity()


def test_without_prefix_caching_all_is_freed() -> None:
    """The verbs of the original's naive cache: nothing is found, and every page goes home."""
    caches = new_caches(8, 2, enable_prefix_caching=False)
    for _ in range(2):
        request = Request(0, [1, 2, 3, 4, 5])
        admit(caches, request)
        request.cached_len = 5
        caches.cache_req(request, finished=False)
        assert request.cache_handle.cached_len == 0 and row(caches, request) == [0, 1, 2, 3, 4]
        finish(caches, request)
        caches.check_integrity()
        assert caches.prefix_cache.size_info == (0, 0) and caches.available_size == 16
    caches.prefix_cache.manager.close()


@pytest.mark.parametrize("fails", [False, True])
def test_frees_are_done_together(caches: CacheManager, fails: bool) -> None:
    """In a lazy region nothing is given back before its end, whatever comes; an inner region changes nothing."""
    slots = caches.allocate(6)
    with pytest.raises(KeyError) if fails else nullcontext(), caches.lazy_free_region():
        caches.free(slots[:2])
        with caches.lazy_free_region():
            caches.free(slots[2:4])
        assert caches.available_size == 10
        if fails:
            raise KeyError
    assert caches.available_size == 14
    caches.free(slots[4:])
    assert caches.available_size == 16
    with pytest.raises(BlockOwnerError), caches.lazy_free_region():
        caches.free(slots[:1])


def test_integrity_finds_a_lost_page(caches: CacheManager) -> None:
    """A page that was neither cached nor given back is missed."""
    serve(caches, [1, 2, 3])
    caches.check_integrity()
    caches.allocate(2)
    with pytest.raises(AssertionError, match="not given back"):
        caches.check_integrity()
    with pytest.raises(AssertionError, match="not given back"):
        caches.check_integrity(num_held_pages=3)
    caches.check_integrity(num_held_pages=2)


def test_a_page_is_freed_once(caches: CacheManager) -> None:
    """Cached pages and free ones are refused, and nothing is changed; a request is finished once."""
    request = Request(0, [1, 2, 3])
    admit(caches, request)
    finish(caches, request)
    for slots in ([0], [7]):
        with pytest.raises(BlockOwnerError):
            caches.free(slots)
    with pytest.raises(BlockOwnerError):
        finish(caches, request)
    assert caches.prefix_cache.size_info == (3, 0) and caches.available_size == 16
