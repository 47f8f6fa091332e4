"""SGLang's device pools as pages of bytes, by layer. Knows SGLang by duck typing only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy_cache.errors import ConfigError, LayoutError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.tensors import ArrayPlace

KV, SWA, MAMBA = "kv", "swa", "mamba"  # SGLang's names of the pools
KNOWN_COMPONENTS = frozenset({"full", SWA, MAMBA})
PAGE_TOKENS = 16  # by which our cache counts a page: its hash is 32 bytes, and two are one token
_PART_NAMES = ("key", "value")


@dataclass(frozen=True, eq=False)
class DevicePool:
    """Pages of one pool.

    Attributes:
        layers: the model's layers, as this rank counts them, first to last.
        arrays: of each layer one or two tensors [slots, ...]; a page is `page_slots` slots in a row of each.
    """

    name: str
    layers: tuple[int, ...]
    arrays: tuple[tuple[Any, ...], ...]
    page_slots: int

    @property
    def num_pages(self) -> int:
        """The pages of the whole pool."""
        return int(self.arrays[0][0].shape[0]) // self.page_slots

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of a page in each of a layer's tensors; the same in all layers."""
        return tuple([_slot_bytes(array) * self.page_slots for array in self.arrays[0]])

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return len(self.layers) * sum(self.part_bytes)

    def layout(self) -> KVLayout:
        """What our cache takes a page for: a block of bytes, in one or two parts.

        Raises:
            ConfigError: it cannot be told so.
        """
        parts = [[_slot_bytes(array) for array in in_layer] for in_layer in self.arrays]
        if any(each != parts[0] for each in parts) or not 1 <= len(parts[0]) <= len(_PART_NAMES):
            raise ConfigError(
                f"the pool {self.name!r} has layers of {sorted({tuple(each) for each in parts})} bytes a slot; all "
                "must be alike, and in one or two parts"
            )
        if any(size % PAGE_TOKENS for size in self.part_bytes):
            raise ConfigError(
                f"a page of the pool {self.name!r} has parts of {list(self.part_bytes)} bytes in a layer; they must be "
                f"multiples of {PAGE_TOKENS}: use a larger --page-size"
            )
        first, *rest = [size // PAGE_TOKENS for size in self.part_bytes]
        return KVLayout(
            num_layers=len(self.layers),
            num_kv_heads=1,
            head_dim=first,
            dtype="uint8",
            value_head_dim=rest[0] if rest else 0,
        )

    def places(self) -> list[dict[str, ArrayPlace]]:
        """Where the pages are, by layer and part.

        Raises:
            LayoutError: the bytes of a page lie apart.
        """
        names = _PART_NAMES if len(self.part_bytes) > 1 else ("latent",)
        return [
            {name: self._place(array) for name, array in zip(names, in_layer, strict=True)} for in_layer in self.arrays
        ]

    def _place(self, array: Any) -> ArrayPlace:
        slot_bytes = _slot_bytes(array)
        if not array[0].is_contiguous() or (self.page_slots > 1 and not array.is_contiguous()):
            raise LayoutError(f"a page of the pool {self.name!r} lies apart: strides {tuple(array.stride())}")
        stride = int(array.stride(0)) * array.element_size()
        return ArrayPlace(
            address=array.data_ptr(),
            shape=(self.num_pages, slot_bytes * self.page_slots),
            strides_bytes=(stride * self.page_slots, 1),
            item_bytes=1,
            device=array.device.type,
            device_id=array.device.index or 0,
        )

    def pages_of(self, slots: Any, num_pages: int) -> list[int]:
        """The pages of these slots, of each all in a row.

        Raises:
            ConfigError: there are more or fewer, or a page lies apart or outside the pool.
        """
        given, size = [int(each) for each in slots.flatten().tolist()], self.page_slots
        pages = [first // size for first in given[::size]]
        is_whole = given == [page * size + place for page in pages for place in range(size)]
        if len(pages) != num_pages or not is_whole or not all(0 <= page < self.num_pages for page in pages):
            raise ConfigError(
                f"{len(given)} slots of the pool {self.name!r} for {num_pages} pages of {size} slots, which lie apart "
                f"or outside its {self.num_pages} pages"
            )
        return pages


def _slot_bytes(array: Any) -> int:
    return int(array[0].numel()) * int(array.element_size())


def device_pools(params: Any, components: Iterable[Any]) -> tuple[DevicePool, ...]:
    """The pools of SGLang's `CacheInitParams`, that of keys and values first.

    Raises:
        ConfigError: a component or a pool that this linker cannot restore, by its name.
    """
    names = [str(getattr(each, "name", each)).lower() for each in components]
    if unknown := sorted(set(names) - KNOWN_COMPONENTS):
        raise ConfigError(
            f"the component {unknown[0]!r} cannot be restored; known: {', '.join(sorted(KNOWN_COMPONENTS))}"
        )
    kvcache, page_size = params.token_to_kv_pool_allocator.get_kvcache(), int(params.page_size)
    for drafts in ("mtp_draft_device_pools", "sidecar_draft_device_pools"):
        if getattr(params, drafts, ()):
            raise ConfigError(
                f"a draft model keeps KV of its own ({drafts}), which cannot be restored; start without it"
            )
    start, pools = int(getattr(kvcache, "start_layer", 0) or 0), list[DevicePool]()
    if SWA in names:
        mapping = getattr(kvcache, "layers_mapping", None)
        if not isinstance(mapping, dict):
            raise _no_pages(kvcache)
        for name, inner, is_window in ((KV, kvcache.full_kv_pool, False), (SWA, kvcache.swa_kv_pool, True)):
            numbers = {layer - start: place for layer, (place, of_window) in mapping.items() if of_window is is_window}
            pools.append(_attention(name, inner, numbers, page_size))
    elif hasattr(kvcache, "full_kv_pool"):
        numbers = {layer - start: place for layer, place in kvcache.full_attention_layer_id_mapping.items()}
        pools.append(_attention(KV, kvcache.full_kv_pool, numbers, page_size))
    else:
        buffers = getattr(kvcache, "k_buffer", None) or getattr(kvcache, "kv_buffer", None) or ()
        pools.append(_attention(KV, kvcache, {layer: layer for layer in range(len(buffers))}, page_size))
    if MAMBA in names:
        pools.append(_states(params.req_to_token_pool, start))
    return tuple(pools)


def _no_pages(pool: Any) -> ConfigError:
    return ConfigError(f"the pool {type(pool).__name__} has no pages in memory that could be moved")


def _attention(name: str, pool: Any, numbers: dict[int, int], page_size: int) -> DevicePool:
    """A pool of keys and values, or of latents."""
    scales = [each for each in ("k_scale_buffer", "native_k_scale_buffer") if getattr(pool, each, None) is not None]
    if scales:
        raise ConfigError(f"the pool {name!r} has scales beside its keys ({scales[0]}), which cannot be restored")
    if getattr(pool, "k_buffer", None) is not None:
        sides: Sequence[Sequence[Any]] = (pool.k_buffer, pool.v_buffer)
    elif type(pool).__name__ == "MLATokenToKVPool":  # its kinds keep an indexer beside it
        sides = (pool.kv_buffer,)
    else:
        raise _no_pages(pool)
    layers = tuple(sorted(numbers))
    if not layers:
        raise _no_pages(pool)
    arrays = tuple([tuple([side[numbers[layer]] for side in sides]) for layer in layers])
    return DevicePool(name, layers, arrays, page_size)


def _states(pool: Any, start: int) -> DevicePool:
    """The pool of states: a slot is one state."""
    beside = [each for each in ("mamba_ckpt_pool",) if getattr(pool, each, None) is not None]
    beside += [
        each for each in ("short_conv_pool", "ngram_pool") if getattr(getattr(pool, each, None), "enabled", False)
    ]
    if beside:
        raise ConfigError(f"the pool 'mamba' has states beside it ({beside[0]}), which cannot be restored")
    cache = pool.mamba_pool.mamba_cache
    parts = [part for part in (cache.temporal, *cache.conv) if part.numel()]
    layers = sorted(pool.mamba_map)
    arrays = tuple([tuple([part[pool.mamba_map[layer]] for part in parts]) for layer in layers])
    return DevicePool(MAMBA, tuple([layer - start for layer in layers]), arrays, 1)
