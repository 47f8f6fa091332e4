"""What a transfer moves, and to whom it belongs when it has ended. All of it under the lock. See `Cargo`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from fastdeploy_cache.books.arrivals import land
from fastdeploy_cache.books.block_pool import REQUEST, TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Copied
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run, Tier
from fastdeploy_cache.books.transfer import Transfer


class Landings:
    """Blocks of runs on their way to the other tier, which join their runs there."""

    def __init__(self, books: Books, transfer: Transfer, num_landed: list[int]) -> None:
        """`num_landed`: by tier, blocks that have joined it; counted on."""
        self._books, self._transfer, self._num_landed = books, transfer, num_landed

    @property
    def ids(self) -> Sequence[int]:
        return [block_id for segment in self._transfer.segments for block_id in segment.ids]

    @property
    def pins(self) -> Sequence[Pin]:
        return self._transfer.segments

    def num_freed(self, held: dict[Run, int]) -> int:
        transfer, num_freed = self._transfer, 0
        for segment in transfer.segments:
            num_ids = len(segment.ids)
            if transfer.cancelled or (transfer.tier is GPU and segment.run.epoch != self._books.tree.epoch):
                num_freed += 0 if transfer.num_ahead else num_ids  # it, or its successor, joins nothing
            elif transfer.tier is GPU:
                # blocks that were computed meanwhile send the load's ids home; the others join the run
                num_superseded = max(0, min(segment.end, segment.run.num_gpu) - segment.start)
                joined_from = max(segment.start + num_superseded, held.get(segment.run, 0))
                num_home = 0 if transfer.num_ahead else num_superseded
                num_freed += num_home + max(0, segment.end - joined_from)
        return num_freed

    def end(self, succeeded: bool) -> None:
        """Segment by segment, each forgotten only when it has landed."""
        transfer, books = self._transfer, self._books
        while transfer.segments:
            segment = transfer.segments[0]
            num_joined = land(books.tree, segment, succeeded)
            del transfer.segments[0]
            self._num_landed[transfer.tier] += num_joined
            num_left = len(segment.ids) - num_joined
            if num_left:
                del segment.ids[num_left:]
                self._send_home(segment.ids)
            transfer.num_lost += num_left
            run = segment.run
            is_trimmed = books.rows is not None and not run.cpu  # the checkpoint behind it has gone meanwhile
            if num_joined and transfer.tier is CPU and Copied in books.listeners and not is_trimmed:
                books.note(Copied(Pin(run, run.cpu_end), num_blocks=num_joined))

    def _send_home(self, ids: array[int]) -> None:
        """Ids that no run took. Where a request already reads them they stay with the task: given out again, they would
        be overwritten under a step that is running."""
        if self._transfer.num_ahead:
            self._transfer.kept.append(ids)  # one array of all would need memory
        else:
            self._books.pools[self._transfer.tier].free(ids, TASK)


class OneBlock:
    """A cached GPU block on its way into another GPU block, which its request may write."""

    def __init__(self, books: Books, source: Pin, block_ids: array[int]) -> None:
        """`source` ends behind the block; `block_ids` is the one destination."""
        self._books, self._source = books, source
        self.block_ids = block_ids
        self.is_wanted = True  # until the request has settled without it
        self.has_landed = self.is_shown = False  # the last: to the caller of the match, after it had landed
        self.ids: Sequence[int] = block_ids
        self.pins: Sequence[Pin] = (source,)

    def num_freed(self, held: dict[Run, int]) -> int:  # noqa: ARG002 (see `Cargo`)
        return 0 if self.is_wanted else len(self.block_ids)

    def end(self, succeeded: bool) -> None:
        """The block is its request's, if that still waits for it."""
        self._books.tree.unpin(self._source)
        self.pins = ()
        if succeeded and self.is_wanted:
            self._books.pools[GPU].hand_over(self.block_ids, TASK, REQUEST)
            self.has_landed = True
        else:
            self._books.pools[GPU].free(self.block_ids, TASK)
        self.ids = ()


class WipedBlocks:
    """Blocks of a tier that are overwritten, or units of a row behind the full one."""

    pins: Sequence[Pin] = ()

    def __init__(self, tier: Tier, ids: array[int], give: Callable[[bool], None], rows: Sequence[bool]) -> None:
        """`give` gives the ids away when all ranks have answered, well or not. `rows`: whose units they are."""
        self._tier, self._give = tier, give
        self.ids: Sequence[int] = ids if not any(rows) else ()
        self.units: Sequence[Sequence[int]] = [ids if is_its else () for is_its in rows]

    def num_freed(self, held: dict[Run, int]) -> int:  # noqa: ARG002 (see `Cargo`)
        return len(self.ids) if self._tier is GPU else 0

    def end(self, succeeded: bool) -> None:
        """They are free, or to be wiped once more."""
        self._give(succeeded)
        self.ids = self.units = ()


class CallersBlocks:
    """Blocks on their way from or into blocks of a caller, or into the CPU tier on its behalf."""

    def __init__(
        self,
        books: Books,
        ids: array[int],
        pins: Sequence[Pin],
        give: Callable[[bool], None],
        units: Sequence[array[int]] = (),
    ) -> None:
        """`ids`: in the transfer's tier, the task's until it has ended; and so are `units`, by row, where it fills any.
        `pins`: on what it reads, or continues. `give` gives them away when all ranks have answered, well or not."""
        self._books, self._give = books, give
        self.ids: array[int] = ids
        self.units = units
        self.pins: list[Pin] = list(pins)

    def num_freed(self, held: dict[Run, int]) -> int:  # noqa: ARG002 (see `Cargo`)
        return 0

    def end(self, succeeded: bool) -> None:
        try:
            self.give(succeeded)  # first: of a hybrid model, what it continues may go as soon as nobody pins it
        finally:
            while self.pins:
                self._books.tree.unpin(self.pins[-1])
                self.pins.pop()

    def give(self, succeeded: bool) -> None:
        """The ids go to whom they belong now. Where the task could not be sent at all, this is all there is to do."""
        self._give(succeeded)
        self.ids, self.units = array("i"), ()
