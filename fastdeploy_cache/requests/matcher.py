"""A request's way through the tree: find and pin, settle on what arrived, publish what was computed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from fastdeploy_cache.books.block_pool import REQUEST
from fastdeploy_cache.books.path import coming_and_cold, coming_ids, gpu_ids
from fastdeploy_cache.books.prefix_tree import BlockKeys, PrefixTree
from fastdeploy_cache.books.run import GPU, Pin, Run, Transfer, segments_of
from fastdeploy_cache.match import Prefetch
from fastdeploy_cache.movement.block_mover import BlockMover, Part, ignore_copied
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.policies.eviction import Asked
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.storage.prefetch import StoragePrefetch
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.storage.write_out import WriteOut
from fastdeploy_cache.transfer_manager.task import TaskKind


class Matcher:
    """The steps of `PrefixCacheManager.match`, `commit` and `release`; all under the manager's lock."""

    def __init__(
        self,
        tree: PrefixTree,
        mover: BlockMover,
        copy_down: CopyDown,
        *,
        recompute_last_token: bool,
        load_limits: tuple[int, int],
        speeds: LoadOrCompute,
    ) -> None:
        """`load_limits`: blocks below which, and above which, a chain of blocks is not loaded."""
        self.storage: StorageTier | None = None
        self.write_out: WriteOut | None = None
        self._speeds = speeds
        self._tree = tree
        self._mover = mover
        self._copy_down = copy_down
        self._recompute_last_token = recompute_last_token
        self._min_load, self._max_load = load_limits

    def find(self, active: ActiveRequest, num_blocks: int) -> None:
        """Pin the longest cached prefix of a request of `num_blocks` blocks and start loading its CPU part."""
        request, tree = active.request, self._tree
        max_blocks = (request.num_tokens - 1) // tree.block_size  # one token is left to compute
        path, num_found = tree.find(request.namespace, active.keys, max_blocks)
        active.num_asked_blocks, active.num_found_blocks = max_blocks, num_found
        if request.images:
            num_found = request.whole_images(num_found, tree.block_size)
        if not num_found:
            if not self._copy_last(active, 0):
                self._settle_unless_fetching(active, array("i"))
            return
        self._pin(active, path, num_found)
        ids = gpu_ids(path, num_found)
        active.num_gpu_blocks = len(ids)
        if len(ids) == num_found:
            if not self._copy_last(active, num_found):
                self._settle_unless_fetching(active, ids)
            return
        num_coming, parts = coming_and_cold(path, num_found)
        num_cold = sum(n for _, _, n in parts)
        num_near = active.num_gpu_blocks + num_coming
        worth = self._min_load <= num_cold <= self._max_load and num_cold and self._speeds.is_worth_loading(num_cold)
        num_loaded = num_cold if worth and self.start_load(parts, num_cold, num_blocks - num_found) else 0
        num_pinned = request.whole_images(num_near + num_loaded, tree.block_size)
        active.num_unloaded_blocks = num_cold - num_loaded
        if active.num_unloaded_blocks:  # what storage has lies behind these
            self._end_prefetch(active)
        if num_pinned < num_found:
            self._pin(active, path, num_pinned)
        if active.pin is not None:
            last, end = active.pin.run, active.pin.end
            segments = [s for run in last.path() for s in segments_of(run, GPU) if run is not last or s.start < end]
            self._wait_for(active, list(dict.fromkeys([segment.transfer for segment in segments])))

    def start_load(self, parts: list[Part], num_cold: int, num_rest: int) -> bool:
        """Load parts of a pinned path, `num_cold` blocks, for a prompt that needs `num_rest` others: all or nothing.

        Where they do not fit, they would not fit as computed blocks either.
        """
        room = self._tree.residency.num_available(GPU)
        if num_cold + num_rest > room or not self._mover.can(TaskKind.SWAP_IN):
            return False
        self._tree.residency.evict(GPU, max(0, num_cold - self._tree.pools[0].num_free))
        self._mover.load(parts)
        self._copy_down.moved(num_cold)
        return True

    def _wait_for(self, active: ActiveRequest, transfers: list[Transfer]) -> None:
        active.loads = transfers
        for transfer in transfers:
            transfer.num_waiting += 1

    def _copy_last(self, active: ActiveRequest, num_found: int) -> bool:
        """Of a prompt that is cached whole: copy the last block, to compute its last token into the copy."""
        request, size, residency = active.request, self._tree.block_size, self._tree.residency
        num_blocks = num_found + 1
        if not self._recompute_last_token or size == 1 or num_blocks * size != request.num_tokens:
            return False
        if request.ends_inside_image(request.num_tokens - 1):
            return False
        whole, found = self._tree.find(request.namespace, active.keys, num_blocks)
        if found < num_blocks or len(gpu_ids(whole, found)) < found or not self._mover.can(TaskKind.COPY):
            return False
        run, end = self._tree.place(whole, num_blocks)
        assert run is not None
        with_source = self._tree.move_pin(None, run, end)  # or the eviction might take the very block
        room = residency.num_available(GPU)
        if room:
            residency.evict(GPU, max(0, 1 - self._tree.pools[0].num_free))
            transfer = self._mover.copy(run, end - 1, size - 1)
            active.copy = transfer.copy
            self._wait_for(active, [transfer])
        self._tree.move_pin(with_source, None, 0)
        return bool(room)

    def look(self, request: Request, keys: BlockKeys) -> Prefetch:
        """What is cached of a request, counted as a touch: a queued request's prefix is not the coldest."""
        size = self._tree.block_size
        path, num_found = self._tree.find(request.namespace, keys, (request.num_tokens - 1) // size)
        num_found = request.whole_images(num_found, size)
        num_gpu = len(gpu_ids(path, num_found))
        if path:
            self._tree.policy.touch(path)
        return Prefetch(
            num_gpu_tokens=num_gpu * size,
            num_cpu_tokens=(num_found - num_gpu) * size,
            num_missing_tokens=request.num_tokens - num_found * size,
        )

    def is_lost(self, active: ActiveRequest) -> bool:
        """Whether the GPU's bytes have gone since the request was matched."""
        return active.num_kv_losses != self._tree.num_kv_losses

    def show(self, active: ActiveRequest, *, is_final: bool = False) -> tuple[array[int], int]:
        """What the caller is told: the matched blocks that may be read now, and how many more are coming.

        The match settles here when nothing is coming any more, or where `is_final`.
        """
        fetching = self.is_fetching(active)
        if not active.settled and not active.is_ahead:
            active.num_shown_blocks = 0 if self.is_lost(active) else len(self._arrived(active)[0])
            active.shows_copy = active.copy is not None and active.copy.landed
            if is_final or not (fetching or any(not transfer.done.is_set() for transfer in active.loads)):
                self.settle(active)
        if active.settled:
            return active.block_ids[: active.num_matched_blocks + bool(active.num_copied_tokens)], 0
        if active.is_ahead:  # also where somebody else has computed a block meanwhile, it reads the one that is loading
            ids = active.block_ids[: active.num_readable_blocks]
        else:
            ids, _ = self._arrived(active)
        num_coming = active.num_pinned_blocks - len(ids)
        if fetching and active.prefetch is not None:
            end = active.prefetch.first + active.prefetch.num_wanted  # at most: storage may have less
            num_coming += max(1, end - active.num_pinned_blocks)
        return ids, num_coming

    # -- from storage

    def on_copied(self, copied: Callable[[Run, int], None] | None) -> None:
        """Call this whenever a run has more blocks in the CPU tier."""
        self._mover.on_copied = copied or ignore_copied

    def is_fetching(self, active: ActiveRequest) -> bool:
        """Whether more may come from storage for a match that is not settled."""
        prefetch = active.prefetch
        return prefetch is not None and not active.settled and prefetch.is_pending(time.monotonic())

    def follow(self, active: ActiveRequest, prefetch: StoragePrefetch) -> None:
        """The request's prefetch: the match grows with what it brings until it is settled."""
        active.prefetch = prefetch
        if not prefetch.done.is_set() or (self.storage is not None and self.storage.reads.resume(prefetch)):
            prefetch.follower = _Follower(self, active)

    def grow(self, active: ActiveRequest) -> None:
        """More of the prompt has come to the CPU tier: load it, while the rest is still being read."""
        request, tree, before = active.request, self._tree, active.num_pinned_blocks
        if active.settled or active.is_ahead or active.epoch != tree.epoch or active.num_unloaded_blocks:
            self._end_prefetch(active)
            return
        max_blocks = (request.num_tokens - 1) // tree.block_size
        path, num_found = tree.find(request.namespace, active.keys, max_blocks)
        num_found = request.whole_images(num_found, tree.block_size)
        if num_found <= before:
            return
        # first: what is held is no room, and eviction must not take it
        self._pin(active, path, num_found)
        _, parts = coming_and_cold(path, num_found)
        num_cold = sum(n for _, _, n in parts)
        num_rest = -(-request.num_tokens // tree.block_size) - num_found
        fits = num_found - active.num_gpu_blocks <= self._max_load
        if num_cold and not (fits and self.start_load(parts, num_cold, num_rest)):
            num_near = request.whole_images(num_found - num_cold, tree.block_size)  # others have computed or load these
            self._pin(active, path, max(before, num_near))
            active.num_unloaded_blocks = num_cold
            self._end_prefetch(active)
        known = set(active.loads)
        new = dict.fromkeys([s.transfer for run in path for s in segments_of(run, GPU) if s.transfer not in known])
        for transfer in new:
            transfer.num_waiting += 1
        active.loads += new
        active.num_found_blocks = max(active.num_found_blocks, num_found)

    def _end_prefetch(self, active: ActiveRequest) -> None:
        """What has not come from storage is no part of the match."""
        if active.prefetch is not None and self.storage is not None:
            self.storage.reads.revoke(active.prefetch)

    def settle(self, active: ActiveRequest) -> None:
        """Fix the match at what its caller was shown last; what has not arrived is no part of it.

        A load may land after the caller has looked and before its next verb. The caller counts its blocks by what it
        saw: a block more in front of them, and what it computes would be filed one block off. Of a request that runs
        ahead `end_ahead` decides.
        """
        if active.settled or active.is_ahead:
            return
        self._end_prefetch(active)
        ids, path = self._arrived(active)
        del ids[active.num_shown_blocks :]
        if len(ids) < active.num_pinned_blocks:
            self._pin(active, path, len(ids))
        self._settle_at(active, ids)

    def _arrived(self, active: ActiveRequest) -> tuple[array[int], list[Run]]:
        """Of the pinned blocks those that may be read, and the pinned path."""
        path = active.pin.run.path() if active.pin is not None else []
        ids = gpu_ids(path, active.num_pinned_blocks)
        del ids[active.request.whole_images(len(ids), self._tree.block_size) :]
        return ids, path

    def _settle_unless_fetching(self, active: ActiveRequest, ids: array[int]) -> None:
        if not self.is_fetching(active):
            self._settle_at(active, ids)

    def _settle_at(self, active: ActiveRequest, ids: array[int]) -> None:
        self._stop_waiting(active)
        active.settled, active.block_ids = True, ids
        active.num_matched_blocks = active.num_committed_blocks = len(ids)
        copy, active.copy = active.copy, None
        if copy is not None and not copy.landed:
            copy.wanted = False
        elif copy is not None and active.shows_copy:
            active.block_ids += copy.ids
            active.num_copied_tokens = self._tree.block_size - 1
        elif copy is not None:  # it has landed since the caller looked
            self._tree.pools[GPU].free(copy.ids, REQUEST)

    @staticmethod
    def _stop_waiting(active: ActiveRequest) -> None:
        for transfer in active.loads:
            transfer.num_waiting -= 1
        active.loads = []

    # -- running ahead of loads

    def coming(self, active: ActiveRequest) -> tuple[array[int], list[Transfer]]:
        """The ids of the pinned blocks behind the readable ones, and the loads that bring them.

        Some may be on the GPU already: in front of the rest of an image.
        """
        if active.is_ahead:
            return active.block_ids[active.num_readable_blocks : active.num_matched_blocks], active.ahead
        readable, path = self._arrived(active)
        return coming_ids(path, len(readable), active.num_pinned_blocks)

    def run_ahead(self, active: ActiveRequest) -> None:
        """Let the request use the blocks that are coming as if they were there; nothing is published until they are."""
        (ids, _), (coming, transfers) = self._arrived(active), self.coming(active)
        if active.copy is not None or not coming or len(ids) + len(coming) < active.num_pinned_blocks:
            self.show(active, is_final=True)  # the caller looks again after this
            return
        self._end_prefetch(active)
        active.ahead = transfers
        for transfer in transfers:
            self._mover.use_ahead(transfer)
        active.block_ids, active.num_readable_blocks = ids + coming, len(ids)
        active.num_matched_blocks = active.num_committed_blocks = len(active.block_ids)

    def end_ahead(self, active: ActiveRequest, arrived: bool) -> None:
        """Decide what has become of the request that ran ahead: settled for good, and maybe void.

        `arrived`: nobody has used a layer that was not in.
        """
        came = arrived and all(transfer.succeeded for transfer in active.ahead) and not self.is_lost(active)
        ids, path = self._arrived(active)
        self._stop_waiting(active)
        active.settled = True
        if came and len(ids) == active.num_pinned_blocks:
            return
        active.epoch = -1  # its blocks continue nothing that is cached
        if not came:
            active.is_void, active.num_matched_blocks = True, active.num_readable_blocks
        if len(ids) < active.num_pinned_blocks:
            self._pin(active, path, len(ids))

    def _leave_ahead(self, active: ActiveRequest) -> None:
        """The request uses no block of its loads any more."""
        for transfer in active.ahead:
            self._mover.end_ahead(transfer)
        active.ahead = []

    def publish(self, active: ActiveRequest, num_blocks: int) -> None:
        """Put the blocks up to `num_blocks` into the tree, and copy down when there is enough to copy."""
        tree, start, pin = self._tree, active.num_committed_blocks, active.pin
        ids = active.block_ids[start:num_blocks]
        if pin is None or not tree.grow(pin, active.keys, start, ids):
            at = (pin.run, pin.end) if pin is not None else (tree.root(active.request.namespace), 0)
            done = tree.insert(at, active.keys, start, ids, active.duplicates)
            active.pin = pin = tree.move_pin(pin, done.run, done.end)
            active.duplicates = done.duplicates
            num_blocks = start + done.num_blocks
        active.num_pinned_blocks = active.num_committed_blocks = num_blocks
        assert pin is not None
        if active.request.priority is not None:
            pin.run.usage.store_priority = active.request.priority
        self._copy_down.committed(pin.run)

    def abandon(self, active: ActiveRequest) -> None:
        """The match has failed half way: take back what it holds. What it has started to load goes on for others."""
        self._end_prefetch(active)
        self._stop_waiting(active)
        copy, active.copy = active.copy, None
        if copy is not None:
            copy.wanted = False
        active.pin = self._tree.move_pin(active.pin, None, 0)

    def release(self, active: ActiveRequest) -> int:
        """Note the use, copy the rest down, take the pin back; returns how many blocks could not be copied."""
        if active.ahead:
            self._leave_ahead(active)
        self._end_prefetch(active)
        pin, num_skipped = active.pin, 0
        if pin is None:
            return 0
        try:
            if active.epoch == self._tree.epoch and active.admitted:
                num_skipped = self._note_use(active, pin)
        except MemoryError:  # it is not counted, and the request goes all the same
            self._tree.mishaps.note("policy")
        num_held = pin.run.num_held
        self._tree.unpin(pin)
        self._copy_down.moved(num_held - pin.run.num_held)
        return num_skipped

    def _note_use(self, active: ActiveRequest, pin: Pin) -> int:
        tree, request = self._tree, active.request
        if pin.end == pin.run.num_held < pin.run.num_blocks:  # what is behind, and nobody uses now, keeps its age
            tree.split(pin.run, pin.end)
        path = pin.run.path()
        if request.used:
            tree.policy.touch(path)
        else:
            request.used = True
            tree.policy.use(path, request, Asked(active.num_asked_blocks, active.num_found_blocks))
        path = pin.run.path()  # the policy may have cut it
        if request.priority is not None:
            for run in path:
                run.usage.store_priority = request.priority
        num_skipped = self._copy_down.released(path)
        if self.write_out is not None:
            self.write_out.released(path, has_uncopied=num_skipped > 0)
        return num_skipped

    def _pin(self, active: ActiveRequest, path: list[Run], num_blocks: int) -> None:
        """Pin the first `num_blocks` blocks of a path instead of what was pinned before."""
        active.pin = self._tree.move_pin(active.pin, *self._tree.place(path, num_blocks))
        active.num_pinned_blocks = num_blocks


class _Follower:
    """See `storage_prefetch.Follower`."""

    def __init__(self, matcher: Matcher, active: ActiveRequest) -> None:
        self._matcher, self._active = matcher, active

    def landed(self) -> None:
        self._matcher.grow(self._active)

    def is_loading(self) -> bool:
        return not self._active.settled and not all(transfer.done.is_set() for transfer in self._active.loads)
