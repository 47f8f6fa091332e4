"""Copies of slots: what is reported as copied lies in the target; a source that has changed is a miss."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.adapters.slots.copies import RankSlots
from fastdeploy_cache.adapters.slots.prefix_cache import SlotPrefixCache
from fastdeploy_cache.errors import CacheError, ConfigError, RequestError
from tests.rigs.faulty_engine import BLOCK_SIZE, new_config
from tests.rigs.slot_cache import NOTHING, filled, serve


def arrays(num_slots: int = 3) -> tuple[np.ndarray, np.ndarray]:
    k = np.arange(num_slots * 8 * 4 * 2, dtype=np.float32).reshape(num_slots, 8, 4, 2)
    return k, -k


def test_a_prefix_is_copied_to_another_slot() -> None:
    """Its positions and the first layers, in both arrays; all else is untouched."""
    slots, cache = filled(3)
    source, target = serve(slots, cache, [1, 2, 3, 4]), 1
    slots.occupy(source)
    cache.insert([1, 2, 3, 4], source, 1)  # in use: to be copied, not occupied
    assert slots.alloc() == target
    k, v = arrays()
    wanted = arrays()
    for array in wanted:
        array[target, :3, :2] = array[source, :3, :2]
    assert cache.copy_kv([1, 2, 3, 9], target, (k, v), 2) == 3
    assert np.array_equal(k, wanted[0]) and np.array_equal(v, wanted[1])
    assert cache.find([1, 2, 3, 9]) == (3, source, 1), "the target is found once it is inserted"


def test_nothing_is_copied_from_a_slot_that_has_changed() -> None:
    """The version is checked; the arrays stay as they are."""
    slots, cache = filled(2)
    serve(slots, cache, [1, 2, 3])
    assert slots.alloc() == 0 and slots.alloc() == 1
    kv = arrays()
    assert cache.copy_kv([1, 2, 3], 1, kv, 4) == cache.copy_kv([], 1, kv, 4) == 0
    assert all(np.array_equal(array, untouched) for array, untouched in zip(kv, arrays(), strict=True))


def test_a_slot_is_not_copied_onto_itself() -> None:
    """What the target holds already is reported as copied, and stays known."""
    slots, cache = filled(1)
    slots.alloc()
    cache.insert([1, 2, 3], 0, 1)
    assert cache.copy_kv([1, 2, 3, 4], 0, arrays(), 4) == 3
    assert cache.find([1, 2, 3]) == (3, 0, 1)


def test_what_the_target_held_is_forgotten() -> None:
    """Its first positions are others' now."""
    cache = SlotPrefixCache()
    cache.insert([1, 2, 3], 0, 1)
    cache.insert([7, 8, 9], 1, 1)
    assert cache.copy_kv([1, 2], 1, arrays(), 4) == 2
    assert cache.find([7, 8, 9]) == NOTHING


def test_copies_that_cannot_be_are_refused() -> None:
    """A free target, arrays too small: nothing is copied, and what the target holds stays known."""
    slots, cache = filled(3)
    for i in range(2):
        slots.alloc()
        cache.insert([i] * 9, i, 1)
    k, v = arrays(2)
    for target, kv, num_layers in (
        (2, (k, v), 4),
        (1, (k, v), 4),
        (1, (k, v), 0),
        (1, (k, v[:1]), 1),
        (1, (k, k[0, 0]), 1),
    ):
        with pytest.raises(CacheError):
            cache.copy_kv([0] * (9 if num_layers == 4 else 3), target, kv, num_layers)
    with pytest.raises(RequestError, match="shape"):
        cache.copy_kv([0], 1, (k, v), 5)
    assert np.array_equal(k, arrays(2)[0]) and cache.find([1]) == (1, 1, 1)


