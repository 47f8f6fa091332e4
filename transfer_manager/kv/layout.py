"""What a KV block looks like in bytes: parts, layers, images. Everything that has a size gets it from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, Row, check_groups, row_of_each, rows_of
from fastdeploy_cache.transfer_manager.kv.parts import PER_STORED, STORAGE_DTYPES, KVPart, check_aligned
from fastdeploy_cache.transfer_manager.settings import check_integers, names_checked

MAX_LAYERS = 4000  # a layer's number shares a 32-bit progress word with its task's


@names_checked
@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The model's keys and values, before they are shared out to ranks.

    Args:
        num_layers: the number of layers that keep keys and values.
        num_kv_heads: heads of the whole model. Their number must be a multiple of the number of ranks, or divide it;
            then heads are replicated.
        head_dim: elements of one head's key for one token.
        dtype: what an element is: float32, float16, bfloat16, float8_e4m3, float8_e5m2, int8, uint8 or int4. Of int4
            two elements share a byte.
        value_head_dim: elements of one head's value, where it differs from the key. 0 means that there is no value: the
            keys are the one latent part of multi-head latent attention (`num_kv_heads` 1, `head_dim` latent and rope
            elements together).
        scale_dtype: the dtype of the scales beside quantised keys and values. Without it there are none.
        scale_elements: how many elements of a token's head share a scale. Without it all of them do.
        heads_first: true makes the arrays [blocks, heads, tokens, elements], and false [blocks, tokens, heads,
            elements].
        num_extra_layers: layers of a speculative (MTP) head, behind the others.
        extra_layer_block_ratio: blocks of the extra layers' arrays for each block of the GPU pool, 1 or more.
        device_order: `layer_first` makes an array for each layer and part. `block_first` puts all of a block side by
            side.
        groups: the layers of a hybrid model, by what they keep. Without groups all layers keep everything; extra layers
            always do.

    Raises:
        LayoutError: a size or a combination that cannot be, with the numbers.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    value_head_dim: int | None = None
    scale_dtype: str | None = None
    scale_elements: int | None = None
    heads_first: bool = False
    num_extra_layers: int = 0
    extra_layer_block_ratio: float = 1.0
    device_order: Literal["layer_first", "block_first"] = "layer_first"
    groups: tuple[KVGroup, ...] = ()

    def __post_init__(self) -> None:
        check_integers(self, LayoutError, prefix="layout.")
        for name, least in (("num_layers", 1), ("num_kv_heads", 1), ("head_dim", 1), ("num_extra_layers", 0)):
            if getattr(self, name) < least:
                raise LayoutError(f"layout.{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("dtype", "scale_dtype"):
            value = getattr(self, name)
            if value not in STORAGE_DTYPES and not (name == "scale_dtype" and value is None):
                raise LayoutError(f"layout.{name} is {value!r}; known: {', '.join(STORAGE_DTYPES)}")
        if self.num_layers + self.num_extra_layers > MAX_LAYERS:
            raise LayoutError(f"layout has {self.num_layers} + {self.num_extra_layers} layers; at most {MAX_LAYERS}")
        self._check_value()
        self._check_scales()
        if self.device_order not in ("layer_first", "block_first"):
            raise LayoutError(f"layout.device_order is {self.device_order!r}; use 'layer_first' or 'block_first'")
        ratio = self.extra_layer_block_ratio
        if ratio != 1 and not self.num_extra_layers:
            raise LayoutError(f"layout.extra_layer_block_ratio is {ratio} without layout.num_extra_layers; give both")
        if not 1 <= ratio <= 1024 or (ratio != 1 and self.device_order == "block_first"):
            raise LayoutError(f"layout.extra_layer_block_ratio is {ratio}; use 1 or more, and 1 with block_first")
        if self.groups:
            self._check_groups()

    def _check_groups(self) -> None:
        if self.device_order == "block_first":
            raise LayoutError("layout.device_order is 'block_first' with layout.groups; use 'layer_first'")
        check_groups(self.groups, self.num_layers)
        for index, group in enumerate(self.groups):
            try:
                self._of_group(group)
            except LayoutError as error:
                where, said = f"layout.groups[{index}]", str(error)
                is_own = said.removeprefix("layout.").partition(" ")[0] in KVGroup.__dataclass_fields__
                told = said.replace("layout.", f"{where}.", 1) if is_own else f"{where}: {said}"
                raise LayoutError(told) from error

    def _of_group(self, group: KVGroup) -> KVLayout:
        """The layout of a model whose layers are all like those of a group that is no state."""
        alike: dict[str, Any] = {"groups": (), "num_extra_layers": 0, "extra_layer_block_ratio": 1.0}
        return dataclasses.replace(self, **{**alike, "num_layers": len(group.layers), **group.own_fields()})

    def _check_value(self) -> None:
        if self.value_head_dim is not None and self.value_head_dim < 0:
            raise LayoutError(f"layout.value_head_dim is {self.value_head_dim}; it must not be negative")
        if self.value_head_dim == 0 and self.num_kv_heads != 1:
            raise LayoutError(
                f"layout.value_head_dim is 0 (latent attention) with {self.num_kv_heads} KV heads; "
                "the latent is one head that every rank holds: use num_kv_heads = 1"
            )
        per_stored = PER_STORED.get(self.dtype, 1)
        for dim in (self.head_dim, self.value_head_dim or 0):
            if dim % per_stored:
                raise LayoutError(f"{dim} elements of {self.dtype} do not fill whole bytes; use a multiple of 2")

    def _check_scales(self) -> None:
        if self.scale_dtype in PER_STORED:
            raise LayoutError(f"layout.scale_dtype is {self.scale_dtype!r}; a packed dtype holds no scales")
        if self.scale_elements is None:
            return
        if self.scale_dtype is None:
            raise LayoutError(f"layout.scale_elements is {self.scale_elements} without layout.scale_dtype; give both")
        for dim in (self.head_dim, self.value_head_dim or self.head_dim):
            if self.scale_elements < 1 or dim % self.scale_elements:
                raise LayoutError(f"layout.scale_elements is {self.scale_elements}; it must divide {dim} elements")

    def heads_per_rank(self, tp_size: int) -> int:
        """Heads that each rank holds; one (replicated) where there are fewer heads than ranks."""
        if tp_size < 1:
            raise LayoutError(f"tp_size is {tp_size}; it must be at least 1")
        if self.num_kv_heads % tp_size == 0:
            return self.num_kv_heads // tp_size
        if tp_size % self.num_kv_heads == 0:
            return 1
        raise LayoutError(
            f"transfer.tp_size is {tp_size}, but the model's {self.num_kv_heads} KV heads neither divide by {tp_size} "
            f"ranks nor {tp_size} by {self.num_kv_heads}; use one that divides {self.num_kv_heads}, or a multiple of it"
        )

    def for_rank(self, tp_size: int, block_size: int) -> RankLayout:
        """The share of one rank of `tp_size`, in blocks of `block_size` tokens."""
        if block_size < 1:
            raise LayoutError(f"block_size is {block_size}; it must be at least 1 token")
        parts = self._parts(tp_size, block_size)
        return RankLayout(
            num_layers=self.num_layers + self.num_extra_layers,
            parts=parts,
            num_extra_layers=self.num_extra_layers,
            extra_layer_block_ratio=self.extra_layer_block_ratio,
            device_order=self.device_order,
            rows=rows_of(self.groups, block_size) if self.groups else (),
            layers=self._layers(tp_size, block_size, RankLayer(parts, 0)) if self.groups else (),
        )

    def _layers(self, tp_size: int, block_size: int, extra: RankLayer) -> tuple[RankLayer, ...]:
        rows, by_number = rows_of(self.groups, block_size), dict[int, RankLayer]()
        for index, (group, row) in enumerate(zip(self.groups, row_of_each(self.groups, block_size), strict=True)):
            if group.kind == "state":
                where = f"layout.groups[{index}].parts"
                parts = tuple(part.for_rank(tp_size, f"{where}[{each}]") for each, part in enumerate(group.parts))
                check_aligned(parts)
            else:
                parts = self._of_group(group).for_rank(tp_size, block_size).parts
            layer = RankLayer(parts, rows.index(row))
            by_number |= dict.fromkeys(group.layers, layer)
        return (*(by_number[number] for number in range(self.num_layers)), *(extra,) * self.num_extra_layers)

    def _parts(self, tp_size: int, block_size: int) -> tuple[KVPart, ...]:
        """The arrays of one rank's block in each layer that keeps keys and values by the layout's own fields."""
        heads = self.heads_per_rank(tp_size)
        value_dim = self.head_dim if self.value_head_dim is None else self.value_head_dim
        names = (("key", self.head_dim), ("value", value_dim)) if value_dim else (("latent", self.head_dim),)
        parts = [self._part(name, block_size, heads, dim, self.dtype) for name, dim in names]
        if self.scale_dtype is not None:
            parts += [
                self._part(f"{name}_scale", block_size, heads, dim // (self.scale_elements or dim), self.scale_dtype)
                for name, dim in names
            ]
        check_aligned(parts)
        return tuple(parts)

    def _part(self, name: str, block_size: int, heads: int, dim: int, dtype: str) -> KVPart:
        if self.heads_first:
            return KVPart(name, (heads, block_size, dim), dtype, token_axis=1)
        return KVPart(name, (block_size, heads, dim), dtype)


class Place(NamedTuple):
    """Where the pieces of one part in one layer lie in a rank's KV memory: one for each block, `stride_bytes` apart."""

    segment: int  # of the memory, where that is not in one piece
    offset_bytes: int
    stride_bytes: int
    num_blocks: int


