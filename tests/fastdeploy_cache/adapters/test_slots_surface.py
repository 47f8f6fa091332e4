"""Every name that the callers of the original slot cache use is there, with its parameters."""

from __future__ import annotations

import pytest

from fastdeploy_cache.adapters.slots.prefix_cache import SlotAllocator, SlotPrefixCache
from tests.rigs.original_surface import Surface, missing, unnamed

# AstrAI's slot cache (spring 2026), `SlotAllocator` and `PrefixCacheManager`, as its generation loop calls them.
ALLOCATOR: Surface = {
    "alloc": (),
    "free": ("idx",),
    "occupy": ("idx",),
    "is_free": ("idx",),
    "version": ("idx",),
    "free_count": None,
}
CACHE: Surface = {
    "insert": ("token_ids", "slot", "slot_ver"),
    "find": ("token_ids",),
    "pin": ("token_ids",),
    "release": ("token_ids",),
    "copy_kv": ("token_ids", "target_slot", "kv_cache", "n_layers"),
    "max_capacity": None,
}


def test_every_call_of_the_loop_is_taken() -> None:
    """Allocator and cache have the original names and parameters; the page names the class that is called otherwise."""
    assert missing(SlotAllocator(2), ALLOCATOR) == missing(SlotPrefixCache(max_capacity=8), CACHE) == []
    assert unnamed("slots.md", ("PrefixCacheManager",)) == []


def test_keys_and_values_may_be_tensors() -> None:
    """`copy_kv` copies in PyTorch's tensors as in arrays: the first positions and layers, and no others."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'fastdeploy-cache[torch]'")
    slots = SlotAllocator(2)
    cache = SlotPrefixCache(allocator=slots)
    k, v = (torch.arange(2 * 6 * 3 * 2, dtype=torch.float32).reshape(2, 6, 3, 2) + sign for sign in (0, 1000))
    before = k.clone(), v.clone()
    source, target = slots.alloc(), slots.alloc()
    cache.insert((1, 2, 3, 4), source, slots.version(source))
    assert cache.copy_kv((1, 2, 3, 9), target, kv_cache=(k, v), n_layers=2) == 3
    for now, then in zip((k, v), before, strict=True):
        assert torch.equal(now[target, :3, :2], then[source, :3, :2])
        assert torch.equal(now[target, 3:], then[target, 3:]) and torch.equal(now[:, :, 2], then[:, :, 2])
        assert torch.equal(now[source], then[source])
