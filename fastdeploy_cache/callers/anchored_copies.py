"""Copies of a hybrid model's blocks for callers: full KV together with the checkpoint behind it. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from fastdeploy_cache.books.arrivals import insert_copies
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import TASK, BlockPool
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Copied, ImageCopied
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.callers.own_blocks import OwnIds, Reading, cargo_of
from fastdeploy_cache.callers.own_units import CallerUnits, given
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.cargo import CallersBlocks
from fastdeploy_cache.transfer_manager.task import TaskKind

_NOTHING = array("i")  # never changed


class Sequenced(NamedTuple):
    """A caller's sequence of tokens, and what is cached of it: the first `num_found` blocks, which lie on `path`."""

    namespace: str
    keys: BlockKeys
    path: list[Run]
    num_found: int


class AnchoredLanding:
    """What two tasks bring to the CPU tier for a caller: blocks, and the image of the checkpoint behind them."""

    __slots__ = ("began", "blocks", "boundary", "has_failed", "kept", "num_left", "pages", "sequence")

    def __init__(self, sequence: Sequenced, blocks: array[int], pages: array[int], *, began: int) -> None:
        """`blocks`: those behind what was found. The ids are the tasks'. `began`: in this generation of the cache."""
        self.sequence, self.boundary = sequence, sequence.num_found + len(blocks)
        self.blocks, self.pages, self.began = blocks, pages, began
        self.num_left = int(bool(blocks)) + int(bool(pages))  # tasks that have not ended
        self.has_failed = False
        self.kept = _NOTHING  # what the task that has ended first has brought


