"""Requests that use blocks before the loads that bring them have ended. Under the lock."""

from __future__ import annotations

from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.requests.accounts import Accounts
from fastdeploy_cache.requests.active_request import AHEAD, SETTLED, VOID, ActiveRequest
from fastdeploy_cache.requests.anchors import Anchors
from fastdeploy_cache.requests.listener import CONFIRMED, RequestListener
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.requests.waiting import stop_waiting


class RunsAhead:
    """See `PrefixCacheManager.allocate` with `ahead_of_loads`, and `confirm`."""

    def __init__(self, matcher: Matcher, mover: BlockMover, accounts: Accounts, anchors: Anchors | None) -> None:
        self._matcher, self._mover, self._accounts, self._anchors = matcher, mover, accounts, anchors
        self._listener: RequestListener | None = None

    def tell(self, listener: RequestListener) -> None:
        """See `Requests.tell`."""
        self._listener = listener

    def begin(self, active: ActiveRequest) -> None:
        """Let the request use the blocks that are coming as if they were there; nothing is published until they are."""
        (ids, _), (coming, transfers) = self._matcher.arrived(active), self._matcher.coming(active)
        units = self._anchors.matches.units_ahead(active) if self._anchors is not None else ()
        is_whole = active.copy is None and active.room is None and units is not None
        if not is_whole or not coming or len(ids) + len(coming) < active.num_pinned_blocks:
            self._matcher.show(active, is_final=True)  # the caller looks again after this
            return
        self._matcher.end_prefetch(active)
        table = ids + coming  # first: it may need memory
        if self._anchors is not None and units:
            self._anchors.matches.begin_ahead(active, units)
        active.ahead = transfers
        for transfer in transfers:
            self._mover.use_ahead(transfer)
        active.block_ids, active.num_readable_blocks = table, len(ids)
        active.num_matched_blocks = active.num_committed_blocks = len(active.block_ids)
        active.enter(AHEAD)

    def end(self, active: ActiveRequest, arrived: bool, *, is_told: bool = True) -> None:
        """Decide what has become of the request that ran ahead: settled for good, or void.

        `arrived`: nobody has used a layer that was not in. Not `is_told`: its release comes next, and says it all.
        """
        matcher = self._matcher
        came = arrived and all(transfer.succeeded for transfer in active.ahead) and not matcher.is_lost(active)
        ids, path = matcher.arrived(active)
        matches = self._anchors.matches if self._anchors is not None else None
        is_whole = matches is None or matches.has_come(active, len(ids))  # may need memory, as all above
        stop_waiting(active)
        self._accounts.loaded(active)
        active.enter(SETTLED if came else VOID)
        if is_told and self._listener is not None:
            self._listener.note((CONFIRMED, active.trail.number, arrived))
        if came and is_whole and len(ids) == active.num_pinned_blocks:
            if matches is not None:
                matches.confirmed(active)
            return
        active.is_detached = True
        if not came:
            active.num_matched_blocks = active.num_readable_blocks
        if matches is not None:
            matches.end_ahead(active)
        else:
            matcher.cut(active, path, len(ids))

    def leave(self, active: ActiveRequest) -> None:
        """The request uses no block of its loads any more."""
        for transfer in active.ahead:
            self._mover.end_ahead(transfer)
        active.ahead = []
