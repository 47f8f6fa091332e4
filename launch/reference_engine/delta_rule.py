"""The gated delta rule: a layer that keeps one matrix for each head instead of keys and values.

Behind each token it is S = keep * S, and then S += strength * outer(k, v - k @ S). What it gives is q @ S. Of a piece
of tokens all that is one system of equations, whose matrix is a triangle: Yang et al., "Gated Delta Networks", 2024.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.launch.reference_engine.weight_cache import Float32Array

_PIECE_TOKENS = 64  # of one system; pieces end at multiples of it in the sequence, wherever a step begins


class DeltaInputs(NamedTuple):
    """What n tokens bring, all float32.

    Attributes:
        query: [n, heads, group, dim], of length 1.
        key: [n, heads, dim], of length 1.
        value: [n, heads, dim].
        gates: [2, n, heads]: keep and strength, each between 0 and 1.
    """

    query: Float32Array
    key: Float32Array
    value: Float32Array
    gates: Float32Array

    def part(self, begin: int, end: int) -> DeltaInputs:
        """Those of some of the tokens."""
        of, gates = slice(begin, end), self.gates[:, begin:end]
        return DeltaInputs(self.query[of], self.key[of], self.value[of], gates)


def advance(state: Float32Array, inputs: DeltaInputs, start: int) -> tuple[Float32Array, Float32Array]:
    """What tokens from position `start` on read, and the state [heads, dim, dim] behind them, from that in front.

    Returns:
        [n, heads, group, dim], and the state.
    """
    end = start + len(inputs.key)
    first = start // _PIECE_TOKENS * _PIECE_TOKENS + _PIECE_TOKENS
    edges = [start, *range(first, end, _PIECE_TOKENS), end]
    read = []
    for begin, stop in pairwise(edges):
        found, state = _advance(state, inputs.part(begin - start, stop - start))
        read.append(found)
    return np.concatenate(read), state


def _advance(state: Float32Array, inputs: DeltaInputs) -> tuple[Float32Array, Float32Array]:
    query, key, value, gates = inputs
    keys, values = key.transpose(1, 0, 2), value.transpose(1, 0, 2)  # [heads, n, dim]
    keep, strength = gates.transpose(0, 2, 1)  # [heads, n]
    kept = np.cumprod(keep, axis=1)  # of the state in front, behind each token
    ratio = np.tril(kept[:, :, None] / kept[:, None, :])  # of what token j wrote, behind token i
    near = np.tril(keys @ keys.transpose(0, 2, 1) * ratio, -1)
    triangle = np.eye(len(key), dtype=np.float32) + strength[:, :, None] * near
    wanted = strength[:, :, None] * (values - kept[:, :, None] * (keys @ state))
    written = np.linalg.solve(triangle, wanted)  # [heads, n, dim]
    queries = query.transpose(1, 2, 0, 3)  # [heads, group, n, dim]
    scores = queries @ keys[:, None].transpose(0, 1, 3, 2) * ratio[:, None]
    read = kept[:, None, :, None] * (queries @ state[:, None]) + scores @ written[:, None]
    last = ratio[:, -1, :, None] * keys
    new = kept[:, -1, None, None] * state + last.transpose(0, 2, 1) @ written
    return read.transpose(2, 0, 1, 3).astype(np.float32), new.astype(np.float32)
