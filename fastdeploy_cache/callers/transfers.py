"""What a caller holds of a copy that is on its way."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.transfer import Transfer, wait_done
from fastdeploy_cache.ipc.clock import Clock, seconds_to_wait


class CallerTransfer:
    """A copy on its way, of `num_blocks` blocks; of none, it has ended well. Any thread.

    Of a hybrid model it is also of the checkpoint behind the first `num_checkpoint_blocks` blocks of the sequence. None
    says that nothing was begun. There was no memory to begin all of it unless it `is_whole`; then it fails.
    """

    __slots__ = ("_clock", "_transfers", "is_whole", "num_blocks", "num_checkpoint_blocks", "task_ids")

    def __init__(
        self,
        transfers: Sequence[Transfer],
        num_blocks: int,
        clock: Clock,
        *,
        num_checkpoint_blocks: int | None = None,
        is_whole: bool = True,
    ) -> None:
        self._transfers, self._clock = tuple(transfers), clock
        self.num_blocks, self.num_checkpoint_blocks, self.is_whole = num_blocks, num_checkpoint_blocks, is_whole
        self.task_ids = tuple([transfer.task_id for transfer in transfers])  # for `LayerProgress.wait_layer`

    @property
    def done(self) -> bool:
        """Every rank has answered, or is gone."""
        return all(transfer.done.is_set() for transfer in self._transfers)

    @property
    def succeeded(self) -> bool:
        """Every rank has copied all of it."""
        return self.done and self.is_whole and all(transfer.succeeded for transfer in self._transfers)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until it has ended; whether all ranks succeeded in time. Every task ends at its own deadline."""
        wait_done(self._transfers, seconds_to_wait("wait", timeout_seconds), self._clock)
        return self.succeeded


class CallerLoad(CallerTransfer):
    """A load into the tree: `block_ids` is where the blocks that are not on the GPU yet are coming to."""

    __slots__ = ("block_ids", "generation", "pinned")

    def __init__(
        self,
        transfers: Sequence[Transfer],
        block_ids: list[int],
        pinned: PinnedPrefix | None,
        generation: int,
        clock: Clock,
    ) -> None:
        super().__init__(transfers, len(block_ids), clock)
        self.block_ids = block_ids
        self.generation = generation  # of the cache, when it began
        self.pinned = pinned  # with `ahead`, until `end`

    def end(self) -> Sequence[Transfer]:
        """The copies whose destinations it uses ahead of their end, once."""
        pinned, self.pinned = self.pinned, None
        return self._transfers if pinned is not None else ()
