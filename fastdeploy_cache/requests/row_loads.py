"""Loads for requests of a hybrid model: what a checkpoint lacks on the GPU, and full KV before it. Under the lock."""

from __future__ import annotations

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.path import coming_and_cold
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.movement.images import ImageMover
from fastdeploy_cache.movement.loader import Loader
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.checkpoint_maker import rows_of
from fastdeploy_cache.requests.waiting import loads_of_pinned, pin_leading, wait_for


class RowLoads:
    """A match has a *goal*, the deepest checkpoint of its prompt, and a *base*, the deepest that was on the GPU with
    its full KV when it was matched. Both are pinned until the match is settled: at the goal where all of that has come,
    else at the base. A load may fail, and the full KV and the checkpoint come by tasks of their own."""

    def __init__(self, books: Books, rows: RowBooks, loader: Loader, images: ImageMover) -> None:
        self._tree, self._checkpoints, self._size = books.tree, rows.checkpoints, books.tree.block_size
        self._loader, self._images = loader, images

    def begin(self, active: ActiveRequest, path: list[Run], goal: Checkpoint, base: Checkpoint | None) -> bool:
        """Load what the goal lacks on the GPU: all of it or nothing. Whether it is on its way; else the request holds
        nothing of it."""
        rows = rows_of(active)
        pin_leading(self._tree, active, path, goal.boundary)  # first: what makes room must not take it
        for each in (base, goal):
            if each is not None:
                rows.anchors.append(each)
                self._checkpoints.pin(each)
        if not self._start(active, path, goal, base):
            num_near = base.boundary if base is not None else 0
            active.trail.refused_for, active.num_unloaded_blocks = self._loader.refused_for, goal.boundary - num_near
            self.give_up(active)
            return False
        rows.goal, rows.base = goal, base
        image = self.loading(active)
        wait_for(active, [*loads_of_pinned(active), *([image] if image is not None else [])])
        return True

    def _start(self, active: ActiveRequest, path: list[Run], goal: Checkpoint, base: Checkpoint | None) -> bool:
        num_near = base.boundary if base is not None else 0
        _, parts = coming_and_cold(path, goal.boundary)
        is_needed = goal.units is None and self._images.loading(goal) is None
        num_cold = sum([length for _, _, length in parts])
        if not num_cold and not is_needed:  # others bring it
            return True
        num_pages = self._checkpoints.sizes.num_pages(goal.boundary) if is_needed else 0
        if not self._loader.is_worth(num_cold + num_pages, goal.boundary - num_near):
            return False
        num_rest = -(-active.request.num_tokens // self._size) - goal.boundary
        return self._loader.start(parts, num_cold, num_rest, image=goal if is_needed else None)

    def give_up(self, active: ActiveRequest, kept: Checkpoint | None = None) -> None:
        """It keeps no checkpoint of its match any more but this one. Needs no memory."""
        rows = rows_of(active)
        rows.goal = rows.base = None
        for each in rows.anchors:
            if each is not kept:
                self._checkpoints.unpin(each)
        del rows.anchors[:]
        if kept is not None:
            rows.anchors.append(kept)

    def loading(self, active: ActiveRequest) -> Transfer | None:
        """The load that brings the checkpoint which a match waits for."""
        goal = rows_of(active).goal
        return self._images.loading(goal) if goal is not None and goal.units is None else None
