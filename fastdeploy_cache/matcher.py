"""A request's way through the tree: find and pin, settle on what arrived, publish what was computed."""

from __future__ import annotations

from array import array

from fastdeploy_cache.active_request import ActiveRequest
from fastdeploy_cache.block_mover import BlockMover, Part, first_blocks, num_uncopied
from fastdeploy_cache.policies.eviction import Asked
from fastdeploy_cache.prefix_tree import PrefixTree
from fastdeploy_cache.run import GPU, Run, segments_of

MIN_STORE_BLOCKS = 64  # a task for each block that a decoding request fills would cost more than its commit


class Matcher:
    """The steps of `PrefixCacheManager.match`, `commit` and `release`; all under the manager's lock."""

    def __init__(self, tree: PrefixTree, mover: BlockMover, recompute_last_token: bool) -> None:
        self._tree = tree
        self._mover = mover
        self._recompute_last_token = recompute_last_token

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
                active.settled = True
            return
        self._pin(active, path, num_found)
        ids = _gpu_ids(path, num_found)
        active.num_gpu_blocks = len(ids)
        if len(ids) == num_found:
            if not self._copy_last(active, num_found):
                self._settle_at(active, ids)
            return
        num_coming, parts = _coming_and_cold(path, num_found)
        num_cold = sum(n for _, _, n in parts)
        num_near = active.num_gpu_blocks + num_coming
        num_loadable = self._num_loadable(num_cold, num_blocks - num_found)
        num_pinned = request.whole_images(num_near + num_loadable, tree.block_size)
        num_loaded = max(0, num_pinned - num_near)
        if num_loaded:
            tree.residency.evict(GPU, max(0, num_loaded - tree.pools[0].num_free))
            self._mover.load(first_blocks(parts, num_loaded))
        active.num_unloaded_blocks = num_cold - num_loaded
        if num_pinned < num_found:
            self._pin(active, path, num_pinned)
        if active.pin is not None:
            transfers = [s.transfer for run in active.pin.run.path() for s in segments_of(run, GPU)]
            active.loads = list(dict.fromkeys(transfers))

    def _num_loadable(self, num_cold: int, num_rest: int) -> int:
        """How many of `num_cold` blocks can be loaded so that the `num_rest` others of the prompt fit, too."""
        if not self._mover.available:
            return 0
        return max(0, min(num_cold, self._tree.residency.num_available(GPU) - num_rest))

    def _copy_last(self, active: ActiveRequest, num_found: int) -> bool:
        """Of a prompt that is cached whole: copy the last block, to compute its last token into the copy."""
        request, size, residency = active.request, self._tree.block_size, self._tree.residency
        num_blocks = num_found + 1
        if not self._recompute_last_token or size == 1 or num_blocks * size != request.num_tokens:
            return False
        if request.ends_inside_image(request.num_tokens - 1):
            return False
        whole, found = self._tree.find(request.namespace, active.keys, num_blocks)
        if found < num_blocks or len(_gpu_ids(whole, found)) < found or not self._mover.available:
            return False
        run, end = self._tree.place(whole, num_blocks)
        assert run is not None
        with_source = self._tree.move_pin(None, run, end)  # or the eviction might take the very block
        room = residency.num_available(GPU)
        if room:
            residency.evict(GPU, max(0, 1 - self._tree.pools[0].num_free))
            transfer = self._mover.copy(run, end - 1)
            active.copy, active.loads = transfer.copy, [transfer]
        self._tree.move_pin(with_source, None, 0)
        return bool(room)

    def readable(self, active: ActiveRequest) -> tuple[array[int], int]:
        """The matched blocks that may be read now, and how many more are coming. Settles when none is."""
        if not active.settled and all(transfer.done.is_set() for transfer in active.loads):
            self.settle(active)
        if active.settled:
            return active.block_ids[: active.num_matched_blocks + bool(active.num_copied_tokens)], 0
        ids, _ = self._arrived(active)
        return ids, active.num_pinned_blocks - len(ids)

    def settle(self, active: ActiveRequest) -> None:
        """Fix the match at what is readable now; what has not arrived is no part of it."""
        if active.settled:
            return
        ids, path = self._arrived(active)
        if len(ids) < active.num_pinned_blocks:
            self._pin(active, path, len(ids))
        self._settle_at(active, ids)

    def _arrived(self, active: ActiveRequest) -> tuple[array[int], list[Run]]:
        """Of the pinned blocks those that may be read, and the pinned path."""
        path = active.pin.run.path() if active.pin is not None else []
        ids = _gpu_ids(path, active.num_pinned_blocks)
        del ids[active.request.whole_images(len(ids), self._tree.block_size) :]
        return ids, path

    def _settle_at(self, active: ActiveRequest, ids: array[int]) -> None:
        active.settled, active.loads, active.block_ids = True, [], ids
        active.num_matched_blocks = active.num_committed_blocks = len(ids)
        copy, active.copy = active.copy, None
        if copy is not None and copy.landed:
            active.block_ids += copy.ids
            active.num_copied_tokens = self._tree.block_size - 1
        elif copy is not None:
            copy.wanted = False

    def publish(self, active: ActiveRequest, num_blocks: int) -> None:
        """Put the blocks up to `num_blocks` into the tree, and copy down when there is enough to copy."""
        tree, start, pin = self._tree, active.num_committed_blocks, active.pin
        ids = active.block_ids[start:num_blocks]
        if pin is None or not tree.grow(pin, active.keys, start, ids):
            at = (pin.run, pin.end) if pin is not None else (tree.root(active.request.namespace), 0)
            run, end, duplicates = tree.insert(at, active.keys, start, ids)
            active.pin = pin = tree.move_pin(pin, run, end)
            active.duplicates += duplicates
        active.num_pinned_blocks = active.num_committed_blocks = num_blocks
        assert pin is not None
        if num_uncopied(pin.run) >= MIN_STORE_BLOCKS:
            self._mover.store((pin.run,), MIN_STORE_BLOCKS)

    def release(self, active: ActiveRequest) -> int:
        """Note the use, copy the rest down, take the pin back; returns how many blocks could not be copied."""
        pin, tree, num_skipped = active.pin, self._tree, 0
        if pin is None:
            return 0
        if active.epoch == tree.epoch and active.admitted:
            if pin.end == pin.run.num_held < pin.run.num_blocks:  # what is behind, and nobody uses now, keeps its age
                tree.split(pin.run, pin.end)
            path = pin.run.path()
            if active.request.used:
                tree.policy.touch(path)
            else:
                active.request.used = True
                asked = Asked(active.num_asked_blocks, active.num_found_blocks)
                tree.policy.use(path, active.request, asked)
            if tree.pools[1].num_blocks:
                num_skipped = self._mover.store(pin.run.path())  # the policy may have cut it
        tree.unpin(pin)
        return num_skipped

    def _pin(self, active: ActiveRequest, path: list[Run], num_blocks: int) -> None:
        """Pin the first `num_blocks` blocks of a path instead of what was pinned before."""
        active.pin = self._tree.move_pin(active.pin, *self._tree.place(path, num_blocks))
        active.num_pinned_blocks = num_blocks


def _gpu_ids(path: list[Run], num_blocks: int) -> array[int]:
    """Of a path's first `num_blocks` those on the GPU: the first ones, as residency is prefix-closed."""
    ids = array("i")
    for run in path:
        ids += run.ids[0]
    del ids[num_blocks:]
    return ids


def _coming_and_cold(path: list[Run], num_blocks: int) -> tuple[int, list[Part]]:
    """Behind the blocks on the GPU, up to `num_blocks`: how many are being loaded by others, and what nobody loads yet.

    Behind the first part that nobody loads, everything counts as such: a load in flight there lands before ours, finds
    its parent missing, and is dropped.
    """
    num_coming, parts = 0, list[Part]()
    for run in path:
        length = min(num_blocks, run.num_blocks)
        num_blocks -= length
        end = min(run.num_gpu, length)
        if not parts:
            for segment in sorted(segments_of(run, GPU), key=lambda s: s.start):
                if segment.start <= end:
                    end = min(max(end, segment.end), length)
            num_coming += end - min(run.num_gpu, length)
        if end < length:
            parts.append((run, end, length - end))
    return num_coming, parts
