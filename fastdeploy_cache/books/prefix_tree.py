"""The prefix tree: which prefix is in which blocks. Moves ids only; the manager holds its lock around every call."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from fastdeploy_cache.books.block_hash import TOKEN_BYTES, root_hash
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_names import BlockNames
from fastdeploy_cache.books.block_pool import REQUEST, RUN, BlockPool, Owner
from fastdeploy_cache.books.comparing import num_common
from fastdeploy_cache.books.generations import Generations, Reason
from fastdeploy_cache.books.graves import AT_ONCE, Roots
from fastdeploy_cache.books.large_dict import piece_of, put
from fastdeploy_cache.books.mishaps import Mishaps
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import GPU, TIERS, Pin, Run, Tier, Usage
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.transfer import Segment, split_pins
from fastdeploy_cache.policies.eviction import EvictionPolicy
from fastdeploy_cache.policies.guarded import GuardedPolicy

_SWEEP_EVERY = 64  # namespaces that come
_MAX_MOVED = 1024  # children that a merge hangs elsewhere: some hundred microseconds
Pools = tuple[BlockPool, BlockPool]  # by Tier
_NONE = array("i")  # never changed


class Insertion(NamedTuple):
    """What `insert` did: the place where the inserted blocks end, and the ids that the tree did not want."""

    run: Run
    end: int
    duplicates: array[int]
    num_blocks: int


class PrefixTree:
    """A radix tree of runs, one root per namespace; `residency` keeps their blocks."""

    def __init__(self, block_size: int, pools: Pools, policy: EvictionPolicy, lost_bytes: int = 0) -> None:
        """`lost_bytes`: what the memory of blocks that have gone may take."""
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.pools = pools  # by Tier
        self.mishaps = Mishaps()
        self.policy = GuardedPolicy(policy, self.mishaps, self.runs)
        self.residency = Residency(self.block_bytes, pools, self.policy, lost_bytes)
        self.roots: Roots = {}
        self.generations = Generations()
        self.graves = self.residency.graves
        self.names = BlockNames(block_size)
        self.policy.clear(self.residency.is_leaf, self.split)
        self._num_roots_made = self._num_appended = 0

    def __del__(self) -> None:
        """The collector does not see runs, so their circles of parents and children are opened here."""
        stack = [*self.graves.unlinked(), *self.roots.values(), *self.graves.all_roots()]
        while stack:
            run = stack.pop()
            stack.extend(run.children.values())
            run.cut_off()

    @property
    def epoch(self) -> int:
        """Raised by every reset."""
        return self.residency.epoch

    @property
    def generation(self) -> int:
        """Raised whenever what blocks held may have gone, or is worth nothing any more."""
        return self.generations.current

    # -- looking

    def root(self, namespace: str) -> Run:
        """The namespace's root, made where there is none; for `insert`, which hangs something on it at once."""
        run = self.roots.get(namespace)
        if run is None:
            self._num_roots_made += 1
            if not self._num_roots_made % _SWEEP_EVERY:  # namespaces come from outside: empty ones must not pile up
                some = piece_of(self.roots, self._num_roots_made // _SWEEP_EVERY)
                for name in [name for name, root in some.items() if not root.children]:
                    self.roots.pop(name)
            run = Run(None, self.epoch, Usage())
            run.hashes = root_hash(namespace, self.block_size)
            self.roots = put(self.roots, namespace, run)
        return run

    def find(self, namespace: str, keys: BlockKeys, max_blocks: int) -> tuple[list[Run], int]:
        """The longest prefix of `keys` in the tree, up to `max_blocks`: its runs and how many blocks match.

        On its way it joins runs between which a fork has vanished.
        """
        path: list[Run] = []
        size = self.block_bytes
        tokens, _ = keys.buffer(0, max_blocks * size)
        run, position = self.roots.get(namespace), 0
        while run is not None and position < max_blocks:
            child = run.children.get(self.key(keys, position))
            if child is None:
                break
            num_blocks = child.num_blocks
            whole = position + num_blocks <= max_blocks and tokens.startswith(child.tokens, position * size)
            if not whole or keys.extras is not None or child.extras is not None:
                num_blocks = num_common(child, 0, keys, slice(position, max_blocks), size)
            position += num_blocks
            if num_blocks < child.num_blocks:
                path.append(child)
                break
            if len(run.children) == 1 and self._mergeable(run, child):
                self._merge(run, child)
            else:
                path.append(child)
                run = child
        return path, position

    def key(self, keys: BlockKeys, block: int) -> bytes:
        """What a run that begins with this block is found under."""
        start = block * self.block_bytes
        tokens = keys.part(start, start + self.block_bytes)
        return tokens if keys.extras is None else tokens + keys.extras.get(block, b"")

    def runs(self) -> Iterator[Run]:
        """Every run of every root, parents first."""
        unlinked = list(self.graves.unlinked())
        stack = [*reversed(unlinked), *self.roots.values(), *self.graves.all_roots()]
        while stack:
            run = stack.pop()
            stack.extend(run.children.values())
            if run.parent is not None:
                yield run

    # -- pinning

    def pin(self, pin: Pin) -> None:
        """Keep blocks [0, pin.end) of its run and everything above where they are."""
        pin.run.pins = (*pin.run.pins, pin)
        self.residency.hold(pin.run)

    def unpin(self, pin: Pin) -> None:
        """Take a pin back. What it alone held may be evicted or (of an older epoch) is freed."""
        run = pin.run
        run.pins = () if len(run.pins) == 1 else tuple([each for each in run.pins if each is not pin])
        self.residency.hold(run)
        if self.graves.roots:
            self.graves.sweep()

    def move_pin(self, pin: Pin | None, run: Run | None, end: int) -> Pin | None:
        """Pin another place instead; None stands for none. The new place is held before the old one is let go."""
        if pin is not None and pin.run is run:
            pin.end = end
            self.residency.hold(run)
            return pin
        moved = Pin(run, end) if run is not None else None
        if moved is not None:
            self.pin(moved)
        if pin is not None:
            self.unpin(pin)
        return moved

    @staticmethod
    def place(path: list[Run], num_blocks: int) -> tuple[Run | None, int]:
        """The run and offset at which the first `num_blocks` of a path end; no run for no blocks."""
        num_beyond = sum([run.num_blocks for run in path]) - num_blocks
        assert num_beyond >= 0, "the path is shorter than asked for"
        for run in reversed(path):
            if num_beyond < run.num_blocks:
                return run, run.num_blocks - num_beyond
            num_beyond -= run.num_blocks
        return None, 0

    # -- growing

    def insert(
        self, at: tuple[Run, int], keys: BlockKeys, first: int, ids: array[int], duplicates: array[int] = _NONE
    ) -> Insertion:
        """Put blocks [first, first + len(ids)) of `keys`, which the caller computed into GPU blocks `ids`, behind `at`.

        `at` is the pinned place where the blocks before `first` end; the caller pins the place that is returned, and
        only then can it be evicted when it is let go. Where the tree has a GPU copy already, the
        caller's ids stay its own: they come behind those in `duplicates`. Where a block is in the CPU tier only, or
        still loading, the caller's id is adopted as its GPU copy. Where memory runs out between two runs, fewer blocks
        are inserted.
        """
        (run, offset), position, end = at, 0, len(ids)
        done = Insertion(run, offset, duplicates, 0)
        try:
            while position < end:
                if offset == run.num_blocks:
                    child = run.children.get(self.key(keys, first + position)) if run.children else None
                    if child is None:
                        run = self._append(run, keys, first + position, ids[position:] if position else ids)
                        return Insertion(run, run.num_blocks, duplicates, end)
                    run, offset = child, 0
                num_known = num_common(run, offset, keys, slice(first + position, first + end), self.block_bytes)
                if not num_known:  # the prompts part here
                    run = self.split(run, offset)
                    continue
                num_there = min(num_known, max(0, run.num_gpu - offset))
                known = duplicates + ids[position : position + num_there]
                if num_there < num_known:
                    self.adopt(run, ids[position + num_there : position + num_known], REQUEST)
                position, offset, duplicates = position + num_known, offset + num_known, known
                done = Insertion(run, offset, duplicates, position)
        except MemoryError:
            if not done.num_blocks:
                raise
        return done

    def _append(self, at: Run, keys: BlockKeys, first: int, ids: array[int]) -> Run:
        """New blocks behind `at`: in place where it has no children, else as a new run."""
        run = at
        if at.children or at.parent is None or at.usage.is_shared:
            at.usage.is_shared = at.parent is not None
            run = Run(at, self.epoch, Usage())
        self.pools[0].hand_over(ids, REQUEST, RUN)
        try:
            self.extend(run, keys, first, ids)
            if run is not at:
                key = self.key(keys, first)
                if key == run.tokens:  # a run of one block has these bytes once
                    run.tokens = key
                at.add_child(key, run)
        except BaseException:
            self.pools[0].take_back(ids, REQUEST)
            raise
        self.residency.added_ids(run, GPU, len(ids), is_offered=False)
        return run

    def extend(self, run: Run, keys: BlockKeys, first: int, ids: array[int], tier: Tier = GPU) -> None:
        """Add blocks' tokens, extra keys and ids in a tier to the end of a run, which may be new: all of it
        or, on `MemoryError`, nothing. What follows from the ids is the caller's to count."""
        assert run.parent is not None
        size, num_blocks, before = self.block_bytes, len(ids), run.num_blocks
        extras = run.extras
        if keys.extras is not None:
            shift = before - first
            new = {b + shift: extra for b, extra in keys.extras.items() if first <= b < first + num_blocks}
            extras = {**(extras or {}), **new} or None
        tokens = run.tokens
        try:
            run.add_tokens(keys, first * size, (first + num_blocks) * size)
            run.add_ids(tier, ids)
        except BaseException:
            run.tokens = tokens
            if type(tokens) is bytearray:
                del tokens[before * size :]
            raise
        run.extras = extras
        run.num_blocks += num_blocks
        self._num_appended += 1
        run.usage.inserted = self._num_appended
        if self.policy.hears_growth:
            self.policy.grow(run, before)

    def grow(self, pin: Pin, keys: BlockKeys, first: int, ids: array[int]) -> bool:
        """Do what `insert` and `move_pin` would, where blocks are added behind a leaf that `pin` holds whole.

        That is each step of a decoding request, and cheap because nothing but the end of the run changes. False where
        it is not so; then nothing is done.
        """
        run = pin.run
        if pin.end != run.num_blocks or run.children or run.usage.is_shared:
            return False
        self.pools[0].hand_over(ids, REQUEST, RUN)
        try:
            self.extend(run, keys, first, ids)
        except BaseException:
            self.pools[0].take_back(ids, REQUEST)
            raise
        for came in self.residency.taps.came:
            came(run, GPU, pin.end, len(ids))
        pin.end = run.num_held = run.num_blocks
        self.residency.num_protected[0] += len(ids)
        return True

    def adopt(self, run: Run, ids: array[int], giver: Owner) -> None:
        """These are the next blocks of a run on the GPU, as copies of what it has below."""
        self.pools[0].hand_over(ids, giver, RUN)
        try:
            self.residency.add_ids(run, GPU, ids)
        except BaseException:
            self.pools[0].take_back(ids, giver)
            raise

    def reset(self, lost_by: Loss = Loss.RESET) -> None:
        """Forget everything. What is pinned stays owned, out of reach, until it is unpinned."""
        old, self.roots = self.roots, {}  # first of all: whatever comes, nothing of the old is found any more
        self.graves.add(old)
        self.residency.begin_epoch(lost_by)
        self.generations.begin(Reason.RESET)
        self.policy.clear(self.residency.is_leaf, self.split)
        self.graves.clear(AT_ONCE)

    # -- shape

    def split(self, run: Run, num_blocks: int) -> Run:
        """Cut a run after `num_blocks` blocks; returns the upper part, which is new. The lower keeps its identity."""
        assert run.parent is not None and 0 < num_blocks < run.num_blocks
        residency, had_blocks = self.residency, (bool(run.gpu), bool(run.cpu))
        upper, key = run.front(num_blocks, self.block_bytes), residency.key(run)
        upper.usage.is_shared = True
        run.cut_front(upper, self.block_bytes)  # may lack memory: until here nothing has changed
        run.parent.add_child(key, upper)
        run.parent = upper
        upper.add_child(residency.key(run), run)
        upper.num_gpu_children, upper.num_cpu_children = int(bool(run.gpu)), int(bool(run.cpu))
        for tier in TIERS:
            residency.count_child(upper, tier, bool(upper.packed_ids(tier)) - had_blocks[tier])
        split_pins(run, upper)
        for parted in residency.taps.parted:
            parted(upper, run)
        for tier in TIERS:
            residency.offer(upper, tier)
            residency.offer(run, tier)
        return upper

    def _mergeable(self, upper: Run, lower: Run) -> bool:
        """Whether nothing needs the border between a run and its only child any more, and it goes in no time."""
        if upper.parent is None or len(lower.children) > _MAX_MOVED or not self.policy.alike(upper, lower):
            return False
        gpu_joins = not lower.gpu or upper.num_gpu == upper.num_blocks
        has_both = upper.cpu and lower.cpu
        cpu_joins = not has_both or (upper.cpu_end == upper.num_blocks and lower.cpu_start == 0)
        in_flight = any(isinstance(pin, Segment) for pin in (*upper.pins, *lower.pins))
        return gpu_joins and bool(cpu_joins) and not in_flight

    def _merge(self, upper: Run, lower: Run) -> None:
        """The reverse of `split`: the upper run takes in the lower one, its pins and its children."""
        num_above, had_blocks = upper.num_blocks, (bool(upper.gpu), bool(upper.cpu))
        tokens = bytearray(upper.tokens) + lower.tokens
        hashes, marks = upper.names_with(lower)
        gpu, cpu = upper.gpu + lower.gpu, upper.cpu + lower.cpu
        if lower.extras is not None:
            upper.extras = {**(upper.extras or {}), **{b + num_above: x for b, x in lower.extras.items()}}
        upper.tokens, upper.hashes, upper.block_marks = tokens, hashes, marks
        if upper.sample is not None and lower.sample is not None:  # see `EvictionPolicy.alike`
            upper.sample = upper.sample.joined(lower.sample)
        upper.join_marks(lower)
        upper.num_blocks += lower.num_blocks
        if not upper.cpu:
            upper.cpu_start = lower.cpu_start + num_above
        upper.gpu, upper.cpu = gpu, cpu
        for pin in lower.pins:
            pin.run, pin.end = upper, pin.end + num_above
            upper.pins = (*upper.pins, pin)
        upper.children = lower.children
        for child in upper.children.values():
            child.parent = upper
        upper.num_held_children = lower.num_held_children
        upper.num_gpu_children, upper.num_cpu_children = lower.num_gpu_children, lower.num_cpu_children
        if lower.num_held:
            upper.num_held = num_above + lower.num_held
        for tier in TIERS:
            self.residency.count_child(upper, tier, bool(upper.packed_ids(tier)) - had_blocks[tier])
        for joined in self.residency.taps.joined:
            joined(upper, lower)
        self.residency.withdraw(lower)
        lower.parent = None
        upper.usage = upper.usage.joined(lower.usage)
        for tier in TIERS:
            self.residency.offer(upper, tier)
