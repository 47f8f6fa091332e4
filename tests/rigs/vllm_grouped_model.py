"""A model of several KV cache groups that is arithmetic, under vLLM's own scheduler: windows, chunks, states.

What a layer reads of a token is its own bytes for that prefix, so anything that lies elsewhere gives another token.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

SIZE, HEADS, DIM, VOCABULARY = 16, 2, 4, 1000
_BASE: dict[str, Any] = {"block_size": SIZE, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float16}
_FULL = FullAttentionSpec(**_BASE)
_PAGE = _FULL.page_size_bytes
_STATE_BYTES = 400  # of a page: the rest is padding
_SPECS: dict[str, Any] = {
    "full": _FULL,
    "window": SlidingWindowSpec(**_BASE, sliding_window=40),
    "chunk": ChunkedLocalAttentionSpec(**_BASE, attention_chunk_size=48),
    "state": MambaSpec(
        block_size=SIZE,
        shapes=((_STATE_BYTES // 2,),),
        dtypes=(torch.float16,),
        page_size_padded=_PAGE,
        mamba_cache_mode="align",
    ),
}
Kind = Literal["full", "window", "chunk", "state"]


@functools.lru_cache(100_000)
def _token_bytes(seed: int, number: int) -> bytes:
    noise = np.random.default_rng((seed, number)).integers(0, 2**15, HEADS * 2 * DIM, dtype=np.int16)
    return noise.tobytes()


@functools.lru_cache(10_000)
def _state_bytes(seed: int, number: int) -> bytes:
    return np.random.default_rng((seed, number, 1)).integers(0, 256, _STATE_BYTES, dtype=np.uint8).tobytes()


@functools.lru_cache(100_000)
def _seeds(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """One for each prefix, by its length less one."""
    seeds, seed = [], 0
    for token in tokens:
        seed = zlib.crc32(token.to_bytes(4, "little"), seed)
        seeds.append(seed)
    return tuple(seeds)


class GroupedModel:
    """`kinds`: of vLLM's groups, each of two layers."""

    def __init__(self, *kinds: Kind, retention: int | None = None) -> None:
        """`retention`: as vLLM's `prefix_cache_retention_interval`, which is 0 by default there."""
        self.kinds, self.retention = kinds, retention
        self.has_states = "state" in kinds
        self.layers = [[f"model.layers.{2 * group + each}.attn" for each in range(2)] for group in range(len(kinds))]

    def kv_cache_config(self, num_blocks: int, layout: KVCacheLayout) -> KVCacheConfig:
        """All groups lie over one another in two arrays of blocks."""
        size = 2 * num_blocks * _PAGE
        tensors = [
            KVCacheTensor(size=size, layers=names, layer_stride=num_blocks * _PAGE, block_stride=_PAGE)
            for names in self.layers
        ]
        groups = [KVCacheGroupSpec(names, _SPECS[kind]) for names, kind in zip(self.layers, self.kinds, strict=True)]
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=tensors,
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.retention,
        )

    def caches(self, raw: torch.Tensor, num_blocks: int, layout: KVCacheLayout) -> dict[str, torch.Tensor]:
        """vLLM's views of it, by layer."""
        found: dict[str, torch.Tensor] = {}
        config = self.kv_cache_config(num_blocks, layout)
        for names, kind, tensor in zip(self.layers, self.kinds, config.kv_cache_tensors, strict=True):
            if kind == "state":
                for number, name in enumerate(names):
                    shape, strides = (num_blocks, 1, 1, _STATE_BYTES), (_PAGE, _STATE_BYTES, _STATE_BYTES, 1)
                    found[name] = raw.as_strided(shape, strides, number * num_blocks * _PAGE)
            else:
                views = create_kv_cache_views(raw, _SPECS[kind], num_blocks, layout, tensor)
                found |= dict(zip(names, views, strict=True))
        return found

    def forward(
        self, caches: dict[str, torch.Tensor], rank: int, work: dict[str, tuple[list[int], list[list[int]], int]]
    ) -> dict[str, bytes]:
        """Write what is new, layer by layer; returns all that each request has read."""
        read = dict.fromkeys(work, b"")
        for group, (names, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            for number, name in enumerate(names):
                cache, salt = caches[name], 100 * rank + 10 * group + number
                for request_id, (tokens, tables, first) in work.items():
                    seeds = _seeds(tuple(tokens))
                    if kind == "state":
                        self._step_state(cache, salt, seeds, tables[group], first)
                    else:
                        read[request_id] += self._attend(cache, salt, seeds, tables[group], first, kind)
        return read

    @staticmethod
    def _step_state(cache: torch.Tensor, salt: int, seeds: Sequence[int], table: list[int], first: int) -> None:
        """The state in front of the step is in the block of its last token; the one behind it goes to that of the new
        ones'."""
        if first:
            found = cache[table[(first - 1) // SIZE]].numpy().tobytes()
            assert found == _state_bytes(seeds[first - 1], salt), f"another state is read behind {first} tokens"
        target = cache[table[(len(seeds) - 1) // SIZE]]
        after = np.frombuffer(_state_bytes(seeds[-1], salt), np.int8)
        target[...] = torch.from_numpy(after.copy()).view(target.shape)

    @staticmethod
    def _attend(
        cache: torch.Tensor, salt: int, seeds: Sequence[int], table: list[int], first: int, kind: Kind
    ) -> bytes:
        words, read = cache.view(torch.int16), b""
        for position in range(first, len(seeds)):
            new = np.frombuffer(_token_bytes(seeds[position], salt), np.int16).copy().reshape(HEADS, 2 * DIM)
            words[table[position // SIZE], :, position % SIZE] = torch.from_numpy(new)
        last_reads = _read_from(kind, len(seeds) - 1)
        for position in range(_read_from(kind, first), len(seeds)):
            block = table[position // SIZE]
            assert block, f"token {position} of a {kind} is read, and its block has gone"
            found = words[block, :, position % SIZE].numpy().tobytes()
            assert found == _token_bytes(seeds[position], salt), f"another token {position} of a {kind} is read"
            read += found if position >= last_reads else b""
        return read

    @staticmethod
    def overwrite(memory: np.ndarray, num_blocks: int, block_ids: list[int]) -> None:
        """Write in these blocks, of all groups."""
        memory[: 2 * num_blocks * _PAGE].reshape(2, num_blocks, _PAGE)[:, block_ids] = 255

    def expected_output(self, prompt: Sequence[int], num_tokens: int, tp_size: int) -> list[int]:
        """What the model says where nothing is cached, whatever the steps are."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.sampled(b"".join(self._whole(tokens, rank) for rank in range(tp_size))))
        return tokens[len(prompt) :]

    def _whole(self, tokens: Sequence[int], rank: int) -> bytes:
        seeds, read = _seeds(tuple(tokens)), b""
        for group, kind in enumerate(self.kinds):
            for number in range(2):
                if kind != "state":
                    salt = 100 * rank + 10 * group + number
                    positions = range(_read_from(kind, len(tokens) - 1), len(tokens))
                    read += b"".join(_token_bytes(seeds[position], salt) for position in positions)
        return read

    @staticmethod
    def sampled(read: bytes) -> int:
        """The next token follows from what the last one reads."""
        return zlib.crc32(read) % (VOCABULARY - 10) + 5


def _read_from(kind: Kind, token: int) -> int:
    """The first that a token reads."""
    return {"full": 0, "window": max(0, token - 39), "chunk": token // 48 * 48}[kind]
