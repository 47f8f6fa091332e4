"""Contiguous slots: what is found in a slot lies there, whatever is taken, evicted or overwritten."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache.adapters.slots.prefix_cache import SlotAllocator, SlotPrefixCache
from fastdeploy_cache.errors import BlockOwnerError, ConfigError, RequestError
from tests.rigs.slot_cache import NOTHING, filled, serve

DOCUMENT = Path(__file__).parents[3] / "docs/adapters/slots.md"


# -- the allocator


def test_the_lowest_free_slot_is_given_with_a_new_version() -> None:
    """`alloc` counts versions up, slot by slot, and gives -1 when all are taken."""
    slots = SlotAllocator(3)
    assert [slots.alloc() for _ in range(4)] == [0, 1, 2, -1]
    assert [slots.version(slot) for slot in range(3)] == [1, 1, 1] and slots.free_count == 0
    slots.free(2)
    slots.free(1)
    assert slots.is_free(1) and not slots.is_free(0) and slots.free_count == 2
    assert slots.alloc() == 1 and slots.version(1) == 2 and slots.version(2) == 1


def test_occupy_keeps_the_version() -> None:
    """A free slot is taken for what it holds."""
    slots = SlotAllocator(2)
    slots.free(slots.alloc())
    slots.occupy(0)
    assert slots.version(0) == 1 and not slots.is_free(0) and slots.free_count == 1


@pytest.mark.parametrize("slot", [0, 2, -1])
@pytest.mark.parametrize("verb", ["free", "occupy"])
def test_what_cannot_be_given_or_taken_is_refused(verb: str, slot: int) -> None:
    """Double free, `occupy` of a taken slot and slots that do not exist change nothing."""
    slots = SlotAllocator(2)
    if verb == "occupy":
        slots.alloc()
    state = slots.free_count, slots.version(0), slots.num_takes(0)
    with pytest.raises(BlockOwnerError, match=f"slot {slot}"):
        getattr(slots, verb)(slot)
    assert state == (slots.free_count, slots.version(0), slots.num_takes(0))


def test_many_slots_and_numpy_numbers() -> None:
    """The mask is wider than a machine word."""
    slots, cache = filled(200)
    for _ in range(200):
        slots.alloc()
    slots.free(np.int64(150))
    assert slots.alloc() == 150 and slots.version(np.int64(150)) == 2
    cache.insert(np.array([1, 2], np.int32), np.int64(150), 2)
    assert cache.find([1, 2, 3]) == (2, 150, 2)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_impossible_sizes_are_refused(value: object) -> None:
    """The message names setting and value."""
    with pytest.raises(ConfigError, match="max_slots"):
        SlotAllocator(value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_capacity"):
        SlotPrefixCache(value or -1)  # type: ignore[arg-type]


# -- finding


def test_the_deepest_match_is_found_also_inside_a_path() -> None:
    """By its signatures alone, without an allocator."""
    cache = SlotPrefixCache()
    assert cache.find([1, 2]) == NOTHING
    cache.insert([1, 2, 3, 4, 5], 2, 7)
    assert cache.find([1, 2, 3, 4, 5, 6]) == cache.find([1, 2, 3, 4, 5]) == (5, 2, 7)
    assert cache.find([1, 2, 3, 9]) == (3, 2, 7)
    assert cache.find([2]) == cache.find([]) == NOTHING


def test_every_node_on_the_path_takes_the_newest_slot() -> None:
    """A shared prefix is reported where it was inserted last, what is behind it where it lies."""
    cache = SlotPrefixCache()
    cache.insert([1, 2, 3, 4], 0, 1)
    cache.insert([1, 2, 8, 9], 1, 5)
    assert cache.find([1, 2]) == (2, 1, 5) and cache.find([1, 2, 3]) == (3, 0, 1)
    cache.insert([1, 2, 3, 4], 0, 1)
    assert cache.find([1, 2]) == (2, 0, 1)


def test_an_older_slot_serves_when_the_newest_has_changed() -> None:
    """The prefix lies in two slots; one is given to others."""
    slots, cache = filled(2)
    serve(slots, cache, [1, 2, 3])
    slots.occupy(0)  # so that the next one is slot 1
    cache.insert([1, 2, 3], 0, 1)
    serve(slots, cache, [1, 2, 4])
    assert cache.find([1, 2]) == (2, 1, 1)
    assert slots.alloc() == 1
    assert cache.find([1, 2, 4]) == (2, 0, 1)


def test_a_freed_slot_is_found_until_it_is_given_out() -> None:
    """Pinned or not: a version that has changed is never reported."""
    slots, cache = filled(1)
    serve(slots, cache, [1, 2, 3])
    assert cache.pin([1, 2, 3]) and cache.find([1, 2, 3]) == (3, 0, 1)
    assert slots.alloc() == 0
    assert cache.find([1, 2, 3]) == NOTHING and not cache.pin([1, 2, 3])
    cache.release([1, 2, 3])
    assert cache.num_tokens == 0


def test_an_occupied_slot_is_not_found_until_it_is_inserted() -> None:
    """What its new owner writes over is never reported: not while it writes, not when it gives up."""
    conversation, other = list(range(100)), [*range(40), 777]
    slots, cache = filled(1)
    serve(slots, cache, conversation)
    length, slot, version = cache.find(other)
    assert (length, slot, version) == (40, 0, 1)
    slots.occupy(slot)
    assert cache.find(conversation) == NOTHING
    cache.insert(other[:length], slot, version)
    assert cache.find(conversation) == (40, 0, 1)
    cache.insert(other, slot, version)
    slots.free(slot)
    assert cache.find(conversation) == (40, 0, 1) and cache.find(other) == (41, 0, 1)
    slots.occupy(slot)
    slots.free(slot)
    assert cache.find(other) == NOTHING


def test_an_insert_says_what_the_slot_holds_now() -> None:
    """Of a slot with the same version only the last sequence is found; a shorter one is a step back."""
    cache = SlotPrefixCache()
    cache.insert([1, 2, 3, 4], 0, 1)
    cache.insert([1, 2, 8], 0, 1)
    assert cache.find([1, 2, 3, 4]) == (2, 0, 1) and cache.find([1, 2, 8]) == (3, 0, 1)
    cache.insert([1], 0, 1)
    assert cache.find([1, 2, 8]) == (1, 0, 1)


def test_who_does_not_own_a_slot_cannot_insert() -> None:
    """A late insert, with the version of before, or into a free slot, leaves nothing behind."""
    slots, cache = filled(2)
    slots.free(slots.alloc())
    slots.alloc()
    for slot, version in ((0, 1), (1, 0), (5, 0)):
        with pytest.raises(BlockOwnerError, match=f"slot {slot}"):
            cache.insert([1, 2], slot, version)
    with pytest.raises(RequestError, match="-1"):
        cache.insert([1, 2], -1, 0)
    with pytest.raises(RequestError):
        cache.insert([], 0, 2)
    assert cache.num_tokens == 0 and cache.find([1, 2]) == NOTHING


# -- pins and eviction


def test_the_least_recently_used_goes_first() -> None:
    """From its end, and exactly what is too much."""
    slots, cache = filled(4, capacity=8)
    slot_of = [serve_and_hold(slots, cache, [10 * i + j for j in range(4)]) for i in (1, 2)]
    assert cache.find([10, 11, 12, 13]) == (4, slot_of[0], 1)
    serve_and_hold(slots, cache, [30, 31, 32])
    assert cache.find([20, 21, 22, 23]) == (1, slot_of[1], 1)
    assert cache.find([10, 11, 12, 13])[0] == 4 and cache.find([30, 31, 32])[0] == 3 and cache.num_tokens == 8


def test_inserting_and_finding_a_part_are_uses() -> None:
    """Of a sequence inserted after another one was found; and of the whole, once nothing else is pinned in it."""
    slots, cache = filled(4, capacity=8)
    first, second = serve_and_hold(slots, cache, [1, 2, 3, 4]), 1
    cache.pin([1, 2])
    assert cache.find([1, 2, 3, 4])[0] == 4 and serve_and_hold(slots, cache, [5, 6, 7, 8]) == second
    serve_and_hold(slots, cache, [9])
    assert cache.find([5, 6, 7, 8]) == (4, second, 1)
    assert cache.find([1, 2]) == (2, first, 1)
    cache.release([1, 2])
    serve_and_hold(slots, cache, [10, 11])  # takes the 9 first
    assert cache.find([1, 2, 3]) == (3, first, 1) and cache.find([5, 6, 7, 8]) == (3, second, 1)


def serve_and_hold(slots: SlotAllocator, cache: SlotPrefixCache, tokens: list[int]) -> int:
    """A sequence that is not pinned, in a slot that stays taken."""
    slot = slots.alloc()
    cache.insert(tokens, slot, slots.version(slot))
    cache.release(tokens)
    return slot


def test_what_a_changed_slot_held_goes_before_anything_else() -> None:
    """It is worth nothing, however recently it was used."""
    slots, cache = filled(3, capacity=6)
    assert serve_and_hold(slots, cache, [1, 2, 3]) == 0
    serve(slots, cache, [7, 8, 9])
    assert slots.alloc() == 1
    slots.alloc()
    cache.insert([4, 5], 2, 1)
    assert cache.find([1, 2, 3]) == (3, 0, 1) and cache.num_tokens == 5


def test_eviction_ends_when_everything_is_pinned() -> None:
    """The capacity is exceeded by what is pinned, and kept again once it is released."""
    slots, cache = filled(4, capacity=2)
    for i in range(4):
        slots.alloc()
        cache.insert([i, 8, 9], i, 1)
    assert cache.num_tokens == 12
    assert all(cache.find([i, 8, 9]) == (3, i, 1) for i in range(4))
    for i in range(4):
        cache.release([i, 8, 9])
    assert cache.num_tokens == 2 and cache.find([3, 8, 9]) == (2, 3, 1)


def test_an_unpinned_ancestor_of_a_pinned_sequence_stays() -> None:
    """Not pinned itself, used longest ago, and on the way to what is pinned."""
    slots, cache = filled(3, capacity=5)
    serve_and_hold(slots, cache, [1, 2])
    slots.alloc()
    cache.insert([1, 2, 3, 4], 1, 1)  # stays pinned
    serve_and_hold(slots, cache, [7, 8, 9])
    assert cache.find([1, 2, 3, 4]) == (4, 1, 1) and cache.find([1, 2])[0] == 2
    assert cache.num_tokens == 5 and cache.find([7, 8, 9])[0] == 1


def test_finding_after_evictions_never_raises() -> None:
    """Every prefix of what was ever inserted, while a small index turns over."""
    slots, cache = filled(4, capacity=7)
    texts = [[(i * i + text * (i // 3)) % 3 for i in range(9)] for text in range(6)]
    for text in texts * 3:
        serve(slots, cache, text)
        for other in texts:
            for end in range(len(other) + 1):
                length, slot, version = cache.find(other[:end])
                assert length <= end and (slot == -1 or version == slots.version(slot))
    assert cache.num_tokens <= 7


def test_a_sequence_is_released_as_often_as_it_was_pinned() -> None:
    """The slot stays reusable at zero; once more is refused, as is what was never pinned."""
    cache = SlotPrefixCache()
    cache.insert([1, 2, 3, 4], 0, 1)
    with pytest.raises(BlockOwnerError, match="2 tokens"):
        cache.release([1, 2])
    assert cache.pin([1, 2]) and cache.pin([1, 2, 3, 4])
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4]):
        cache.release(tokens)
    assert cache.find([1, 2, 3, 4]) == (4, 0, 1)
    for tokens in ([1, 2, 3, 4], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [9]):
        with pytest.raises(BlockOwnerError, match="not pinned"):
            cache.release(tokens)
    assert not cache.pin([1, 2, 3, 4, 5]) and not cache.pin([9])
    assert cache.find([1, 2, 3, 4]) == (4, 0, 1)


def test_a_reset_forgets_all_slots() -> None:
    """Their memory is gone. Pins are released as before."""
    cache = SlotPrefixCache()
    cache.insert([1, 2], 0, 1)
    cache.reset()
    assert cache.find([1, 2]) == NOTHING
    cache.release([1, 2])
    assert cache.num_tokens == 0


@pytest.mark.processes
def test_the_sample_prints_what_it_says() -> None:
    """The sample of docs/adapters/slots.md runs as it stands."""
    sample, *fragments = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert all(fragment.startswith("# fragment:") for fragment in fragments)
    result = subprocess.run([sys.executable, "-c", sample], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == re.findall(r"^# (.*)", sample, re.MULTILINE)
