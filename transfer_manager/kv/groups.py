"""Layers with one kind of memory, and which blocks of it a request reads that goes on at a block boundary.

The kinds are those of current models: a sliding window (Gemma 3, gpt-oss), chunked attention (Llama 4), and a recurrent
state (Qwen3-Next, Nemotron-H), beside layers that keep everything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastdeploy_cache.errors import LayoutError, counted
from fastdeploy_cache.transfer_manager.kv.parts import PER_STORED, STORAGE_DTYPES, KVPart
from fastdeploy_cache.transfer_manager.settings import check_integers, names_checked

GroupKind = Literal["full", "window", "chunk", "state"]
GROUP_KINDS: tuple[GroupKind, ...] = ("full", "window", "chunk", "state")
_WITH_REACH = ("window", "chunk")


@names_checked
@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One array of a layer's recurrent state, of the whole model.

    Args:
        name: what the array is called, such as `conv` or `ssm`.
        shape: its elements.
        dtype: what an element is, as in `layout.dtype`.
        split_axis: the dimension of `shape` that is shared out to the ranks. Without it each rank has the whole array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    split_axis: int | None = None

    def for_rank(self, tp_size: int, where: str) -> KVPart:
        """One rank's share. Raises `LayoutError`, which names the part by `where`, if it cannot be shared out."""
        if self.split_axis is None:
            return KVPart(self.name, self.shape, self.dtype, token_axis=None)
        shape, axis = list(self.shape), self.split_axis
        if shape[axis] % tp_size:
            raise LayoutError(
                f"{where}.shape is {list(self.shape)} with split_axis {axis}, but its {shape[axis]} elements there do "
                f"not divide by {counted(tp_size, 'rank')}; use a transfer.tp_size that divides them"
            )
        shape[axis] //= tp_size
        return KVPart(self.name, tuple(shape), self.dtype, token_axis=None)


