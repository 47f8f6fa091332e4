"""The verbs of a model whose layers do not all keep everything: `cache.rows`."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Sequence
from functools import partial

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.tokens import TokenIds
from fastdeploy_cache.errors import CacheError, OutOfBlocksError, RequestError
from fastdeploy_cache.ipc.clock import seconds_to_wait
from fastdeploy_cache.request import Request, whole_number
from fastdeploy_cache.requests.active_request import WAITING, ActiveRequest, Committed
from fastdeploy_cache.requests.anchors import Anchors
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.requests.steps import Steps
from fastdeploy_cache.requests.tables import RowBlocks, RowTable


class RowAllocation:
    """Blocks of all rows, or none. See `fastdeploy_cache.requests.steps.Allocation`."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def allocate(self, active: ActiveRequest, num_blocks: int, *, ahead_of_loads: bool = False) -> RowBlocks:
        """See there, and `PrefixCacheManager.allocate`."""
        anchors = self._requests.anchors
        assert anchors is not None
        try:
            self._check_room(anchors, active, num_blocks, may_settle=not ahead_of_loads)
        except OutOfBlocksError as refused:
            if not ahead_of_loads:  # else nothing was changed, and a replay has nothing to do again
                self._requests.tell_refused(active, num_blocks, refused.missing)
            raise
        ids = self._requests.allocate(active, num_blocks, ahead_of_loads=ahead_of_loads, is_told=False)
        first = len(active.block_ids) - num_blocks  # not before: that settles a match
        try:
            return RowBlocks(ids.tolist(), anchors.extend(active, first, num_blocks))
        except BaseException:
            self._requests.take_back(active, num_blocks)
            raise

    def _check_room(self, anchors: Anchors, active: ActiveRequest, num_blocks: int, *, may_settle: bool) -> None:
        try:
            anchors.check_room(active, num_blocks)
        except OutOfBlocksError:
            if not may_settle or active.phase is not WAITING:
                raise
            self._requests.matcher.settle(active)  # what it waits for, and does not get, holds units, too
            anchors.check_room(active, num_blocks)

    def take_back(self, active: ActiveRequest, num_blocks: int, taken: RowBlocks) -> None:
        """See there."""
        assert self._requests.anchors is not None
        self._requests.anchors.take_back(active, taken.tables)
        self._requests.take_back(active, num_blocks)

    def undo(self, active: ActiveRequest, taken: RowBlocks) -> None:
        """The same, of one allocation alone."""
        self.take_back(active, len(taken.block_ids), taken)

    def none(self, active: ActiveRequest) -> RowBlocks:
        """See there."""
        assert active.rows is not None
        return RowBlocks([], tuple([RowTable(len(active.block_ids), []) for _ in active.rows.firsts]))


