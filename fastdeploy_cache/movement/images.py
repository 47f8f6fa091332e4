"""Checkpoints on their way between the tiers, each by a task of its own. Under the lock."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import ImageCopied
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run, Tier
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.cargo import WipedBlocks
from fastdeploy_cache.movement.unit_copies import UnitCopy
from fastdeploy_cache.transfer_manager.task import TaskKind


class ImageLanding:
    """A checkpoint that comes to another tier. See `fastdeploy_cache.books.transfer.Cargo`."""

    def __init__(
        self, books: Books, rows: RowBooks, checkpoint: Checkpoint, moving: dict[Checkpoint, Transfer]
    ) -> None:
        """It has no destinations yet. The checkpoint is pinned once for it. `moving`: where it is noted meanwhile."""
        self._rows, self._books, self._moving = rows, books, moving
        self.checkpoint = checkpoint
        self.units: list[array[int]] = []  # of a load
        self.pages = array("i")  # of a copy down
        # Made now: at its end there may be no memory for them.
        self._no_units: list[array[int]] = []
        self._no_pages = array("i")
        self.pins: Sequence[Pin] = ()
        self.transfer: Transfer | None = None

    @property
    def ids(self) -> Sequence[int]:
        """Pages of the CPU tier; units are in pools of their own."""
        return self.pages

    def num_freed(self, held: dict[Run, int]) -> int:  # noqa: ARG002 (see `Cargo`)
        return 0

    def end(self, succeeded: bool) -> None:
        if self._moving.get(self.checkpoint) is self.transfer:  # else another one was started, as this was cancelled
            del self._moving[self.checkpoint]
        if self.units:
            is_used = self.transfer is not None and self.transfer.num_ahead > 0  # by a step, which reads there
            has_landed = self._rows.end_units(self.checkpoint, self.units, succeeded, stays=is_used)
            if self.transfer is not None and is_used and not has_landed:
                self.transfer.kept_units = self.units
            self.units = self._no_units
        is_copied = False
        if self.pages:
            is_copied = self._rows.end_pages(self.checkpoint, self.pages, succeeded)
            self.pages = self._no_pages
        if self.pins:
            self._rows.checkpoints.unpin(self.checkpoint)
            (pin,), self.pins = self.pins, ()
            self._books.tree.unpin(pin)
        if is_copied and ImageCopied in self._books.listeners:  # last: it needs memory
            self._books.mishaps.contain("write_out", self._tell_copied)

    def _tell_copied(self) -> None:
        self._books.note(ImageCopied(checkpoint=self.checkpoint))


class ImageMover:
    """Starts loads and copies down of checkpoints. Full KV in front of one is moved by the tasks of its runs."""

    def __init__(self, books: Books, rows: RowBooks, mover: BlockMover) -> None:
        self._books, self._tree, self._rows, self._mover = books, books.tree, rows, mover
        self._sizes = rows.checkpoints.sizes
        self._moving: tuple[dict[Checkpoint, Transfer], ...] = ({}, {})  # by destination: the newest of each

    def load(self, checkpoint: Checkpoint) -> None:
        """Start bringing one to the GPU, of which the CPU tier has the image; there is room in each row."""
        assert checkpoint.pages is not None
        self._start(checkpoint, GPU, TaskKind.SWAP_IN, lambda _: True)

    def store(self, checkpoint: Checkpoint, has_room: Callable[[int], bool]) -> bool:
        """Start copying one down, if there is room for so many pages. That is asked when the checkpoint is pinned: or
        what makes room might take it, or count on what it holds."""
        assert checkpoint.units is not None
        return self._start(checkpoint, CPU, TaskKind.SWAP_OUT, has_room)

    def loading(self, checkpoint: Checkpoint) -> Transfer | None:
        """The load that brings one to the GPU, and that is wanted."""
        transfer = self._moving[GPU].get(checkpoint)
        return transfer if transfer is not None and not transfer.cancelled else None

    def units_of_load(self, checkpoint: Checkpoint) -> list[array[int]] | None:
        """Where such a load brings it, by row; None where there is none."""
        transfer = self.loading(checkpoint)
        cargo = transfer.cargo if transfer is not None else None
        return cargo.units or None if isinstance(cargo, ImageLanding) else None

    def is_storing(self, checkpoint: Checkpoint) -> bool:
        """Whether one is on its way to the CPU tier."""
        return checkpoint in self._moving[CPU]

    @property
    def can_store(self) -> bool:
        """Whether a copy down can be started now."""
        return self._mover.can(TaskKind.SWAP_OUT)

    @property
    def num_storing(self) -> int:
        """How many are on their way to the CPU tier."""
        return len(self._moving[CPU])

    def num_coming(self) -> list[int]:
        """Units of each row that become free, or can be had from checkpoints, when the copies in flight end well."""
        pools = self._rows.checkpoints.pools
        num_coming, held = [0] * len(pools), [Counter[int]() for _ in pools]
        flights = [each for each in self._mover.in_flight.values() if not each.done.is_set()]
        cargoes = [(each, each.cargo) for each in flights if isinstance(each.cargo, ImageLanding | UnitCopy)]
        num_pins = Counter([cargo.checkpoint for _, cargo in cargoes])
        for transfer, cargo in cargoes:
            is_alone = cargo.checkpoint.num_pins == num_pins[cargo.checkpoint]  # nobody but copies in flight pins it
            is_vain = isinstance(cargo, UnitCopy) and not cargo.is_wanted
            if is_vain or (isinstance(cargo, ImageLanding) and is_alone and not transfer.num_ahead):
                for number, units in enumerate(cargo.units):
                    num_coming[number] += len(units)
        for checkpoint in num_pins:
            if checkpoint.num_pins == num_pins[checkpoint]:
                for count, ids in zip(held, self._rows.checkpoints.unit_ids(checkpoint), strict=True):
                    count.update(ids)
        for wiped in [each.cargo for each in flights if isinstance(each.cargo, WipedBlocks)]:
            for number, wiped_units in enumerate(wiped.units):
                num_coming[number] += len(wiped_units)
        for number, pool in enumerate(pools):
            num_coming[number] += pool.pool.num_soiled
            num_coming[number] += sum([pool.num_pins(unit) == num for unit, num in held[number].items()])
        return num_coming

    def _start(self, checkpoint: Checkpoint, tier: Tier, kind: TaskKind, has_room: Callable[[int], bool]) -> bool:
        """All of it or nothing."""
        hold = Pin(checkpoint.run, checkpoint.end)
        self._tree.pin(hold)
        try:
            self._rows.checkpoints.pin(checkpoint)
            is_started = False
            try:
                is_started = has_room(self._sizes.num_pages(checkpoint.boundary)) and self._send(checkpoint, tier, kind)
            finally:
                if not is_started:
                    self._rows.checkpoints.unpin(checkpoint)
        finally:
            self._tree.unpin(hold)
        return is_started

    def _send(self, checkpoint: Checkpoint, tier: Tier, kind: TaskKind) -> bool:
        moving = self._moving[tier]
        cargo = ImageLanding(self._books, self._rows, checkpoint, moving)
        before = moving.get(checkpoint)
        try:
            self._take(cargo, tier)
            # Not before: what made room may have joined runs, and a pin that nobody knows follows no block.
            cargo.pins = (Pin(checkpoint.run, checkpoint.end),)
            cargo.transfer = moving[checkpoint] = self._mover.new_transfer(tier)
            self._mover.send_image(cargo.transfer, cargo, kind, *self._ids(cargo, tier))
        except BaseException:
            moving.pop(checkpoint, None)
            if before is not None:
                moving[checkpoint] = before
            self._rows.free_units(cargo.units)
            self._books.pools[CPU].free_each(cargo.pages, TASK)
            raise
        return True

    def _take(self, cargo: ImageLanding, tier: Tier) -> None:
        boundary = cargo.checkpoint.boundary
        if tier is CPU:
            cargo.pages = self._books.take(self._sizes.num_pages(boundary), CPU, TASK)
            return
        for number, count in enumerate(self._sizes.counts(boundary)):
            cargo.units.append(array("i"))  # first: it may need memory
            cargo.units[-1] = self._rows.take(number, count, TASK)

    def _ids(self, cargo: ImageLanding, tier: Tier) -> tuple[array[int], tuple[array[int], ...]]:
        """Pages, and units by row."""
        if tier is CPU:
            return cargo.pages, tuple(self._rows.checkpoints.unit_ids(cargo.checkpoint))
        packed = cargo.checkpoint.pages
        assert packed is not None, "a load of what the CPU tier has not"
        return array("i", packed), tuple(cargo.units)
