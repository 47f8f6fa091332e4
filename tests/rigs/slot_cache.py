"""An allocator of slots, the cache over it, and whole requests."""

from __future__ import annotations

from fastdeploy_cache.adapters.slots.prefix_cache import SlotAllocator, SlotPrefixCache

NOTHING = (0, -1, 0)


def filled(num_slots: int = 4, capacity: int = 1000) -> tuple[SlotAllocator, SlotPrefixCache]:
    """An allocator and a cache that hears of it."""
    slots = SlotAllocator(num_slots)
    return slots, SlotPrefixCache(capacity, slots)


def serve(slots: SlotAllocator, cache: SlotPrefixCache, tokens: list[int]) -> int:
    """A whole request in a new slot, which is free again; nothing stays pinned."""
    slot = slots.alloc()
    cache.insert(tokens, slot, slots.version(slot))
    cache.release(tokens)
    slots.free(slot)
    return slot
