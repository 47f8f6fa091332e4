"""The prefix tree: which prefix is in which blocks. Moves ids only; the manager holds its lock around every call."""

from __future__ import annotations

from collections.abc import Iterator

from fastdeploy_cache.books.block_hash import TOKEN_BYTES, root_hash
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_names import BlockNames
from fastdeploy_cache.books.comparing import num_common
from fastdeploy_cache.books.generations import Generations, Reason
from fastdeploy_cache.books.graves import AT_ONCE, Roots
from fastdeploy_cache.books.large_dict import piece_of, place_of_name, put
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.leaves.policy import EvictionPolicy
from fastdeploy_cache.books.lost_blocks import LostBlocks
from fastdeploy_cache.books.mishaps import Mishaps
from fastdeploy_cache.books.residency import Policy, Pools, Residency
from fastdeploy_cache.books.run import TIERS, Pin, Run
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.transfer import Segment, halves, split_pins
from fastdeploy_cache.ipc.clock import Clock

_SWEEP_EVERY = 64  # namespaces that come
_MAX_MOVED = 1024  # children that a merge hangs elsewhere: some hundred microseconds


class PrefixTree:
    """A radix tree of runs, one root per namespace; `residency` keeps their blocks."""

    def __init__(self, block_size: int, pools: Pools, policy: EvictionPolicy, lost_bytes: int, clock: Clock) -> None:
        """`lost_bytes`: what the memory of blocks that have gone may take."""
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.pools = pools  # by Tier
        self.mishaps = Mishaps()
        self.policy: Policy = GuardedPolicy(policy, self.mishaps, self.runs, clock)
        lost = LostBlocks(lost_bytes, self.block_bytes, clock)
        self.residency = Residency(pools, self.policy, lost, clock, self.block_bytes)
        self.roots: Roots = {}
        self.graves = self.residency.graves
        self.generations, self.names = Generations(), BlockNames(block_size, clock)
        self.policy.clear(self.residency.is_leaf, self.split)
        self._num_roots_made = self.num_grown = 0  # the last: how often runs have got new blocks

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
            tenant = 0 if (shares := self.residency.shares) is None else shares.tenant_of(namespace)
            run = Run(None, self.epoch, namespace=namespace, tenant=tenant)
            run.hashes = root_hash(namespace, self.block_size)
            self.roots = put(self.roots, namespace, run, place_of_name)
        return run

    def find(self, namespace: str, keys: BlockKeys, max_blocks: int) -> tuple[list[Run], int]:
        """The longest prefix of `keys` in the tree, up to `max_blocks`: its runs and how many blocks match.

        On its way it joins runs between which a fork has vanished.
        """
        path: list[Run] = []
        size, extras = self.block_bytes, keys.extras
        end = max_blocks * size
        tokens = keys.prompt if end <= len(keys.prompt) else keys.part(0, end)
        run, position = self.roots.get(namespace), 0
        while run is not None and position < max_blocks:
            start = position * size
            key = tokens[start : start + size] if extras is None else keys.key(position, size)
            child = run.children.get(key)
            if child is None:
                break
            num_blocks = child.num_blocks
            whole = position + num_blocks <= max_blocks and tokens.startswith(child.tokens, start)
            if not whole or extras is not None or child.extras is not None:
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
        if self.residency.trim is not None:
            self.residency.trim(run, Loss.TRIMMED)
        if self.graves.roots:
            self.graves.sweep()

    def move_pin(self, pin: Pin | None, run: Run | None, end: int) -> Pin | None:
        """Pin another place instead; None stands for none. The new place is held before the old one is let go."""
        if pin is not None and pin.run is run:
            pin.end = end
            self.residency.hold(run)
            if self.residency.trim is not None:
                self.residency.trim(run, Loss.TRIMMED)
            return pin
        moved = None
        if run is not None:
            moved = Pin(run, end)
            run.pins = (*run.pins, moved)
            self.residency.hold(run)
        if pin is not None:
            self.unpin(pin)
        return moved

    @staticmethod
    def place(path: list[Run], num_blocks: int) -> tuple[Run | None, int]:
        """The run and offset at which the first `num_blocks` of a path end; no run for no blocks."""
        for run in path:
            if num_blocks <= run.num_blocks:
                return (run, num_blocks) if num_blocks else (None, 0)
            num_blocks -= run.num_blocks
        assert not num_blocks, "the path is shorter than asked for"
        return None, 0

    def reset(self, lost_by: Loss = Loss.RESET) -> None:
        """Forget everything. What is pinned stays owned, out of reach, until it is unpinned."""
        old, self.roots = self.roots, {}  # first of all: whatever comes, nothing of the old is found any more
        self.graves.add(old)
        self.residency.begin_epoch(lost_by)
        self.generations.begin(Reason.RESET)
        self.policy.clear(self.residency.is_leaf, self.split)
        self.mishaps.contain("settling", lambda: self.graves.clear(AT_ONCE))  # what is left goes bit by bit

    # -- shape

    def split(self, run: Run, num_blocks: int) -> Run:
        """Cut a run after `num_blocks` blocks; returns the upper part, which is new. The lower keeps its identity."""
        assert run.parent is not None and 0 < num_blocks < run.num_blocks
        residency, had_blocks = self.residency, (bool(run.gpu), bool(run.cpu))
        upper, key = run.front(num_blocks, self.block_bytes), residency.key(run)
        ids = halves(run, num_blocks) if run.pins else {}
        upper.is_shared = True
        run.cut_front(upper, self.block_bytes)  # may lack memory: until here nothing has changed
        run.parent.add_child(key, upper)
        run.parent = upper
        upper.add_child(residency.key(run), run)
        upper.num_gpu_children, upper.num_cpu_children = int(bool(run.gpu)), int(bool(run.cpu))
        for tier in TIERS:
            if change := bool(upper.packed_ids(tier)) - had_blocks[tier]:
                residency.count_child(upper, tier, change)
        split_pins(run, upper, ids)
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
        return upper.session == lower.session and gpu_joins and bool(cpu_joins) and not in_flight

    def _merge(self, upper: Run, lower: Run) -> None:
        """The reverse of `split`: the upper run takes in the lower one, its pins and its children."""
        num_above, had_blocks = upper.num_blocks, (bool(upper.gpu), bool(upper.cpu))
        upper.take_in(lower)
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
        for tier in TIERS:
            self.residency.offer(upper, tier)
