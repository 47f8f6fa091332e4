"""Verbs without a request, over blocks that their caller owns."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import CALLER, REQUEST
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Used
from fastdeploy_cache.books.evicting import evict, evict_run
from fastdeploy_cache.books.growing import Insertion, insert
from fastdeploy_cache.books.leaves.policy import Asked
from fastdeploy_cache.books.path import gpu_ids, num_gpu
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.callers.copies import BlockCopies
from fastdeploy_cache.callers.finder import Finder
from fastdeploy_cache.callers.own_blocks import OwnIds, as_first, as_ids
from fastdeploy_cache.callers.own_units import CallerUnits
from fastdeploy_cache.callers.view import BlockView
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import OutOfBlocksError, RequestError
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.requests import Requests


class Lookup(NamedTuple):
    """What is cached of a sequence of tokens, from its front."""

    block_ids: list[int]  # on the GPU
    num_cpu_blocks: int  # behind these, in the CPU tier only
    gpu_hash: bytes  # of the last block on the GPU; b"" for none, or where hashes were not asked for
    last_hash: bytes  # of the last block in any tier; likewise
    num_checkpoint_blocks: int | None = None  # of a hybrid model: up to the deepest checkpoint in these

    @property
    def num_blocks(self) -> int:  # in any tier
        return len(self.block_ids) + self.num_cpu_blocks


class Inserted(NamedTuple):
    """What became of a caller's blocks."""

    num_blocks: int  # of the sequence, cached now; those before `first_block` where nothing of the caller's was
    duplicate_ids: list[int]  # still the caller's: these had a copy on the GPU, or are not cached (no memory)
    pinned: PinnedPrefix | None  # None, too, where there was no memory for it