class AnchoredCopies:
    """What `BlockCopies` does for a model whose layers do not all keep everything.

    Full KV without a checkpoint behind it serves nobody. So both join the tree together, when both have ended well.
    """

    def __init__(self, books: Books, mover: BlockMover, blocks: OwnIds, units: CallerUnits, most_inner: int) -> None:
        """`blocks`: callers' on the GPU. `most_inner`: checkpoints of one path that are kept in front of its last."""
        assert books.rows is not None
        self._books, self._tree, self._mover = books, books.tree, mover
        self._blocks, self._units = blocks, units
        self._rows, self._checkpoints, self._most_inner = books.rows, books.rows.checkpoints, most_inner
        self._landings: dict[AnchoredLanding, None] = {}

    @property
    def kept_ids(self) -> list[int]:
        """CPU blocks that have come, and wait for the other task of the same copy."""
        return [block_id for landing in self._landings for block_id in landing.kept]

    def _checkpoint_at(self, path: list[Run], boundary: int) -> Checkpoint | None:
        """The checkpoint behind so many blocks of a path, if the CPU tier has its image."""
        found = self._rows.deepest_within(path, boundary)
        if found is None or found.boundary != boundary:
            return None
        return found if found.pages is not None or not self._checkpoints.sizes.num_pages(boundary) else None

    def _begun(self, sends: Sequence[Callable[[], Transfer]], num_blocks: int, boundary: int | None) -> CallerTransfer:
        """Send these one after the other. Where memory runs out between two, the first is on its way: as one that will
        fail, since what it writes is not its caller's until it has ended."""
        started, clock = list[Transfer](), self._books.clock
        try:
            for send in sends:
                started.append(send())
        except MemoryError:
            if not started:
                raise
            self._books.mishaps.note("landing")
        is_whole = len(started) == len(sends)
        return CallerTransfer(started, num_blocks, clock, num_checkpoint_blocks=boundary, is_whole=is_whole)

    # -- up

    def swap_in(
        self, path: list[Run], first_block: int, sources: array[int], ids: array[int], units: Sequence[Sequence[int]]
    ) -> CallerTransfer:
        """See `BlockCopies.swap_in`. `path`: none, where it has not all of these blocks. `sources`: those of the blocks
        behind `first_block` that are in the CPU tier."""
        boundary = first_block + len(ids)
        by_row = self._units.checked(units, boundary, may_leave_out=True)
        checkpoint = self._checkpoint_at(path, boundary)
        wanted = [(self._units.own(row), given(each)) for row, each in enumerate(by_row)]
        wanted = [(own, each) for own, each in wanted if each]
        num_tasks = int(bool(sources)) + int(bool(wanted))
        if checkpoint is None or len(sources) < len(ids) or not self._mover.can(TaskKind.SWAP_IN, num_tasks):
            return self._begun((), 0, None)
        sends = [partial(self._fill, checkpoint, sources, [(self._blocks, ids)], ())] if sources else []
        if wanted:
            pages = array("i", checkpoint.pages or b"")
            sends.append(partial(self._fill, checkpoint, pages, wanted, by_row))
        self._tree.policy.touch(checkpoint.run.path())
        self._checkpoints.use(checkpoint, is_first=False)
        return self._begun(sends, len(sources), boundary)

    def _fill(
        self,
        checkpoint: Checkpoint,
        sources: array[int],
        wanted: Sequence[tuple[OwnIds, array[int]]],
        units: Sequence[array[int]],
    ) -> Transfer:
        """One task. A pin keeps the blocks that it reads, though not each copy, and the pages may be an heir's."""
        reading, pins = Reading((self._books.pools[CPU], sources)), [Pin(checkpoint.run, checkpoint.end)]
        of_rows = [given(each) for each in units]
        cargo = cargo_of(self._books, wanted, reading, self._tree.generation, pins=pins, units=of_rows)
        try:
            if units:
                return self._send_image(TaskKind.SWAP_IN, cargo, sources, units)
            return self._mover.copy_for_caller(TaskKind.SWAP_IN, sources, cargo)
        except BaseException:  # they go home as after a copy that has failed
            cargo.give(False)
            raise

    # -- down

    def swap_out(
        self,
        sequence: Sequenced,
        first_block: int,
        ids: array[int],
        units: Sequence[Sequence[int]],
        generation: int | None,
        *,
        enabled: bool,
    ) -> CallerTransfer:
        """See `BlockCopies.swap_out`. `enabled`: the cache may take these blocks."""
        boundary, num_found = first_block + len(ids), sequence.num_found
        by_row = self._units.checked(units, boundary, may_leave_out=False)
        if num_found < first_block:
            raise RequestError(
                f"swap_out behind block {first_block}, and only {num_found} before it are cached; give all blocks from "
                "there on"
            )
        enabled = enabled and self._units.are_current(by_row, generation)
        is_there = num_found == boundary and self._checkpoint_at(sequence.path, boundary) is not None
        num_pages, sources = self._checkpoints.sizes.num_pages(boundary), ids[num_found - first_block :]
        num_tasks = int(bool(sources)) + int(bool(num_pages))
        if not boundary or not enabled or is_there or not self._mover.can(TaskKind.SWAP_OUT, num_tasks):
            return self._begun((), 0, None)
        # what makes room must not take what this continues
        hold = self._tree.move_pin(None, *self._tree.place(sequence.path, num_found))
        try:
            if self._books.residency.num_available(CPU) < len(sources) + num_pages:
                return self._begun((), 0, None)
            taken = self._books.take(len(sources) + num_pages, CPU, TASK)
            try:
                landing, sends = self._prepared(sequence, taken, hold, sources, by_row)
            except BaseException:
                self._books.pools[CPU].free(taken, TASK)
                raise
            if not sends:  # a checkpoint without units, behind blocks that are there
                self._land(landing)
            return self._begun(sends, len(sources), boundary)
        finally:
            self._tree.move_pin(hold, None, 0)

    def _prepared(
        self,
        sequence: Sequenced,
        taken: array[int],
        hold: Pin | None,
        sources: array[int],
        units: Sequence[array[int]],
    ) -> tuple[AnchoredLanding, list[Callable[[], Transfer]]]:
        """What is going to land in these CPU blocks, and its one or two tasks."""
        blocks, pages = taken[: len(sources)], taken[len(sources) :]
        landing = AnchoredLanding(sequence, blocks, pages, began=self._tree.generation)
        sends = list[Callable[[], Transfer]]()
        if blocks:
            sends.append(partial(self._send_down, landing, blocks, hold, [(self._books.pools[GPU], sources)]))
        if pages:
            read = [(pool.pool, each) for pool, each in zip(self._checkpoints.pools, units, strict=True)]
            sends.append(partial(self._send_down, landing, pages, hold, read))
        if sends:
            self._landings[landing] = None
        return landing, sends

    def _send_down(
        self,
        landing: AnchoredLanding,
        ids: array[int],
        hold: Pin | None,
        read: Sequence[tuple[BlockPool, array[int]]],
    ) -> Transfer:
        """One task. Where it cannot be sent nothing of the landing joins the tree."""
        reading = Reading()
        try:
            reading = Reading(*read)

            def give(succeeded: bool) -> None:
                reading.end()
                self._end_part(landing, ids, succeeded)

            cargo = CallersBlocks(self._books, ids, [Pin(hold.run, hold.end)] if hold is not None else [], give)
            if ids is landing.blocks:
                return self._mover.copy_for_caller(TaskKind.SWAP_OUT, read[0][1], cargo)
            return self._send_image(TaskKind.SWAP_OUT, cargo, ids, [each for _, each in read])
        except BaseException:
            reading.end()
            is_alone = ids is landing.pages or not landing.pages
            self._end_part(landing, ids, False)
            if not is_alone:  # nor is the other one sent
                self._end_part(landing, landing.pages, False)
            raise

    def _send_image(
        self, kind: TaskKind, cargo: CallersBlocks, pages: array[int], units: Sequence[array[int]]
    ) -> Transfer:
        transfer = self._mover.new_transfer(CPU if kind is TaskKind.SWAP_OUT else GPU)
        self._mover.send_image(transfer, cargo, kind, pages, units)
        return transfer

    def _end_part(self, landing: AnchoredLanding, ids: array[int], succeeded: bool) -> None:
        """A task has ended. With the last one all of it joins the tree, or goes home."""
        landing.num_left -= 1
        landing.has_failed |= not succeeded
        if landing.num_left:
            landing.kept = ids
            return
        landing.kept = _NOTHING
        self._landings.pop(landing, None)
        if not landing.has_failed and landing.began == self._tree.generation:
            self._land(landing)
        for each in (landing.blocks, landing.pages):
            free_left(self._books.pools[CPU], each)

    def _land(self, landing: AnchoredLanding) -> None:
        """Without memory it has come in vain, and what has joined goes again."""
        tree, leaf, num_joined = self._tree, None, 0
        namespace, keys, _, first = landing.sequence
        try:
            if landing.blocks and (leaf := insert_copies(tree, namespace, keys, first, landing.blocks, stored=False)):
                num_joined = leaf.num_blocks
            path, num_found = tree.find(namespace, keys, landing.boundary)  # it may join runs
            leaf = path[-1] if path else None
            if num_found == landing.boundary:
                checkpoint = self._anchor(path, landing)
                if num_joined:  # first: storage is offered full KV before its checkpoint
                    self._books.note(Copied(Pin(path[-1], path[-1].cpu_end), num_blocks=num_joined))
                if checkpoint is not None and ImageCopied in self._books.listeners:
                    self._books.note(ImageCopied(checkpoint=checkpoint))
        except MemoryError:
            self._books.mishaps.note("landing")
        if leaf is not None and tree.residency.trim is not None:
            tree.residency.trim(leaf, Loss.TRIMMED)

    def _anchor(self, path: list[Run], landing: AnchoredLanding) -> Checkpoint | None:
        """The checkpoint of these pages; None: another one has made it meanwhile."""
        run, end = self._tree.place(path, landing.boundary)
        assert run is not None
        path_pin = self._tree.move_pin(None, run, end)  # one that is there already may be pinned with its path alone
        try:
            checkpoint = self._checkpoints.restore(run, end, landing.boundary, landing.pages)
            if checkpoint is not None:
                try:
                    self._rows.limit_path(checkpoint, self._most_inner)
                finally:
                    self._checkpoints.unpin(checkpoint)
            return checkpoint
        finally:
            self._tree.move_pin(path_pin, None, 0)


def free_left(pool: BlockPool, ids: Iterable[int]) -> None:
    """Those of a task's blocks that have not joined the tree go home. Needs no memory."""
    pool.free_each((i for i in ids if pool.owner(i) is TASK), TASK)
