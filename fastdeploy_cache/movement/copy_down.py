"""What is copied from the GPU to the CPU tier, and when: the write policies. All of it under the lock."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.evicting import evict_tail, make_room, next_victim
from fastdeploy_cache.books.mishaps import contained
from fastdeploy_cache.books.path import Part
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run
from fastdeploy_cache.books.transfer import segments_of
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.block_mover import BlockMover, TaskEnded
from fastdeploy_cache.movement.burst_losses import BurstLosses
from fastdeploy_cache.movement.image_copies import ImageCopies
from fastdeploy_cache.transfer_manager.task import TaskKind

MIN_STORE_BLOCKS = 64  # a task for each block that a decoding request fills would cost more than its commit
_MAX_BYTES_IN_FLIGHT = 256 * 2**20  # of a rank
MAX_LOOKED = 256  # leaves that one look at the cold end goes over, under the lock: about a millisecond
_PIECE_TOKENS = 16384  # of a copy that a look starts, or `MIN_STORE_BLOCKS` blocks where that is more
_MAX_STARTED = 64  # copies that one look starts
_MAX_YOUNG = 4096  # runs
_YOUNG_RUNS = 32  # of a batch, at most: when its copy has come, each takes some twenty microseconds under the lock


class CopyDown:
    """`write_through` copies what is committed; `write_through_selective` what has been used often enough.

    `write_back` copies all that is committed or released as long as the CPU tier has free blocks: in batches, as a task
    for each release costs more than its books. So a burst loses nothing that fits, but for less than a batch. Then it
    copies ahead of eviction: of the runs whose ends would be evicted next (the cold zone: as many blocks as are to be
    free or copied) what has no copy. Such a copy takes free CPU blocks or those of something colder than its source,
    never the copy of what is in the cold zone itself: so copying comes to rest, and trades no copy for another.
    """

    def __init__(self, config: CacheConfig, books: Books, mover: BlockMover, images: ImageCopies | None = None) -> None:
        """The settings `cpu_write_*` of the configuration say what is copied, and when. `images`: of a hybrid model."""
        self._books, self._tree, self._images = books, books.tree, images
        self.mishaps = books.mishaps
        self._mover = mover
        self._pool = books.pools[CPU]
        policy = config.cpu_write_policy
        self._through = policy == "write_through" and self._pool.num_blocks > 0
        self._selective = policy == "write_through_selective" and self._pool.num_blocks > 0
        self._back = policy == "write_back" and self._pool.num_blocks > 0
        num_gpu = books.pools[GPU].num_blocks
        self._num_reserve = max(1, num_gpu - int(num_gpu * config.cpu_write_high_water))
        self._min_uses = config.cpu_write_min_uses
        self._own = self._through, self._selective, self._min_uses  # without storage
        self._block_bytes = max(1, config.block_bytes())  # in a simulation there are no bytes
        self._max_bytes_in_flight = max(
            self._block_bytes, min(self._num_reserve * self._block_bytes, _MAX_BYTES_IN_FLIGHT)
        )
        self._piece_blocks = max(MIN_STORE_BLOCKS, _PIECE_TOKENS // config.block_size)
        self._look_after = max(1, self._num_reserve // 4)  # blocks: a quarter of what the last look went over
        self._young_batch = min(self._look_after, self._piece_blocks)
        self._num_looked = 0  # blocks that had moved when the cold zone was last looked at
        self._has_more = False
        self._num_started = 0  # blocks that were on their way after the last look
        self._young: dict[Run, int] = {}  # blocks that are to be copied at once, and are not given to the ranks yet
        self._num_young = 0  # all of these
        self._begun = set[Run]()  # of requests that run
        self._tells_losses = config.layout is not None  # without one there are no bytes, as in a simulation
        self._losses = BurstLosses(self._tree.residency, self._pool, mover)
        books.listen(TaskEnded, self._on_task_ended)
        if self._back:
            books.listen_to_moves(self._moved)

    def follow_storage(self, policy: str | None, min_uses: int) -> None:
        """Storage is written through (or not any more): what goes there is copied to the CPU tier at once, too."""
        self._through, self._selective, self._min_uses = self._own
        if policy == "write_through":
            self._through = True
        elif policy == "write_through_selective" and not self._through:
            self._min_uses = min(min_uses, self._min_uses) if self._selective else min_uses
            self._selective = True

    # -- when

    def committed(self, run: Run, num_blocks: int) -> None:
        """So many blocks of a run are new. Much is copied before it is released, when others want its place at once."""
        if self._through and _num_uncopied(run) >= MIN_STORE_BLOCKS:
            self.store((run,), MIN_STORE_BLOCKS)
        elif self._back and 4 * num_blocks >= self._young_batch and self._pool.num_free:
            self._note_young((run,))
            if run not in self._young:  # its beginning is on its way
                self._begun = {run, *self._begun} if len(self._begun) < _MAX_YOUNG else {run}

    def released(self, path: Sequence[Run]) -> int:
        """A path was used and is still pinned. Returns how many blocks should have been copied and could not be."""
        if self._selective and not self._through:
            path = [run for run in path if run.num_uses >= self._min_uses]
        if self._through or self._selective:
            return self.store(path)
        if self._back and self._pool.num_free:
            is_begun = not self._begun.isdisjoint(path)
            self._begun.difference_update(path)
            self._note_young(path, is_begun=is_begun)
        return 0

    @contained("copy_down", None)
    def _moved(self, num_moved: int) -> None:
        """See `Books.listen_to_moves`."""
        is_far = num_moved - self._num_looked >= self._look_after
        if is_far or (self._has_more and not self._mover.num_storing):
            self.look_ahead()
            if self._tells_losses:
                self._losses.look()

    def _on_task_ended(self, ended: TaskEnded) -> None:
        """A copy has ended: go on with what was left for want of room in flight, once half of that has ended: each look
        costs a walk. After a failure not before the next verb, or a rank that fails all would be asked for ever."""
        if ended.result.task.kind is not TaskKind.SWAP_OUT:
            return
        succeeded = ended.result.error is None
        if succeeded and self._has_more and 2 * self._mover.num_storing <= self._num_started:
            self.look_ahead()
        self._has_more |= self._back and not succeeded

    # -- write through

    @contained("copy_down", 0)
    def store(
        self, path: Sequence[Run], min_blocks: int = 1, *, unstored: bool = False, into_free: bool = False
    ) -> int:
        """The same as `_store_blocks`, and then of checkpoints on the path, unless there is a `min_blocks`."""
        num_left = self._store_blocks(path, min_blocks, unstored=unstored, into_free=into_free)
        if self._images is not None and min_blocks == 1 and not num_left:
            num_left = self._images.store(path, into_free=into_free)
        return num_left

    def _store_blocks(self, path: Sequence[Run], min_blocks: int, *, unstored: bool, into_free: bool) -> int:
        """Start copying down what of a path is neither copied nor on its way, if it is `min_blocks` or more.

        With `unstored` only what storage has not been given yet.

        Of each run it begins where the copies end, not at the newest blocks: what an earlier store failed to bring is
        copied again, or its gap would keep out every later copy of the run. Evicts older copies where there is no room;
        with `into_free` none.
        Returns how many blocks should have been copied and could not be.
        """
        firsts = [(run, run.stored.num_blocks if unstored else 0) for run in path if _num_uncopied(run) > 0]
        parts = [part for run, first in firsts if first < run.num_gpu for part in _uncopied(run, first)]
        wanted = sum([length for _, _, length in parts])
        if wanted < min_blocks or not parts:
            return 0
        if not self._mover.can(TaskKind.SWAP_OUT):
            return wanted
        last, residency = parts[-1][0], self._tree.residency
        whole = Pin(last, last.num_blocks)  # or the eviction would take the copies that these are to continue
        self._tree.pin(whole)
        try:
            num_room = _num_free(residency, last) if into_free else residency.num_available(CPU, last.tenant)
            num_blocks = min(wanted, num_room)
            if num_blocks:
                make_room(residency, CPU, num_blocks, last.tenant)
                self._mover.store(_pieces(parts, num_blocks))
        finally:
            self._tree.unpin(whole)
        return wanted - num_blocks

    # -- write back

    @contained("copy_down", None)
    def _note_young(self, path: Sequence[Run], *, is_begun: bool = False) -> None:
        """Copy what has no copy into free blocks, together with what was noted before, once that is worth a task: a
        batch, or the rest of a released prompt of which a part was copied when it was committed (`is_begun`)."""
        has_rest = False
        for run in path:
            num_uncopied = _num_uncopied(run) and sum([length for _, _, length in _uncopied(run, 0)])
            if self._images is not None:
                num_uncopied += self._images.num_uncopied_pages(run)
            if num_uncopied:
                self._num_young += num_uncopied - self._young.get(run, 0)
                self._young[run], has_rest = num_uncopied, is_begun
        if has_rest or self._num_young >= self._young_batch or len(self._young) >= _YOUNG_RUNS:
            self._copy_young()

    @contained("copy_down", None)
    def _copy_young(self) -> None:
        if not self._mover.can(TaskKind.SWAP_OUT):  # later; but not all that comes and goes till then is kept in mind
            if len(self._young) > _MAX_YOUNG:
                self._young, self._num_young = {}, 0
            return
        young, self._young, self._num_young = self._young, {}, 0
        # What was cut since has given its front to a run above it; what was evicted has no path.
        whole = dict.fromkeys(run for released in young for run in released.path())
        current = [run for run in whole if run.epoch == self._tree.epoch]
        for tenant in sorted({run.tenant for run in current}):  # each within its own share
            self.store([run for run in current if run.tenant == tenant], into_free=True)

    def go_on(self) -> None:
        """Copies may be started again."""
        self._copy_young()
        self.look_ahead()

    @contained("copy_down", None)
    def look_ahead(self) -> None:
        """Start copying what of the cold zone has no copy."""
        self._num_looked = self._books.num_moved
        if self._images is not None:
            self._images.look_ahead()
        # what is on its way is pinned, and so not among the coldest
        num_zone = self._num_reserve - self._tree.pools[GPU].num_free - self._mover.num_storing
        if num_zone <= 0:
            return
        self._has_more = False
        zone, parts = self._cold_zone(num_zone)
        num_left = _MAX_STARTED
        for part in parts:
            num_left -= self._start(part, zone, num_left)
            if self._has_more:
                break
        self._num_started = self._mover.num_storing

    def _start(self, part: Part, zone: set[Run], at_most: int) -> int:
        """Start copies of a part, piece by piece, as far as there is room; returns how many."""
        run, first, length = part
        num_started = 0
        while length > 0:
            num_room = self._max_bytes_in_flight // self._block_bytes - self._mover.num_storing
            if num_room <= 0 or num_started >= at_most or not self._mover.can(TaskKind.SWAP_OUT):
                self._has_more = True  # also where the ranks are down: the next verbs look again
                break
            num_blocks = self._make_room(min(length, num_room, self._piece_blocks), run, zone)
            if run.parent is None or first + length > run.num_gpu:
                break  # what went to make room, for this part or for one before, was the last checkpoint behind it
            if not num_blocks:
                self._losses.num_declined += length
                break
            # the end is evicted first, so it is copied first, but for what goes on where copies end
            ends = [segment.end for segment in segments_of(run, CPU)] + ([run.cpu_end] if run.cpu else [])
            is_next = first in ends
            self._mover.store([(run, first if is_next else first + length - num_blocks, num_blocks)])
            first, length = first + num_blocks * is_next, length - num_blocks
            num_started += 1
        return num_started

    def _cold_zone(self, num_blocks: int) -> tuple[set[Run], list[Part]]:
        """The runs whose ends are the next `num_blocks` to be evicted, or the first of these, and what of them has no
        copy."""
        policy, zone, parts, num_wanted = self._tree.policy, set[Run](), list[Part](), num_blocks
        exposed: list[Run] = []  # parents whose only child is in the zone: leaves by then

        def take(run: Run) -> int:
            num_taken = min(num_blocks, run.num_gpu - run.num_held)
            if num_taken > 0:
                zone.add(run)
                parts.extend(_uncopied(run, run.num_held))  # all: without its beginning, the end of a run is lost, too
                parent = run.parent
                alone = parent is not None and parent.parent is not None and parent.num_gpu_children == 1
                if parent is not None and alone and num_taken == run.num_gpu:
                    exposed.append(parent)
            return max(0, num_taken)

        with contextlib.closing(policy.coldest(GPU)) as walk:
            for leaf in walk:
                while num_blocks > 0 and (older := next((p for p in exposed if policy.is_colder(p, leaf)), None)):
                    exposed.remove(older)
                    num_blocks -= take(older)
                if num_blocks <= 0 or len(zone) >= MAX_LOOKED:
                    break
                num_blocks -= take(leaf)
        num_seen = min(self._num_reserve, num_wanted - num_blocks)
        self._look_after = max(1, num_seen // (4 if parts else 2))  # what has copies goes first, and needs no look
        while num_blocks > 0 and exposed:
            num_blocks -= take(exposed.pop(0))
        return zone, parts

    def _make_room(self, num_blocks: int, source: Run, zone: set[Run]) -> int:
        """Free up to `num_blocks` CPU blocks that are worth less than a copy of `source`; how many there are now."""
        residency, policy, rows = self._tree.residency, self._tree.policy, self._books.rows
        if residency.graves.open:
            residency.graves.free(CPU, num_blocks - self._pool.num_free)
        if rows is not None:
            rows.make_room_below(source, num_blocks, zone)
            return min(num_blocks, self._pool.num_free)
        while (named := next_victim(residency, CPU, num_blocks, source.tenant)) is not None:
            victim, at_most = named
            if victim in zone or not policy.is_colder(victim, source):
                break
            evict_tail(residency, victim, CPU, at_most)  # may free less: what storage is reading
        return min(num_blocks, _num_free(residency, source))


def _num_free(residency: Residency, source: Run) -> int:
    """Blocks of the CPU tier that a copy of `source` may take without anything being evicted."""
    num_free, shares = residency.pools[CPU].num_free, residency.shares
    return num_free if shares is None else min(num_free, shares.num_below_most(CPU, source.tenant))


def _num_uncopied(run: Run) -> int:
    """Blocks on the GPU without a copy; some may be on their way."""
    return run.num_gpu - run.num_in(CPU, run.num_gpu) if run.cpu else run.num_gpu


def _pieces(parts: Sequence[Part], num_blocks: int) -> list[Part]:
    """So many blocks of the parts, chosen such that each piece joins what its run has."""
    chosen: list[Part] = []
    for run, first, length in parts:
        if num_blocks:
            taken = min(length, num_blocks)
            joins_behind = taken < length and run.cpu and first + length == run.cpu_start
            chosen.append((run, first + length - taken if joins_behind else first, taken))
            num_blocks -= taken
    return chosen


def _uncopied(run: Run, first: int) -> list[Part]:
    """What of the GPU blocks from `first` on has no copy and none on its way, so that copies stay one interval."""
    segments = segments_of(run, CPU)
    starts = [segment.start for segment in segments] + ([run.cpu_start] if run.cpu else [])
    ends = [segment.end for segment in segments] + ([run.cpu_end] if run.cpu else [])
    if not ends:
        return [(run, first, run.num_gpu - first)]
    parts: list[Part] = []
    if max(ends) < run.num_gpu:
        parts.append((run, max(ends), run.num_gpu - max(ends)))  # from the copies on, even if that is before `first`
    if first < min(starts):
        parts.append((run, first, min(starts) - first))
    return parts