Places = tuple[tuple[Place, ...], ...]  # by layer, by part


@dataclass(frozen=True)
class RankLayer:
    """One layer of a hybrid model: the arrays of a block, or of a state, and the place of its row in
    `RankLayout.rows`."""

    parts: tuple[KVPart, ...]
    row: int


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """One rank's share of a block: `parts` in each of `num_layers` layers, the extra ones (the last) included.

    On the device a rank's KV memory is by `device_order`; `place` says where. In the CPU tier a block is one
    contiguous image: for each layer, its parts one after the other. Of a hybrid model `layers` says what each layer
    has, and a block is what the layers of the full row have, which is the first of `rows`.
    """

    num_layers: int
    parts: tuple[KVPart, ...]
    num_extra_layers: int = 0
    extra_layer_block_ratio: float = 1.0
    device_order: Literal["layer_first", "block_first"] = "layer_first"
    rows: tuple[Row, ...] = ()
    layers: tuple[RankLayer, ...] = ()  # none: all are alike, and of the full row
    num_units: tuple[int, ...] = ()  # of the GPU pools of the rows behind the full one

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's image in the CPU tier; what a copy of it moves."""
        return self.unit_bytes(0) if self.layers else self.num_layers * self.layer_bytes

    def unit_bytes(self, row: int) -> int:
        """Bytes of one unit of a row: in all its layers."""
        return sum(part.num_bytes for layer in self.layers if layer.row == row for part in layer.parts)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the largest checkpoint: the units of all rows behind the full one. 0 where all layers are alike."""
        return sum(row.num_checkpoint_units * self.unit_bytes(index) for index, row in enumerate(self.rows) if index)

    @property
    def num_checkpoint_pages(self) -> int:
        """Blocks of the CPU tier that the largest checkpoint takes there: as many pages, in which it is packed."""
        return -(-self.checkpoint_bytes // self.block_bytes)

    def parts_of(self, layer: int) -> tuple[KVPart, ...]:
        """The arrays of a block in one layer."""
        assert 0 <= layer < self.num_layers
        return self.layers[layer].parts if self.layers else self.parts

    def row_of(self, layer: int) -> int:
        """The place of a layer's row in `rows`: 0 is the full one."""
        return self.layers[layer].row if self.layers else 0

    def num_layer_blocks(self, layer: int, num_gpu_blocks: int) -> int:
        """Blocks or units that a layer's arrays hold beside a GPU pool of `num_gpu_blocks`."""
        if row := self.row_of(layer):
            return self.num_units[row - 1]
        is_extra = layer >= self.num_layers - self.num_extra_layers
        return int(num_gpu_blocks * self.extra_layer_block_ratio) if is_extra else num_gpu_blocks

    def gpu_bytes(self, num_gpu_blocks: int) -> int:
        """Bytes of the KV memory of a GPU pool, that of extra layers and of all rows included."""
        if self.layers:
            return sum(self._array_bytes(layer, num_gpu_blocks) for layer in range(self.num_layers))
        num_main = self.num_layers - self.num_extra_layers
        num_extra_blocks = self.num_layer_blocks(self.num_layers - 1, num_gpu_blocks)
        return self.layer_bytes * (num_main * num_gpu_blocks + self.num_extra_layers * num_extra_blocks)

    def _array_bytes(self, layer: int, num_gpu_blocks: int) -> int:
        """Bytes of all arrays of one layer."""
        return self.num_layer_blocks(layer, num_gpu_blocks) * sum(part.num_bytes for part in self.parts_of(layer))

    def num_gpu_blocks_in(self, memory_bytes: int) -> int:
        """The largest GPU pool whose KV memory fits in so many bytes."""
        num_main, ratio = self.num_layers - self.num_extra_layers, self.extra_layer_block_ratio
        if ratio == 1:
            return memory_bytes // self.block_bytes
        num_blocks = int(memory_bytes / (self.layer_bytes * (num_main + self.num_extra_layers * ratio))) + 2
        while num_blocks and self.gpu_bytes(num_blocks) > memory_bytes:  # the ratio rounds down, some blocks at most
            num_blocks -= 1
        return num_blocks

    def num_cpu_blocks_in(self, memory_bytes: int) -> int:
        """The largest CPU pool that fits in so many bytes."""
        return memory_bytes // self.block_bytes

    def image_offset_bytes(self, layer: int, part: int) -> int:
        """Where a part of a layer begins inside the image of one block, or of one unit of the layer's row."""
        above = layer * self.layer_bytes
        if self.layers:
            same = (each for each in self.layers[:layer] if each.row == self.layers[layer].row)
            above = sum(p.num_bytes for each in same for p in each.parts)
        return above + sum(p.num_bytes for p in self.parts_of(layer)[:part])

    def place(self, layer: int, part: int, num_gpu_blocks: int) -> Place:
        """Where a part's pieces are inside a rank's KV memory of `num_gpu_blocks` blocks."""
        if self.device_order == "block_first":
            return Place(0, self.image_offset_bytes(layer, part), self.block_bytes, num_gpu_blocks)
        num_blocks = self.num_layer_blocks(layer, num_gpu_blocks)
        num_main = min(layer, self.num_layers - self.num_extra_layers)
        above = self.layer_bytes * (num_main * num_gpu_blocks + (layer - num_main) * num_blocks)
        if self.layers:
            above = sum(self._array_bytes(each, num_gpu_blocks) for each in range(layer))
        in_layer = sum(p.num_bytes for p in self.parts_of(layer)[:part]) * num_blocks
        return Place(0, above + in_layer, self.parts_of(layer)[part].num_bytes, num_blocks)

    def places(self, num_gpu_blocks: int) -> Places:
        """`place` for every layer and part."""
        return tuple(
            tuple(self.place(layer, part, num_gpu_blocks) for part in range(len(self.parts_of(layer))))
            for layer in range(self.num_layers)
        )

    def kv_views(
        self, segments: Sequence[np.ndarray[Any, np.dtype[np.uint8]]], places: Places
    ) -> list[dict[str, np.ndarray[Any, np.dtype[Any]]]]:
        """The arrays [blocks, *part.storage_shape] over a rank's KV memory, by layer and part name. Nothing is copied.

        `segments` are the memory's pieces as flat bytes.
        """
        return [
            {
                part.name: np.lib.stride_tricks.as_strided(
                    segments[place.segment][place.offset_bytes :],
                    (place.num_blocks, part.num_bytes),
                    (place.stride_bytes, 1),
                )
                .view(part.storage_dtype)
                .reshape(place.num_blocks, *part.storage_shape)
                for part, place in zip(self.parts_of(layer), in_layer, strict=True)
            }
            for layer, in_layer in enumerate(places)
        ]

    def check_places(self, places: Places, segment_bytes: Sequence[int], num_gpu_blocks: int) -> None:
        """Raise `LayoutError` unless every piece of a GPU pool of so many blocks lies inside its segment."""
        is_other = len(places) != self.num_layers
        if is_other or any(len(each) != len(self.parts_of(layer)) for layer, each in enumerate(places)):
            raise LayoutError(
                f"KV arrays of {len(places)} layers; the layout has {self.num_layers} of {len(self.parts)} parts each"
            )
        for layer, in_layer in enumerate(places):
            for part, place in zip(self.parts_of(layer), in_layer, strict=True):
                inside = 0 <= place.segment < len(segment_bytes) and place.offset_bytes >= 0
                end = place.offset_bytes + (place.num_blocks - 1) * place.stride_bytes + part.num_bytes
                if not inside or place.stride_bytes < part.num_bytes or end > segment_bytes[place.segment]:
                    raise LayoutError(f"layer {layer} {part.name}: {place} leaves its segment of {segment_bytes} bytes")
                if place.num_blocks < self.num_layer_blocks(layer, num_gpu_blocks):
                    needed, what = self.num_layer_blocks(layer, num_gpu_blocks), self._counted_as(layer)
                    raise LayoutError(
                        f"layer {layer} {part.name} has {place.num_blocks} {what}; the GPU pool needs {needed}"
                    )

    def _counted_as(self, layer: int) -> str:
        row = self.row_of(layer)
        return f"units of the row {str(self.rows[row])!r}" if row else "blocks"
