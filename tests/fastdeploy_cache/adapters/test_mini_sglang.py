"""mini-sglang's prefix cache: prefixes, locks and whole-node eviction over one manager."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.adapters.mini_sglang.radix_cache import (
    RadixCacheHandle,
    RadixPrefixCache,
    find_first_diff_pos,
    new_manager,
)
from fastdeploy_cache.adapters.slots.pages import pages_of, slots_of
from fastdeploy_cache.errors import BlockOwnerError, CacheError, ConfigError, OutOfBlocksError, RequestError

DOCUMENT = Path(__file__).parents[3] / "docs/adapters/mini_sglang.md"
NewCache = Callable[..., RadixPrefixCache]


@pytest.fixture(name="new_cache")
def fixture_new_cache() -> Iterator[NewCache]:
    """Makes caches; the books of each must add up at the end."""
    managers: list[PrefixCacheManager] = []

    def new_cache(num_pages: int = 16, page_size: int = 1, **settings: Any) -> RadixPrefixCache:
        managers.append(new_manager(num_pages, page_size, **settings))
        return RadixPrefixCache(managers[-1])

    yield new_cache
    for manager in managers:
        manager.check_invariants()
        manager.close()


def insert(cache: RadixPrefixCache, tokens: list[int]) -> RadixCacheHandle:
    """Compute what is not cached of a sequence, and cache it."""
    found = cache.match_prefix(tokens).cuda_handle.get_matched_indices()
    pages = cache.manager.blocks.allocate((len(tokens) - len(found)) // cache.page_size)
    num_tokens = len(found) + len(pages) * cache.page_size
    return cache.insert_prefix(tokens[:num_tokens], [*found, *slots_of(pages, cache.page_size)]).handle


def nodes(cache: RadixPrefixCache) -> set[tuple[int, tuple[int, ...]]]:
    """Every node: pages before it, and its tokens."""
    return {(view.first_block, tuple(view.token_ids.tolist())) for view in cache.manager.blocks.view.runs()}


# -- nodes


def test_a_node_ends_where_an_insert_ended(new_cache: NewCache) -> None:
    """A longer insert makes a child, prompts that part cut a node, and lone children are not joined."""
    cache = new_cache()
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3, 4])
    assert nodes(cache) == {(0, (1, 2)), (2, (3, 4))}
    insert(cache, [1, 2, 3, 4, 5])
    insert(cache, [1, 2, 3, 9])
    assert nodes(cache) == {(0, (1, 2)), (2, (3,)), (3, (4,)), (3, (9,)), (4, (5,))}
    assert cache.evict(1).tolist() == [4] and cache.evict(1).tolist() == [3]  # [5], then [4]: lone ones are left
    assert cache.match_prefix([1, 2, 3, 9]).cuda_handle.cached_len == 4
    assert nodes(cache) == {(0, (1, 2)), (2, (3,)), (3, (9,))}


def test_a_request_of_the_manager_keeps_borders_too(new_cache: NewCache) -> None:
    """What native verbs commit is found by the adapter, in nodes of its own; and the other way round."""
    cache = new_cache()
    insert(cache, [1, 2])
    request = Request(request_id="native", prompt_token_ids=[1, 2, 3, 4])
    assert cache.manager.match(request).num_tokens == 2
    cache.manager.allocate(request, 2)
    for num_tokens in (3, 4):
        cache.manager.commit(request, num_tokens)
    cache.manager.release(request)
    assert nodes(cache) == {(0, (1, 2)), (2, (3,)), (3, (4,))}
    assert cache.match_prefix([1, 2, 3, 4]).cuda_handle.cached_len == 4


def test_a_match_uses_nodes_and_cuts_the_last(new_cache: NewCache) -> None:
    """What is behind the end of a match keeps its age, so that it goes before what was used since."""
    cache = new_cache()
    insert(cache, [1, 2, 3, 4])
    insert(cache, [5, 6])
    assert cache.match_prefix([1, 2, 7]).cuda_handle.cached_len == 2
    assert nodes(cache) == {(0, (1, 2)), (2, (3, 4)), (0, (5, 6))}
    assert [cache.evict(1).tolist() for _ in range(3)] == [[2, 3], [4, 5], [0, 1]]


def test_a_match_of_everything_there_is(new_cache: NewCache) -> None:
    """A prefix that fills the whole pool is found and used, though no token more would fit."""
    cache = new_cache(4)
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3, 4])
    assert cache.match_prefix([1, 2, 3, 4, 5]).cuda_handle.get_matched_indices().tolist() == [0, 1, 2, 3]
    assert cache.evict(1).tolist() == [2, 3]


def test_matching_is_no_request_in_the_statistics(new_cache: NewCache) -> None:
    """Hit rates and use counts are not changed by looking; nothing stays registered."""
    cache = new_cache()
    insert(cache, [1, 2, 3])
    before = cache.manager.stats()
    cache.match_prefix([1, 2])
    assert cache.manager.stats() == before
    assert all(view.num_uses == 1 for view in cache.manager.blocks.view.runs())


# -- insert


def test_insert_takes_whole_pages(new_cache: NewCache) -> None:
    """Tokens behind the last whole page are not cached; the page they lie in stays the caller's."""
    cache = new_cache(8, 4)
    slots = slots_of(cache.manager.blocks.allocate(3), 4)
    cached_len, handle = cache.insert_prefix(list(range(10)), slots[:10])
    assert (cached_len, handle.cached_len) == (0, 8)
    assert handle.get_matched_indices().tolist() == list(range(8))
    assert cache.size_info == (8, 0)
    assert cache.match_prefix(list(range(7))).cuda_handle.cached_len == 4
    cache.manager.blocks.free([2])


