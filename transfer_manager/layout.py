"""What a KV block looks like in bytes: parts, layers, images. Everything that has a size gets it from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from transfer_manager.config import check_integers
from transfer_manager.errors import LayoutError

# name -> NumPy dtype of its storage; what NumPy has no type for is stored as an unsigned integer of the same size
STORAGE_DTYPES: dict[str, str] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8_e4m3": "uint8",
    "int8": "int8",
    "uint8": "uint8",
}


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The model's keys and values, before they are shared out to ranks.

    Args:
        num_layers: layers that keep keys and values.
        num_kv_heads: key/value heads of the whole model.
        head_dim: elements of one head's key (and value) for one token.
        dtype: one of `STORAGE_DTYPES`.

    Raises:
        LayoutError: a size below 1 or an unknown dtype.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        check_integers(self, LayoutError, prefix="layout.")
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise LayoutError(f"layout.{name} is {getattr(self, name)}; it must be at least 1")
        if self.dtype not in STORAGE_DTYPES:
            raise LayoutError(f"layout.dtype is {self.dtype!r}; known: {', '.join(STORAGE_DTYPES)}")

    def heads_per_rank(self, tp_size: int) -> int:
        """Heads that each rank holds; one (replicated) where there are fewer heads than ranks."""
        if tp_size < 1:
            raise LayoutError(f"tp_size is {tp_size}; it must be at least 1")
        if self.num_kv_heads % tp_size == 0:
            return self.num_kv_heads // tp_size
        if tp_size % self.num_kv_heads == 0:
            return 1
        raise LayoutError(
            f"{self.num_kv_heads} KV heads neither divide by {tp_size} ranks nor {tp_size} by {self.num_kv_heads}; "
            f"use a tp_size that divides {self.num_kv_heads} or is a multiple of it"
        )

    def for_rank(self, tp_size: int, block_size: int) -> RankLayout:
        """The share of one rank: blocks of `block_size` tokens, key and value of [block_size, heads, head_dim]."""
        if block_size < 1:
            raise LayoutError(f"block_size is {block_size}; it must be at least 1 token")
        shape = (block_size, self.heads_per_rank(tp_size), self.head_dim)
        parts = (KVPart("key", shape, self.dtype), KVPart("value", shape, self.dtype))
        return RankLayout(num_layers=self.num_layers, parts=parts)


@dataclass(frozen=True)
class KVPart:
    """One array of a block in one layer: `shape` without the block dimension, `dtype` out of `STORAGE_DTYPES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def storage_dtype(self) -> str:
        """The NumPy dtype that holds it."""
        return STORAGE_DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of this part for one block in one layer."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.storage_dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """One rank's share of a block: `parts` in each of `num_layers` layers.

    On the device a rank's KV memory is layer-first: for each layer, for each part, `num_blocks` pieces side by side.
    In the CPU tier a block is one contiguous image: for each layer, its parts one after the other.
    """

    num_layers: int
    parts: tuple[KVPart, ...]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: of its image in the CPU tier, and of its pieces on the device together."""
        return self.num_layers * self.layer_bytes

    def image_offset_bytes(self, layer: int, part: int) -> int:
        """Where a part begins inside a block's image."""
        return layer * self.layer_bytes + sum(p.num_bytes for p in self.parts[:part])

    def device_offset_bytes(self, layer: int, part: int, num_blocks: int) -> int:
        """Where the pieces of a part begin inside a rank's KV memory of `num_blocks` blocks."""
        return self.image_offset_bytes(layer, part) * num_blocks

    def kv_views(self, memory: Any, num_blocks: int) -> list[dict[str, np.ndarray[Any, np.dtype[Any]]]]:
        """Per layer, by part name, the array [num_blocks, *part.shape] over a rank's KV memory; nothing is copied.

        `memory` is an `ipc.shared_array.SharedArray` (anything with its `view`).
        """
        return [
            {
                part.name: memory.view(
                    part.storage_dtype,
                    (num_blocks, *part.shape),
                    self.device_offset_bytes(layer, index, num_blocks),
                )
                for index, part in enumerate(self.parts)
            }
            for layer in range(self.num_layers)
        ]
