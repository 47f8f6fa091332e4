"""A match's way back to the cache: look again, wait, be called."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fastdeploy_cache.books.mishaps import call_user
from fastdeploy_cache.books.transfer import Transfer, wait_done
from fastdeploy_cache.ipc.clock import Alarm
from fastdeploy_cache.requests.active_request import WAITING, ActiveRequest
from fastdeploy_cache.requests.explanation import Explanation
from fastdeploy_cache.requests.match import Match
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.requests.tables import RowTable
from fastdeploy_cache.storage.prefetch import StoragePrefetch

_ALARM_SECONDS = 3600.0


class MatchLoads:
    """See `fastdeploy_cache.requests.match.MatchHandle`. Any thread; each call is a turn of its own."""

    __slots__ = ("_active", "_requests", "timeout_seconds")

    def __init__(self, active: ActiveRequest, requests: Requests, timeout_seconds: float) -> None:
        """`timeout_seconds`: how long `wait` waits where no time is given."""
        self._active, self._requests, self.timeout_seconds = active, requests, timeout_seconds

    def describe(self, *, is_final: bool = False) -> Match:
        """The match as it stands, and where `is_final` as it stays. Under the lock, but of a settled match."""
        active, matcher, size = self._active, self._requests.matcher, self._requests.books.tree.block_size
        ids, num_coming = matcher.show(active, is_final=is_final)
        is_lost = matcher.is_lost(active)
        if is_lost:  # nothing of it is there any more
            ids, num_coming = ids[:0], 0
        num_copied = active.num_copied_tokens if ids else 0
        num_copying = size - 1 if active.copy is not None else 0
        num_blocks = len(ids) - (num_copied > 0)
        num_gpu = min(active.num_gpu_blocks, num_blocks)
        num_storage = active.num_storage_blocks(num_gpu, num_blocks) if active.prefetch is not None else 0
        coming, transfers = matcher.coming(active) if num_coming else ((), ())
        tables, wanted = self._row_tables(num_blocks, is_lost=is_lost) if active.rows is not None else ((), ())
        match = Match(
            block_ids=ids.tolist(),
            num_tokens=num_blocks * size + num_copied,
            num_gpu_tokens=num_gpu * size + num_copied,
            num_cpu_tokens=(num_blocks - num_gpu - num_storage) * size,
            num_storage_tokens=num_storage * size,
            num_coming_tokens=num_coming * size + num_copying,
            num_unloaded_tokens=active.num_unloaded_blocks * size,
            coming_block_ids=tuple(coming),
            load_ids=tuple([transfer.task_id for transfer in transfers]) if transfers else (),
            _loads=self,
            tables=tables,
            checkpoint_tokens=wanted,
        )
        if not active.trail.match_seconds:
            active.trail.match_seconds = self._requests.books.clock.now() - active.trail.matched_at
        return match

    def _row_tables(self, num_blocks: int, *, is_lost: bool) -> tuple[tuple[RowTable, ...], tuple[int, ...]]:
        """What a match of a hybrid model has beside that of others."""
        anchors, rows, size = self._requests.anchors, self._active.rows, self._requests.books.tree.block_size
        if anchors is None or rows is None:
            return (), ()
        wanted = tuple([boundary * size for boundary in rows.wanted])
        return anchors.matches.tables(self._active, num_blocks, is_lost=is_lost), wanted

    def explain(self) -> Explanation:
        with self._requests.books:
            return self._requests.explain(self._active.request.request_id)

    def poll(self) -> Match:
        with self._requests.books:
            self._requests.active(self._active.request)
            return self.describe()

    def wait(self, timeout_seconds: float) -> Match:
        self._wait_until_settled(self._requests.books.clock.now() + timeout_seconds)
        with self._requests.books:
            self._requests.active(self._active.request)
            return self.describe(is_final=True)

    def _wait_until_settled(self, deadline: float) -> None:
        """Wait for room, and for storage, whose pieces bring new loads, and for the loads."""
        clock = self._requests.books.clock
        while (now := clock.now()) < deadline:
            with self._requests.books:
                fetching = self._active.is_fetching
                transfers, prefetch, room = self._transfers(), self._active.prefetch, self._active.room
            if room is not None:
                room.done.wait(min(deadline, room.deadline) - now)
                with self._requests.books:
                    if self._active.room is room and clock.now() >= room.deadline:  # and nothing else happens
                        self._requests.matcher.stop_waiting_for_room(self._active)
                continue
            if not fetching or prefetch is None:
                if not wait_done(transfers, deadline - now, clock) or not self._goes_on():
                    return
                continue
            prefetch.done.wait(min(deadline, prefetch.deadline) - now)

    def _call_or_go_on(self, call: Callable[[], None]) -> None:
        """Nothing is on its way: call, or when what follows has come. Without memory for that it is called now, and
        what it sees is what there is."""
        try:
            if self._goes_on():
                self.call_when_ready(call)
                return
        except MemoryError:
            pass
        call_user(call)

    def _goes_on(self) -> bool:
        """All that it waited for has ended. Whether something is to come still, that began only now: a state is copied
        when its load has brought it."""
        active = self._active
        if active.rows is None:
            return False
        with self._requests.books:
            return active.phase is WAITING and self._requests.matcher.copy_state(active)

    @property
    def fetch_seconds_left(self) -> float | None:
        prefetch = self._active.prefetch
        if prefetch is None or not self._active.is_fetching:
            return None
        return prefetch.seconds_left

    def call_when_ready(self, call: Callable[[], None]) -> None:
        with self._requests.books:
            prefetch, room = self._active.prefetch, self._active.room
            if room is not None:
                room.on_done.append(lambda: self.call_when_ready(call))
                return
            if prefetch is not None and self._active.is_fetching:
                self._look_again(prefetch, lambda: self.call_when_ready(call))
                return
            pending = [transfer for transfer in self._transfers() if not transfer.done.is_set()]
            num_left = len(pending)

            def one_less() -> None:
                nonlocal num_left
                with self._requests.books:
                    num_left -= 1
                    is_last = num_left == 0
                if is_last:
                    self._call_or_go_on(call)

            for transfer in pending:
                transfer.on_done.append(one_less)
        if not pending:
            self._call_or_go_on(call)

    @staticmethod
    def _look_again(prefetch: StoragePrefetch, look: Callable[[], None]) -> None:
        """Once, when storage is through or nobody may wait for it any more. Under the lock."""
        pending = threading.Lock()
        alarm: Alarm | None = None

        def once() -> None:
            if pending.acquire(blocking=False):
                if alarm is not None:
                    alarm.cancel()
                look()

        if prefetch.seconds_left < _ALARM_SECONDS:  # else every task's own deadline ends it
            alarm = prefetch.clock.call_at(prefetch.deadline, once)
        prefetch.on_done.append(once)

    def _transfers(self) -> list[Transfer]:
        active = self._active
        return list(dict.fromkeys((*active.loads, *active.ahead)))
