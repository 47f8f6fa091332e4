"""What a match holds while it waits: the path that it pins, and the loads that bring what of it is not there."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import GPU, Run
from fastdeploy_cache.books.transfer import Transfer, segments_of
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.room_queue import RoomQueue


def pin_leading(tree: PrefixTree, active: ActiveRequest, path: list[Run], num_blocks: int) -> None:
    """Pin the first `num_blocks` blocks of a path instead of what was pinned before."""
    active.pin = tree.move_pin(active.pin, *tree.place(path, num_blocks))
    active.num_pinned_blocks = num_blocks


def loads_of_pinned(active: ActiveRequest) -> list[Transfer]:
    """What brings pinned blocks to the GPU, of others' too."""
    if active.pin is None:
        return []
    last, end = active.pin.run, active.pin.end
    segments = [s for run in last.path() for s in segments_of(run, GPU) if run is not last or s.start < end]
    return list(dict.fromkeys([segment.transfer for segment in segments]))


def wait_for(active: ActiveRequest, transfers: Iterable[Transfer]) -> None:
    """It waits for these, too."""
    known = set(active.loads)
    new = [transfer for transfer in transfers if transfer not in known]
    for transfer in new:
        transfer.num_waiting += 1
    active.loads = [*active.loads, *new]
    if active.prefetch is not None:
        active.prefetch.loads = active.loads


def end_room_wait(room: RoomQueue, clock: Clock, active: ActiveRequest) -> None:
    """It waits for no room any more, if it did."""
    if active.room is not None:
        active.trail.room_seconds += clock.now() - active.room.began_at
        room.leave(active.room)
        active.room = None


def stop_waiting(active: ActiveRequest) -> None:
    """It waits for no load any more."""
    for transfer in active.loads:
        transfer.num_waiting -= 1
        if transfer.succeeded:
            active.trail.load_seconds += transfer.seconds
        elif transfer.done.is_set():
            active.trail.has_failed_load = True
    active.loads = []
    if active.prefetch is not None:
        active.prefetch.loads = active.loads
