"""A model in float64 that computes token by token: a gated delta-rule state, two windows, and full attention.

Whatever memory it reads through, equal tokens give equal bits. Memory that nobody has written holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout

Array = np.ndarray[Any, np.dtype[np.float64]]
BLOCK, DIM, VOCABULARY = 4, 8, 40
STATE, NEAR, FULL, FAR = range(4)  # its layers
REACHES = {NEAR: 6, FAR: 10}
LAYOUT = KVLayout(
    num_layers=4,
    num_kv_heads=1,
    head_dim=2 * DIM,  # float32 elements, in two of which there is one of float64
    dtype="float32",
    groups=(
        KVGroup(kind="full", layers=(FULL,)),
        KVGroup(kind="state", layers=(STATE,), parts=(StatePart(name="state", shape=(DIM, 2 * DIM)),)),
        KVGroup(kind="window", reach_tokens=REACHES[NEAR], layers=(NEAR,)),
        KVGroup(kind="window", reach_tokens=REACHES[FAR], layers=(FAR,)),
    ),
)


class KVMemoryOf(Protocol):
    """The memory of one request, as the model sees it."""

    def read(self, layer: int, first: int, end: int) -> Array:
        """Keys and values [end - first, 2, DIM] of tokens [first, end)."""
        ...

    def write(self, layer: int, token: int, key_value: Array) -> None:
        """Those of one token."""
        ...


class Flat:
    """Memory of a request by itself, from its first token on."""

    def __init__(self, num_tokens: int) -> None:
        self._arrays = np.full((4, num_tokens, 2, DIM), np.nan)

    def read(self, layer: int, first: int, end: int) -> Array:
        return self._arrays[layer, first:end].copy()

    def write(self, layer: int, token: int, key_value: Array) -> None:
        self._arrays[layer, token] = key_value


class Float64Model:
    """`compute` takes one token on, and gives its logits."""

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self._embedding = draw.normal(size=(VOCABULARY, DIM))
        self._weights = draw.normal(size=(4, 4, DIM, DIM)) / np.sqrt(DIM)  # by layer: query, key, value, output
        self._gates = draw.normal(size=(2, DIM)) / np.sqrt(DIM)
        self._head = draw.normal(size=(DIM, VOCABULARY))

    def compute(self, token: int, at: int, memory: KVMemoryOf, state: Array) -> tuple[Array, Array]:
        """Logits behind the token at position `at`, and the state behind it."""
        x = self._embedding[token] + np.sin(at * np.arange(1, DIM + 1) / 7)
        for layer in range(4):
            query, key, value = (x @ self._weights[layer, kind] for kind in range(3))
            if layer == STATE:
                keep, strength = (1 / (1 + np.exp(-(gate * x).sum())) for gate in self._gates)
                key = key / np.sqrt((key * key).sum())
                state = keep * state
                state = state + strength * np.outer(key, value - key @ state)
                out = query @ state
            else:
                memory.write(layer, at, np.stack([key, value]))
                first = max(0, at - REACHES[layer] + 1) if layer in REACHES else 0
                held = memory.read(layer, first, at + 1)
                scores = (held[:, 0] * query).sum(axis=1)
                weights = np.exp(scores - scores.max())
                out = (weights[:, None] * held[:, 1]).sum(axis=0) / weights.sum()
            x = x + np.tanh(out @ self._weights[layer, 3])
        return x @ self._head, state

    def from_scratch(self, tokens: Sequence[int]) -> Array:
        """The logits behind each token."""
        memory, state = Flat(len(tokens)), np.zeros((DIM, DIM))
        logits = np.empty((len(tokens), VOCABULARY))
        for at, token in enumerate(tokens):
            logits[at], state = self.compute(token, at, memory, state)
        return logits
