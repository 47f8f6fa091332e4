"""What a manager offers to adapters: verbs without a request, over blocks that their caller owns."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastdeploy_cache.books.block_pool import CALLER, REQUEST, TASK, BlockPool
from fastdeploy_cache.books.path import gpu_ids, hash_at
from fastdeploy_cache.books.prefix_tree import BlockKeys, PrefixTree
from fastdeploy_cache.books.prefix_tree import Inserted as InsertedBlocks
from fastdeploy_cache.books.run import GPU, CallerCopy, Run, Tier
from fastdeploy_cache.books.run_view import RunView, path_views, views_of
from fastdeploy_cache.callers.pinned_prefix import Pinned, PinnedPrefix
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import OutOfBlocksError, RequestError
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.policies.eviction import Asked
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.stats import TierStats


class Lookup(NamedTuple):
    """What is cached of a sequence of tokens, from its front."""

    block_ids: list[int]  # on the GPU
    num_cpu_blocks: int  # behind these, in the CPU tier only
    gpu_hash: bytes  # of the last block on the GPU; b"" for none
    last_hash: bytes  # of the last block in any tier; b"" for none

    @property
    def num_blocks(self) -> int:  # in any tier
        return len(self.block_ids) + self.num_cpu_blocks


class Inserted(NamedTuple):
    """What became of a caller's blocks."""

    num_blocks: int  # of the sequence, cached now; those before `first_block` where nothing of the caller's was
    duplicate_ids: list[int]  # still the caller's: these had a copy on the GPU, or are not cached (no memory)
    pinned: PinnedPrefix | None


