"""Which blocks running requests are computing now, by the first of them. Under the lock."""

from __future__ import annotations

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.block_marks import block_marks, num_equal
from fastdeploy_cache.requests.active_request import ActiveRequest


class Computing:
    """Each request that computes part of its prompt until it goes, under the key of its first block not committed.

    Of two that compute the same the later one is found; when it goes first, the other is found no more.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.by_key: dict[int, ActiveRequest] = {}

    def begin(self, active: ActiveRequest, key: int) -> None:
        """The block at the place of this key is the first that the request computes."""
        active.trail.computing_key = key
        self.by_key[key] = active

    def end(self, active: ActiveRequest) -> None:
        """It has committed something, or has gone."""
        key = active.trail.computing_key
        active.trail.computing_key = None
        if key is not None and self.by_key.get(key) is active:
            del self.by_key[key]

    def num_blocks(self, active: ActiveRequest, key: int, first: int, end: int) -> int:
        """How many of the blocks [first, end) of a request's prompt another one is computing; `key`: of the first."""
        other = self.by_key.get(key)
        if other is None or other is active or other.num_committed_blocks > first:
            return 0
        size, extras, others = self._block_bytes, active.keys.extras, other.keys.extras
        num_blocks = max(0, min(end, other.request.num_tokens * TOKEN_BYTES // size) - first)
        mine, at = active.keys.buffer(first * size, (first + num_blocks) * size)
        theirs, start = other.keys.buffer(first * size, (first + num_blocks) * size)
        marks = block_marks(mine, at, num_blocks, size)
        num_same = num_equal(marks, block_marks(theirs, start, num_blocks, size))
        if extras is not None or others is not None:
            own, their = extras or {}, others or {}
            blocks = range(first, first + num_same)
            num_same = next((b - first for b in blocks if own.get(b) != their.get(b)), num_same)
        return num_same
