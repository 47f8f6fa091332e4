"""vLLM's KV cache groups as rows of a layout. Knows vLLM by duck typing only.

vLLM makes groups of as many layers each, so layers of one kind and reach may be in several groups, and each group has a
block table of its own. All groups lie over one another in one allocation: the block of an id is the same bytes for a
layer of each group. So each group but the full one is a row whose units have ids of their own, and every id of vLLM's
is one of each row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.kv.groups import GroupKind, KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.parts import STORAGE_DTYPES

FULL_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")  # by name: their subclasses give blocks away early, or add sinks
_WINDOWS = ("SlidingWindowSpec", "SlidingWindowMLASpec")
_CHUNK, _STATE = "ChunkedLocalAttentionSpec", "MambaSpec"

Tables = Sequence[Sequence[int]]  # a request's blocks, by group and position


class GroupMap(NamedTuple):
    """Which of vLLM's groups is what: numbers of groups."""

    full: int
    rows: tuple[int, ...]  # by row behind the full one
    states: frozenset[int]  # of `rows`, those of states

    @classmethod
    def of(cls, groups: Sequence[Any]) -> GroupMap:
        """The same of vLLM's groups, of which one keeps everything."""
        kinds = [kind_of(group.kv_cache_spec) for group in groups]
        others = [number for number, kind in enumerate(kinds) if kind != "full"]
        states = frozenset(number for number in others if kinds[number] == "state")
        return cls(kinds.index("full"), tuple(others), states)


def kind_of(spec: Any) -> GroupKind | None:
    """What a group's layers keep; None: it is not known here."""
    name = type(spec).__name__
    if name in FULL_SPECS:
        return "full"
    if name in _WINDOWS:
        return "window"
    return "chunk" if name == _CHUNK else "state" if name == _STATE else None


def reach_of(spec: Any) -> int:
    """A window's or a chunk's tokens; 0 of the others."""
    kind = kind_of(spec)
    return int(spec.sliding_window if kind == "window" else spec.attention_chunk_size if kind == "chunk" else 0)


def layout_of(groups: Sequence[Any]) -> KVLayout:
    """A block of a layer is one piece of memory in vLLM, keys and values together: one part, one row for each token.

    A state is one part, too, without the padding that makes it as long as a block.
    """
    full = next(group for group in groups if kind_of(group.kv_cache_spec) == "full")
    dtype, width = _token_row(full.kv_cache_spec)
    names = layer_order(name for group in groups for name in group.layer_names)
    base = KVLayout(num_layers=len(names), num_kv_heads=1, head_dim=width, dtype=dtype, value_head_dim=0)
    if len(groups) == 1:
        return base
    number_of = {name: number for number, name in enumerate(names)}
    made = tuple([_group_of(group, number_of) for group in groups])
    return KVLayout(num_layers=len(names), num_kv_heads=1, head_dim=width, dtype=dtype, value_head_dim=0, groups=made)


def _group_of(group: Any, number_of: Mapping[str, int]) -> KVGroup:
    spec, kind = group.kv_cache_spec, kind_of(group.kv_cache_spec)
    assert kind is not None, "groups are checked before"
    layers, own = tuple(sorted(number_of[name] for name in group.layer_names)), kind != "full"
    if kind == "state":
        parts = (StatePart(name="state", shape=(state_bytes(spec),), dtype="uint8"),)
        return KVGroup(kind=kind, layers=layers, parts=parts, own_units=own)
    dtype, width = _token_row(spec)
    return KVGroup(kind=kind, layers=layers, reach_tokens=reach_of(spec), head_dim=width, dtype=dtype, own_units=own)


def state_bytes(spec: Any) -> int:
    """Bytes of one state of one layer, without padding."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))


def _token_row(spec: Any) -> tuple[str, int]:
    """The dtype of a block, and how many elements it has for each token."""
    dtype, item_bytes = str(spec.dtype).removeprefix("torch."), spec.dtype.itemsize
    if dtype not in STORAGE_DTYPES:
        dtype, item_bytes = "uint8", 1
    row_bytes, rest = divmod(spec.page_size_bytes, spec.block_size)
    if rest or row_bytes % item_bytes:
        raise ConfigError(f"a block of {spec.page_size_bytes} bytes has no whole rows for {spec.block_size} tokens")
    return dtype, row_bytes // item_bytes


def layer_order(names: Iterable[str]) -> list[str]:
    """Layers in the order in which the model runs: loads fill the first first."""
    return sorted(names, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name))
