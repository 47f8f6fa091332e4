"""A hybrid model of a story: what its window and its state hold of each rank, and which of it a request reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from fastdeploy_cache import KVGroup, KVLayout, StatePart
from fastdeploy_cache.launch.faults.kv_bytes import Content, Rows
from fastdeploy_cache.launch.faults.story import BLOCK_SIZE
from fastdeploy_cache.requests.tables import RowTable

_REACH_TOKENS: Final = 6  # of the window: a token reads itself, and five before it
HYBRID_LAYOUT: Final = KVLayout(
    num_layers=3,
    num_kv_heads=1,
    head_dim=4,
    dtype="float16",
    groups=(
        KVGroup(kind="full", layers=(0,)),
        KVGroup(kind="state", layers=(1,), parts=(StatePart(name="state", shape=(4,)),)),
        KVGroup(kind="window", reach_tokens=_REACH_TOKENS, layers=(2,)),
    ),
)
NUM_FULL_LAYERS: Final = 1
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def first_read(num_tokens: int) -> int:
    """The first token that the window of the next one reaches."""
    return max(0, num_tokens - _REACH_TOKENS + 1)


class RowBytes:
    """The rows of one rank behind the full one, as its model reads and writes them."""

    def __init__(self, views: Sequence[dict[str, np.ndarray[Any, np.dtype[Any]]]]) -> None:
        state, window = views[1]["state"], views[2].values()
        self._state: Bytes = state.view(np.uint8).reshape(len(state), -1)
        self._window: list[Bytes] = [each.view(np.uint8).reshape(len(each), BLOCK_SIZE, -1) for each in window]
        self.arrays: list[list[Bytes]] = [[self._state], self._window]  # by row

    def write(self, rows: Rows, state: Rows, first: int, units: dict[int, int], slot: int) -> None:
        """Tokens from `first` on are computed: `units` of the window by block, and a slot of the state."""
        self._state[slot] = state[-1, : self._state.shape[1]]
        for token in range(first, len(rows)):
            for part, wanted in self._parts(units[token // BLOCK_SIZE], token, rows):
                part[:] = wanted

    def wrong(self, rows: Rows, state: Rows, units: dict[int, int], slot: int | None) -> list[str]:
        """What the next token would read, and is not what it should be."""
        if slot is None or not np.array_equal(self._state[slot], state[-1, : self._state.shape[1]]):
            return [f"the state in slot {slot}"]
        wrong = list[str]()
        for token in range(first_read(len(rows)), len(rows)):
            unit = units.get(token // BLOCK_SIZE)
            if unit is None or any(not np.array_equal(*pair) for pair in self._parts(unit, token, rows)):
                wrong.append(f"token {token} of the window in unit {unit}")
        return wrong

    def _parts(self, unit: int, token: int, rows: Rows) -> Iterator[tuple[Bytes, Rows]]:
        """Its key and value, and what each should be: what the full layer has not of its row."""
        end = rows.shape[1]
        for array in reversed(self._window):
            part = array[unit, token % BLOCK_SIZE]
            yield part, rows[token, end - len(part) : end]
            end -= len(part)


class HeldRows:
    """What one prompt has of rows, as its user knows it.

    Attributes:
        units: of the window, by block.
        slot: that it writes its state to, if it has one.
        read_slot: in which the state is behind what is computed.
        stops: after how many tokens a piece of the prompt should end.
    """

    def __init__(self) -> None:
        self.units: dict[int, int] = {}
        self.slot: int | None = None
        self.read_slot: int | None = None
        self.stops: tuple[int, ...] = ()

    def take(self, tables: Sequence[RowTable]) -> None:
        """New ones, behind those that it has."""
        state, window = tables
        if state.block_ids:
            (self.slot,) = state.block_ids
        self.units.update(enumerate(window.block_ids, window.first_block))

    def forget(self, num_tokens: int) -> None:
        """What no token behind so many reads is not its own any more."""
        first = first_read(num_tokens // BLOCK_SIZE * BLOCK_SIZE) // BLOCK_SIZE
        for block in [block for block in self.units if block < first]:
            del self.units[block]

    def wrong(self, kv: RowBytes, content: Content, space: str, rank: int, tokens: Sequence[int]) -> list[str]:
        """What the token behind these would read, and is not theirs."""
        if not tokens:
            return []
        rows, state = content.rows(space, rank, tokens), content.rows(f"{space}|state", rank, tokens)
        return kv.wrong(rows, state, self.units, self.read_slot)

    def all_ids(self) -> tuple[set[int], set[int]]:
        """All that it may read or write, by row."""
        return {slot for slot in (self.slot, self.read_slot) if slot is not None}, set(self.units.values())
