"""Offers that other instances read: what is computed of each, and what of their blocks is held. Under the lock."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from fastdeploy_cache.books.block_pool import REQUEST, TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import Pin
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.peers.end_checkpoints import EndCheckpoints
from fastdeploy_cache.peers.transfers import Send
from fastdeploy_cache.requests.active_request import VOID, ActiveRequest
from fastdeploy_cache.transfer_manager.peer.messages import Detail, Reason, SendDetail, Why
from fastdeploy_cache.transfer_manager.task import TaskKind


@dataclass(eq=False)
class OpenSend:
    """While its request runs, that one holds the blocks; after its release the send does, until it has ended."""

    send: Send
    active: ActiveRequest | None
    task_id: int = -1
    num_told: int = 0  # blocks
    num_complete: int = 0
    step: int | None = None  # that computes what is told and not complete
    why: Why | None = None  # it has failed
    update_id: int | None = None  # the task that tells of it now
    untold_ids: array[int] = field(default_factory=lambda: array("i"))  # with the next
    is_stale: bool = False  # there is more to tell
    pin: Pin | None = None
    checkpoint: Checkpoint | None = None  # of a hybrid model: the one behind all blocks, from when it is there
    ids: array[int] = field(default_factory=lambda: array("i"))  # blocks of the request that are not the tree's


# Hands out a new task, notes it in the dictionary, and returns its id.
Put = Callable[[TaskKind, "array[int]", Detail, dict[int, OpenSend], OpenSend], int]


class PeerSends:
    """Blocks of a send stay as they are until every rank has answered its task: until then readers may be told that
    what they have read counts. So nothing is freed when a send fails, only when it has ended.

    Of each send one update is on its way at a time; what comes meanwhile goes with the next. So there is always room.
    """

    def __init__(self, books: Books, put: Put) -> None:
        self._books, self._tree, self._put, self._ends = books, books.tree, put, EndCheckpoints(books)
        self._has_rows = books.rows is not None
        self._by_task: dict[int, OpenSend] = {}
        self._by_request: dict[str, OpenSend] = {}  # whose request runs
        self._by_update: dict[int, OpenSend] = {}
        self._last_step, self._done_step = 0, -1
        self._has_untold = False

    def __len__(self) -> int:
        return len(self._by_task)

    def __contains__(self, request_id: str) -> bool:
        """Whether a running request has an open send."""
        return request_id in self._by_request

    @property
    def pins(self) -> list[Pin]:
        """The pins on blocks that have left their request."""
        return [each.pin for each in self._by_task.values() if each.pin is not None]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that are read with them; each is pinned, and its path by the same send."""
        return [each.checkpoint for each in self._by_task.values() if each.checkpoint is not None]

    @property
    def held_ids(self) -> list[int]:
        """GPU blocks that have left their request and are no run's."""
        return [block_id for each in self._by_task.values() for block_id in each.ids]

    def begin(self, active: ActiveRequest, send: Send) -> None:
        """Offer the first `send.num_blocks` blocks of a settled request's tokens."""
        self._tell_untold()
        mine = OpenSend(send, active)
        mine.num_complete = mine.num_told = min(self._num_computed(active), send.num_blocks)
        ids = active.block_ids[: mine.num_told]
        self._by_request[send.request_id] = mine
        try:
            if self._has_rows:
                self._keep_checkpoint(mine, active)
            mine.task_id = self._put(TaskKind.SEND, ids, self._detail(mine), self._by_task, mine)
        except BaseException:
            del self._by_request[send.request_id]
            self._let_go(mine)
            raise

    def _keep_checkpoint(self, mine: OpenSend, active: ActiveRequest) -> bool:
        """Pin the one at which the offer ends, with its path, once all blocks are computed and it is there; whether it
        has come just now. All of it or, on `MemoryError`, nothing."""
        pin, num_blocks = active.pin, mine.send.num_blocks
        is_due = mine.checkpoint is None and self._num_computed(active) >= num_blocks
        if not is_due or pin is None or active.num_pinned_blocks < num_blocks:
            return False
        mine.pin = self._tree.move_pin(mine.pin, *self._tree.place(pin.run.path(), num_blocks))
        mine.checkpoint = self._ends.keep(mine.pin, num_blocks)
        if mine.checkpoint is None:
            self._let_go(mine)
        return mine.checkpoint is not None

    def _let_go(self, mine: OpenSend) -> None:
        """What it has pinned. Needs no memory."""
        checkpoint, mine.checkpoint = mine.checkpoint, None
        self._ends.unpin(checkpoint)  # first: its path is pinned as long as it is
        pin, mine.pin = mine.pin, None
        if pin is not None:
            self._tree.unpin(pin)

    def step(self, active: ActiveRequest, num_tokens: int, step: int) -> None:
        """The model's step of that number computes the request's tokens up to there.

        Of one that runs ahead of loads nothing is told: what it computes may be worth nothing.

        Raises:
            RequestError: the number is of an older step, or of one that is over: layers marked under it are none of
                this one.
        """
        if step < self._last_step or step <= self._done_step:
            over = max(self._last_step - 1, self._done_step)
            raise RequestError(f"step {step} after step {over} is over; numbers rise, and each is for one step")
        self._last_step = step
        self._tell_untold()
        mine = self._by_request.get(active.request.request_id)
        if mine is not None and not active.is_ahead and mine.why is None:
            self._tell(mine, active, num_tokens // self._tree.block_size, step)

    def committed(self, active: ActiveRequest) -> None:
        """The request's step is complete."""
        self._tell_untold()
        mine = self._by_request.get(active.request.request_id)
        if mine is None or active.is_ahead or active.phase is VOID or mine.why is not None:
            return
        if mine.step is not None:
            self._done_step, mine.step = max(self._done_step, mine.step), None
        num_complete = min(self._num_computed(active), mine.send.num_blocks)
        if num_complete < mine.num_told:
            text = f"a step computed {num_complete} of the {mine.num_told} blocks that it was to"
            self.fail(mine, "failed", text)  # what was read of the others is computed again
        elif (self._has_rows and self._keep_checkpoint(mine, active)) or num_complete > mine.num_complete:
            num_before, mine.num_complete = mine.num_complete, num_complete
            try:
                self._tell(mine, active, num_complete, None)
            except MemoryError:  # nobody was told, and then its release fails the send
                mine.num_complete = num_before
                self._let_go(mine)
                raise
        elif self._is_past_its_end(mine, active):
            self.fail(mine, "failed", f"no checkpoint was made behind its {mine.send.num_blocks} blocks")

    def _is_past_its_end(self, mine: OpenSend, active: ActiveRequest) -> bool:
        """Whether the checkpoint that it lacks can come no more: no snapshot is of fewer tokens than are computed."""
        end = mine.send.num_blocks * self._tree.block_size
        return self._has_rows and mine.checkpoint is None and active.num_computed_tokens > end

    def _tell(self, mine: OpenSend, active: ActiveRequest, num_blocks: int, step: int | None) -> None:
        ids = active.block_ids[mine.num_told : min(num_blocks, mine.send.num_blocks)]
        # A list of its own, not the same one longer: what has failed may have a view of it still, in its traceback.
        untold, mine.untold_ids = mine.untold_ids, mine.untold_ids + ids
        step_before, mine.step = mine.step, step
        mine.num_told += len(ids)
        try:
            if ids or step is None:
                self._update(mine)
        except MemoryError:
            mine.num_told -= len(ids)
            mine.step = step_before
            mine.untold_ids = untold
            raise

    def _update(self, mine: OpenSend) -> None:
        mine.is_stale = mine.update_id is not None
        if not mine.is_stale:
            ids, none = mine.untold_ids, array("i")
            mine.update_id = self._put(TaskKind.UPDATE_SEND, ids, self._detail(mine), self._by_update, mine)
            mine.untold_ids = none

    def updated(self, task_id: int, *, is_lost: bool) -> None:
        """An update was answered. One that was lost leaves its readers without block ids: the send fails."""
        self._tell_untold()
        mine = self._by_update.pop(task_id)
        mine.update_id = None
        if mine.task_id not in self._by_task:
            return
        if is_lost and mine.why is None:
            self.fail(mine, "failed", "a rank did not hear what is computed")
        elif mine.is_stale:
            self._try_update(mine)

    def released(self, active: ActiveRequest, private_ids: array[int]) -> Callable[[], array[int]]:
        """The request is to go. What is returned makes what was offered of it the send's, needs no memory, and returns
        those of its private ids that go home. Until that is called the request may as well stay.

        Raises:
            MemoryError: the request may be released again.
        """
        mine = self._by_request.get(active.request.request_id)
        if mine is None:
            return lambda: private_ids
        told = set(active.block_ids[: mine.num_told])
        kept = array("i", [block_id for block_id in private_ids if block_id in told])
        home = array("i", [block_id for block_id in private_ids if block_id not in told])
        if active.pin is not None and mine.checkpoint is None:
            # Beside the request's own: it ends with the send, whether the request goes or stays.
            place = self._tree.place(active.pin.run.path(), min(mine.num_told, active.num_pinned_blocks))
            mine.pin = self._tree.move_pin(mine.pin, *place)
        return functools.partial(self._take_over, mine, active, kept, home)

    def _take_over(self, mine: OpenSend, active: ActiveRequest, kept: array[int], home: array[int]) -> array[int]:
        del self._by_request[active.request.request_id]
        mine.active, mine.ids = None, kept
        if kept:
            self._tree.pools[0].hand_over(kept, REQUEST, TASK)
        num_blocks, is_whole = mine.send.num_blocks, not self._has_rows or mine.checkpoint is not None
        if mine.num_complete == num_blocks and not is_whole:
            self.fail(mine, "failed", f"the request was released without a checkpoint behind its {num_blocks} blocks")
        elif mine.num_complete < num_blocks or active.phase is VOID:
            text = f"the request was released with {mine.num_complete} of {num_blocks} blocks computed"
            self.fail(mine, "failed", text)
        return home

    def fail(self, mine: OpenSend, reason: Reason, text: str) -> None:
        """Nobody is to get it any more. Where there is no memory to tell of it now, the next change of any send tells;
        until then its blocks stay as they are, as they do in any case until every rank has answered."""
        if mine.why is None:
            mine.why = Why(reason, text)
            self._try_update(mine)

    def _try_update(self, mine: OpenSend) -> None:
        try:
            self._update(mine)
        except MemoryError:
            mine.is_stale = self._has_untold = True

    def _tell_untold(self) -> None:
        """What there was no memory for before."""
        waiting, self._has_untold = self._has_untold, False
        for mine in self._by_task.values() if waiting else ():
            if mine.is_stale and mine.update_id is None:
                self._try_update(mine)

    def cancel_all(self, text: str) -> None:
        """What they hold is not what it was, or is not to be moved now."""
        for mine in self._by_task.values():
            self.fail(mine, "cancelled", text)

    def failing(self, task_id: int) -> None:
        """One rank has failed it."""
        if (mine := self._by_task.get(task_id)) is not None:
            self.fail(mine, "cancelled", "another rank has failed it")

    def cancel(self, send: Send) -> None:
        """Its caller does not want it any more."""
        for mine in self._by_task.values():
            if mine.send is send:
                self.fail(mine, "cancelled", "the sending side has cancelled it")

    def ended(self, task_id: int) -> Send:
        """Every rank has answered: nobody is told any more that these blocks count."""
        mine = self._by_task.pop(task_id)
        self._tell_untold()
        if mine.active is not None:
            del self._by_request[mine.send.request_id]
        self._let_go(mine)
        if mine.ids:
            self._tree.pools[0].free(mine.ids, TASK)
        return mine.send

    def _num_computed(self, active: ActiveRequest) -> int:
        """Full blocks that hold what they should: of one that runs ahead of loads those that were there before."""
        if active.is_ahead:
            return active.num_readable_blocks
        num_computed = max(active.num_computed_tokens // self._tree.block_size, active.num_matched_blocks)
        return min(num_computed, len(active.block_ids))

    @staticmethod
    def _detail(mine: OpenSend) -> SendDetail:
        return SendDetail(
            number=mine.send.number,
            num_blocks=mine.send.num_blocks,
            num_complete=mine.num_complete,
            step=mine.step,
            units=mine.checkpoint.units if mine.checkpoint is not None else None,
            why=mine.why,
        )