@names_checked
@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers of a hybrid model that have one kind of memory.

    Args:
        kind: `full` keeps the keys and values of every token. `window` keeps those of the last tokens. `chunk` keeps
            those since the last multiple of `reach_tokens`. `state` keeps one recurrent state for all tokens before.
        layers: the numbers of its layers in the model's order, the first of the model being 0.
        reach_tokens: of a window, its tokens, the one that is computed included; of a chunk, its tokens.
        num_kv_heads: as in `layout`, where these layers have other heads.
        head_dim: as in `layout`, where these layers have other heads.
        value_head_dim: as in `layout`, where these layers have other heads.
        dtype: as in `layout`, where these layers have another one.
        parts: of a state alone, its arrays in one layer.
        own_units: its units have ids of their own, as in vLLM. Else all groups of one kind and reach share theirs.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    reach_tokens: int = 0
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    dtype: str | None = None
    parts: tuple[StatePart, ...] = ()
    own_units: bool = False

    def own_fields(self) -> dict[str, int | str]:
        """What of attention it says by itself."""
        names = ("num_kv_heads", "head_dim", "value_head_dim", "dtype")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Row:
    """All groups of one kind and reach: they always hold the same positions. Immutable. A group whose units have ids of
    their own is a row by itself, with a `number` from 1 on.

    A *unit* is one block of a window or chunk row, or one state. The state at a boundary is held at the block before
    it.
    """

    kind: GroupKind
    reach_tokens: int
    block_size: int
    number: int = 0

    def __str__(self) -> str:
        name = f"{self.kind} {self.reach_tokens}" if self.kind in _WITH_REACH else self.kind
        return f"{name} #{self.number}" if self.number else name

    def first_block(self, end: int) -> int:
        """The first block that a request reads of this row where it goes on behind `end` blocks; it reads from there
        up to `end`. Where that is `end` itself, it reads none."""
        if self.kind == "full":
            return 0
        if self.kind == "state":
            return max(0, end - 1)
        end_tokens = end * self.block_size
        if self.kind == "chunk":
            return end_tokens // self.reach_tokens * self.reach_tokens // self.block_size
        return max(0, end_tokens - self.reach_tokens + 1) // self.block_size

    def num_units_at(self, end: int) -> int:
        """How many units of it a request reads that goes on behind `end` blocks."""
        return end - self.first_block(end)

    @property
    def num_checkpoint_units(self) -> int:
        """Units that a checkpoint holds at most; 0 of the full row, which checkpoints leave to the tree."""
        if self.kind == "full":
            return 0
        if self.kind == "state":
            return 1
        behind = 1 if self.kind == "window" else math.gcd(self.reach_tokens, self.block_size)
        return -(-(self.reach_tokens - behind) // self.block_size)

    @property
    def num_request_units(self) -> int:
        """Units that a running request needs: what it reads, the block that is computed, and the next one, which
        it gets before it has committed that; or two states, of which one may be a snapshot while the other goes on.

        A row of which nothing is read at a boundary keeps the block behind the newest snapshot all the same, until
        that is a checkpoint."""
        return 2 if self.kind == "state" else max(1, self.num_checkpoint_units) + 2

    @property
    def num_least_units(self) -> int:
        """Units without which one request alone may not come to its end: it keeps the checkpoint that it has made until
        its window lies behind that."""
        return self.num_request_units + (0 if self.kind == "state" else self.num_checkpoint_units)


def row_of_each(groups: Sequence[KVGroup], block_size: int) -> list[Row]:
    """The row of each group."""
    rows, num_own = list[Row](), Counter[tuple[str, int]]()
    for group in groups:
        shape = group.kind, group.reach_tokens
        num_own[shape] += group.own_units
        rows.append(Row(*shape, block_size, num_own[shape] if group.own_units else 0))
    return rows


def rows_of(groups: Sequence[KVGroup], block_size: int) -> tuple[Row, ...]:
    """The full row, then the others in the order in which their first groups stand."""
    return tuple(dict.fromkeys([Row("full", 0, block_size), *row_of_each(groups, block_size)]))


def check_groups(groups: Sequence[KVGroup], num_layers: int) -> None:
    """Raise `LayoutError` for what no groups of a model of so many layers can be."""
    owner: dict[int, int] = {}
    _check_members(groups, KVGroup, "layout.groups")
    for index, group in enumerate(groups):
        where = f"layout.groups[{index}]"
        check_integers(group, LayoutError, prefix=f"{where}.")
        if group.kind not in GROUP_KINDS:
            raise LayoutError(f"{where}.kind is {group.kind!r}; use one of {', '.join(GROUP_KINDS)}")
        _check_reach(group, where)
        if group.own_units is not False and (group.own_units is not True or group.kind == "full"):
            raise LayoutError(
                f"{where}.own_units is {group.own_units!r} with kind {group.kind!r}; use true or false, and false with "
                "'full', of which all groups have the same blocks"
            )
        if not isinstance(group.layers, tuple | list) or not group.layers:
            raise LayoutError(f"{where}.layers is {group.layers!r}; give the numbers of its layers")
        for layer in group.layers:
            if type(layer) is not int or not 0 <= layer < num_layers:
                raise LayoutError(f"{where}.layers has {layer!r}; the layers are 0 to {num_layers - 1}")
            if layer in owner:
                raise LayoutError(
                    f"{where}.layers has layer {layer}, which layout.groups[{owner[layer]}].layers has already; give "
                    "each layer to one group"
                )
            owner[layer] = index
        _check_parts(group, where)
    missing = next((layer for layer in range(num_layers) if layer not in owner), None)
    if missing is not None:
        raise LayoutError(f"layout.groups leave out layer {missing} of {num_layers}; give each layer to one group")
    if all(group.kind != "full" for group in groups):
        kinds = ", ".join(group.kind for group in groups)
        raise LayoutError(
            f"layout.groups has kinds {kinds}, and none is 'full'; declare a model of windows alone as full, without "
            "groups. One of states alone cannot be cached"
        )


def _check_members(members: object, kind: type, where: str) -> None:
    if not isinstance(members, tuple | list) or not all(isinstance(each, kind) for each in members):
        raise LayoutError(f"{where} is {members!r:.120}; give a tuple of {kind.__name__}")


def _check_reach(group: KVGroup, where: str) -> None:
    if group.kind in _WITH_REACH and not 1 <= group.reach_tokens < 2**31:
        raise LayoutError(
            f"{where}.reach_tokens is {group.reach_tokens}; give the {group.kind}'s tokens, 1 or more, below 2**31"
        )
    if group.kind not in _WITH_REACH and group.reach_tokens:
        raise LayoutError(f"{where}.reach_tokens is {group.reach_tokens} with kind {group.kind!r}; leave it out")


def _check_parts(group: KVGroup, where: str) -> None:
    _check_members(group.parts, StatePart, f"{where}.parts")
    if group.kind != "state":
        if group.parts:
            raise LayoutError(f"{where}.parts is given with kind {group.kind!r}; only a state has parts")
        return
    if not group.parts:
        raise LayoutError(f"{where}.parts is missing; give the arrays of the state in one layer")
    if own := group.own_fields():
        raise LayoutError(f"{where}.{next(iter(own))} is given with kind 'state'; a state is described by its parts")
    if len({part.name for part in group.parts}) < len(group.parts):
        names = ", ".join(part.name for part in group.parts)
        raise LayoutError(f"{where}.parts are called {names}; give each a name of its own")
    for index, part in enumerate(group.parts):
        _check_part(part, f"{where}.parts[{index}]")


def _check_part(part: StatePart, where: str) -> None:
    check_integers(part, LayoutError, prefix=f"{where}.")
    if not isinstance(part.shape, tuple | list):
        raise LayoutError(f"{where}.shape is {part.shape!r}; give sizes of 1 or more")
    shape = list(part.shape)
    if part.dtype not in STORAGE_DTYPES or part.dtype in PER_STORED:
        known = ", ".join(dtype for dtype in STORAGE_DTYPES if dtype not in PER_STORED)
        raise LayoutError(f"{where}.dtype is {part.dtype!r}; use one of {known}")
    if not shape or any(type(size) is not int or size < 1 for size in shape):
        raise LayoutError(f"{where}.shape is {shape}; give sizes of 1 or more")
    if part.split_axis is not None and not 0 <= part.split_axis < len(shape):
        raise LayoutError(f"{where}.split_axis is {part.split_axis}; shape {shape} has no such dimension")
