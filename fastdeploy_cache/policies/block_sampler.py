"""Which blocks are observed, and by what key they are known also when they are gone: without any SHA-256."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.block_sample import BlockSample
from fastdeploy_cache.books.run import Run

_AT_ONCE = 4096  # blocks
_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # odd

Words = np.ndarray[Any, np.dtype[np.uint64]]


class BlockSampler:
    """A block's key is a polynomial, modulo 2**64, of the words of all tokens up to its end: so equal prefixes have
    equal keys, and it takes a few vector operations per run. It is no name: two different prefixes may share a key by
    chance or on purpose, which blurs what is learned and touches no bytes. A block is observed if its key is low:
    spatial sampling as in SHARDS (Waldspurger et al., FAST'15).

    Attributes:
        num_resident: observed blocks in the cache, of what was looked at.
    """

    def __init__(self, ratio: float, block_tokens: int) -> None:
        """`ratio` of all blocks are observed; `block_tokens` are in a block of the tree."""
        self._limit = None if ratio >= 1 else np.uint64(ratio * 2**64)
        size = block_tokens * TOKEN_BYTES
        self._word = np.dtype(np.uint64 if size % 8 == 0 else np.uint32)
        self._num_words = size // self._word.itemsize
        self._weights: Words = np.random.default_rng(1).integers(0, 2**63, self._num_words, np.uint64) * 2 + 1
        powers = np.full(_AT_ONCE, _STEP, np.uint64)
        inverses = np.full(_AT_ONCE, pow(_STEP, -1, 2**64), np.uint64)
        powers[0] = inverses[0] = 1
        self._powers, self._inverses = np.cumprod(powers), np.cumprod(inverses)
        self.num_resident = 0

    def clear(self) -> None:
        """No block is in the cache (any more)."""
        self.num_resident = 0

    def shrink(self, run: Run, first_block: int) -> None:
        """A run is about to lose its blocks from `first_block` on."""
        if (sample := run.notes.sample) is not None:
            self.num_resident -= sample.num_from(first_block)

    def sample(self, run: Run) -> BlockSample:
        """Look at what of a run has not been looked at. Returns the sample of all its blocks, which the run keeps."""
        missing = []
        while run.parent is not None and not _is_whole(run.notes.sample, run):
            missing.append(run)
            run = run.parent
        # a root's is different for each namespace
        end = int.from_bytes(run.hashes[:8], "little") if run.parent is None else _end_of(run)
        for each in reversed(missing):
            known = each.notes.sample
            if known is None or known.end is None:
                self.shrink(each, 0)
                known = BlockSample([], [], 0, end)
            sample = self._extended(each, known)
            each.notes = each.notes.with_sample(sample)
            self.num_resident += len(sample.keys) - len(known.keys)
            end = _end_of(each)
        whole = (missing[0] if missing else run).notes.sample
        assert whole is not None
        return whole

    def _extended(self, run: Run, known: BlockSample) -> BlockSample:
        keys, blocks, end = known.keys, known.blocks, known.end
        assert end is not None
        for first in range(known.num_blocks, run.num_blocks, _AT_ONCE):
            num_blocks = min(run.num_blocks - first, _AT_ONCE)
            states = self._states(run, first, num_blocks, end)
            end = int(states[-1])
            if self._limit is None:
                keys, blocks = keys + states.tolist(), blocks + list(range(first, first + num_blocks))
            else:
                (found,) = (states < self._limit).nonzero()
                if len(found):
                    keys, blocks = keys + states[found].tolist(), blocks + (found + first).tolist()
        return BlockSample(keys, blocks, run.num_blocks, end)

    def _states(self, run: Run, first: int, num_blocks: int, end: int) -> Words:
        """The polynomial at the end of each of these blocks, where it is `end` in front of them."""
        num_words = self._num_words
        words = np.frombuffer(run.tokens, self._word, num_blocks * num_words, first * num_words * self._word.itemsize)
        sums = words.reshape(num_blocks, num_words) @ self._weights
        if run.extras is not None:
            for block, extra in run.extras.items():
                if first <= block < first + num_blocks:
                    digest = hashlib.blake2b(extra, digest_size=8).digest()
                    sums[block - first : block - first + 1] += np.frombuffer(digest, np.uint64)
        sums *= self._inverses[:num_blocks]
        np.add.accumulate(sums, out=sums)
        sums += np.uint64(end * _STEP & _MASK)
        sums *= self._powers[:num_blocks]
        return sums


def _is_whole(sample: BlockSample | None, run: Run) -> bool:
    return sample is not None and sample.num_blocks == run.num_blocks and sample.end is not None


def _end_of(run: Run) -> int:
    sample = run.notes.sample
    assert sample is not None and sample.end is not None
    return sample.end
