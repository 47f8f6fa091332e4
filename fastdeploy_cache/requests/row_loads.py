"""Loads for requests of a hybrid model: what a checkpoint lacks on the GPU, and full KV before it. Under the lock."""

from __future__ import annotations

from functools import partial

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.checkpoints import Checkpoints
from fastdeploy_cache.books.path import coming_and_cold, num_gpu
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.checkpoint_maker import rows_of
from fastdeploy_cache.requests.room_queue import RoomNeed, RoomQueue, RoomWait
from fastdeploy_cache.requests.tables import RequestRows
from fastdeploy_cache.requests.waiting import end_room_wait, loads_of_pinned, pin_leading, wait_for


def give_up(checkpoints: Checkpoints, rows: RequestRows, kept: Checkpoint | None = None) -> None:
    """A request keeps no checkpoint of its match any more but this one, if it has it still: a window may have slid past
    it. Needs no memory."""
    rows.goal = None
    is_kept = False
    for each in rows.anchors:
        if each is kept and not is_kept:
            is_kept = True
        else:
            checkpoints.unpin(each)
    if kept is not None and is_kept:
        rows.anchors[0] = kept
    del rows.anchors[int(is_kept) :]


class RowLoads:
    """A match has a *goal*, the deepest checkpoint of its prompt, and a *base*, the deepest that was on the GPU with
    its full KV when it was matched. Both are pinned until the match is settled: at the goal where all of that has come,
    else at the base. A load may fail, and the full KV and the checkpoint come by tasks of their own. Where copies in
    flight will give back the room that they lack, the match waits for that, with its pins alone."""

    def __init__(
        self, config: CacheConfig, books: Books, rows: RowBooks, movement: Movement, *, room: RoomQueue
    ) -> None:
        assert movement.images is not None
        self._tree, self._checkpoints, self._size = books.tree, rows.checkpoints, config.block_size
        self._loader, self._images, self._room = movement.loader, movement.images, room
        self._clock, self._seconds = books.clock, config.transfer.task_timeout_seconds

    def begin(self, active: ActiveRequest, path: list[Run], goal: Checkpoint, base: Checkpoint | None) -> bool:
        """Load what the goal lacks on the GPU: all of it or nothing. Whether it is on its way, or waits for room; else
        the request holds nothing of it."""
        rows = rows_of(active)
        pin_leading(self._tree, active, path, goal.boundary)  # first: what makes room must not take it
        for each in (base, goal):
            if each is not None:
                rows.anchors.append(each)
                self._checkpoints.pin(each)
        rows.goal = goal
        active.trail.row_load_bytes = self._num_lacking_bytes(path, goal)
        if not self._start(active, goal):
            self._refuse(active, self._loader.refused_for)
            give_up(self._checkpoints, rows)
            return False
        return True

    def extend(self, active: ActiveRequest, path: list[Run], goal: Checkpoint) -> bool:
        """Load a deeper checkpoint than all that the match has, which it keeps: where this one does not come, it is
        settled at one of those. Whether it is on its way, or waits for room; else all is as before."""
        rows, num_pinned = rows_of(active), active.num_pinned_blocks
        before, num_bytes = rows.goal, active.trail.row_load_bytes
        pin_leading(self._tree, active, path, goal.boundary)
        is_started = False
        try:
            rows.anchors.append(goal)
            self._checkpoints.pin(goal)
            rows.goal = goal
            active.trail.row_load_bytes = self._num_lacking_bytes(path, goal)
            is_started = self._start(active, goal)
            if not is_started:
                self._refuse(active, self._loader.refused_for)
        finally:
            if not is_started:
                rows.goal, active.trail.row_load_bytes = before, num_bytes
                if rows.anchors and rows.anchors[-1] is goal:
                    self._checkpoints.unpin(rows.anchors.pop())
                pin_leading(self._tree, active, path, num_pinned)
        return is_started

    def _start(self, active: ActiveRequest, goal: Checkpoint) -> bool:
        """Start what is not on its way, or wait for room. False: neither is worth it, or possible."""
        assert active.pin is not None
        _, parts = coming_and_cold(active.pin.run.path(), goal.boundary)
        is_needed = goal.units is None and self._images.loading(goal) is None
        num_cold = sum([length for _, _, length in parts])
        if num_cold or is_needed:  # else others bring it
            num_pages = self._checkpoints.sizes.num_pages(goal.boundary) if is_needed else 0
            if not self._loader.is_worth(num_cold + num_pages, self._num_saved(active)):
                return False
            num_rest = -(-active.request.num_tokens // self._size) - goal.boundary
            start = partial(self._loader.start, parts, num_cold, num_rest, image=goal if is_needed else None)
            is_behind = self._room.is_behind(active.room)
            is_started = not is_behind and start()
            lacks = self._loader.lacks_room or (active.room is not None and self._loader.lacks_place)
            if not is_started and (is_behind or lacks):
                units = self._checkpoints.sizes.counts(goal.boundary) if is_needed else ()
                if self._wait_for_room(active, RoomNeed(num_cold + num_rest, units)):
                    return True
                is_started = is_behind and start()  # none of those in front can be helped by what is in flight, either
            if not is_started:
                return False
        end_room_wait(self._room, self._clock, active)
        self._wait_for_loads(active)
        return True

    def _num_lacking_bytes(self, path: list[Run], goal: Checkpoint) -> int:
        num_blocks = goal.boundary - num_gpu(path, goal.boundary)
        sizes = self._checkpoints.sizes
        return num_blocks * sizes.page_bytes + (sizes.image_bytes(goal.boundary) if goal.units is None else 0)

    def _num_saved(self, active: ActiveRequest) -> int:
        """Blocks that need not be computed where the goal is reached."""
        rows = rows_of(active)
        assert rows.goal is not None
        there = [each.boundary for each in rows.anchors if each.units is not None and each is not rows.goal]
        return rows.goal.boundary - max(there, default=0)

    def _wait_for_loads(self, active: ActiveRequest) -> None:
        image = self.loading(active)
        wait_for(active, [*loads_of_pinned(active), *([image] if image is not None else [])])

    def _refuse(self, active: ActiveRequest, why: tuple[Cause, str]) -> None:
        active.trail.refused_for, active.num_unloaded_blocks = why, self._num_saved(active)

    # -- waiting for room

    def _wait_for_room(self, active: ActiveRequest, need: RoomNeed) -> bool:
        """Wait until it can be had; False where no copy in flight will give it back."""
        if not self._room.may_come(need):
            return False
        if active.room is None:
            serve, give_up = partial(self._serve, active), partial(self.stop_waiting_for_room, active)
            active.room = RoomWait(self._clock, need, self._seconds, serve, give_up, is_match=True)
            self._room.enter(active.room)
        active.room.need = need
        self._wait_for_loads(active)
        return True

    def _serve(self, active: ActiveRequest) -> bool:
        """Load what a match waits for room for, if there is room now; False while there is none."""
        generations, goal = self._tree.generations, rows_of(active).goal
        if goal is None or max(generations.last_reset, generations.last_gpu_loss) > active.generation:
            self.stop_waiting_for_room(active, Cause.RESET)
        elif not self._start(active, goal):
            self._refuse(active, self._loader.refused_for)
            end_room_wait(self._room, self._clock, active)
        return active.room is None

    def stop_waiting_for_room(self, active: ActiveRequest, cause: Cause = Cause.ROOM) -> None:
        """It gets no room for its load. The match stays as it is until it is settled."""
        if active.room is not None:
            if rows_of(active).goal is not None:
                self._refuse(active, (cause, active.room.detail(self._clock)))
            end_room_wait(self._room, self._clock, active)

    def loading(self, active: ActiveRequest) -> Transfer | None:
        """The load that brings the checkpoint which a match waits for."""
        goal = rows_of(active).goal
        return self._images.loading(goal) if goal is not None and goal.units is None else None
