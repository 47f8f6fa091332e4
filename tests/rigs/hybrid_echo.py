"""An engine whose model reads its context back from full blocks, a window and a state of the cache."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from fastdeploy_cache import CacheConfig, KVGroup, KVLayout, PrefixCacheManager, StatePart
from fastdeploy_cache.launch.reference_engine.engine import Engine, EngineSettings
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from tests.rigs.echo_engine import EOS, SIZE, VOCABULARY, next_token

REACH = 6
LAYOUT = KVLayout(
    num_layers=3,
    num_kv_heads=1,
    head_dim=1,
    dtype="float32",
    groups=(
        KVGroup(kind="full", layers=(0,)),
        KVGroup(kind="window", layers=(1,), reach_tokens=REACH),
        KVGroup(kind="state", layers=(2,), parts=(StatePart(name="state", shape=(1,), dtype="float32"),)),
    ),
)


def state_of(tokens: Sequence[int]) -> float:
    """Behind these tokens."""
    return float(zlib.crc32(np.array(tokens, np.int32).tobytes()) % 9_999)


class HybridEchoModel:
    """What comes next depends on every key of the full layer. What the others hold has to be right, or it fails."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        full, window, state = cache.ranks.kv_views(0)
        self._full, self._window, self._state = full["key"], window["key"], state["state"]
        for array in (self._full, self._window, self._state):
            array[:] = np.nan
        self.num_computed_tokens = 0

    def forward(self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None]) -> np.ndarray:
        before_layer(0)
        logits = np.zeros((len(chunks), VOCABULARY), np.float32)
        for row, chunk in zip(logits, chunks, strict=True):
            self.num_computed_tokens += len(chunk.token_ids)
            context = self._context(chunk)
            row[next_token(context)] = 1.0
        return logits

    def _context(self, chunk: SequenceChunk) -> tuple[int, ...]:
        assert chunk.window is not None and chunk.slots is not None
        new = np.arange(chunk.start, chunk.end)
        for array, table in ((self._full, chunk.block_ids), (self._window, chunk.window)):
            array[table[new // SIZE], new % SIZE, 0, 0] = chunk.token_ids
        positions = np.arange(chunk.end)
        found = self._full[chunk.block_ids[positions // SIZE], positions % SIZE, 0, 0].astype(int)
        near = positions[max(0, chunk.start - REACH + 1) :]
        seen = self._window[chunk.window[near // SIZE], near % SIZE, 0, 0].astype(int)
        assert list(seen) == list(found[near]), "another window"
        before, after = chunk.slots
        assert (before is None) == (chunk.start == 0)
        if before is not None:
            assert self._state[before, 0] == state_of(found[: chunk.start].tolist()), "another state"
        self._state[after, 0] = state_of(found.tolist())
        return tuple(found.tolist())


def make_hybrid(
    num_gpu: int, num_cpu: int, units: tuple[int, int], max_running: int = 4
) -> tuple[PrefixCacheManager, Engine, HybridEchoModel]:
    """An engine over the real cache, with `units` of the window and the state."""
    config = CacheConfig(
        load_policy="always", block_size=SIZE, num_gpu_blocks=num_gpu, num_cpu_blocks=num_cpu, layout=LAYOUT,
        num_gpu_units=units, transfer_client="inline",
    )  # fmt: skip
    cache = PrefixCacheManager(config)
    model = HybridEchoModel(cache)
    settings = EngineSettings(eos_token_id=EOS, context_length=1000, max_running=max_running, overlap=False)
    return cache, Engine(cache, model, settings), model
