"""Loads from the CPU tier to the GPU: whether they are worth it, whether they fit, and their start. Under the lock."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.path import Part
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.causes import Cause
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.movement.block_mover import BlockMover, TaskEnded
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute
from fastdeploy_cache.transfer_manager.task import TaskKind


class Loader:
    """Loads a chain of blocks whole or not at all."""

    def __init__(
        self, config: CacheConfig, books: Books, mover: BlockMover, copy_down: CopyDown, speeds: LoadOrCompute
    ) -> None:
        self._books, self._mover, self._copy_down, self._speeds = books, mover, copy_down, speeds
        self._min_blocks, self._max_blocks = config.load_limits()
        self._never = config.load_policy == "never"
        self.refused_for = Cause.ROOM  # why the last load that was refused was
        books.listen(TaskEnded, self._note_speed)

    def is_worth(self, num_blocks: int) -> bool:
        """Whether so many blocks are within the configured limits, and faster loaded than computed."""
        if self._never or not self._min_blocks <= num_blocks <= self._max_blocks:
            self.refused_for = Cause.LIMIT
            return False
        self.refused_for = Cause.SLOWER
        return self._speeds.is_worth_loading(num_blocks)

    def is_allowed(self, num_blocks: int) -> bool:
        """Whether so many are within the upper limit: for those that were fetched from storage to be loaded."""
        self.refused_for = Cause.LIMIT
        return num_blocks <= self._max_blocks

    def start(self, parts: Sequence[Part], num_cold: int, num_rest: int = 0) -> bool:
        """Load parts of a pinned path, `num_cold` blocks, for a prompt that needs `num_rest` others: all or nothing.

        Where they do not fit, they would not fit as computed blocks either.
        """
        residency = self._books.residency
        if num_cold + num_rest > residency.num_available(GPU):
            self.refused_for = Cause.ROOM
            return False
        if not self._mover.can(TaskKind.SWAP_IN):
            self.refused_for = Cause.ROOM if self._mover.is_up else Cause.RANK
            return False
        residency.evict(GPU, max(0, num_cold - self._books.pools[GPU].num_free))
        self._mover.load(parts)
        self._copy_down.moved(num_cold)
        return True

    def _note_speed(self, ended: TaskEnded) -> None:
        result = ended.result
        if result.task.kind is TaskKind.SWAP_IN and result.error is None:
            slowest = max(r.seconds for r in result.ranks)
            self._speeds.cpu.note(max(r.num_bytes for r in result.ranks), slowest)
