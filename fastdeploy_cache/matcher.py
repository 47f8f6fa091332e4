"""A request's way through the tree: find and pin, settle on what arrived, publish what was computed."""

from __future__ import annotations

from array import array

from fastdeploy_cache.active_request import ActiveRequest
from fastdeploy_cache.block_mover import BlockMover, Part
from fastdeploy_cache.prefix_tree import PrefixTree
from fastdeploy_cache.run import Run, Tier


class Matcher:
    """The steps of `PrefixCacheManager.match`, `commit` and `release`; all under the manager's lock."""

    def __init__(self, tree: PrefixTree, mover: BlockMover) -> None:
        self._tree = tree
        self._mover = mover

    def find(self, active: ActiveRequest, num_blocks: int) -> None:
        """Pin the longest cached prefix of a request of `num_blocks` blocks and start loading its CPU part."""
        request, tree = active.request, self._tree
        max_blocks = (request.num_tokens - 1) // tree.block_size  # one token is left to compute
        found = tree.find(request.namespace, request.tokens, max_blocks)
        num_found = sum(n for _, n in found)
        self._move_pin(active, [run for run, _ in found], num_found)
        if active.pinned is None:
            return
        path = active.pinned.path()
        active.num_gpu_blocks = _num_readable(path)
        num_coming, parts = _coming_and_cold(path)
        num_cold = sum(n for _, _, n in parts)
        num_loaded = self._load(parts, num_blocks - num_found)
        active.num_unloaded_blocks = num_cold - num_loaded
        if num_loaded < num_cold:
            self._move_pin(active, path, active.num_gpu_blocks + num_coming + num_loaded)
        if active.pinned is not None:
            transfers = [segment.transfer for run in active.pinned.path() for segment in run.loads]
            active.loads = list(dict.fromkeys(transfers))

    def _load(self, parts: list[Part], num_rest: int) -> int:
        """Load as many blocks of `parts` as leave room for the `num_rest` others of the prompt; returns how many."""
        if not self._mover.available:
            return 0
        pool, residency = self._tree.pools[Tier.GPU], self._tree.residency
        left = num_blocks = max(
            0, min(sum(n for _, _, n in parts), pool.num_free + residency.num_evictable(Tier.GPU) - num_rest)
        )
        chosen: list[Part] = []
        for run, first, length in parts:
            if left:
                chosen.append((run, first, min(length, left)))
                left -= min(length, left)
        if chosen:
            residency.evict(Tier.GPU, max(0, num_blocks - pool.num_free))
            self._mover.load(chosen)
        return num_blocks

    def readable(self, active: ActiveRequest) -> tuple[array[int], int]:
        """The matched blocks that may be read now, and how many more are coming. Settles when none is."""
        if all(transfer.done.is_set() for transfer in active.loads):
            self.settle(active)
        if active.settled or active.pinned is None:
            return active.block_ids[: active.num_matched_blocks], 0
        path = active.pinned.path()
        ids = _gpu_ids(path)[: _num_readable(path)]
        return ids, active.num_pinned_blocks - len(ids)

    def settle(self, active: ActiveRequest) -> None:
        """Fix the match at what is readable now; what has not arrived is no part of it."""
        if active.settled:
            return
        active.settled, active.loads = True, []
        if active.pinned is None:
            return
        path = active.pinned.path()
        num_readable = _num_readable(path)
        if num_readable < active.num_pinned_blocks:
            self._move_pin(active, path, num_readable)
        active.block_ids = _gpu_ids(active.pinned.path()) if active.pinned is not None else array("i")
        active.num_matched_blocks = active.num_committed_blocks = num_readable

    def publish(self, active: ActiveRequest, num_blocks: int) -> int:
        """Put the blocks up to `num_blocks` into the tree and copy new ones down; returns how many were not copied."""
        request, tree = active.request, self._tree
        start = active.num_committed_blocks
        tokens = bytes(request.tokens[start * tree.block_bytes : num_blocks * tree.block_bytes])
        before = active.pinned
        at = before or tree.root(request.namespace)
        inserted = tree.insert(at, tokens, active.block_ids[start:num_blocks])
        tree.pin(inserted.run)
        # stored before the old pin goes: a merge then would shift the run's blocks
        num_skipped = self._mover.store(inserted.run)
        if before is not None:
            tree.unpin(before)
        active.pinned, active.num_pinned_blocks = inserted.run, num_blocks
        active.duplicates += inserted.duplicates
        active.num_committed_blocks = num_blocks
        return num_skipped

    def _move_pin(self, active: ActiveRequest, path: list[Run], num_blocks: int) -> None:
        """Pin the first `num_blocks` blocks of a path instead of what was pinned before."""
        before = active.pinned
        active.pinned, active.num_pinned_blocks = self._tree.end_at(path, num_blocks), num_blocks
        if active.pinned is not None:
            self._tree.pin(active.pinned)
        if before is not None:
            self._tree.unpin(before)


def _num_readable(path: list[Run]) -> int:
    """Blocks of a path on the GPU: the first ones, as residency is prefix-closed."""
    return sum(run.num_gpu for run in path)


def _gpu_ids(path: list[Run]) -> array[int]:
    ids = array("i")
    for run in path:
        ids += run.ids[Tier.GPU]
    return ids


def _coming_and_cold(path: list[Run]) -> tuple[int, list[Part]]:
    """Behind the blocks on the GPU: how many are being loaded by others, and the parts that nobody loads yet.

    Behind the first part that nobody loads, everything counts as such: a load in flight there lands before ours, finds
    its parent missing, and is dropped.
    """
    num_coming, parts = 0, list[Part]()
    for run in path:
        end = run.num_gpu
        if not parts:
            for segment in sorted(run.loads, key=lambda s: s.start):
                if segment.start <= end:
                    end = max(end, segment.end)
            num_coming += end - run.num_gpu
        if end < run.num_blocks:
            parts.append((run, end, run.num_blocks - end))
    return num_coming, parts
