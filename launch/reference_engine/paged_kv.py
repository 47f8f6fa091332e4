"""KV blocks in memory given from outside, read and written by block id.

Every array [num_blocks, block_size, kv_heads, head_dim] is used as a table of rows of head_dim floats:
row ((block_id * block_size) + offset) * kv_heads + head. One list of row numbers per chunk then serves
all layers and ranks, and one gather yields the contiguous [kv_heads, tokens, head_dim] of attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle, share_array
from fastdeploy_cache.launch.reference_engine.weight_cache import Float32Array
from fastdeploy_cache.launch.reference_engine.weights import ModelSpec

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class KVShard:
    """One rank's KV memory: per layer a key and a value array.

    Each is float32 [num_blocks, block_size, kv_heads_of_rank, head_dim], C-contiguous and writable; or a Paddle tensor
    on a GPU of its rows, [num_blocks * block_size * kv_heads_of_rank, head_dim], and then the two counts are given.
    Of R ranks, rank r holds the kv heads from r * num_kv_heads / R on. The memory must outlive the model.

    Of a hybrid model, layers that keep a state have None there, and in `states` by their number a float32 array
    [num_slots, kv_heads_of_rank, head_dim, head_dim]. The last layer keeps everything.
    """

    keys: Sequence[Any]
    values: Sequence[Any]
    num_blocks: int = 0
    block_size: int = 0
    states: Mapping[int, Float32Array] = field(default_factory=dict)


@dataclass(frozen=True)
class SequenceChunk:
    """The next tokens of one sequence.

    Attributes:
        token_ids: int32 [n], n >= 1.
        start: position of the first of them; the KV of positions 0..start-1 is in the blocks already.
        block_ids: int32 [>= ceil((start + n) / block_size)], the sequence's blocks in order. Blocks
            written here may be in no other chunk of the same call.
        window: of a hybrid model, the blocks of the layers that see a window; those in front of it are not read.
        slots: likewise, where states are in front of the chunk (None: at the very beginning) and go to.
    """

    token_ids: Int32Array
    start: int
    block_ids: Int32Array
    window: Int32Array | None = None
    slots: tuple[int | None, int] | None = None

    @property
    def end(self) -> int:
        """Number of tokens of the sequence after this chunk."""
        return self.start + len(self.token_ids)


class PagedKV:
    """The shards as Paddle tensors over the same memory.

    Raises:
        ValueError: shards of a wrong number, shape, dtype or layout.
        ModelLoadError: this Paddle cannot share memory.
    """

    def __init__(self, shards: Sequence[KVShard], spec: ModelSpec) -> None:
        self._paddle = import_paddle()
        if not 1 <= len(shards) <= spec.num_kv_heads or spec.num_kv_heads % len(shards):
            raise ValueError(f"{len(shards)} ranks cannot share {spec.num_kv_heads} kv heads evenly")
        self.num_ranks = len(shards)
        self.kv_heads_per_rank = spec.num_kv_heads // len(shards)
        first = shards[0]
        on_gpu = first.num_blocks > 0
        array = None if on_gpu else next(keys for keys in reversed(first.keys) if keys is not None)
        self.num_blocks: int = first.num_blocks if array is None else array.shape[0]
        self.block_size: int = first.block_size if array is None else array.shape[1]
        expected = (self.num_blocks, self.block_size, self.kv_heads_per_rank, spec.head_dim)
        for shard in shards:
            if (len(shard.keys), len(shard.values)) != (spec.num_layers, spec.num_layers):
                raise ValueError(f"a shard has {len(shard.keys)} key arrays, expected {spec.num_layers}")
            for array in () if on_gpu else (*shard.keys, *shard.values):
                if array is not None:
                    _check_array(array, (array.shape[0] if shard.states else expected[0], *expected[1:]))
        self._keys, self._values = (
            [
                [
                    array if on_gpu or array is None else share_array(array.reshape(-1, spec.head_dim))
                    for array in arrays
                ]
                for arrays in side
            ]
            for side in ([shard.keys for shard in shards], [shard.values for shard in shards])
        )
        self._states = [shard.states for shard in shards]

    def read_rows(self, chunk: SequenceChunk) -> Any:
        """Rows of all tokens 0..end-1, head by head: an int64 tensor [kv_heads_of_rank * end]."""
        return self._rows(chunk.block_ids, 0, chunk.end).T.reshape([-1])

    def window_rows(self, chunk: SequenceChunk, first: int) -> Any:
        """The same of tokens first..end-1 in the layers that see a window."""
        return self._rows(_window(chunk), first, chunk.end).T.reshape([-1])

    def write_rows(self, chunks: Sequence[SequenceChunk], *, of_window: bool = False) -> Any:
        """Rows of the chunks' own tokens, token by token: an int64 tensor [tokens * kv_heads_of_rank]."""
        tables = [_window(chunk) if of_window else chunk.block_ids for chunk in chunks]
        rows = [self._rows(table, chunk.start, chunk.end) for table, chunk in zip(tables, chunks, strict=True)]
        return self._paddle.concat([each.reshape([-1]) for each in rows])

    def write(self, rank: int, layer: int, rows: Any, key: Any, value: Any) -> None:
        """Store float32 [tokens, kv_heads_of_rank, head_dim]; other processes see it at once."""
        shape = [-1, key.shape[-1]]
        self._paddle.scatter_(self._keys[rank][layer], rows, key.reshape(shape))
        self._paddle.scatter_(self._values[rank][layer], rows, value.reshape(shape))

    def read(self, rank: int, layer: int, rows: Any) -> tuple[Any, Any]:
        """Copies of key and value, each [kv_heads_of_rank, end, head_dim]."""
        shape = [self.kv_heads_per_rank, -1, self._keys[rank][layer].shape[-1]]
        key = self._paddle.gather(self._keys[rank][layer], rows).reshape(shape)
        return key, self._paddle.gather(self._values[rank][layer], rows).reshape(shape)

    def _rows(self, table: Int32Array, first: int, end: int) -> Any:
        positions = np.arange(first, end)
        blocks = np.asarray(table, dtype=np.int64)[positions // self.block_size]
        tokens = (blocks * self.block_size + positions % self.block_size) * self.kv_heads_per_rank
        return self._paddle.to_tensor(tokens[:, None] + np.arange(self.kv_heads_per_rank))

    def read_state(self, layer: int, slot: int | None) -> Float32Array:
        """A copy of the state in a slot, of all heads; of zeros where there is none."""
        parts = [np.zeros_like(states[layer][0]) if slot is None else states[layer][slot] for states in self._states]
        return np.concatenate(parts)

    def write_state(self, layer: int, slot: int, state: Float32Array) -> None:
        """Store it; other processes see it at once."""
        for states, part in zip(self._states, np.split(state, self.num_ranks), strict=True):
            states[layer][slot] = part

    def check(self, chunk: SequenceChunk) -> None:
        """Refuse a chunk whose tokens have no place in the blocks.

        Raises:
            ValueError: no tokens, a negative start, too few blocks or an unknown block id.
        """
        if len(chunk.token_ids) == 0 or chunk.start < 0:
            raise ValueError(f"a chunk needs >= 1 tokens from >= 0, got {len(chunk.token_ids)} from {chunk.start}")
        used = np.asarray(chunk.block_ids)[: -(-chunk.end // self.block_size)]
        if len(used) * self.block_size < chunk.end:
            raise ValueError(f"{len(used)} blocks of {self.block_size} tokens cannot hold {chunk.end} tokens")
        if used.min() < 0 or used.max() >= self.num_blocks:
            raise ValueError(f"block ids {used.min()}..{used.max()} are outside 0..{self.num_blocks - 1}")


def _window(chunk: SequenceChunk) -> Int32Array:
    assert chunk.window is not None, "a chunk of another model"
    return chunk.window


def _check_array(array: Float32Array, expected: tuple[int, ...]) -> None:
    found = (array.shape, array.dtype == np.float32, array.flags.c_contiguous and array.flags.writeable)
    if found != (expected, True, True):
        raise ValueError(
            f"a KV array is {array.dtype} {array.shape}, expected writable C-contiguous float32 {expected}"
        )
