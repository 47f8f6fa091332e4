"""A request's prefix: find and pin it, load what is below the GPU, and settle on what arrived. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

from fastdeploy_cache.books.block_pool import REQUEST
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.books.leaves.policy import Asked
from fastdeploy_cache.books.path import coming_and_cold, coming_ids, gpu_ids, usable_end
from fastdeploy_cache.books.run import GPU, Run
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.requests.active_request import SETTLED, VOID, WAITING, ActiveRequest
from fastdeploy_cache.requests.anchors import Anchors
from fastdeploy_cache.requests.checkpoint_maker import rows_of
from fastdeploy_cache.requests.listener import SETTLED_LATE, STATE_COPIED, RequestListener
from fastdeploy_cache.requests.misses import Misses
from fastdeploy_cache.requests.room_queue import RoomNeed, RoomQueue, RoomWait
from fastdeploy_cache.requests.waiting import end_room_wait, loads_of_pinned, pin_leading, stop_waiting, wait_for
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.storage.prefetch import StoragePrefetch
from fastdeploy_cache.transfer_manager.task import TaskKind


class Matcher:
    """What `PrefixCacheManager.match` does, and what becomes of a match until it is settled."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        movement: Movement,
        storage: StorageAccess,
        *,
        misses: Misses,
        room: RoomQueue,
        anchors: Anchors | None,
    ) -> None:
        self._misses, self._room, self._anchors = misses, room, anchors
        self._seconds = config.transfer.task_timeout_seconds
        self._books, self._tree, self._clock = books, books.tree, books.clock
        self._mover, self._loader, self._storage = movement.mover, movement.loader, storage
        self._recompute_last_token = config.recompute_last_token
        self._listener: RequestListener | None = None

    def tell(self, listener: RequestListener) -> None:
        """See `Requests.tell`."""
        self._listener = listener

    # -- finding

    def take_prefetch(self, active: ActiveRequest) -> None:
        """What a prefetch of the request has brought, or still brings, will be part of its match."""
        if (prefetch := self._storage.reads.take(active.request.request_id)) is not None:
            self.follow(active, prefetch)

    def find(self, active: ActiveRequest) -> None:
        """Pin the longest cached prefix of a request and start loading its CPU part."""
        request, tree = active.request, self._tree
        max_blocks = (request.num_tokens - 1) // tree.block_size  # one token is left to compute
        path, num_found = tree.find(request.namespace, active.keys, max_blocks)
        active.asked = Asked(max_blocks, num_found)
        active.trail.num_searched_blocks = active.trail.num_whole_blocks = num_found
        if num_found < max_blocks and not request.counted:
            self._misses.find(active, path, num_found)
        elif max_blocks and request.num_tokens == (max_blocks + 1) * tree.block_size:
            self._misses.pass_over(active)
        if self._anchors is not None:
            if (ids := self._anchors.matches.match(active, path, num_found)) is not None:
                is_whole = self._recompute_last_token and len(ids) == num_found == max_blocks
                is_copying = is_whole and self._copy_last(active, num_found)
                if not is_copying and not active.is_fetching:
                    self._settle_at(active, ids)
            return
        if request.images:
            active.trail.num_whole_blocks = num_found = usable_end(request, num_found, tree.block_size)
        if num_found:
            active.trail.idle_since = path[-1].used_last
            pin_leading(self._tree, active, path, num_found)
        ids = gpu_ids(path, num_found)
        active.num_gpu_blocks = len(ids)
        if len(ids) < num_found:
            self._load_cold(active, path, num_found, 0, is_fetched=False)
        elif not (self._recompute_last_token and self._copy_last(active, num_found)) and (
            active.prefetch is None or not active.is_fetching
        ):
            self._settle_at(active, ids)

    def grow(self, active: ActiveRequest) -> None:
        """More of the prompt has come to the CPU tier: load it, while the rest is still being read."""
        request, tree = active.request, self._tree
        if active.phase is not WAITING or self.is_stale(active) or active.num_unloaded_blocks:
            self.end_prefetch(active)
            return
        path, num_found = tree.find(request.namespace, active.keys, active.asked.num_asked)
        if self._anchors is not None:
            # First: whatever becomes of the load, the causes of what is missed go by what was found.
            active.asked = Asked(active.asked.num_asked, max(active.asked.num_found, num_found))
            self._anchors.matches.grow(active, path, num_found)
            return
        num_found = usable_end(request, num_found, tree.block_size)
        may_load = active.room is None or self._loader.is_allowed(num_found - active.num_gpu_blocks)
        if not may_load:  # what it waits for is within the limits, and no more of it
            self.end_prefetch(active)
        elif num_found > active.num_pinned_blocks:
            num_sure = active.num_pinned_blocks if active.room is None else 0  # what it waits for may never be loaded
            self._load_cold(active, path, num_found, num_sure, is_fetched=True)
            active.asked = Asked(active.asked.num_asked, max(active.asked.num_found, num_found))
            active.trail.num_whole_blocks = max(active.trail.num_whole_blocks, num_found)

    def _load_cold(
        self, active: ActiveRequest, path: list[Run], num_found: int, num_sure: int, *, is_fetched: bool
    ) -> None:
        """Start to load what of the first `num_found` blocks is in the CPU tier only: all of it or nothing.

        Where copies in flight will give back the room that it lacks, the match waits for that, and holds its pins
        alone. `num_sure` blocks stay pinned also where nothing is loaded.
        """
        request, tree = active.request, self._tree
        # first: what is held is no room, and eviction must not take it
        pin_leading(self._tree, active, path, num_found)
        _, parts = coming_and_cold(path, num_found)
        num_cold = sum(n for _, _, n in parts)
        if num_cold:
            if is_fetched:
                may_load = self._loader.is_allowed(num_found - active.num_gpu_blocks)
            else:
                may_load = self._loader.is_worth(num_cold)
            num_rest = -(-request.num_tokens // tree.block_size) - num_found
            is_behind = may_load and self._room.is_behind(active.room)
            is_started = may_load and not is_behind and self._loader.start(parts, num_cold, num_rest)
            lacks = self._loader.lacks_room or (active.room is not None and self._loader.lacks_place)
            may_wait = may_load and not is_started and (is_behind or lacks)
            need = RoomNeed(num_cold + num_rest, (), parts[0][0].tenant)
            if may_wait and self._wait_for_room(active, need, is_fetched=is_fetched):
                return
            if may_load and is_behind:  # none of those in front can be helped by what is in flight, either
                is_started = self._loader.start(parts, num_cold, num_rest)
            if not is_started:
                self._leave_cold(active, path, num_found - num_cold, num_sure, self._loader.refused_for)
        end_room_wait(self._room, self._clock, active)
        wait_for(active, loads_of_pinned(active))

    def _leave_cold(
        self, active: ActiveRequest, path: list[Run], num_near: int, num_sure: int, why: tuple[Cause, str]
    ) -> None:
        """Nothing behind `num_near` blocks is loaded: what storage has lies behind that, too."""
        num_near = usable_end(active.request, num_near, self._tree.block_size)  # others have computed or load these
        active.trail.refused_for, active.num_unloaded_blocks = why, active.num_pinned_blocks - num_near
        pin_leading(self._tree, active, path, max(num_sure, num_near))
        self.end_prefetch(active)

    # -- waiting for room

    def _wait_for_room(self, active: ActiveRequest, need: RoomNeed, *, is_fetched: bool) -> bool:
        """Wait until so many blocks can be had; False where no copy in flight will give them back."""
        if not self._room.may_come(need):
            return False
        load = partial(self._load_waiting, active, is_fetched=is_fetched)
        if active.room is None:
            active.room = RoomWait(
                self._clock, need, self._seconds, load, partial(self.stop_waiting_for_room, active), is_match=True
            )
            self._room.enter(active.room)
        active.room.need, active.room.serve = need, load
        wait_for(active, loads_of_pinned(active))
        return True

    def _load_waiting(self, active: ActiveRequest, *, is_fetched: bool) -> bool:
        """Load what a match waits for room for, if there is room now; False while there is none."""
        if active.pin is None or self.is_stale(active) or self.is_lost(active):
            self.stop_waiting_for_room(active, Cause.RESET)
            return True
        self._load_cold(active, active.pin.run.path(), active.num_pinned_blocks, 0, is_fetched=is_fetched)
        return active.room is None

    def stop_waiting_for_room(self, active: ActiveRequest, cause: Cause = Cause.ROOM) -> None:
        """What is not on its way to the GPU by now is no part of the match, if it waits for room."""
        wait = active.room
        if wait is None:
            return
        if self._anchors is not None:
            self._anchors.matches.stop_waiting_for_room(active, cause)
            return
        path = active.pin.run.path() if active.pin is not None else []
        num_cold = sum(n for _, _, n in coming_and_cold(path, active.num_pinned_blocks)[1])
        why = cause, wait.detail(self._clock)
        self._leave_cold(active, path, active.num_pinned_blocks - num_cold, 0, why)
        end_room_wait(self._room, self._clock, active)

    def _copy_last(self, active: ActiveRequest, num_found: int) -> bool:
        """Copy the last block of a prompt that is cached whole, to compute its last token into the copy."""
        request, size, num_blocks = active.request, self._tree.block_size, num_found + 1
        ends_with_block = size > 1 and num_blocks * size == request.num_tokens
        if not ends_with_block or request.ends_inside_image(request.num_tokens - 1):
            return False
        whole, found = self._tree.find(request.namespace, active.keys, num_blocks)
        if found < num_blocks or len(gpu_ids(whole, found)) < found or not self._mover.can(TaskKind.COPY):
            return False
        run, end = self._tree.place(whole, num_blocks)
        assert run is not None
        with_source = self._tree.move_pin(None, run, end)  # or the eviction might take the very block
        try:
            if self._books.residency.num_available(GPU, run.tenant) <= 0:
                return False
            if self._anchors is not None and not self._anchors.matches.copy_last(active, run, end, size - 1):
                return False
            transfer, active.copy = self._mover.copy(run, end - 1, size - 1)
            wait_for(active, [transfer])
            return True
        finally:
            self._tree.move_pin(with_source, None, 0)

    # -- what has happened since the match

    def is_stale(self, active: ActiveRequest) -> bool:
        """Whether the cache was reset, for whatever reason, since the request was matched: it publishes nothing."""
        return self._tree.generations.last_reset > active.generation

    def is_lost(self, active: ActiveRequest) -> bool:
        """Whether the GPU's bytes have gone since the request was matched."""
        return self._tree.generations.last_gpu_loss > active.generation

    def arrived(self, active: ActiveRequest) -> tuple[array[int], list[Run]]:
        """The ids of those pinned blocks that may be read, and the pinned path."""
        path = active.pin.run.path() if active.pin is not None else []
        ids = gpu_ids(path, active.num_pinned_blocks)
        if self._anchors is not None:
            del ids[self._anchors.matches.num_reached(active, len(ids)) :]
        else:
            del ids[usable_end(active.request, len(ids), self._tree.block_size) :]
        return ids, path

    def show(self, active: ActiveRequest, *, is_final: bool = False) -> tuple[array[int], int]:
        """What the caller is told: the matched blocks that may be read now, and how many more are coming.

        The match settles here when nothing is coming any more, or where `is_final`.
        """
        is_fetching = active.prefetch is not None and active.is_fetching
        if active.phase is WAITING:
            active.num_readable_blocks = 0 if self.is_lost(active) else len(self.arrived(active)[0])
            if active.copy is not None:
                has_landed = active.copy.has_landed and not self.is_lost(active)
                active.copy.is_shown = has_landed and (
                    self._anchors is None or self._anchors.matches.copies.have_landed(rows_of(active))
                )
            elif self._anchors is not None and not is_final:
                self.copy_state(active)
            is_coming = is_fetching or active.room is not None
            # Others may have brought it all before its own loads have ended. What a hybrid model's match says is asked
            # for then is fixed where it settles.
            is_there = active.rows is not None and active.num_readable_blocks == active.num_pinned_blocks
            is_there = is_there and active.copy is None and not is_fetching
            if is_final or is_there or not (is_coming or any(not transfer.done.is_set() for transfer in active.loads)):
                self.settle(active)
                if self._listener is not None:
                    self._listener.note((SETTLED_LATE, active.trail.number))
        if active.phase is SETTLED or active.phase is VOID:
            return active.block_ids[: active.num_matched_blocks + bool(active.num_copied_tokens)], 0
        # One that runs ahead reads the blocks that are loading, also where somebody else has computed them meanwhile.
        ids = active.block_ids[: active.num_readable_blocks] if active.is_ahead else self.arrived(active)[0]
        num_coming = active.num_pinned_blocks - len(ids)
        if is_fetching and active.prefetch is not None:
            end = active.prefetch.first + active.prefetch.num_wanted  # at most: storage may have less
            end = min(end, active.asked.num_asked)  # a prefetch may be told to bring the last block, too
            num_coming += max(1, end - active.num_pinned_blocks)
        return ids, num_coming

    def copy_state(self, active: ActiveRequest) -> bool:
        """Begin to copy the state at which it goes on, where that is due: whether it has begun."""
        is_begun = self._anchors is not None and self._anchors.matches.copy_state(active)
        if is_begun and self._listener is not None:
            self._listener.note((STATE_COPIED, active.trail.number))
        return is_begun

    def coming(self, active: ActiveRequest) -> tuple[array[int], Sequence[Transfer]]:
        """The ids of the pinned blocks behind the readable ones, and the loads that bring them.

        Some may be on the GPU already: in front of the rest of an image.
        """
        if active.is_ahead:
            return active.block_ids[active.num_readable_blocks : active.num_matched_blocks], active.ahead
        readable, path = self.arrived(active)
        ids, transfers = coming_ids(path, len(readable), active.num_pinned_blocks)
        if self._anchors is not None and (image := self._anchors.matches.loading(active)) is not None:
            transfers.append(image)
        return ids, transfers

    # -- from storage

    def follow(self, active: ActiveRequest, prefetch: StoragePrefetch) -> None:
        """The request's prefetch: the match grows with what it brings until it is settled."""
        active.prefetch = prefetch
        self._storage.reads.follow(prefetch)

    def end_prefetch(self, active: ActiveRequest) -> None:
        """What has not come from storage is no part of the match."""
        if active.prefetch is not None:
            self._storage.reads.revoke(active.prefetch)

    # -- settling

    def settle(self, active: ActiveRequest) -> None:
        """Fix the match at what its caller was shown last; what has not arrived is no part of it.

        A load may land after the caller has looked and before its next verb. The caller counts its blocks by what it
        saw: a block more in front of them, and what it computes would be filed one block off. Of a request that runs
        ahead `RunsAhead.end` decides.
        """
        if active.phase is not WAITING:
            return
        self.stop_waiting_for_room(active, Cause.LATE)
        self.end_prefetch(active)
        ids, path = self.arrived(active)
        del ids[active.num_readable_blocks :]
        if self._anchors is not None:
            del ids[self._anchors.matches.settle(active, len(ids)) :]
        if len(ids) < active.num_pinned_blocks:
            pin_leading(self._tree, active, path, len(ids))
        self._settle_at(active, ids)

    def _settle_at(self, active: ActiveRequest, ids: array[int]) -> None:
        copy, num_blocks = active.copy, len(ids)
        is_taken = copy is not None and copy.has_landed and copy.is_shown
        if copy is not None and is_taken:
            ids += copy.block_ids  # first: it may need memory
            if self._anchors is not None:
                self._anchors.matches.copies.take_windows(rows_of(active))  # and this
        if active.loads or active.prefetch is not None:
            stop_waiting(active)
        active.enter(SETTLED)
        active.block_ids, active.copy = ids, None
        if self._anchors is not None:
            self._anchors.matches.settled(active)
        active.num_matched_blocks = active.num_committed_blocks = num_blocks
        if is_taken:
            active.num_copied_tokens = self._tree.block_size - 1
        elif copy is not None and not copy.has_landed:
            copy.is_wanted = False
        elif copy is not None:  # it has landed since the caller looked
            self._tree.pools[GPU].free(copy.block_ids, REQUEST)

    def cut(self, active: ActiveRequest, path: list[Run], num_blocks: int) -> None:
        """Only so many of the pinned blocks are its match any more."""
        if num_blocks < active.num_pinned_blocks:
            pin_leading(self._tree, active, path, num_blocks)

    def abandon(self, active: ActiveRequest) -> None:
        """The match has failed half way: take back what it holds. What it has started to load goes on for others."""
        active.free_private(self._tree.pools[GPU])
        end_room_wait(self._room, self._clock, active)
        self.end_prefetch(active)
        stop_waiting(active)
        copy, active.copy = active.copy, None
        if copy is not None:
            copy.is_wanted = False
        if self._anchors is not None:
            self._anchors.end(active)
        active.pin = self._tree.move_pin(active.pin, None, 0)
