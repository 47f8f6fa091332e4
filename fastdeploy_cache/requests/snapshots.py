"""Snapshots of states: from the slot that a request gave away to the checkpoint that it becomes. Under the lock."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.block_pool import REQUEST
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.requests.active_request import SETTLED, ActiveRequest
from fastdeploy_cache.requests.checkpoint_maker import CheckpointMaker, rows_of
from fastdeploy_cache.requests.listener import DRAFTED, RequestListener
from fastdeploy_cache.requests.tables import RequestRows, Snapshot


class Snapshots:
    """A request has three at most::

    pending   no commit has reached it
    newest    of its output: a checkpoint when a block more is computed, or at its release
    passed    it became no checkpoint, and the next token is computed from it
    """

    def __init__(self, config: CacheConfig, books: Books, rows: RowBooks, maker: CheckpointMaker) -> None:
        self._tree, self._rows, self._maker, self._size = books.tree, rows, maker, config.block_size
        self._enabled, self._cache_outputs = config.enable_prefix_caching, config.cache_outputs
        shapes = rows.checkpoints.sizes.rows
        self.state_rows = tuple(number for number, row in enumerate(shapes) if row.kind == "state")
        self._listener: RequestListener | None = None

    def tell(self, listener: RequestListener) -> None:
        """See `Requests.tell`."""
        self._listener = listener

    def is_cached(self, active: ActiveRequest, num_tokens: int) -> bool:
        """Whether a checkpoint behind so many tokens could be found by anybody."""
        is_kept = self._enabled and (self._cache_outputs or num_tokens <= active.request.num_prompt_tokens)
        is_current = active.generation >= self._tree.generations.last_reset
        return is_kept and is_current and active.phase is SETTLED and not active.is_detached

    def replace_slots(self, active: ActiveRequest, boundary: int, tail: bytes) -> tuple[int, ...] | None:
        """What is in its slots of states is a snapshot from now on, and the request writes the slots that this returns.
        None, and nothing has changed, where there are none. All of it or, on `MemoryError`, nothing.

        Two slots are enough to keep the newest states of the output: the ones before go, and leave theirs. Where these
        have to be wiped first, because a namespace was forgotten, they have gone, and there are none.
        """
        rows, pools = rows_of(active), self._rows.checkpoints.pools
        if not self._has_slots and not (self._leave_slots(active, rows) and self._has_slots):
            self._rows.counts.num_refused += 1
            return None
        fresh: list[array[int]] = []
        try:
            fresh.extend([array("i")] * len(self.state_rows))
            for place, number in enumerate(self.state_rows):
                fresh[place] = self._rows.take(number, 1, REQUEST)
            slots = tuple([units[0] for units in fresh])
            old = tuple([rows.tables[number][0] for number in self.state_rows])
            pending = Snapshot(boundary, old, tail)
            for number, slot in zip(self.state_rows, slots, strict=True):
                rows.own[number].add(slot)
        except BaseException:
            for number, units in zip(self.state_rows, fresh, strict=False):
                rows.own[number].difference_update(units)
                pools[number].pool.free_each(units, REQUEST)
            raise
        self.drop_pending(active)  # it was of a draft, or of what no commit has come to yet
        for number, units in zip(self.state_rows, fresh, strict=True):
            rows.tables[number], rows.firsts[number] = units, boundary
        rows.pending = pending
        return slots

    @property
    def _has_slots(self) -> bool:
        return all(self._rows.checkpoints.pools[number].num_available for number in self.state_rows)

    def _leave_slots(self, active: ActiveRequest, rows: RequestRows) -> bool:
        """Give up an older snapshot, whose states are read no more; whether there was one."""
        if rows.pending is not None:
            self.drop_pending(active)
            return True
        if rows.newest is not None and active.num_computed_tokens > rows.newest.boundary * self._size:
            self.let_newest_pass(active)
            return True
        return False

    def drop_pending(self, active: ActiveRequest) -> None:
        """The snapshot that no commit has reached becomes no checkpoint."""
        rows = rows_of(active)
        pending, rows.pending = rows.pending, None
        if pending is not None:
            self._free_slots(rows, pending)

    def _reach(self, active: ActiveRequest, rows: RequestRows, pending: Snapshot, *, is_found: bool) -> None:
        """Once a commit has reached what a snapshot is of, it is published or, of the output, kept as the newest one.
        It passes where it was of a draft, and other tokens were accepted, or where nobody would find it."""
        boundary = pending.boundary
        if boundary * self._size > active.num_computed_tokens:
            return
        is_still = self.is_still(active, pending)
        if not is_still and self._listener is not None:
            self._listener.note((DRAFTED, active.trail.number))
        rows.pending = None
        if not is_found or boundary > active.num_committed_blocks or not is_still:
            self._let_pass(active, rows, pending)
        elif boundary <= (active.request.num_prompt_tokens - 1) // self._size:
            self._make(active, rows, pending)
        else:
            self.let_newest_pass(active)  # an earlier boundary, behind which all has been computed
            rows.newest = pending

    def is_still(self, active: ActiveRequest, snapshot: Snapshot) -> bool:
        """Whether a snapshot is of the tokens that the request has now."""
        end = snapshot.boundary * self._size * TOKEN_BYTES
        return not snapshot.tail or active.keys.part(end - len(snapshot.tail), end) == snapshot.tail

    def _pass_newest(self, active: ActiveRequest, rows: RequestRows, newest: Snapshot, *, is_found: bool) -> None:
        """The newest snapshot of the output waits for its release, or for a newer one, no longer than a block: windows
        would not slide beyond it. Then it is a checkpoint, which may be evicted as any other."""
        if not is_found:
            self.let_newest_pass(active)
        elif active.num_computed_tokens // self._size > newest.boundary + 1:
            self.make_newest(active, rows)

    def _make(self, active: ActiveRequest, rows: RequestRows, snapshot: Snapshot) -> None:
        """A checkpoint of it or, where there can be none, let it pass."""
        if not self._maker.publish(active, snapshot.boundary, snapshot):
            self._let_pass(active, rows, snapshot)

    def let_newest_pass(self, active: ActiveRequest) -> None:
        rows = rows_of(active)
        newest, rows.newest = rows.newest, None
        if newest is not None:
            self._let_pass(active, rows, newest)

    def _let_pass(self, active: ActiveRequest, rows: RequestRows, snapshot: Snapshot) -> None:
        """It becomes no checkpoint. Its states are read once more, by what computes the next token."""
        self.end_passed(rows)
        if active.num_computed_tokens > snapshot.boundary * self._size:
            self._free_slots(rows, snapshot)
        else:
            rows.passed = snapshot

    def end_passed(self, rows: RequestRows) -> None:
        passed, rows.passed = rows.passed, None
        if passed is not None:
            self._free_slots(rows, passed)

    def _free_slots(self, rows: RequestRows, snapshot: Snapshot) -> None:
        for number, slot in zip(self.state_rows, snapshot.slots, strict=True):
            rows.own[number].discard(slot)
            self._rows.checkpoints.pools[number].pool.free_each((slot,), REQUEST)

    def committed(self, active: ActiveRequest, rows: RequestRows, *, is_found: bool) -> None:
        """A commit may have reached one, or gone far enough behind one."""
        if rows.pending is not None:
            self._reach(active, rows, rows.pending, is_found=is_found)
        if rows.newest is not None:
            self._pass_newest(active, rows, rows.newest, is_found=is_found)

    def make_newest(self, active: ActiveRequest, rows: RequestRows) -> None:
        """The newest snapshot of its output, if there is one, waits no longer."""
        newest, rows.newest = rows.newest, None
        if newest is not None:
            self._make(active, rows, newest)