def _as_slots(slots: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple([operator.index(slot) for slot in slots])
    except TypeError as error:
        raise RequestError(
            f"a snapshot in slots {reprlib.repr(slots)}; give whole numbers, one of each row of states"
        ) from error


class RowVerbs:
    """What `allocate` and `step` are for other models, and snapshots of states. Any thread; each call is a turn.

    A checkpoint's units are read and never written: a request that goes on at one reads its state from the slot that
    the match has shown, and writes its own from then on.
    """

    def __init__(self, books: Books, requests: Requests, block_size: int) -> None:
        self._books, self._requests, self._size = books, requests, block_size
        self._allocation = RowAllocation(requests)
        self._steps = Steps(requests, block_size, self._allocation)

    def allocate(
        self, request: Request, num_blocks: int, *, ahead_of_loads: bool = False, wait_seconds: float = 0.0
    ) -> RowBlocks:
        """Give the request `num_blocks` more blocks behind those that it has, of every row, or of none.

        Of a row of states it gets one slot with its first blocks, which is its own to write. `ahead_of_loads` and
        `wait_seconds` are those of `PrefixCacheManager.allocate`. With the first, the `tables` of the match that is
        polled after this are those of the checkpoint that is on its way, and `match.load_ids` brings that, too.

        Raises:
            OutOfBlocksError: one row has not that many now, which `row` names; nothing was changed.
            RequestError: not a number of 0 or more; or all layers of this model keep everything: use
                `PrefixCacheManager.allocate`.
        """
        number = whole_number(num_blocks, "num_blocks")
        if wait_seconds != 0:
            seconds = seconds_to_wait("allocate", wait_seconds)
            take = partial(self._allocate, request, number, ahead_of_loads)
            return self._requests.wait_for_blocks(request, number, take, self._allocation.undo, seconds)
        with self._books:
            return self._allocate(request, number, ahead_of_loads)

    def _allocate(self, request: Request, num_blocks: int, ahead_of_loads: bool) -> RowBlocks:
        self._books.check_awake()
        active, anchors = self._requests.active(request), self._anchors()
        if num_blocks < 0:
            raise RequestError(f"allocate of {num_blocks} blocks for {request.request_id!r}; give 0 or more")
        if anchors.matches.copies.copies_states:  # a state is copied when it has come: nothing runs ahead of that
            ahead_of_loads = False
        new = self._allocation.allocate(active, num_blocks, ahead_of_loads=ahead_of_loads)
        try:
            self._requests.tell_allocated(active, num_blocks, ahead_of_loads=ahead_of_loads)
        except MemoryError:
            self._allocation.undo(active, new)
            raise
        return new

    def step(self, steps: Iterable[tuple[Request, TokenIds, int]]) -> list[RowBlocks | CacheError | MemoryError]:
        """See `PrefixCacheManager.step`: the same, with new blocks of all rows for each request."""
        packed = Steps.pack(steps)
        with self._books:
            self._books.check_awake()
            self._anchors()
            return self._steps.run(packed)

    def snapshot(self, request: Request, num_tokens: int, slots: Sequence[int]) -> tuple[int, ...] | None:
        """After exactly the first `num_tokens` tokens the states are in these slots, one of each row of states, which
        are the request's own. Call it before they are written on.

        Returns the slots that the request writes from now on, while those of the snapshot are read and never written:
        the commit that reaches these tokens makes a checkpoint of them. Of output the newest one is kept, and becomes a
        checkpoint when the request is released. None: there is no slot to spare, or what the request computes is not
        cached; then nothing has changed, and the request writes on where it did.

        Raises:
            RequestError: tokens that do not end a block, or that are not computed; slots that are not the request's
                own; a second snapshot of the same tokens; or a model without states. Nothing was changed.
        """
        number, given = whole_number(num_tokens, "num_tokens"), _as_slots(slots)
        with self._books:
            self._books.check_awake()
            active = self._requests.active(request)
            anchors = self._anchors()
            self._check(active, anchors, number, given)
            if not anchors.snapshots.is_cached(active, number):
                self._requests.tell_snapshot(active, number, given=False)
                return None
            first = active.num_committed_blocks * self._size
            tail = active.keys.part(first * TOKEN_BYTES, number * TOKEN_BYTES) if number > first else b""
            fresh = anchors.snapshots.replace_slots(active, number // self._size, tail)
            self._requests.tell_snapshot(active, number, given=fresh is not None)
            if fresh is not None and active.num_computed_tokens >= number:
                anchors.committed(active)
                if active in self._requests.offered:
                    self._books.note(Committed(active=active))
            return fresh

    def _check(self, active: ActiveRequest, anchors: Anchors, num_tokens: int, slots: tuple[int, ...]) -> None:
        name, rows = f"snapshot of request {active.request.request_id!r}", active.rows
        assert rows is not None
        if not anchors.state_rows:
            raise RequestError(f"{name}: the model has no states; windows are cached without snapshots")
        if num_tokens <= 0 or num_tokens % self._size:
            raise RequestError(f"{name} at {num_tokens} tokens; take it where a block of {self._size} tokens ends")
        num_held = min(active.request.num_tokens, len(active.block_ids) * self._size)
        least = max(active.num_computed_tokens, active.num_committed_blocks * self._size)
        if not least <= num_tokens <= num_held:
            raise RequestError(
                f"{name} at {num_tokens} tokens; {least} are committed or cached, and {num_held} are there and have "
                "blocks: take it between these"
            )
        live = [rows.tables[number][0] for number in anchors.state_rows if rows.tables[number]]
        is_own = all(slot in rows.own[number] for slot, number in zip(live, anchors.state_rows, strict=False))
        if not (is_own and len(live) == len(anchors.state_rows) and list(slots) == live):
            raise RequestError(
                f"{name} in slots {list(slots)}; its states are in {live}: give the slots that it writes, one of each "
                "row of states"
            )
        there = [each for each in (rows.pending, rows.newest) if each and each.boundary == num_tokens // self._size]
        if any(anchors.snapshots.is_still(active, each) for each in there):
            raise RequestError(f"{name} at {num_tokens} tokens, of which there is one; take one at each boundary")

    def _anchors(self) -> Anchors:
        if (anchors := self._requests.anchors) is None:
            raise RequestError("all layers of this model keep everything; use `allocate` and `step` of the cache")
        return anchors