def test_insert_says_what_was_cached(new_cache: NewCache) -> None:
    """Duplicates stay the caller's, over exactly the tokens between its match and `cached_len`."""
    cache = new_cache()
    first = insert(cache, [1, 2, 3])
    assert cache.manager.blocks.allocate(4) == [3, 4, 5, 6]
    cached_len, handle = cache.insert_prefix([1, 2, 3, 4], [0, 3, 4, 5])  # matched 1 token, then computed 3
    assert (cached_len, handle.cached_len) == (3, 4)
    assert handle.get_matched_indices().tolist() == [*first.get_matched_indices(), 5]
    cache.manager.blocks.free([3, 4, 6])  # they were not taken from us
    with pytest.raises(BlockOwnerError):
        cache.manager.blocks.free([5])


def test_insert_beside_another_user_of_the_manager(new_cache: NewCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread caches between looking and inserting is a duplicate as well."""
    cache, request = new_cache(), Request(request_id="other", prompt_token_ids=[1, 2])
    assert cache.manager.blocks.allocate(5) == [0, 1, 2, 3, 4]
    look = cache.manager.blocks.lookup

    def look_then_be_late(*arguments: Any, **named: Any) -> Any:
        found = look(*arguments, **named)
        cache.manager.blocks.insert(request, [3, 4])
        return found

    monkeypatch.setattr(cache.manager.blocks, "lookup", look_then_be_late)
    cached_len, handle = cache.insert_prefix([1, 2, 3], [0, 1, 2])
    assert (cached_len, handle.get_matched_indices().tolist()) == (2, [3, 4, 2])
    cache.manager.blocks.free([0, 1])


def test_over_a_cpu_tier(new_cache: NewCache) -> None:
    """What was evicted is kept below, where the manager finds it; the adapter does not, and computes it again."""
    cache = new_cache(8, 1, num_cpu_blocks=8, cpu_write_policy="write_through")
    insert(cache, [1, 2, 3])
    assert cache.manager.wait_for_transfers(5)
    cache.manager.blocks.free(cache.evict(2).tolist())
    assert cache.match_prefix([1, 2, 3]).cuda_handle.cached_len == 0
    request = Request(request_id="native", prompt_token_ids=[1, 2, 3])
    assert cache.manager.blocks.lookup(request).num_cpu_blocks == 3
    handle = insert(cache, [1, 2, 3, 4])
    assert handle.cached_len == 4 and cache.match_prefix([1, 2, 3]).cuda_handle.page_ids == handle.page_ids[:3]


def test_a_refused_insert_changes_nothing(new_cache: NewCache) -> None:
    """Slots that are no pages, too few, or not the caller's: the tree is as before."""
    cache = new_cache(8, 2)
    assert cache.manager.blocks.allocate(3) == [0, 1, 2]
    refused: list[Any] = [[1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2], [[0, 1, 2, 3]], [0.0, 1.0, 2.0, 3.0], [-2, -1, 0, 1]]
    for slots in refused:
        with pytest.raises((RequestError, BlockOwnerError)):
            cache.insert_prefix([1, 2, 3, 4], slots)
    with pytest.raises(BlockOwnerError):
        cache.insert_prefix([1, 2, 3, 4], [0, 1, 6, 7])
    assert nodes(cache) == set() and cache.manager.stats().gpu.num_callers == 3
    cache.manager.blocks.free([0, 1, 2])


class Tensor:
    """As far as it matters, a CPU tensor: a length, and an array of its numbers."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array(self.values, dtype)


@pytest.mark.parametrize("kind", [list, np.int32, np.int64, np.uint16, Tensor])
def test_tokens_and_slots_of_many_types(new_cache: NewCache, kind: Any) -> None:
    """Lists, integer arrays and tensors are the same tokens and slots; what comes back is int32."""

    def given(values: list[int]) -> Any:
        return kind(values) if kind in (list, Tensor) else np.array(values, kind)

    cache = new_cache()
    slots = cache.manager.blocks.allocate(3)
    cache.insert_prefix(given([7, 8, 9]), given(slots))
    found = cache.match_prefix(given([7, 8, 5])).cuda_handle.get_matched_indices()
    assert found.dtype == np.int32 and found.tolist() == [0, 1]
    assert cache.match_prefix(given([])).cuda_handle.cached_len == 0


def test_nothing_keeps_the_callers_arrays(new_cache: NewCache) -> None:
    """Tokens and slots are copied: a caller's large array may change or go, and so may what was handed out."""
    cache = new_cache()
    cache.manager.blocks.allocate(4)
    tokens, slots = np.arange(1000, dtype=np.int32), np.arange(1000, dtype=np.int32)
    handle = cache.insert_prefix(tokens[:4], slots[:4]).handle
    tokens[:] = slots[:] = 77
    found = cache.match_prefix([0, 1, 2, 3]).cuda_handle.get_matched_indices()
    assert found.tolist() == handle.get_matched_indices().tolist() == [0, 1, 2, 3]
    assert found.base is None and found.nbytes == 16
    found[:] = 5
    assert cache.match_prefix([0, 1, 2, 3]).cuda_handle.get_matched_indices().tolist() == [0, 1, 2, 3]


# -- locks


def test_a_lock_protects_all_of_the_handle(new_cache: NewCache) -> None:
    """The node that a handle ends in is protected, too, and what is behind it is not."""
    cache = new_cache()
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3, 4, 5])
    handle = cache.match_prefix([1, 2, 3]).cuda_handle
    cache.lock_handle(handle)
    assert cache.size_info == (2, 3)
    assert cache.evict(2).tolist() == [3, 4]
    assert cache.match_prefix([1, 2, 3, 4]).cuda_handle.get_matched_indices().tolist() == [0, 1, 2]
    cache.lock_handle(handle)
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info == (0, 3)
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info == (3, 0) and cache.size_info.total_size == 3


