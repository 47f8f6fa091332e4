"""Checkpoints from the units of a request. Under the lock."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from typing import cast

from fastdeploy_cache.books.block_pool import REQUEST
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.tables import RequestRows, Snapshot


def rows_of(active: ActiveRequest) -> RequestRows:
    """What a request of a hybrid model holds."""
    assert active.rows is not None
    return active.rows


class CheckpointMaker:
    """Publishes what a request has at a boundary, and keeps it for the request as long as its windows lie there."""

    def __init__(self, books: Books, rows: RowBooks, most_inner: int) -> None:
        """`most_inner`: checkpoints of one path that are kept in front of its last."""
        self._books, self._tree, self._rows, self._most_inner = books, books.tree, rows, most_inner
        self._shapes = rows.checkpoints.sizes.rows

    def publish(self, active: ActiveRequest, boundary: int, snapshot: Snapshot | None) -> bool:
        """Make a checkpoint; whether it has the request's units now. What fails costs the checkpoint alone."""
        try:
            is_taken = self._try_publishing(active, boundary, snapshot)
        except (MemoryError, AssertionError):
            self._books.mishaps.note("checkpoint")
            self._rows.counts.num_refused += 1
            return False
        if is_taken:
            self._keep_newest(rows_of(active), boundary)
            try:
                self._rows.limit_path(rows_of(active).anchors[-1], self._most_inner)
            except MemoryError:  # it is there, and one more than should be
                self._books.mishaps.note("checkpoint")
        return is_taken

    def _keep_newest(self, rows: RequestRows, boundary: int) -> None:
        """Let those go that the request kept before: all that it still reads in front of the new one is in that, too. A
        row with a short window would else run out of units while a long one slides over the others."""
        if rows.newest is not None and rows.newest.boundary < boundary:
            return
        for checkpoint in rows.anchors[:-1]:
            self._rows.checkpoints.unpin(checkpoint)
        del rows.anchors[:-1]

    def _try_publishing(self, active: ActiveRequest, boundary: int, snapshot: Snapshot | None) -> bool:
        """All of it or, on `MemoryError`, nothing."""
        rows, slots = rows_of(active), iter(snapshot.slots if snapshot is not None else ())
        units = [self._units_for(rows, number, boundary, slots) for number in range(len(self._shapes))]
        given = [each for each in units if each is not None]
        if len(given) < len(units) or active.pin is None:
            self._rows.counts.num_refused += 1
            return False
        run, end = self._tree.place(active.pin.run.path(), boundary)
        assert run is not None
        own = [kept.difference(ids) for kept, ids in zip(rows.own, given, strict=True)]
        with self._places(rows):
            checkpoint, is_taken = self._rows.checkpoints.publish(run, end, boundary, given, REQUEST)
        rows.used[-1] = rows.anchors[-1] = checkpoint
        if is_taken:
            rows.own = own  # it is pinned for us
        else:
            rows.anchors.pop()
            if checkpoint in rows.used[:-1]:
                rows.used.pop()
        return is_taken

    @staticmethod
    @contextlib.contextmanager
    def _places(rows: RequestRows) -> Iterator[None]:
        """Places at the ends of both lists: whoever asks for them when the checkpoint has our units may get no memory,
        and nobody would know whose these are."""
        nothing, num_anchors, num_used = cast("Checkpoint", None), len(rows.anchors), len(rows.used)
        try:
            rows.anchors.append(nothing)
            rows.used.append(nothing)
            yield
        except BaseException:
            del rows.anchors[num_anchors:], rows.used[num_used:]
            raise

    def _units_for(self, rows: RequestRows, number: int, boundary: int, slots: Iterator[int]) -> array[int] | None:
        """The units of a row at a boundary; None where the request has them no more."""
        row = self._shapes[number]
        if row.kind == "state":
            return array("i", [next(slots)])
        first = row.first_block(boundary) - rows.firsts[number]
        units = rows.tables[number][max(0, first) : boundary - rows.firsts[number]]
        return units if first >= 0 and len(units) == boundary - row.first_block(boundary) else None
