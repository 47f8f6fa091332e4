"""Which blocks were used before: what no request has used yet, no cache of any size can have."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastdeploy_cache.what_if.sampling import Words

_NUM_BITS: Final = 25  # 32 MiB, of which the pages that are used take memory
_MASK, _HALF = np.uint64(2**_NUM_BITS - 1), np.uint64(32)


class SeenBlocks:
    """A Bloom filter of two probes: it may take a new block for a used one, never a used one for new.

    So what it counts is an upper bound, whatever it is given. With a million blocks it is wrong of 4 in 1,000 new ones.
    """

    def __init__(self) -> None:
        self._is_used: np.ndarray[Any, np.dtype[np.bool_]] = np.zeros(2**_NUM_BITS, np.bool_)

    def count_and_add(self, hashes: Words) -> int:
        """How many blocks of a path, from the first on, were used before; all of them are used now."""
        first, second = hashes & _MASK, (hashes >> _HALF) & _MASK
        is_seen = self._is_used[first] & self._is_used[second]
        self._is_used[first] = self._is_used[second] = True
        return len(is_seen) if is_seen.all() else int(is_seen.argmin())

    def forget(self) -> None:
        """Nothing that was used counts any more."""
        self._is_used[:] = False
