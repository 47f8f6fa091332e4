"""The prefix tree: which prefix is in which blocks. Moves ids only; the manager holds its lock around every call."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastdeploy_cache.block_hash import HASH_BYTES, extend_hashes, root_hash
from fastdeploy_cache.block_pool import BlockPool, Owner
from fastdeploy_cache.request import TOKEN_BYTES
from fastdeploy_cache.residency import OnEvict, Residency
from fastdeploy_cache.run import Run, Segment, Tier

_MIN_ROOTS = 64


@dataclass(frozen=True)
class Inserted:
    """What `insert` did: the run that ends with the inserted blocks, and the ids that the tree did not want."""

    run: Run
    duplicates: array[int]


class PrefixTree:
    """A radix tree of runs, one root per namespace; `residency` keeps their blocks."""

    def __init__(self, block_size: int, pools: tuple[BlockPool, BlockPool], on_evict: OnEvict) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.pools = pools  # by Tier
        self.residency = Residency(self.block_bytes, pools, on_evict)
        self.roots: dict[str, Run] = {}
        self.old_roots: list[Run] = []  # of earlier epochs, as long as something under them is pinned
        self._clock = 0
        self._sweep_roots_at = _MIN_ROOTS

    @property
    def epoch(self) -> int:
        """Raised by every reset."""
        return self.residency.epoch

    # -- looking

    def root(self, namespace: str) -> Run:
        """The namespace's root, made where there is none; for `insert`, which hangs something on it at once."""
        run = self.roots.get(namespace)
        if run is None:
            if len(self.roots) >= self._sweep_roots_at:  # namespaces come from outside: empty ones must not pile up
                self.roots = {name: root for name, root in self.roots.items() if root.children}
                self._sweep_roots_at = max(_MIN_ROOTS, 2 * len(self.roots))
            run = Run(None, self.epoch, b"", root_hash(namespace, self.block_size))
            self.roots[namespace] = run
        return run

    def find(self, namespace: str, tokens: bytearray, max_blocks: int) -> list[tuple[Run, int]]:
        """The longest prefix of `tokens` in the tree, up to `max_blocks`: runs and how many of their blocks match."""
        path: list[tuple[Run, int]] = []
        run, position, end = self.roots.get(namespace), 0, max_blocks * self.block_bytes
        while run is not None and position < end:
            child = run.children.get(bytes(tokens[position : position + self.block_bytes]))
            if child is None:
                break
            num_blocks = self._common_blocks(child, tokens, position, end)
            path.append((child, num_blocks))
            if num_blocks < child.num_blocks:
                break
            run, position = child, position + num_blocks * self.block_bytes
        return path

    def _common_blocks(self, run: Run, tokens: bytes | bytearray, position: int, end: int) -> int:
        """Leading blocks of `run` that equal `tokens` from `position` on; compares tokens, so no hash can collide."""
        num_bytes = min(len(run.tokens), end - position)
        num_bytes -= num_bytes % self.block_bytes
        if num_bytes == len(run.tokens) and tokens.startswith(run.tokens, position):
            return run.num_blocks
        ours = np.frombuffer(run.tokens, np.int32, num_bytes // TOKEN_BYTES)
        theirs = np.frombuffer(tokens, np.int32, num_bytes // TOKEN_BYTES, position)
        different = ours != theirs
        first = int(different.argmax())
        return (first if different[first] else len(ours)) // self.block_size

    def runs(self) -> Iterator[Run]:
        """Every run of every root, parents first."""
        stack = [*self.roots.values(), *self.old_roots]
        while stack:
            run = stack.pop()
            stack.extend(run.children.values())
            if run.parent is not None:
                yield run

    # -- pinning

    def pin(self, run: Run) -> None:
        """Keep the run and everything above it where it is."""
        for node in self._upwards(run):
            node.pins += 1
            if node.pins == 1:
                self.residency.protect(node, 1)

    def unpin(self, run: Run) -> None:
        """Take one pin of the run back. Unpinned runs may be evicted, merged, or (of an older epoch) freed."""
        self._clock += 1
        path = list(self._upwards(run))
        for node in path:
            node.pins -= 1
            if not node.pins:
                self.residency.protect(node, -1)
                if node.epoch != self.epoch:
                    self.residency.remove(node)
            node.last_used = self._clock
            self.residency.offer(node)
        self.old_roots = [root for root in self.old_roots if root.children]
        if run.epoch == self.epoch:
            self._merge_lone_children(path)

    def end_at(self, path: list[Run], num_blocks: int) -> Run | None:
        """The run of `path` that ends after `num_blocks` blocks, split off where needed; None for no blocks."""
        for run in path:
            if num_blocks < run.num_blocks:
                return self._split(run, num_blocks) if num_blocks else _not_root(run.parent)
            num_blocks -= run.num_blocks
        assert num_blocks == 0, "the path is shorter than asked for"
        return path[-1] if path else None

    @staticmethod
    def _upwards(run: Run) -> Iterator[Run]:
        node: Run | None = run
        while node is not None and node.parent is not None:
            parent = node.parent
            yield node
            node = parent

    # -- growing

    def insert(self, at: Run, tokens: bytes, ids: array[int]) -> Inserted:
        """Put the full blocks of `tokens`, which the caller computed into GPU blocks `ids`, behind the pinned run `at`.

        Where the tree has a GPU copy already, the caller's ids stay its own (`duplicates`). Where a block is in the
        CPU tier only, or still loading, the caller's id is adopted as its GPU copy.
        """
        duplicates: array[int] = array("i")
        position, own_pins = 0, 1
        while position < len(ids):
            start = position * self.block_bytes
            child = at.children.get(tokens[start : start + self.block_bytes])
            if child is None:
                at = self._append(at, own_pins, tokens[start:], ids[position:])
                break
            num_blocks = self._common_blocks(child, tokens, start, len(tokens))
            if num_blocks < child.num_blocks:
                child = self._split(child, num_blocks)
            assert at.num_gpu == at.num_blocks, "a computed block's parent is on the GPU"
            num_known = child.num_gpu
            duplicates.extend(ids[position : position + num_known])
            if num_known < num_blocks:
                self._adopt(child, ids[position + num_known : position + num_blocks], Owner.REQUEST)
            at, position, own_pins = child, position + num_blocks, 0
        return Inserted(at, duplicates)

    def _append(self, at: Run, own_pins: int, tokens: bytes, ids: array[int]) -> Run:
        """New blocks behind `at`: in place where no other request's pin ends there, else as a new run."""
        hashes = extend_hashes(at.last_hash, tokens, self.block_bytes)
        pins_of_requests = at.pins - len(at.loads) - len(at.stores)
        if at.parent is None or at.children or pins_of_requests > own_pins:
            run = Run(at, self.epoch, tokens, hashes)
            at.children[tokens[: self.block_bytes]] = run
        else:
            run = at
            run.tokens += tokens
            run.hashes += hashes
            run.num_blocks += len(ids)
        self._adopt(run, ids, Owner.REQUEST)
        return run

    def _adopt(self, run: Run, ids: array[int], giver: Owner) -> None:
        self.pools[Tier.GPU].hand_over(ids, giver, Owner.RUN)
        self.residency.set_ids(run, Tier.GPU, run.ids[Tier.GPU] + ids)

    def land(self, segment: Segment, succeeded: bool) -> int:
        """End a segment: its blocks join the run where they still fit, the other ids go home, the pin goes.

        Returns how many joined.
        """
        run, transfer = segment.run, segment.transfer
        (run.loads if transfer.tier is Tier.GPU else run.stores).remove(segment)
        num_joined = 0
        if succeeded and run.epoch == self.epoch:
            joined = self._fitting(segment)
            num_joined = len(joined)
            if num_joined and transfer.tier is Tier.GPU:
                skipped = len(segment.ids) - num_joined
                self.pools[Tier.GPU].free(segment.ids[:skipped], Owner.TASK)
                self._adopt(run, joined, Owner.TASK)
            elif num_joined:
                self.pools[Tier.CPU].hand_over(joined, Owner.TASK, Owner.RUN)
                if not run.ids[Tier.CPU]:
                    run.cpu_start = segment.start
                self.residency.set_ids(run, Tier.CPU, run.ids[Tier.CPU] + joined)
        if not num_joined:
            self.pools[transfer.tier].free(segment.ids, Owner.TASK)
        self.unpin(run)
        return num_joined

    @staticmethod
    def _fitting(segment: Segment) -> array[int]:
        """The tail of a segment's ids that continues the run's interval in the destination tier."""
        run = segment.run
        if segment.transfer.tier is Tier.CPU:
            fits = not run.ids[Tier.CPU] or run.cpu_end == segment.start
            return segment.ids if fits else array("i")
        # freshly computed blocks may have been adopted meanwhile; an earlier load may have failed
        assert run.parent is not None
        fits = segment.start <= run.num_gpu < segment.end and run.parent.num_gpu == run.parent.num_blocks
        return segment.ids[run.num_gpu - segment.start :] if fits else array("i")

    def reset(self) -> None:
        """Forget everything. What is pinned stays owned, out of reach, until it is unpinned."""
        old = list(self.runs())
        self.residency.begin_epoch()
        for run in reversed(old):  # children first
            if not run.pins:
                self.residency.remove(run)
        self.old_roots = [r for r in (*self.old_roots, *self.roots.values()) if r.children]
        self.roots = {}

    # -- shape

    def _split(self, run: Run, num_blocks: int) -> Run:
        """Cut a run after `num_blocks` blocks. The lower part keeps its identity, so pins and holders stay right."""
        assert run.parent is not None and 0 < num_blocks < run.num_blocks
        cut_bytes, cut_hashes = num_blocks * self.block_bytes, num_blocks * HASH_BYTES
        upper = Run(run.parent, run.epoch, run.tokens[:cut_bytes], run.hashes[:cut_hashes])
        upper.pins, upper.last_used = run.pins, run.last_used
        run.parent.children[self.residency.key(run)] = upper
        del run.tokens[:cut_bytes], run.hashes[:cut_hashes]
        run.num_blocks -= num_blocks
        run.parent = upper
        upper.children[self.residency.key(run)] = run
        num_above = [num_blocks, max(0, num_blocks - run.cpu_start)]
        upper.cpu_start, run.cpu_start = run.cpu_start, max(0, run.cpu_start - num_blocks)
        assert upper.parent is not None
        for tier in Tier:
            ids = run.ids[tier]
            upper.ids[tier], run.ids[tier] = ids[: num_above[tier]], ids[num_above[tier] :]
            upper.num_children_in[tier] = int(bool(run.ids[tier]))
            self.residency.count_child(upper, tier, bool(upper.ids[tier]) - bool(ids))
        for segment in (*run.loads, *run.stores):
            self._split_segment(segment, upper)
        self.residency.offer(upper)
        self.residency.offer(run)
        return upper

    def _split_segment(self, segment: Segment, upper: Run) -> None:
        """Hand a segment, or its first part, to the upper run; each part holds a pin of its own."""
        lower, cut = segment.run, upper.num_blocks
        is_load = segment.transfer.tier is Tier.GPU
        above, below = (upper.loads, lower.loads) if is_load else (upper.stores, lower.stores)
        if segment.start >= cut:
            segment.start -= cut
        elif segment.end <= cut:
            below.remove(segment)
            above.append(segment)
            segment.run = upper
            lower.pins -= 1
            if not lower.pins:
                self.residency.protect(lower, -1)
        else:
            num_above = cut - segment.start
            part = Segment(segment.transfer, upper, segment.start, segment.ids[:num_above])
            segment.start, segment.ids = 0, segment.ids[num_above:]
            above.append(part)
            segments = segment.transfer.segments
            segments.insert(segments.index(segment), part)  # loads land from the top down
            self.pin(upper)

    def _merge_lone_children(self, path: list[Run]) -> None:
        """Join borders that nothing needs any more; `path` from the deepest run up.

        The whole path, not its end alone: a fork that eviction emptied is a border that no pin will ever come to.
        """
        for run in path:
            if run.parent is not None and len(run.children) == 1:
                (child,) = run.children.values()
                if self._mergeable(run, child):
                    self._merge(run, child)

    @staticmethod
    def _mergeable(upper: Run, lower: Run) -> bool:
        gpu_joins = not lower.ids[Tier.GPU] or upper.num_gpu == upper.num_blocks
        has_both = upper.ids[Tier.CPU] and lower.ids[Tier.CPU]
        cpu_joins = not has_both or (upper.cpu_end == upper.num_blocks and lower.cpu_start == 0)
        in_flight = upper.loads or upper.stores or lower.loads or lower.stores
        return len(upper.children) == 1 and upper.pins == lower.pins and not in_flight and gpu_joins and bool(cpu_joins)

    def _merge(self, upper: Run, lower: Run) -> None:
        """The reverse of `_split`: the lower run takes the upper one in."""
        assert upper.parent is not None
        upper.parent.children[self.residency.key(upper)] = lower
        lower.parent = upper.parent
        for tier in Tier:
            self.residency.count_child(lower, tier, bool(upper.ids[tier] or lower.ids[tier]) - bool(upper.ids[tier]))
        if upper.ids[Tier.CPU]:
            lower.cpu_start = upper.cpu_start
        elif lower.ids[Tier.CPU]:
            lower.cpu_start += upper.num_blocks
        for tier in Tier:
            lower.ids[tier] = upper.ids[tier] + lower.ids[tier]
        lower.tokens = upper.tokens + lower.tokens
        lower.hashes = upper.hashes + lower.hashes
        lower.num_blocks += upper.num_blocks
        lower.last_used = max(upper.last_used, lower.last_used)
        upper.parent = None
        self.residency.offer(lower)


def _not_root(run: Run | None) -> Run | None:
    return run if run is not None and run.parent is not None else None
