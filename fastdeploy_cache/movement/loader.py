"""Loads from the CPU tier to the GPU: whether they are worth it, whether they fit, and their start. Under the lock."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.path import Part
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.block_mover import BlockMover, TaskEnded
from fastdeploy_cache.movement.images import ImageMover
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute
from fastdeploy_cache.transfer_manager.task import TaskKind


class Loader:
    """Loads a chain of blocks whole or not at all."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        mover: BlockMover,
        speeds: LoadOrCompute,
        *,
        images: ImageMover | None = None,
    ) -> None:
        """`images`: of a hybrid model."""
        self._books, self._mover, self._speeds, self._images = books, mover, speeds, images
        self._size = config.block_size
        self._min_blocks, max_blocks = config.load_limits()
        self._block_bytes = max(1, config.block_bytes())  # in a simulation there are no bytes
        self._max_bytes = max_blocks * self._block_bytes
        self._config = config
        self.refused_for = Cause.ROOM, ""  # why the last load that was refused was, and with which numbers
        self.lacks_room = False  # whether that was for want of blocks, or of units of a row, alone
        self.lacks_place = False  # or of a place in the queue of loads
        books.listen(TaskEnded, self._note_speed)

    def is_worth(self, num_blocks: int, num_saved: int | None = None) -> bool:
        """Whether so many blocks are within the configured limits, and faster loaded than computed. A checkpoint counts
        as its pages; then `num_saved` says how many blocks need not be computed."""
        if self._config.load_policy == "never":
            self.refused_for = Cause.LIMIT, "load_policy is 'never'"
            return False
        if num_blocks < self._min_blocks:
            least = self._config.min_load_tokens
            self.refused_for = Cause.LIMIT, f"min_load_tokens is {least}, and it has {num_blocks * self._size}"
            return False
        if not self.is_allowed(num_blocks):
            return False
        num_saved = num_blocks if num_saved is None else num_saved
        is_worth = self._speeds.is_worth_loading(num_blocks, num_saved)
        if not is_worth:
            load, compute = (
                self._speeds.load_seconds(num_blocks) or 0.0,
                self._speeds.compute_seconds(num_saved) or 0.0,
            )
            times = f"loading was expected to take {load * 1000:.1f} ms, and computing {compute * 1000:.1f} ms"
            self.refused_for = Cause.SLOWER, times
        return is_worth

    def is_allowed(self, num_blocks: int) -> bool:
        """Whether so many are within the upper limit: for those that were fetched from storage to be loaded."""
        is_allowed = num_blocks * self._block_bytes <= self._max_bytes
        if not is_allowed:
            share = f"max_load_share allows {self._max_bytes // self._block_bytes} blocks, and it has {num_blocks}"
            self.refused_for = Cause.LIMIT, share
        return is_allowed

    def start(
        self, parts: Sequence[Part], num_cold: int, num_rest: int = 0, *, image: Checkpoint | None = None
    ) -> bool:
        """Load parts of a pinned path, `num_cold` blocks, for a prompt that needs `num_rest` others, and the checkpoint
        behind them where an `image` is given: all or nothing.

        Where the whole prompt does not fit, what was loaded would be held in vain.
        """
        num_available = self._books.residency.num_available(GPU, parts[0][0].tenant if parts else None)
        self.lacks_room, self.lacks_place = num_cold + num_rest > num_available, False
        if self.lacks_room:
            rooms = f"the prompt needs {num_cold + num_rest} blocks, and {num_available} can be had"
            self.refused_for = Cause.ROOM, rooms
            return False
        lacking = self._lacking(image) if image is not None else None
        if lacking is not None:
            self.lacks_room = True
            self.refused_for = Cause.ROOM, lacking
            return False
        if not self._mover.can(TaskKind.SWAP_IN, bool(parts) + (image is not None)):
            self.lacks_place = is_up = self._mover.is_up
            self.refused_for = (Cause.ROOM, "the queue of loads is full") if is_up else (Cause.RANK, "a rank is down")
            return False
        if image is not None and self._images is not None:
            self._images.load(image)
        if parts:
            self._mover.load(parts)
        return True

    def _lacking(self, image: Checkpoint) -> str | None:
        rows = self._books.rows
        assert rows is not None, "an image of a model without rows"
        sizes = rows.checkpoints.sizes
        if (lacking := rows.checkpoints.lacking(sizes.counts(image.boundary))) is None:
            return None
        number, num_short = lacking
        return f"its checkpoint lacks {num_short} units of the row {str(sizes.rows[number])!r}"

    def _note_speed(self, ended: TaskEnded) -> None:
        result = ended.result
        if result.task.kind is TaskKind.SWAP_IN and result.error is None:
            slowest = max(r.seconds for r in result.ranks)
            self._speeds.cpu.note(max(r.num_bytes for r in result.ranks), slowest)
