"""SGLang's hierarchical radix cache over ours: what its checklist asks for, at page sizes 1 and up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_cache import KVLayout, StorageConfig
from fastdeploy_cache.adapters.sglang.radix_cache import HiRadixCache, RadixKey, ReqToTokenPool, new_config, new_manager
from fastdeploy_cache.errors import BlockOwnerError, ConfigError, RequestError
from tests.rigs.sglang_engine import Req, Scheduler


@pytest.fixture
def one() -> Iterator[Scheduler]:
    scheduler = Scheduler()
    yield scheduler
    scheduler.close()


def put(scheduler: Scheduler, tokens: list[int], extra_key: str | None = None) -> np.ndarray:
    """Insert tokens with slots of their own; returns the slots that the cache did not take."""
    slots = scheduler.allocator.alloc(len(tokens))
    assert slots is not None
    num_known = scheduler.cache.insert(RadixKey(tokens, extra_key), slots[: len(tokens)])
    return slots[:num_known]


def test_match_gives_slots_and_nodes(one: Scheduler) -> None:
    """Slots of the longest prefix; a key without a page, an empty one and a stranger are clean misses."""
    put(one, [1, 2, 3, 4])
    match = one.cache.match_prefix([1, 2, 3, 9])
    assert match.device_indices.tolist() == [0, 1, 2] and match.device_indices.dtype == np.int32
    assert match.last_device_node == match.last_host_node and match.host_hit_length == 0
    for key in ([], [7]):
        match = one.cache.match_prefix(key)
        assert len(match.device_indices) == 0 and match.last_device_node.is_root
    paged = Scheduler(64, 16)
    assert paged.cache.match_prefix([1, 2, 3]).last_host_node == paged.cache.root_node, "fewer tokens than a page"
    paged.close()


def test_insert_counts_what_was_there_and_keeps_its_own_slots(one: Scheduler) -> None:
    """The returned prefix is the caller's to free; the cache's slots stay; foreign and torn slots are refused."""
    put(one, [1, 2, 3])
    duplicates = put(one, [1, 2, 3, 4, 5])
    assert duplicates.tolist() == [3, 4, 5]
    one.allocator.free(duplicates)
    assert one.cache.match_prefix([1, 2, 3, 4, 5]).device_indices.tolist() == [0, 1, 2, 6, 7]
    with pytest.raises(BlockOwnerError):
        one.cache.insert([8, 9], np.array([0, 1], np.int32))
    with pytest.raises(RequestError, match="1 slots for 2 tokens"):
        one.cache.insert([8, 9], np.array([9], np.int32))
    assert one.cache.total_size() == 5


def test_matching_splits_so_that_the_suffix_ages_alone(one: Scheduler) -> None:
    """A match inside a node makes the front younger: evicting takes the suffix, and no more."""
    put(one, [1, 2, 3, 4])
    one.cache.match_prefix([1, 2])
    assert one.cache.evict(1) == 2
    assert one.cache.match_prefix([1, 2, 3, 4]).device_indices.tolist() == [0, 1]


def test_eviction_takes_whole_nodes_oldest_first_and_no_locked_one(one: Scheduler) -> None:
    """One slot asked: the whole oldest leaf goes; then its parent; a locked path stays."""
    put(one, [1, 2, 3, 4, 5, 6])
    one.allocator.free(put(one, [1, 2, 3, 9, 9, 9]))
    other = one.cache.match_prefix([1, 2, 3, 9, 9, 9])
    assert one.cache.inc_lock_ref(other.last_device_node) == -6
    assert (one.cache.evictable_size(), one.cache.protected_size()) == (3, 6)
    assert one.cache.evict(1) == 3 and one.cache.evict(100) == 0
    assert one.cache.dec_lock_ref(other.last_device_node) == 6
    assert one.cache.evict(4) == 6 and one.cache.total_size() == 0


def test_locks_are_counted_and_refuse_nonsense(one: Scheduler) -> None:
    """A node locked twice needs two unlocks; one that is gone cannot be locked; the root is always held."""
    put(one, [1, 2, 3])
    node = one.cache.match_prefix([1, 2, 3]).last_device_node
    assert [one.cache.inc_lock_ref(node), one.cache.inc_lock_ref(node), one.cache.lock_ref(node)] == [-3, 0, 2]
    assert [one.cache.dec_lock_ref(node), one.cache.dec_lock_ref(node)] == [0, 3]
    with pytest.raises(RequestError, match="not locked"):
        one.cache.dec_lock_ref(node)
    one.cache.evict(3)
    with pytest.raises(RequestError, match="cached up to 0 only"):
        one.cache.inc_lock_ref(node)
    assert one.cache.inc_lock_ref(one.cache.root_node) == one.cache.dec_lock_ref(one.cache.root_node) == 0


def test_namespaces_never_meet(one: Scheduler) -> None:
    """The same tokens under another extra key, none, or an empty one, are other prefixes."""
    for key in (None, "", "lora"):
        put(one, [1, 2, 3], key)
    found = [one.cache.match_prefix(RadixKey([1, 2, 3], k)).device_indices.tolist() for k in (None, "", "lora", "x")]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_come_and_go(page_size: int) -> None:
    """Prefill in chunks, answers, a second turn that finds the first: all slots come home."""
    scheduler = Scheduler(256, page_size)
    turn = list(range(50))
    assert scheduler.serve(turn, [90, 91, 92], chunk=7) == 0
    found = scheduler.serve([*turn, 90, 91, 92, 93], [94], chunk=7)
    assert found == 52 // page_size * page_size, "the last sampled token was not computed"
    assert scheduler.serve(turn, [90], extra_key="lora") == 0
    scheduler.close()


def test_two_requests_compute_the_same_and_one_keeps_its_slots() -> None:
    """The later one's row points to the cache's slots before its own are freed."""
    scheduler = Scheduler(64, 1)
    reqs = [Req(name, [1, 2, 3, 4, 5]) for name in "ab"]
    for req in reqs:
        assert scheduler.admit(req)
        scheduler.compute(req, 5)
    for req in reqs:
        scheduler.cache.cache_unfinished_req(req)
    assert scheduler.row(reqs[0]).tolist() == scheduler.row(reqs[1]).tolist() == [0, 1, 2, 3, 4]
    assert scheduler.allocator.available_size() == 59
    for req in reqs:
        assert scheduler.decode(req, 6) and scheduler.decode(req, 7)
        scheduler.cache.cache_finished_req(req)
    assert scheduler.cache.total_size() == 6
    scheduler.close()


def test_a_request_given_up_frees_all_it_had() -> None:
    """is_insert False: neither its slots nor its tokens stay."""
    scheduler = Scheduler(64, 4)
    req = Req("a", list(range(10)))
    assert scheduler.admit(req)
    scheduler.compute(req, 10)
    scheduler.cache.cache_finished_req(req, is_insert=False)
    assert scheduler.cache.total_size() == 0 and scheduler.allocator.available_size() == 64
    scheduler.close()


def test_a_refused_request_leaves_nothing_behind() -> None:
    """No slots: no lock, no row, nothing evicted that could not help."""
    scheduler = Scheduler(16, 1)
    holder = Req("a", list(range(10)))
    assert scheduler.admit(holder)
    before = scheduler.manager.stats()
    assert not scheduler.admit(Req("b", list(range(20, 30))))
    assert scheduler.manager.stats() == before and scheduler.pool.available_size() == 7
    scheduler.compute(holder, 10)
    scheduler.cache.cache_finished_req(holder)
    scheduler.close()


@pytest.mark.parametrize("page_size", [1, 4])
def test_load_back_brings_the_host_part(page_size: int) -> None:
    """Evicted to the CPU tier, matched as host hit, loaded whole; quota and threshold keep it out."""
    scheduler = Scheduler(64, page_size, 256)
    tokens = list(range(32))
    scheduler.serve(tokens, [1])
    scheduler.client.land_all()
    assert scheduler.cache.evict(32) == 32
    match = scheduler.cache.match_prefix(tokens)
    assert (len(match.device_indices), match.host_hit_length) == (0, 32) and match.last_device_node.is_root
    for quota, threshold in ((31, 1), (None, 33)):
        scheduler.cache.load_back_threshold = threshold
        loaded, node = scheduler.cache.init_load_back(match.last_host_node, 32, quota)
        assert len(loaded) == 0 and node.is_root
    scheduler.cache.load_back_threshold = 10
    scheduler.client.auto = True
    loaded, node = scheduler.cache.init_load_back(match.last_host_node, 32, 32)
    assert len(loaded) == 32 and node == match.last_host_node
    scheduler.check(Req("x", tokens), tokens, loaded)
    assert len(scheduler.cache.init_load_back(node, 0)[0]) == 0, "resident already"
    scheduler.close()


def test_a_load_that_fails_is_recomputed() -> None:
    """Waited for: nothing is loaded. Overlapped: loading_check names the node, and its slots are not given out
    before."""
    scheduler, tokens = Scheduler(32, 1, 128), list(range(20))
    slots, node = scheduler.load_ahead(tokens)
    assert len(slots) == 20 and len(scheduler.cache.ready_to_load_host_cache()) == 1
    assert scheduler.cache.ready_to_load_host_cache() == () and scheduler.cache.check_hicache_events() == []
    scheduler.client.land("rank died")
    taken = scheduler.allocator.alloc(12)
    assert taken is not None and not set(taken.tolist()) & set(slots.tolist())
    assert scheduler.allocator.alloc(1) is None, "the failed load's slots are still used by its request"
    assert scheduler.cache.loading_check() == [node] and scheduler.cache.loading_check() == []
    assert scheduler.allocator.available_size() == 20
    scheduler.allocator.free(taken)
    scheduler.close()


@pytest.mark.parametrize(
    ("policy", "num_after"), [("write_through", [1, 1, 1]), ("write_through_selective", [0, 0, 1])]
)
@pytest.mark.parametrize("page_size", [1, 4])
def test_write_policies_count_uses(policy: str, num_after: list[int], page_size: int) -> None:
    """write_through copies at the first insert, the selective one at the third request; also of one that only hits."""
    scheduler = Scheduler(64, page_size, 256, hicache_write_policy=policy)
    counts = []
    for _ in range(3):
        scheduler.serve(list(range(20)), [1], chunk=5)
        scheduler.client.land_all()
        counts.append(int(scheduler.manager.stats().cpu.num_cached > 0))
    assert counts == num_after
    scheduler.close()


def test_write_back_copies_what_would_be_evicted_next() -> None:
    """Under a full pool the oldest has a copy before it goes."""
    scheduler = Scheduler(32, 1, 128, hicache_write_policy="write_back")
    for number in range(6):
        scheduler.serve([number, *range(100, 109)], [1])
        scheduler.client.land_all()
    assert scheduler.manager.stats().cpu.num_cached >= 20
    scheduler.close()


def test_options_are_checked_and_reset_forgets() -> None:
    """Unknown layouts and IO backends are refused; reset frees all but what is held, locked prefixes until unlocked."""
    with pytest.raises(ConfigError, match="hicache_mem_layout is 'x'"):
        new_config(8, hicache_mem_layout="x")
    with pytest.raises(ConfigError, match="hicache_io_backend is 'x'"):
        new_config(8, hicache_io_backend="x")
    config = new_config(
        8, hicache_mem_layout="page_first", hicache_io_backend="direct", hicache_ratio=1.5, transfer_client="inline"
    )
    assert config.pool_sizes() == (8, 12)
    scheduler = Scheduler(64, 1)
    put(scheduler, [1, 2, 3])
    node = scheduler.cache.match_prefix([1, 2, 3]).last_device_node
    scheduler.cache.inc_lock_ref(node)
    held = scheduler.allocator.alloc(2)
    assert held is not None and "[1, 2, 3] x3 gpu=3" in scheduler.cache.pretty_print()
    scheduler.cache.reset()
    assert len(scheduler.cache.match_prefix([1, 2, 3]).device_indices) == 0
    assert scheduler.allocator.available_size() == 59, "what is locked stays in place"
    scheduler.cache.dec_lock_ref(node)
    assert scheduler.cache.total_size() == 0 and scheduler.allocator.available_size() == 62
    for page_size in (0, 16):
        with pytest.raises(ConfigError, match="8 tokens in pages"):
            new_config(8, page_size)
    scheduler.allocator.free(held)
    scheduler.close()


def test_pools_refuse_double_frees() -> None:
    """Slots and rows are freed once, by their owner."""
    pool = ReqToTokenPool(2, 8)
    rows = pool.alloc(2)
    assert rows == [0, 1] and pool.alloc(1) is None
    pool.free(0)
    for bad in (0, 2):
        with pytest.raises(RequestError):
            pool.free(bad)
    scheduler = Scheduler(8, 1)
    slots = scheduler.allocator.alloc(2)
    assert slots is not None and scheduler.allocator.alloc(7) is None
    scheduler.allocator.free(slots)
    with pytest.raises(BlockOwnerError):
        scheduler.allocator.free(slots[:1])
    with pytest.raises(ConfigError, match="no ReqToTokenPool"):
        HiRadixCache(scheduler.manager).cache_finished_req(Req("a", [1]))
    scheduler.close()


def test_prefetch_waits_as_its_policy_says() -> None:
    """Unknown requests are ready; without a store nothing is asked for; terminate forgets."""
    scheduler = Scheduler(64, 1, 64)
    scheduler.cache.prefetch_from_storage("r", scheduler.cache.root_node, list(range(40)))
    assert scheduler.cache.check_prefetch_progress("r") and scheduler.cache.check_prefetch_progress("unknown")
    scheduler.cache.prefetch_from_storage("r", scheduler.cache.root_node, list(range(40)))
    scheduler.cache.terminate_prefetch("r")
    scheduler.cache.terminate_prefetch("r")
    scheduler.close()


@pytest.mark.processes
@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_prefetch_from_a_real_store(policy: str, tmp_path: object) -> None:
    """What one engine wrote to a folder, another prefetches, matches as host hit and loads back: the same bytes."""
    store = StorageConfig(folder=str(tmp_path), weights_id="w", admission="all", capacity_bytes=10**7)
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4)
    tokens = list(range(48))

    def start() -> HiRadixCache:
        config = new_config(
            64, 4, layout=layout, storage=store, hicache_storage_prefetch_policy=policy, prefetch_threshold=16,
            prefetch_timeout_seconds=10.0, load_policy="always",
        )  # fmt: skip
        return HiRadixCache(new_manager(config), ReqToTokenPool(4, 64))

    writer = start()
    slots = writer.token_to_kv_pool_allocator.alloc(48)
    assert slots is not None
    for parts in writer.manager.ranks.kv_views(0):
        for array in parts.values():
            array[: len(slots) // 4] = np.arange(1, len(slots) // 4 + 1).reshape(-1, 1, 1, 1)
    writer.insert(tokens, slots)
    assert writer.manager.storage.flush(10)
    writer.manager.close()
    reader = start()
    reader.prefetch_from_storage("r", reader.root_node, tokens)
    if policy == "best_effort":
        assert reader.check_prefetch_progress("r"), "it never waits"
    else:
        assert reader._prefetches["r"][1].wait(10) and reader.check_prefetch_progress("r")
        match = reader.match_prefix(tokens)
        assert match.host_hit_length == 48
        loaded, _ = reader.init_load_back(match.last_host_node, match.host_hit_length)
        assert len(loaded) == 48
        for parts in reader.manager.ranks.kv_views(0):
            for array in parts.values():
                assert [int(array[page].flat[0]) for page in loaded[::4] // 4] == list(range(1, 13))
    reader.manager.close()


def test_hits_are_counted_when_inserted_not_when_matched(one: Scheduler) -> None:
    """Matching ten times is no use; two requests are two."""
    one.serve([1, 2, 3, 4], [5])
    for _ in range(10):
        one.cache.match_prefix([1, 2, 3, 4])
    assert {run.num_uses for run in one.manager.blocks.view.runs()} == {1}
    one.serve([1, 2, 3, 4], [5])
    assert {run.num_uses for run in one.manager.blocks.view.runs()} == {2}


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", "ABC"), ("mru", "CBA"), ("fifo", "ABC"), ("filo", "CBA"), ("lfu", "CAB"), ("slru", "CAB")],
)
def test_nodes_go_in_the_order_of_their_policy(policy: str, order: str) -> None:
    """A, B and C are inserted; C has one use, A and then B have two, and C is matched last."""
    scheduler = Scheduler(64, eviction_policy=policy)
    for name in "ABCAB":
        duplicates = put(scheduler, [ord(name), 1, 2])
        if len(duplicates):
            scheduler.allocator.free(duplicates)
    scheduler.cache.match_prefix([ord("C"), 1, 2])
    gone = ""
    for _ in order:
        assert scheduler.cache.evict(1) == 3
        here = {name for name in order if len(scheduler.cache.match_prefix([ord(name), 1, 2]).device_indices)}
        gone += "".join(sorted(set(order) - here - set(gone)))
        if policy in {"lru", "mru"}:
            break  # looking is a use
    assert order.startswith(gone) and gone
    scheduler.close()


def test_a_policy_without_an_order_of_nodes_is_refused() -> None:
    """`reuse` decides block by block."""
    with pytest.raises(ConfigError, match="eviction_policy is 'reuse'; where nodes go whole"):
        Scheduler(64, eviction_policy="reuse")