def test_locks_are_counted(new_cache: NewCache) -> None:
    """An unlock without a lock is an error; the root's handle may be locked and unlocked, and protects nothing."""
    cache = new_cache()
    handle, nothing = insert(cache, [1]), cache.match_prefix([5]).cuda_handle
    with pytest.raises(RequestError, match="not locked"):
        cache.lock_handle(handle, unlock=True)
    cache.lock_handle(nothing)
    assert cache.size_info == (1, 0) and nothing.get_matched_indices().tolist() == []
    for _ in range(2):
        cache.lock_handle(nothing, unlock=True)


def test_a_handle_is_safe_only_when_locked(new_cache: NewCache) -> None:
    """A lock is refused when the slots have gone, also if the tokens are cached elsewhere by now."""
    cache = new_cache()
    handle = insert(cache, [1, 2])
    gone = cache.evict(2)
    assert not cache.is_cached(handle)
    with pytest.raises(RequestError, match="match again"):
        cache.lock_handle(handle)
    insert(cache, [1, 2])
    with pytest.raises(RequestError, match="match again"):
        cache.lock_handle(handle)
    assert cache.size_info == (2, 0)
    cache.manager.blocks.free(gone.tolist())


# -- evict


def test_evict_of_nothing_and_of_too_much(new_cache: NewCache) -> None:
    """0 is empty; more than there is raises and evicts nothing."""
    cache = new_cache()
    insert(cache, [1, 2])
    assert cache.evict(0).tolist() == [] and cache.evict(0).dtype == np.int32
    with pytest.raises(OutOfBlocksError, match="1 block is missing"):
        cache.evict(3)
    with pytest.raises(RequestError):
        cache.evict(-1)
    assert cache.size_info == (2, 0)