class Interrupted:
    """Bytes of slots: something happens while they are copied."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens = happens

    def check(self, last_slot: int, num_positions: int) -> None:
        """Anything goes."""

    def copy(self, source_slot: int, target_slot: int, num_positions: int) -> bool:
        """Copies well."""
        self._happens()
        return True


@pytest.mark.parametrize("verb", ["alloc", "occupy", "reset", "nothing"])
def test_a_source_that_is_taken_meanwhile_is_a_miss(verb: str) -> None:
    """Another thread takes the free source slot while it is read, or its memory is lost: nothing was copied."""
    slots, cache = filled(2)
    slots.alloc()
    slots.alloc()
    cache.insert([1, 2], 1, 1)
    slots.free(1)
    happens = {"alloc": slots.alloc, "occupy": lambda: slots.occupy(1), "reset": cache.reset, "nothing": lambda: None}
    assert cache.copy_slot([1, 2], 0, Interrupted(happens[verb])) == (2 if verb == "nothing" else 0)


# -- on the ranks


def block_words(cache: PrefixCacheManager, block_id: int, tp_size: int) -> list[np.ndarray]:
    return [
        array[block_id].view(np.uint16)
        for rank in range(tp_size)
        for parts in cache.ranks.kv_views(rank)
        for array in parts.values()
    ]


@pytest.mark.processes
def test_ranks_copy_a_slot_byte_for_byte() -> None:
    """Whole blocks and the first tokens of the last one, in every layer, part and rank; the rest is untouched."""
    length = 2 * BLOCK_SIZE + 3
    tokens = list(range(length))
    with PrefixCacheManager(new_config(2, num_gpu=16, num_cpu=2)) as manager:
        slots, cache = filled(3)
        with RankSlots(manager, 3, 4) as rank_slots:
            random = np.random.default_rng(0)
            for block_id in range(12):
                for words in block_words(manager, block_id, 2):
                    words[...] = random.integers(0, 2**16, words.shape, np.uint16)
            slots.alloc()
            slots.alloc()
            cache.insert([*tokens, 99], 0, 1)
            before = [words.copy() for words in block_words(manager, 7, 2)]
            assert cache.copy_slot(tokens, 1, rank_slots) == length
            for ours, theirs in ((0, 4), (1, 5)):
                for source, target in zip(block_words(manager, ours, 2), block_words(manager, theirs, 2), strict=True):
                    assert np.array_equal(source, target)
            for source, target in zip(block_words(manager, 2, 2), block_words(manager, 6, 2), strict=True):
                assert np.array_equal(source[:3], target[:3]) and not np.array_equal(source, target)
            assert all(map(np.array_equal, before, block_words(manager, 7, 2)))
            manager.check_invariants()
            assert list(rank_slots.block_ids(2)) == [8, 9, 10, 11] and manager.stats().gpu.num_free == 4
        assert manager.stats().gpu.num_free == 16


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_fails_is_a_miss(number: signal.Signals) -> None:
    """Dead or stuck: nothing was copied, nobody writes to the target any more, and later copies succeed."""
    config = new_config(2, num_gpu=4, num_cpu=2, task_timeout_seconds=1.0)
    with PrefixCacheManager(config) as manager, RankSlots(manager, 2, 2) as rank_slots:
        slots, cache = filled(2)
        slots.alloc()
        slots.alloc()
        cache.insert([1, 2], 0, 1)
        pid = manager.stats().ranks[1].pid
        assert pid is not None
        os.kill(pid, number)
        copied = cache.copy_slot([1, 2], 1, rank_slots)
        assert manager.wait_for_transfers(0.0), "none is in flight"
        assert copied == 0 and cache.find([1, 2]) == (2, 0, 1)
        assert manager.ranks.wait_ready(30.0)
        assert cache.copy_slot([1, 2], 1, rank_slots) == 2
        manager.check_invariants()


def test_slots_need_the_first_blocks() -> None:
    """Blocks that others have are not slots; what was taken is given back. Slots beyond the end are refused."""
    with PrefixCacheManager(new_config(1, num_gpu=6, num_cpu=0, kind="inline")) as manager:
        taken = manager.blocks.allocate(1)
        with pytest.raises(RequestError, match="first"):
            RankSlots(manager, 2, 2)
        manager.blocks.free(taken)
        with pytest.raises(ConfigError):
            RankSlots(manager, 0, 2)
        assert manager.stats().gpu.num_free == 6
        with RankSlots(manager, 2, 2) as rank_slots:
            cache = SlotPrefixCache()
            cache.insert([1] * (2 * BLOCK_SIZE + 1), 0, 1)
            for tokens, target in (([1] * (2 * BLOCK_SIZE + 1), 1), ([1], 2)):
                with pytest.raises(RequestError, match="slot"):
                    cache.copy_slot(tokens, target, rank_slots)
        rank_slots.close()
        assert manager.stats().gpu.num_free == 6