class CallerBlocks:
    """The part of `PrefixCacheManager` that needs no matched request; any thread.

    A `Request` only names tokens, namespace and images here: it is not registered, and one object may serve many calls.
    """

    config: CacheConfig
    _copy_down: CopyDown
    _lock: threading.Lock
    _matcher: Matcher
    _mover: BlockMover
    _filling: tuple[dict[int, CallerCopy], dict[int, CallerCopy]]  # by Tier: callers' blocks that are copied into
    _pinned: Pinned
    _pools: tuple[BlockPool, BlockPool]
    _requests: dict[str, ActiveRequest]
    _taken: tuple[dict[int, int], dict[int, int]]  # by Tier: the tree's generation when a block was taken or filled
    _tree: PrefixTree

    @property
    def generation(self) -> int:
        """Raised by every reset, change of weights, sleep and loss of KV arrays: what a caller's blocks held before is
        not cached afterwards."""
        return self._tree.generation

    # -- blocks

    def take(self, num_blocks: int, tier: Tier = GPU) -> list[int]:
        """`num_blocks` blocks of a tier for the caller, lowest ids first; evicts what the policy names.

        Raises:
            OutOfBlocksError: not that many can be had now; nothing was changed.
        """
        num_blocks = operator.index(num_blocks)
        if num_blocks < 0:
            raise RequestError(f"take of {num_blocks} blocks; give 0 or more")
        with self._lock:
            self._check_running()
            pool, residency = self._pools[tier], self._tree.residency
            missing = num_blocks - residency.num_available(tier)
            if missing > 0:
                raise OutOfBlocksError(missing, self._num_coming() if tier is GPU else 0)
            residency.evict(tier, max(0, num_blocks - pool.num_free))
            ids = pool.allocate(num_blocks, CALLER)
            self._stamp(ids, tier)
            if tier is GPU:
                self._copy_down.moved(num_blocks)
        self._submit()
        return ids.tolist()

    def give_back(self, block_ids: Sequence[int], tier: Tier = GPU) -> None:
        """The caller's blocks are free again; all of them or, on `BlockOwnerError`, none.

        One that is still being copied into is free once that has ended.
        """
        ids, filling = as_ids(block_ids), self._filling[tier]
        with self._lock:
            own = array("i", [block_id for block_id in ids if block_id not in filling])
            if len(own) < len(ids):
                self._pools[tier].check(own, CALLER)
                late = [block_id for block_id in ids if block_id in filling]
                self._pools[tier].check(array("i", late), TASK)
                for block_id in late:
                    filling.pop(block_id).unwanted.add(block_id)
            self._pools[tier].free(own, CALLER)

    def evict(self, num_blocks: int, tier: Tier = GPU) -> int:
        """Evict so many blocks of a tier now, or as many as can be; returns how many. `take` does it by itself."""
        with self._lock:
            self._check_open()
            residency, num_free = self._tree.residency, self._pools[tier].num_free
            residency.evict(tier, max(0, min(num_blocks, residency.num_available(tier) - num_free)))
            return self._pools[tier].num_free - num_free

    def evict_runs(self, num_blocks: int) -> list[int]:
        """Evict whole runs, as the policy names them, until `num_blocks` blocks or more have gone; they are the
        caller's now, run by run, each from its first block on. What has a copy stays cached in the CPU tier.

        Fewer where no more can be evicted. `take` evicts exactly what it needs.
        """
        evicted, num_free = array("i"), 0
        with self._lock:
            self._check_open()
            residency, pool = self._tree.residency, self._pools[GPU]
            num_before = pool.num_free
            while num_free < num_blocks and residency.num_available(GPU) > pool.num_free:
                evicted += residency.evict_run()
                num_free = pool.num_free - num_before  # what is being read is not free yet
            unread = set(pool.deferred_ids)
            evicted = array("i", [block_id for block_id in evicted if block_id not in unread])
            pool.claim(evicted, CALLER)
            self._stamp(evicted, GPU)
            self._copy_down.moved(len(evicted))
        self._submit()
        return evicted.tolist()

    def hand_over(self, request: Request, block_ids: Sequence[int]) -> None:
        """The caller's blocks become a matched request's, behind those that it has, as if `allocate` had given them.

        A request that gets blocks of an older generation publishes nothing any more.

        Raises:
            BlockOwnerError: one is not the caller's; nothing was changed.
            UnknownRequestError: not matched, or released already.
        """
        with self._lock:
            active, ids = self._active(request), as_ids(block_ids)
            self._pools[GPU].check(ids, CALLER)
            self._matcher.settle(active)
            active.block_ids += ids  # first: it may need memory
            self._pools[GPU].hand_over(ids, CALLER, REQUEST)
            if not self._are_current(ids):
                active.epoch = -1
            if not active.admitted:
                self._admit(active)
        self._submit()

    # -- prefixes

    def lookup(self, request: Request, *, touch: bool = True, split: bool = False) -> Lookup:
        """What is cached of the tokens' full blocks. Pins nothing; with `touch` it counts as recently used.

        `split`: cut the runs in which it ends, on the GPU and anywhere, so that what is behind ages, and is evicted, by
        itself.
        """
        with self._lock:
            path, num_found = self._find(request)
            ids = gpu_ids(path, num_found)
            for end in (num_found, len(ids)) if split else ():
                run, offset = self._tree.place(path, end)
                if run is not None and offset < run.num_blocks:
                    upper = self._tree.split(run, offset)
                    path = (upper if end == num_found else path[-1]).path()
            if path and touch:
                self._tree.policy.touch(path)
            return Lookup(ids.tolist(), num_found - len(ids), hash_at(path, len(ids)), hash_at(path, num_found))

    def pin(self, request: Request, num_blocks: int | None = None) -> PinnedPrefix:
        """Keep the longest cached prefix, at most `num_blocks` blocks of it, where it is until `unpin`."""
        with self._lock:
            return self._pin_found(*self._find(request, num_blocks))

    def _pin_found(self, path: list[Run], num_found: int) -> PinnedPrefix:
        ids = gpu_ids(path, num_found).tolist()  # first: it may need memory
        pin = self._tree.move_pin(None, *self._tree.place(path, num_found))
        pinned = PinnedPrefix(pin, num_found, ids)
        if pin is not None:
            self._pinned[pin] = pinned
        return pinned

    def unpin(self, pinned: PinnedPrefix) -> None:
        """The reverse of `pin`. Doing it again does nothing."""
        with self._lock:
            pin = pinned.end()
            if pin is not None:
                del self._pinned[pin]
                num_held = pin.run.num_held
                self._tree.unpin(pin)
                self._copy_down.moved(max(0, num_held - pin.run.num_held))
        self._submit()

    def insert(
        self,
        request: Request,
        block_ids: Sequence[int],
        *,
        first_block: int = 0,
        pin: bool = False,
        used: bool = True,
        generation: int | None = None,
    ) -> Inserted:
        """The caller has computed the request's blocks from `first_block` on into its `block_ids`: they are cached now.

        What has a GPU copy already stays the caller's (`duplicate_ids`); what is in the CPU tier only is adopted. With
        `pin` the whole is pinned in the same step. `used`: a request ends here, for policies that count uses.

        Nothing is cached, and all stay the caller's, where a block was taken, or `generation` was, before the cache's
        last reset, change of weights, sleep or loss of KV arrays: what it holds may have gone. `generation` is for
        blocks that are kept for long: that of the cache when the caller began to compute.

        Raises:
            RequestError: more blocks than the tokens fill, or the blocks before `first_block` are not on the GPU.
            BlockOwnerError: a block is not the caller's. Nothing was changed.
        """
        ids, keys, first_block = as_ids(block_ids), self._keys(request), as_first(first_block)
        num_blocks = first_block + len(ids)
        if num_blocks > request.num_tokens // self.config.block_size:
            raise RequestError(f"insert of {num_blocks} blocks for {request.num_tokens} tokens; only full ones count")
        with self._lock:
            self._check_open()
            path, _ = self._tree.find(request.namespace, keys, first_block)
            if len(gpu_ids(path, first_block)) < first_block:
                raise RequestError(f"insert behind block {first_block}, but not all before it is on the GPU")
            self._pools[GPU].check(ids, CALLER)
            caches = self.config.enable_prefix_caching and not self.is_gpu_asleep
            if not num_blocks or not caches or not self._are_current(ids, generation):
                return Inserted(first_block, ids.tolist(), self._pin_found(path, first_block) if pin else None)
            run, end = self._tree.place(path, first_block)
            if ids:
                at = (run, end) if run is not None else (self._tree.root(request.namespace), 0)
                run, end, known, num_inserted = self._insert(at, keys, first_block, ids)
                num_blocks, ids = first_block + num_inserted, known + ids[num_inserted:]
            assert run is not None
            count = functools.partial(self._count_use, request, run, end, used)  # cached they are all the same
            path = self._tree.mishaps.ask("policy", count, run.path())
            pinned = self._pin_found(path, num_blocks) if pin else None
        self._submit()
        return Inserted(num_blocks, ids.tolist(), pinned)

    def _insert(self, at: tuple[Run, int], keys: BlockKeys, first_block: int, ids: array[int]) -> InsertedBlocks:
        """What the tree did not want is the caller's still."""
        pool = self._pools[GPU]
        pool.hand_over(ids, CALLER, REQUEST)
        try:
            done = self._tree.insert(at, keys, first_block, ids)
        except BaseException:
            pool.hand_over(ids, REQUEST, CALLER)
            raise
        pool.hand_over(done.duplicates + ids[done.num_blocks :], REQUEST, CALLER)
        return done

    def _are_current(self, ids: Iterable[int], generation: int | None = None) -> bool:
        """Whether these hold what they held when they were taken."""
        now, taken = self._tree.generation, self._taken[GPU]
        return generation == now if generation is not None else all(taken.get(block_id) == now for block_id in ids)

    def _stamp(self, ids: array[int], tier: Tier, generation: int | None = None) -> None:
        """Note when the caller got its blocks; they are free again where there is no memory for that."""
        try:
            self._taken[tier].update(dict.fromkeys(ids, self._tree.generation if generation is None else generation))
        except MemoryError:
            self._pools[tier].free(ids, CALLER)
            raise

    def _count_use(self, request: Request, run: Run, end: int, used: bool) -> list[Run]:
        """Tell the policies; returns the path that ends there."""
        tree = self._tree
        if end < run.num_blocks:  # what is behind keeps its age
            run = tree.split(run, end)
        holding = tree.move_pin(None, run, run.num_blocks)  # or the copies' own evictions might take it
        try:
            if used:
                num_blocks = request.num_tokens // self.config.block_size
                tree.policy.use(run.path(), request, Asked(num_blocks, num_blocks))
            else:
                tree.policy.touch(run.path())
            path = run.path()
            self._copy_down.committed(run)
            num_skipped = self._copy_down.released(path)
            if self._matcher.write_out is not None:
                self._matcher.write_out.released(path, has_uncopied=num_skipped > 0)
        finally:
            tree.move_pin(holding, None, 0)
        return path

    # -- looking in

    def tier_stats(self, tier: Tier = GPU) -> TierStats:
        """What `stats` says of one tier, cheaper."""
        with self._lock:
            return TierStats.of(self._pools[tier], self._tree.residency, tier)

    def runs(self) -> list[RunView]:
        """Every run of the tree, parents first, as it is now. Walks the whole tree."""
        with self._lock:
            return list(views_of(self._tree))

    def runs_of(self, request: Request, num_blocks: int | None = None) -> list[RunView]:
        """The runs that the tokens' cached prefix, at most `num_blocks` of it, lies on, first to last, as they are now.
        The last one may go on behind it."""
        with self._lock:
            path, _ = self._find(request, num_blocks)
            return list(path_views(path, request.namespace))

    def free_block_ids(self, tier: Tier = GPU) -> list[int]:
        """The blocks of a tier that nobody owns, lowest first. Walks the pool."""
        with self._lock:
            return sorted(self._pools[tier].free_ids())

    def eviction_order(self, tier: Tier = GPU) -> list[bytes]:
        """The hashes of the last blocks of the runs whose ends can be evicted, about in the order of eviction."""
        with self._lock, contextlib.closing(self._tree.policy.coldest(tier)) as runs:
            return [run.last_hash for run in runs]

    def drop(self, block_hash: bytes) -> int:
        """Forget a cached block that has none behind it, and those before it up to the first that is pinned or has
        other children; returns how many. None where it is unknown, or not the last of its chain. Walks the tree."""
        with self._lock:
            self._check_open()
            epoch, num_dropped = self._tree.epoch, 0
            runs = (run for run in self._tree.runs() if run.epoch == epoch and not run.children)
            leaf = next((run for run in runs if run.last_hash == block_hash), None)
            while leaf is not None and leaf.parent is not None and not leaf.children:
                above, num_blocks = leaf.parent, leaf.num_blocks
                self._tree.residency.truncate(leaf, leaf.num_held)
                num_dropped += num_blocks - leaf.num_held
                leaf = above if not leaf.num_held else None
            return num_dropped

    def _keys(self, request: Request) -> BlockKeys:
        return BlockKeys(request.tokens, request.extra_keys(self.config.block_size))

    def _find(self, request: Request, num_blocks: int | None = None) -> tuple[list[Run], int]:
        self._check_open()  # under the lock
        most = request.num_tokens // self.config.block_size
        most = most if num_blocks is None else min(most, num_blocks)
        if self.is_gpu_asleep:
            return [], 0
        path, num_found = self._tree.find(request.namespace, self._keys(request), most)
        whole = request.whole_images(num_found, self.config.block_size)
        return path, whole

    def _num_coming(self) -> int:
        return self._mover.num_coming([active.pin for active in self._requests.values() if active.pin is not None])

    def _active(self, request: Request) -> ActiveRequest:
        raise NotImplementedError

    def _admit(self, active: ActiveRequest) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _check_running(self) -> None:
        raise NotImplementedError

    @property
    def is_gpu_asleep(self) -> bool:
        """See `LifeCycle`."""
        raise NotImplementedError

    def _submit(self) -> None:
        raise NotImplementedError


def as_first(first_block: int) -> int:
    """The number of a block."""
    first = operator.index(first_block)
    if first < 0:
        raise RequestError(f"first_block is {first}; blocks of a sequence are counted from 0")
    return first


def as_ids(block_ids: Sequence[int]) -> array[int]:
    """Block ids as the books keep them."""
    try:
        return array("i", block_ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"block ids are {block_ids!r:.80}: {error}; give a list of integers") from error
