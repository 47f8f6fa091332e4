"""Checkpoints on their way between the tiers, each by a task of its own. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run, Tier
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.transfer_manager.task import TaskKind


class ImageLanding:
    """A checkpoint that comes to another tier. See `fastdeploy_cache.books.transfer.Cargo`."""

    def __init__(self, rows: RowBooks, books: Books, checkpoint: Checkpoint, tier: Tier) -> None:
        """It has no destinations yet. The checkpoint is pinned once for it."""
        self._rows, self._books, self._tier = rows, books, tier
        self.checkpoint = checkpoint
        self.units: list[array[int]] = []  # of a load
        self.pages = array("i")  # of a copy down
        self.pins: Sequence[Pin] = ()

    @property
    def ids(self) -> Sequence[int]:
        """Pages of the CPU tier; units are in pools of their own."""
        return self.pages

    def num_freed(self, held: dict[Run, int]) -> int:  # noqa: ARG002 (see `Cargo`)
        return 0

    def end(self, succeeded: bool) -> None:
        if self._tier is GPU and self.units:
            self._rows.end_units(self.checkpoint, self.units, succeeded)
            self.units = []
        if self._tier is CPU and self.pages:
            self._rows.end_pages(self.checkpoint, self.pages, succeeded)
            self.pages = array("i")
        if self.pins:
            self._rows.checkpoints.unpin(self.checkpoint)
            (pin,), self.pins = self.pins, ()
            self._books.tree.unpin(pin)


class ImageMover:
    """Starts loads and copies down of checkpoints. Full KV in front of one is moved by the tasks of its runs."""

    def __init__(self, books: Books, rows: RowBooks, mover: BlockMover) -> None:
        self._books, self._tree, self._rows, self._mover = books, books.tree, rows, mover
        self._sizes = rows.checkpoints.sizes

    def load(self, checkpoint: Checkpoint) -> Transfer:
        """Start bringing one to the GPU, of which the CPU tier has the image; there is room in each row."""
        assert checkpoint.pages is not None
        return self._start(checkpoint, GPU, TaskKind.SWAP_IN)

    def store(self, checkpoint: Checkpoint) -> Transfer:
        """Start copying one down; the pages are free."""
        assert checkpoint.units is not None
        return self._start(checkpoint, CPU, TaskKind.SWAP_OUT)

    def loading(self, checkpoint: Checkpoint) -> Transfer | None:
        """The load that brings one to the GPU, and that is wanted."""
        return self._coming(checkpoint, GPU)

    def is_storing(self, checkpoint: Checkpoint) -> bool:
        """Whether one is on its way to the CPU tier."""
        return self._coming(checkpoint, CPU) is not None

    @property
    def can_store(self) -> bool:
        """Whether a copy down can be started now."""
        return self._mover.can(TaskKind.SWAP_OUT)

    @property
    def num_storing(self) -> int:
        """How many are on their way to the CPU tier."""
        return sum([transfer.tier is CPU for transfer, _ in self._moving()])

    def num_lacking(self, checkpoint: Checkpoint) -> tuple[int, str] | None:
        """How many units a load of it lacks, and of which row; None: there is room."""
        counts = self._sizes.counts(checkpoint.boundary)
        for pool, count, row in zip(self._rows.checkpoints.pools, counts, self._sizes.rows, strict=True):
            if count > pool.num_available:
                return count - pool.num_available, str(row)
        return None

    def _moving(self) -> list[tuple[Transfer, Checkpoint]]:
        moving = self._mover.in_flight.values()
        return [
            (transfer, transfer.cargo.checkpoint) for transfer in moving if isinstance(transfer.cargo, ImageLanding)
        ]

    def _coming(self, checkpoint: Checkpoint, tier: Tier) -> Transfer | None:
        for transfer, moved in self._moving():
            if moved is checkpoint and transfer.tier is tier and not transfer.cancelled and not transfer.done.is_set():
                return transfer
        return None

    def _start(self, checkpoint: Checkpoint, tier: Tier, kind: TaskKind) -> Transfer:
        """All of it or nothing."""
        hold = Pin(checkpoint.run, checkpoint.end)  # or what makes room might take the very checkpoint
        self._tree.pin(hold)
        try:
            self._rows.checkpoints.pin(checkpoint)
            cargo = ImageLanding(self._rows, self._books, checkpoint, tier)
            try:
                self._take(cargo, tier)
                # Not before: what made room may have joined runs, and a pin that nobody knows follows no block.
                cargo.pins = (Pin(checkpoint.run, checkpoint.end),)
                transfer = self._mover.send_image(tier, cargo, kind, *self._ids(cargo, tier))
            except BaseException:
                self._give_back(cargo)
                self._rows.checkpoints.unpin(checkpoint)
                raise
        finally:
            self._tree.unpin(hold)
        return transfer

    def _take(self, cargo: ImageLanding, tier: Tier) -> None:
        boundary = cargo.checkpoint.boundary
        if tier is CPU:
            cargo.pages = self._books.take(self._sizes.num_pages(boundary), CPU, TASK)
            return
        for number, count in enumerate(self._sizes.counts(boundary)):
            cargo.units.append(array("i"))  # first: it may need memory
            cargo.units[-1] = self._rows.take(number, count, TASK)

    def _give_back(self, cargo: ImageLanding) -> None:
        for pool, units in zip(self._rows.checkpoints.pools, cargo.units, strict=False):
            pool.pool.free_each(units, TASK)
        self._books.pools[CPU].free_each(cargo.pages, TASK)

    def _ids(self, cargo: ImageLanding, tier: Tier) -> tuple[array[int], tuple[array[int], ...]]:
        """Pages, and units by row."""
        if tier is CPU:
            return cargo.pages, tuple(self._rows.checkpoints.unit_ids(cargo.checkpoint))
        packed = cargo.checkpoint.pages
        assert packed is not None, "a load of what the CPU tier has not"
        return array("i", packed), tuple(cargo.units)
