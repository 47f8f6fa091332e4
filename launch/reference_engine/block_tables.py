"""The blocks that requests have of the cache: of the full row alone, or of several rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fastdeploy_cache import Match, PrefixCacheManager
from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.reference_engine.hybrid_spec import STATE, WINDOW
from fastdeploy_cache.launch.reference_engine.paged_kv import Int32Array, SequenceChunk

Steps = Sequence[tuple[Any, list[int], int]]  # see `PrefixCacheManager.step`


@dataclass
class RequestUnits:
    """What a request of the hybrid model has beside full KV.

    Attributes:
        window: its blocks from the first token on; those that nothing reads any more may be others' by now.
        read_slot: where the state is, behind what is computed; None: at the very beginning.
        write_slot: where the next step leaves it.
        stops: where a prompt's pieces have to end.
    """

    window: list[int] = field(default_factory=list)
    read_slot: int | None = None
    write_slot: int | None = None
    stops: tuple[int, ...] = ()


class BlockTables(Protocol):
    """How an engine takes blocks. One thread."""

    def admitted(self, generation: Generation, match: Match) -> None:
        """It begins with what its match has found."""
        ...

    def num_first_blocks(self, num_missing: int) -> int:
        """How many of the blocks that a prompt lacks it gets when it is admitted."""
        ...

    def allocate(self, generation: Generation, num_blocks: int, *, ahead_of_loads: bool = False) -> Any:
        """So many more, for `add`. Raises `OutOfBlocksError`."""
        ...

    def add(self, generation: Generation, new: Any) -> None:
        """They are behind those that it has."""
        ...

    def step(self, steps: Steps) -> list[Any]:
        """See `PrefixCacheManager.step`; an answer that is no error goes to `add`."""
        ...

    def end_of_piece(self, generation: Generation, end: int) -> int:
        """Where a piece that is to end after so many tokens ends."""
        ...

    def chunk(self, generation: Generation, token_ids: Int32Array) -> SequenceChunk:
        """Its next tokens, with all that the model reads and writes of the cache."""
        ...

    def computed(self, generation: Generation) -> None:
        """A step has computed up to `num_computed_tokens`, and it is not committed."""
        ...

    def is_committed(self, generation: Generation, token_id: int | None) -> bool:
        """Whether a step that has sampled this is told by a commit alone, and asks for no room."""
        ...


class FullTables:
    """All layers keep everything."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self._cache = cache
        self.step = cache.step

    def admitted(self, generation: Generation, match: Match) -> None:
        """Nothing more than the generation notes itself."""

    def num_first_blocks(self, num_missing: int) -> int:
        """All."""
        return num_missing

    def allocate(self, generation: Generation, num_blocks: int, *, ahead_of_loads: bool = False) -> list[int]:
        """See `BlockTables`."""
        return self._cache.allocate(generation.request, num_blocks, ahead_of_loads=ahead_of_loads)

    def add(self, generation: Generation, new: list[int]) -> None:
        """See `BlockTables`."""
        generation.block_ids += new

    def end_of_piece(self, generation: Generation, end: int) -> int:  # noqa: ARG002 (see `BlockTables`)
        """Anywhere."""
        return end

    def chunk(self, generation: Generation, token_ids: Int32Array) -> SequenceChunk:
        """See `BlockTables`."""
        return SequenceChunk(token_ids, generation.num_computed_tokens, _as_array(generation.block_ids))

    def computed(self, generation: Generation) -> None:
        """Nothing: the commit says all."""

    def is_committed(self, generation: Generation, token_id: int | None) -> bool:  # noqa: ARG002 (see `BlockTables`)
        """One for another instance."""
        return bool(generation.num_offered_tokens)


class RowTables:
    """One window, and one state. A prompt gets blocks piece by piece: it gives some of the window's back meanwhile."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self._cache = cache
        self.step = cache.rows.step

    def admitted(self, generation: Generation, match: Match) -> None:
        """See `BlockTables`."""
        window, state = match.tables[WINDOW], match.tables[STATE]
        generation.rows = RequestUnits(
            window=[0] * window.first_block + list(window.block_ids),
            read_slot=state.block_ids[0] if state.block_ids else None,
            stops=match.checkpoint_tokens,
        )

    def num_first_blocks(self, num_missing: int) -> int:  # noqa: ARG002 (see `BlockTables`)
        """None: each step asks for its own."""
        return 0

    def allocate(self, generation: Generation, num_blocks: int, *, ahead_of_loads: bool = False) -> Any:
        """See `BlockTables`."""
        return self._cache.rows.allocate(generation.request, num_blocks, ahead_of_loads=ahead_of_loads)

    def add(self, generation: Generation, new: Any) -> None:
        """See `BlockTables`."""
        rows = self._rows(generation)
        generation.block_ids += new.block_ids
        rows.window += new.tables[WINDOW].block_ids
        if new.tables[STATE].block_ids:
            (rows.write_slot,) = new.tables[STATE].block_ids

    def end_of_piece(self, generation: Generation, end: int) -> int:
        """Where a state is wanted, if that comes before."""
        stops = self._rows(generation).stops
        return min([end, *[stop for stop in stops if generation.num_computed_tokens < stop]])

    def computed(self, generation: Generation) -> None:
        """The state is in its slot. It becomes a snapshot where a block ends, if one is wanted or an answer goes on."""
        rows, num_tokens = self._rows(generation), generation.num_computed_tokens
        assert rows.write_slot is not None
        rows.read_slot = rows.write_slot
        is_answer = num_tokens > generation.request.num_prompt_tokens
        if num_tokens % self._cache.config.block_size == 0 and (num_tokens in rows.stops or is_answer):
            fresh = self._cache.rows.snapshot(generation.request, num_tokens, [rows.write_slot])
            if fresh is not None:
                (rows.write_slot,) = fresh

    def chunk(self, generation: Generation, token_ids: Int32Array) -> SequenceChunk:
        """See `BlockTables`."""
        rows, start = self._rows(generation), generation.num_computed_tokens
        assert rows.write_slot is not None
        slots = rows.read_slot, rows.write_slot
        return SequenceChunk(token_ids, start, _as_array(generation.block_ids), _as_array(rows.window), slots)

    def is_committed(self, generation: Generation, token_id: int | None) -> bool:  # noqa: ARG002 (see `BlockTables`)
        """A piece of a prompt: a step would ask for the blocks of all the prompt."""
        return token_id is None

    @staticmethod
    def _rows(generation: Generation) -> RequestUnits:
        assert isinstance(generation.rows, RequestUnits)
        return generation.rows


def _as_array(ids: list[int]) -> Int32Array:
    return np.array(ids, dtype=np.int32)


def new_tables(cache: PrefixCacheManager) -> BlockTables:
    """Those that the cache's layout asks for."""
    layout = cache.config.layout
    return RowTables(cache) if layout is not None and layout.groups else FullTables(cache)
