"""Which blocks are looked at, and what they are called here."""

from __future__ import annotations

from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint64]]
Tokens = np.ndarray[Any, np.dtype[np.int32]]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd
_INVERSE = np.uint64(pow(int(_STEP), -1, 2**64))
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64
_HALF = np.uint64(32)
_AT_ONCE = 65536  # blocks


class BlockSubset:
    """A block is looked at by its place in the tree: if the hash of all marks up to its own is low. So a prefix that
    is met again has the same blocks in the sample: spatial sampling as in SHARDS (Waldspurger et al., FAST'15).

    A block in the sample is one token of a small cache, with a number of 31 bits.
    """

    def __init__(self, ratio: float) -> None:
        """`ratio` of all blocks are looked at."""
        self._limit = None if ratio >= 1 else np.uint64(ratio * 2**64)
        self._powers, self._inverses = (_powers(each) for each in (_STEP, _INVERSE))

    def tokens(self, marks: bytes, namespace: int) -> tuple[Tokens, Words]:
        """The numbers of those blocks of a path that are in the sample, and their places in the path. `marks`: four
        bytes for each block of the path."""
        return self.sample(self.hashes(marks, namespace))

    def hashes(self, marks: bytes, namespace: int) -> Words:
        """A hash of each block's place: of all marks up to its own."""
        words = np.frombuffer(marks, "<u4").astype(np.uint64)
        hashes, state = np.empty(len(words), np.uint64), np.uint64(namespace)
        for first in range(0, len(words), _AT_ONCE):
            piece = words[first : first + _AT_ONCE] + np.uint64(1)
            piece *= self._inverses[: len(piece)]
            np.add.accumulate(piece, out=piece)
            with np.errstate(over="ignore"):
                piece += state * _STEP
            piece *= self._powers[: len(piece)]
            hashes[first : first + _AT_ONCE], state = piece, piece[-1]
        for mix in _MIX:
            hashes ^= hashes >> _HALF
            hashes *= mix
        hashes ^= hashes >> _HALF
        return hashes

    def sample(self, hashes: Words) -> tuple[Tokens, Words]:
        """The sample of the blocks at these places: see `tokens`."""
        if self._limit is None:
            places = np.arange(len(hashes), dtype=np.uint64)
        else:
            places = (hashes < self._limit).nonzero()[0].astype(np.uint64)
            hashes = hashes[places]
        return (hashes & np.uint64(0x7FFFFFFF)).astype(np.int32), places


def _powers(base: np.uint64) -> Words:
    """base**0, base**1 and so on, modulo 2**64."""
    factors = np.full(_AT_ONCE, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
