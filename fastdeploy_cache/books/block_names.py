"""The hashes of cached blocks, computed when somebody asks for them."""

from __future__ import annotations

from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.ipc.clock import Clock


class BlockNames:
    """The tree finds blocks by their tokens. Only storage, peers and adapters name them by a hash, so a block's hash is
    computed when one of these asks, and its run keeps it. Under the lock.

    Of each run the first blocks have a hash, `len(run.hashes) // 32` of them; a root has one, its first blocks' parent.

    Attributes:
        num_hashed: blocks hashed since the start.
        seconds: what that took.
    """

    def __init__(self, block_size: int, clock: Clock) -> None:
        self._now = clock.now
        self._hasher = BlockHasher(block_size)
        self.num_hashed = 0
        self.seconds = 0.0

    def of(self, run: Run, start: int, end: int) -> bytes:
        """The hashes, joined, of a run's blocks [start, end)."""
        if len(run.hashes) < end * HASH_BYTES:
            self._hash(run, end)
        return bytes(run.hashes[start * HASH_BYTES : end * HASH_BYTES])

    def of_last(self, run: Run) -> bytes:
        """The hash of a run's last block (of a root: the parent of its first blocks)."""
        return self.of(run, run.num_blocks - 1, run.num_blocks) if run.num_blocks else bytes(run.hashes)

    def at(self, path: list[Run], num_blocks: int) -> bytes:
        """The hash of the last of a path's first `num_blocks`, which names them all; b"" for none."""
        for run in path:
            if 0 < num_blocks <= run.num_blocks:
                return self.of(run, num_blocks - 1, num_blocks)
            num_blocks -= run.num_blocks
        return b""

    @staticmethod
    def has_all(run: Run) -> bool:
        """Whether each block of a run has its hash; also of one that has left the tree."""
        return len(run.hashes) >= run.num_blocks * HASH_BYTES or run.parent is None

    @staticmethod
    def num_missing(path: list[Run]) -> int:
        """How many blocks of a path have no hash yet."""
        return sum([run.num_blocks - len(run.hashes) // HASH_BYTES for run in path])

    def add(self, run: Run, at_most: int) -> int:
        """Hash up to so many more blocks of a run whose parent has all; returns how many."""
        before = self.num_hashed
        self.of(run, 0, min(run.num_blocks, len(run.hashes) // HASH_BYTES + at_most))
        return self.num_hashed - before

    def count(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were hashed elsewhere, for storage to be asked for them."""
        self.num_hashed += num_blocks
        self.seconds += seconds

    def _hash(self, run: Run, end: int) -> None:
        """Hash what is missing of a run's first `end` blocks, and of what is above it, as each hash needs the one
        before."""
        started, missing = self._now(), [(run, end)]
        while not run.hashes:
            assert run.parent is not None
            run = run.parent
            end = run.num_blocks
            if len(run.hashes) < end * HASH_BYTES:
                missing.append((run, end))
        for each, last in reversed(missing):
            above, known = each.parent, len(each.hashes) // HASH_BYTES
            assert above is not None
            parent = bytes((each.hashes or above.hashes)[-HASH_BYTES:])
            each.hashes += self._hasher.extend(parent, each.tokens, known, last - known, each.extras)
            self.num_hashed += last - known
        self.seconds += self._now() - started