def test_evict_frees_whole_nodes_oldest_first(new_cache: NewCache) -> None:
    """It may free more than asked; a parent goes after its children, and not because it is older."""
    cache = new_cache(32, 2)
    insert(cache, [1, 1, 2, 2])
    insert(cache, [1, 1, 2, 2, 3, 3])
    insert(cache, [4, 4, 5, 5])
    cache.match_prefix([1, 1, 2, 2, 3, 3])
    insert(cache, [6, 6])
    assert cache.evict(1).tolist() == [6, 7, 8, 9]  # [4, 4, 5, 5]: a page was wanted, the node has two
    assert cache.evict(3).tolist() == [4, 5, 0, 1, 2, 3]  # [3, 3], then what was above it
    assert cache.size_info == (2, 0)


def test_two_caches_know_nothing_of_each_other(new_cache: NewCache) -> None:
    """Walks depend on nothing but their own cache: page sizes, contents and times differ."""
    one, two = new_cache(8, 1), new_cache(8, 4)
    insert(one, [1, 2, 3, 4, 5])
    insert(two, [1, 2, 3, 4, 5])
    assert [cache.match_prefix([1, 2, 3, 4, 5]).cuda_handle.cached_len for cache in (one, two)] == [5, 4]
    assert one.evict(1).tolist() == [0, 1, 2, 3, 4] and two.size_info == (4, 0)


# -- reset, settings, small things


def test_reset_forgets_all_but_what_is_locked(new_cache: NewCache) -> None:
    """Nothing is found; locked slots are nobody else's until they are unlocked."""
    cache = new_cache(4)
    handle = insert(cache, [1, 2])
    cache.lock_handle(handle)
    insert(cache, [3])
    cache.reset()
    assert nodes(cache) == set() and cache.size_info == (0, 2) and not cache.is_cached(handle)
    assert cache.manager.blocks.view.free_block_ids() == [2, 3]
    with pytest.raises(RequestError, match="match again"):
        cache.lock_handle(handle)
    cache.lock_handle(handle, unlock=True)
    assert cache.manager.blocks.view.free_block_ids() == [0, 1, 2, 3]
    cache.check_integrity()


def test_settings_of_the_manager() -> None:
    """Settings are passed on; another policy is refused, since nodes would not be kept."""
    with new_manager(4, 2, cache_outputs=False) as manager:
        assert (manager.config.block_size, manager.config.pool_sizes()) == (2, (4, 0))
        assert not manager.config.cache_outputs
    with pytest.raises(ConfigError, match="eviction_policy"):
        new_manager(4, eviction_policy="lfu")
    with pytest.raises(CacheError):
        new_manager(0)


def test_over_a_manager_that_exists() -> None:
    """Its own policy keeps the borders of nodes: `lru` extends a leaf in place, which then goes as one."""
    config = CacheConfig(block_size=1, num_gpu_blocks=8, transfer_client="inline")
    with PrefixCacheManager(config) as manager:
        cache = RadixPrefixCache(manager)
        insert(cache, [1, 2])
        insert(cache, [1, 2, 3, 4])
        assert nodes(cache) == {(0, (1, 2, 3, 4))}
        assert cache.evict(1).tolist() == [0, 1, 2, 3]


def test_pages_and_slots_are_each_others_reverse() -> None:
    """Slots of pages give these pages; a part of the last page stands for it."""
    slots = slots_of([3, 0, 2], 4)
    assert slots.tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 8, 9, 10, 11]
    assert pages_of(slots, 4) == pages_of(slots[:9], 4) == [3, 0, 2] and pages_of(slots[:8], 4) == [3, 0]
    with pytest.raises(RequestError, match="no pages"):
        pages_of(slots[1:], 4)


@pytest.mark.parametrize(("a", "b", "position"), [([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)])
def test_the_first_difference(a: list[int], b: list[int], position: int) -> None:
    """Where two sequences part; for equal ones their length."""
    assert find_first_diff_pos(a, b) == find_first_diff_pos(b, a) == position
    assert find_first_diff_pos(b, b) == len(b)


@pytest.mark.processes
def test_the_documented_sample_prints_what_it_says() -> None:
    """The sample of docs/adapters/mini_sglang.md runs as it stands."""
    (sample,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", sample], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == re.findall(r"^# (.*)", sample, re.MULTILINE)