class CallerBlocks:
    """Blocks for callers that keep their own requests: `cache.blocks`. Any thread; each verb is a turn of its own.

    A `Request` only names tokens, namespace and images here: it is not registered, and one object may serve many calls.
    `copies` moves bytes for such callers, `units` has those of the rows of a hybrid model, `view` looks into the tree.
    """

    def __init__(self, config: CacheConfig, books: Books, movement: Movement, requests: Requests) -> None:
        self._config, self._books, self._tree = config, books, books.tree
        self._copy_down, self._requests = movement.copy_down, requests
        self._own = OwnIds(books.tree, books.pools[GPU]), OwnIds(books.tree, books.pools[CPU])
        self._finder, self.units = Finder(config, books), CallerUnits(books, movement.images)
        self.copies = BlockCopies(config, books, movement, self._finder, own=self._own, units=self.units)
        self.view = BlockView(books, self._finder)

    @property
    def generation(self) -> int:
        """Raised by every reset, change of weights, sleep and loss of KV arrays: what a caller's blocks held before is
        not cached afterwards."""
        return self._tree.generation

    # -- blocks

    def allocate(self, num_blocks: int, tier: Tier = GPU) -> list[int]:
        """`num_blocks` blocks of a tier for the caller, lowest ids first; evicts what the policy names.

        Raises:
            OutOfBlocksError: not that many can be had now; nothing was changed.
        """
        num_blocks = operator.index(num_blocks)
        if num_blocks < 0:
            raise RequestError(f"allocate of {num_blocks} blocks; give 0 or more")
        with self._books:
            self._books.check_awake()
            missing = num_blocks - self._books.residency.num_available(tier)
            if missing > 0:
                num_all = self._books.pools[tier].num_blocks
                num_coming = self._requests.num_coming() if tier is GPU else 0
                raise OutOfBlocksError(missing, num_coming, num_all=num_all if num_blocks > num_all else None)
            ids = self._books.take(num_blocks, tier, CALLER)
            return self._own[tier].note_taken(ids)

    def free(self, block_ids: Sequence[int], tier: Tier = GPU) -> None:
        """The caller's blocks are free again; all of them or, on `BlockOwnerError`, none.

        One that is still being copied into is free once that has ended.
        """
        with self._books:
            self._own[tier].free(as_ids(block_ids))

    def evict(self, num_blocks: int, tier: Tier = GPU) -> int:
        """Evict so many blocks of a tier now, or as many as can be; returns how many. `allocate` does it by itself."""
        with self._books:
            self._books.check_open()
            residency, num_free = self._tree.residency, self._books.pools[tier].num_free
            evict(residency, tier, max(0, min(num_blocks, residency.num_available(tier) - num_free)))
            return self._books.pools[tier].num_free - num_free

    def evict_runs(self, num_blocks: int) -> list[int]:
        """Evict whole runs, as the policy names them, until `num_blocks` blocks or more have gone; they are the
        caller's now, run by run, each from its first block on. What has a copy stays cached in the CPU tier.

        Fewer where no more can be evicted. `allocate` evicts exactly what it needs.
        """
        with self._books:
            self._books.check_uniform("blocks.evict_runs")
            residency, pool = self._tree.residency, self._books.pools[GPU]
            evicted = pool.allocate(residency.graves.free(GPU, num_blocks), CALLER)  # a reset has forgotten these
            try:
                while len(evicted) < num_blocks and residency.num_available(GPU) > pool.num_free:
                    evict_run(residency, evicted)
            except BaseException:  # no memory: the caller hears of none of them
                pool.free(evicted, CALLER)
                raise
            listed = self._own[GPU].note_taken(evicted)
            self._books.note_moved(len(evicted))
        return listed

    def hand_over(self, request: Request, block_ids: Sequence[int]) -> None:
        """The caller's blocks become a matched request's, behind those that it has, as if `allocate` had given them.

        A request that gets blocks of an older generation publishes nothing any more.

        Raises:
            BlockOwnerError: one is not the caller's; nothing was changed.
            UnknownRequestError: not matched, or released already.
        """
        with self._books:
            self._books.check_uniform("blocks.hand_over")
            active, ids = self._requests.active(request), as_ids(block_ids)
            self._books.pools[GPU].check(ids, CALLER)
            self._requests.matcher.settle(active)
            active.block_ids += ids  # first: it may need memory
            self._books.pools[GPU].hand_over(ids, CALLER, REQUEST)
            if not self._own[GPU].are_current(ids):
                active.is_detached = True
            if not active.is_admitted:
                self._requests.accounts.admit(active, self._books.clock.now())

    # -- prefixes

    def lookup(self, request: Request, *, touch: bool = True, split: bool = False, hashes: bool = False) -> Lookup:
        """What is cached of the tokens' full blocks. Pins nothing; with `touch` it counts as recently used.

        `hashes`: compute those of the answer, too; a block's first costs some tenths of a microsecond.
        `split`: cut the runs in which it ends, on the GPU and anywhere, so that what is behind ages, and is evicted, by
        itself.
        """
        with self._books:
            path, num_found = self._finder.find(request)
            if not hashes or not self.view.names_much(path):
                return self._look(path, num_found, touch=touch, split=split, hashes=hashes)
        self.view.name_prefix(request)
        with self._books:
            return self._look(*self._finder.find(request), touch=touch, split=split, hashes=hashes)

    def _look(self, path: list[Run], num_found: int, *, touch: bool, split: bool, hashes: bool) -> Lookup:
        ids = gpu_ids(path, num_found)
        for end in (num_found, len(ids)) if split else ():
            run, offset = self._tree.place(path, end)
            if run is not None and offset < run.num_blocks:
                upper = self._tree.split(run, offset)
                path = (upper if end == num_found else path[-1]).path()
        if path and touch:
            self._tree.policy.touch(path)
        gpu_hash, last_hash = [self._tree.names.at(path, end) if hashes else b"" for end in (len(ids), num_found)]
        boundary = None
        if self._books.rows is not None:
            deepest = self._books.rows.deepest_within(path, num_found)
            boundary = deepest.boundary if deepest is not None else 0
        return Lookup(ids.tolist(), num_found - len(ids), gpu_hash, last_hash, boundary)

    def pin(self, request: Request, num_blocks: int | None = None) -> PinnedPrefix:
        """Keep the longest cached prefix, at most `num_blocks` blocks of it, where it is until `unpin`."""
        with self._books:
            return self._books.pin_prefix(*self._finder.find(request, num_blocks))

    def unpin(self, pinned: PinnedPrefix) -> None:
        """The reverse of `pin`. Doing it again does nothing."""
        with self._books:
            self._books.unpin_prefix(pinned)

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
        ids, keys, first_block = as_ids(block_ids), self._finder.keys(request), as_first(first_block)
        num_blocks, num_asked = first_block + len(ids), request.num_tokens // self._config.block_size
        if num_blocks > num_asked:
            raise RequestError(f"insert of {num_blocks} blocks for {request.num_tokens} tokens; only full ones count")
        with self._books:
            self._books.check_uniform("blocks.insert")
            path, num_found = self._tree.find(request.namespace, keys, first_block)
            num_there, is_current = num_gpu(path, num_found), self._own[GPU].are_current(ids, generation)
            if num_there < first_block and is_current:
                raise RequestError(f"insert behind block {first_block}, but not all before it is on the GPU")
            self._books.pools[GPU].check(ids, CALLER)
            caches = self._config.enable_prefix_caching and GPU not in self._books.asleep
            if not num_blocks or not caches or not is_current:
                return Inserted(num_there, ids.tolist(), self._books.pin_prefix(path, num_there) if pin else None)
            (run, end), known, kept = self._tree.place(path, first_block), array("i"), ids.tolist()
            if ids:
                at = (run, end) if run is not None else (self._tree.root(request.namespace), 0)
                run, end, known, num_inserted = self._insert(at, keys, first_block, ids)
                num_blocks = first_block + num_inserted
                del kept[len(known) : num_inserted]  # cached now; what stood before them has a copy on the GPU
            assert run is not None
            asked = Asked(num_asked, num_asked) if used else None
            # whatever becomes of the count, the blocks are cached
            count = functools.partial(self._count_use, request, run, end, asked, first_block + len(known))
            path = self._tree.mishaps.ask("policy", count, run.path())
            pinned = self._pin(path, num_blocks) if pin else None
        return Inserted(num_blocks, kept, pinned)

    def note_use(self, request: Request, *, num_found_blocks: int) -> int:
        """A request has ended that was served in blocks of its caller's own: what is cached of it was used once more.

        Eviction policies count it, and storage is offered again what it has declined. `num_found_blocks`: how many of
        its blocks were cached when it came. Returns how many are cached now.
        """
        with self._books:
            path, num_blocks = self._finder.find(request)
            if num_blocks:
                run, end = self._tree.place(path, num_blocks)
                assert run is not None
                asked = Asked(max(1, request.num_prompt_tokens // self._config.block_size), num_found_blocks)
                count = functools.partial(self._count_use, request, run, end, asked, num_found_blocks)
                self._tree.mishaps.ask("policy", count, path)
            return num_blocks

    def count_request(self, request: Request, hit_tokens: tuple[int, int, int]) -> None:
        """Count a request that was matched in its caller's own blocks: the tokens of its prompt that the GPU, the CPU
        tier and storage have served. Why it missed the rest is told by what is cached and remembered here."""
        with self._books:
            self._requests.count(request, hit_tokens)

    def _pin(self, path: list[Run], num_blocks: int) -> PinnedPrefix | None:
        """None for want of memory: what is cached has its owners already, and the caller must hear whose each is."""
        try:
            return self._books.pin_prefix(path, num_blocks)
        except MemoryError:
            return None

    def _insert(self, at: tuple[Run, int], keys: BlockKeys, first_block: int, ids: array[int]) -> Insertion:
        """What the tree did not want is the caller's still; of `ids` only what is behind it is left."""
        pool = self._books.pools[GPU]
        pool.hand_over(ids, CALLER, REQUEST)
        try:
            done = insert(self._tree, at, keys, first_block, ids)
        except BaseException:
            pool.hand_over(ids, REQUEST, CALLER)
            raise
        del ids[: done.num_blocks]
        for left in (done.duplicates, ids):
            pool.hand_over(left, REQUEST, CALLER)
        return done

    def _count_use(self, request: Request, run: Run, end: int, asked: Asked | None, num_hit_blocks: int) -> list[Run]:
        """Tell the policies; returns the path that ends there. `asked`: a request ends here that looked for these, and
        that did not compute the first `num_hit_blocks`."""
        tree = self._tree
        if end < run.num_blocks:  # what is behind keeps its age
            run = tree.split(run, end)
        holding = tree.move_pin(None, run, run.num_blocks)  # or the copies' own evictions might take it
        try:
            if asked is not None:
                ages, path = tree.residency.ages, run.path()
                num_blocks = sum([each.num_blocks for each in path])  # a caller may have found more than it inserts
                hit_run, _ = tree.place(path, min(num_hit_blocks, num_blocks))
                if hit_run is not None:
                    ages.hit(hit_run)
                ages.used(path)
                self._books.use(path, request, asked)
                if self._books.rows is not None:
                    found = [self._books.rows.deepest_within(path, each) for each in (num_hit_blocks, num_blocks)]
                    self._books.rows.use([each for each in dict.fromkeys(found) if each is not None], is_first=True)
            else:
                tree.policy.touch(run.path())
            path = run.path()
            self._copy_down.committed(run, 0)
            num_skipped = self._copy_down.released(path)
            if Used in self._books.listeners:
                self._books.note(Used(Pin(run, run.num_blocks), has_uncopied=num_skipped > 0))
        finally:
            tree.move_pin(holding, None, 0)
        return path

    def drop(self, block_hash: bytes) -> int:
        """Forget a cached block that has none behind it, and those before it up to the first that is pinned or has
        other children; returns how many. None where it is unknown, or not the last of its chain. Walks the tree, and
        hashes what nobody has asked for yet."""
        self.view.name_all()
        with self._books:
            self._books.check_uniform("blocks.drop")
            epoch, num_dropped = self._tree.epoch, 0
            runs = (run for run in self._tree.runs() if run.epoch == epoch and not run.children)
            named = (run for run in runs if self._tree.names.has_all(run))  # what came since has no name yet
            leaf = next((run for run in named if self._tree.names.of_last(run) == block_hash), None)
            while leaf is not None and leaf.parent is not None and not leaf.children:
                above, num_blocks = leaf.parent, leaf.num_blocks
                self._tree.residency.truncate(leaf, leaf.num_held, Loss.RESET)
                num_dropped += num_blocks - leaf.num_held
                leaf = above if not leaf.num_held else None
            return num_dropped
