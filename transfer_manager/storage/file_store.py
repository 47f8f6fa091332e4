"""The embedded file store: a rank's blocks in files of a folder, on a disk of this machine.

`file_space` has the folder and its lock, `file_slabs` the files and the threads that move bytes, `file_index` knows
what is where, `file_journal` and `file_commit` bring that through a crash, `file_admission` keeps out what is not worth
a write, `file_full` tells of a full disk, `file_disk` is the operating system.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import StorageError, StorageGoneError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.base import Blocks, News, Segment, StorageStats, Written
from fastdeploy_cache.transfer_manager.storage.config import slot_bytes_of
from fastdeploy_cache.transfer_manager.storage.file_admission import Admission
from fastdeploy_cache.transfer_manager.storage.file_commit import Commits
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk, storage_error
from fastdeploy_cache.transfer_manager.storage.file_full import NO_ROOM, FullDisk
from fastdeploy_cache.transfer_manager.storage.file_index import Index
from fastdeploy_cache.transfer_manager.storage.file_journal import (
    JOURNAL_NAME,
    Geometry,
    Journal,
    puts_of,
    read_journal,
    sort_out,
)
from fastdeploy_cache.transfer_manager.storage.file_shares import SlotShare, SlotShares
from fastdeploy_cache.transfer_manager.storage.file_slabs import Mover, Slabs
from fastdeploy_cache.transfer_manager.storage.file_space import (
    LOCK_NAME,
    find_spaces,
    make_room,
    open_space,
    other_weights,
    remove_space,
)
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace, is_owned, is_page

logger = logging.getLogger(__name__)

_WRITES_BEFORE_GROWTH = 16


class FileStorage:
    """See `Storage`. An object can be read from the end of its `write` on, and outlives a crash half a second later.

    Args:
        options: of `StorageConfig.store_options`. `capacity_bytes` bounds the slabs of all of the rank's spaces in the
            folder; a journal comes on top, of about 64 KiB and 300 bytes per object that has room. `shares` of these
            slots may be added: of each namespace its mark, what is guaranteed to it, and what it has at most, up to 1.
        space: whose objects.
        segment: the memory that buffers lie in.
        disk: the operating system, or what a test puts in its place.
        in_background: False leaves all commits to `close` and the caller.
    """

    needs_token_ids = False

    def __init__(
        self,
        options: Mapping[str, Any],
        space: KeySpace,
        segment: Segment,
        *,
        disk: Disk | None = None,
        in_background: bool = True,
    ) -> None:
        self._disk = disk or Disk()
        self._space = space
        self._folder = Path(options["folder"])
        self._capacity_bytes = int(options["capacity_bytes"])
        self._num_evicted = self._num_damaged = 0
        self._is_full = self._is_closed = False
        self._num_until_growth = 0  # writes until a growth that was refused is tried again
        self._full = FullDisk(self._folder)
        if segment.shape[1] != space.object_bytes:
            raise StorageRefusedError(f"memory has {segment.shape[1]} bytes per block, the space {space.object_bytes}")
        slot_bytes = slot_bytes_of(space.object_bytes)
        num_slots = self._capacity_bytes // slot_bytes
        self._index, self._most_slots = Index(_shares_of(options, num_slots)), num_slots
        if not num_slots:
            raise StorageRefusedError(
                f"capacity_bytes is {self._capacity_bytes} for this rank, and one object takes {slot_bytes}; raise it"
            )
        with _failing(f"open {self._folder}"):
            self._path, self._lock_fd = open_space(self._disk, self._folder, space)
            try:
                self._open(Geometry(slot_bytes, max(int(options["slab_bytes"]) // slot_bytes, 1)), num_slots)
            except OSError:
                self._disk.close(self._lock_fd)
                raise
        self._admission = Admission(options["admission"], float(options["min_priority"]), num_slots)
        num_threads = int(options["num_io_threads"])
        self._reader, self._writer = (
            Mover(self._disk, self._slabs, self._geometry, space.object_bytes, num_threads) for _ in range(2)
        )
        if in_background:
            self._commits.start()

    def _open(self, geometry: Geometry, num_slots: int) -> None:
        """Take up what is there. Raises OSError, and leaves nothing but the lock open then."""
        replay = read_journal(self._disk, self._path / JOURNAL_NAME)
        if replay is not None and replay.geometry.slot_bytes != geometry.slot_bytes:
            replay = None
        self._geometry = replay.geometry if replay else geometry
        self._slabs = Slabs(self._disk, self._path, self._geometry, num_slots)
        journal = self._journal = Journal(self._disk, self._path / JOURNAL_NAME, self._geometry)
        try:
            live, free = sort_out(replay, self._slabs.open())
            self._index.restore(puts_of(live), free)
            if replay and replay.is_whole and len(self._index) == len(replay.live):
                journal.resume(replay)
            else:  # what it says wrongly would be believed again when the slots have been given to others
                journal.rewrite(self._index.journaled())
            self._slabs.cut()
            make_room(self._disk, self._path, self._space.rank, self._capacity_bytes, 0)
            self._num_other_weights = other_weights(self._disk, self._path, self._space)
            self._commits = Commits(
                self._disk,
                lock_path=self._path / LOCK_NAME,
                lock_fd=self._lock_fd,
                journal=journal,
                slabs=self._slabs,
                index=self._index,
                full=self._full,
            )
        except OSError:
            journal.close()
            self._slabs.close()
            raise

    def count_leading(self, blocks: Blocks) -> int:
        """See `Storage`; the index knows."""
        self._check_open()
        return len(self._index.find_leading(blocks.hashes))

    def find(self, hashes: Sequence[bytes]) -> list[bool]:
        """See `Storage`."""
        self._check_open()
        missing = set(self._index.missing(hashes))
        return [place not in missing for place in range(len(hashes))]

    def read(self, blocks: Blocks) -> int:
        """See `Storage`. Damaged objects and those that the disk cannot read are removed."""
        self._check_open()
        puts = self._index.find_leading(blocks.hashes)
        bad = self._reader.read(puts, blocks.buffers) if puts else []
        if bad:
            # One that the writer evicted meanwhile, and whose slot it gave to another, is not damaged: it is not found.
            num_dropped = self._index.drop(puts[i] for i in bad)
            self._num_damaged += num_dropped
            self._commits.notice(0)
        self._index.touch(blocks.hashes)
        return min(bad, default=len(puts))

    def write(self, blocks: Blocks) -> Written:
        """See `Storage`."""
        self._check_open()
        self._commits.raise_failure()
        hashes = blocks.hashes
        self._commits.check_there()
        kept = self._index.touch([*blocks.above, *hashes])
        missing = self._index.missing(hashes)
        is_image = bool(missing) and is_page(hashes[missing[0]])
        if not is_image:  # of a checkpoint, whose blocks were admitted before it
            del missing[self._admission.admit([hashes[i] for i in missing], blocks.priority) :]
        if missing:
            with _failing(f"write to {self._path}"):
                slots = self._take_slots(len(missing), kept, blocks.owner, is_whole=is_image)
                del missing[len(slots) :]
                names = [hashes[i] for i in missing]
                try:
                    with self._full.watching("write"):
                        puts = self._writer.write(names, slots, [blocks.buffers[i] for i in missing])
                except OSError:
                    self._index.add_slots(slots)
                    raise
            self._index.add(hashes, dict(zip(names, puts, strict=True)))
            self._admission.written(names)
            self._commits.notice(len(missing) * self._space.object_bytes)
        num_leading = len(self._index.find_leading(hashes))
        return Written(num_leading, len(missing) * self._space.object_bytes)

    def _take_slots(self, num: int, kept: Collection[bytes], owner: bytes, *, is_whole: bool) -> list[int]:
        """Free slots, as many of those wanted as there are: free now, in a new slab, or by eviction. Raises OSError.
        `is_whole`: where its owner's share is short, none."""
        num_all = self._slabs.num_slots if self._is_full else self._most_slots
        num, num_gone = self._index.keep_to_share(num, kept, owner, is_whole=is_whole, num_slots=num_all)
        self._num_evicted += num_gone
        self._num_until_growth -= 1
        if not self._num_until_growth:
            self._is_full = False
        while self._index.num_free < num and not self._is_full:
            self._grow()
        short = num - self._index.num_free
        if short > 0:
            if short > self._index.num_retired:
                # Some more at a time: the journal is synced for it.
                batch = max(short - self._index.num_retired, self._slabs.num_slots // 64)
                self._num_evicted += self._index.evict(batch, short - self._index.num_retired, kept, owner)
            self._commits.commit_removals()
        return self._index.take(num)

    def _grow(self) -> None:
        def has_room(num_bytes: int) -> bool:
            return make_room(self._disk, self._path, self._space.rank, self._capacity_bytes, num_bytes)

        try:
            with self._full.watching("grow"):
                slots = self._slabs.grow(has_room)
        except OSError as error:
            if not self._slabs.num_slots:
                raise
            slots = range(0)  # go on within what there is
            if error.errno not in NO_ROOM:
                logger.warning("event=growth_failed folder=%s error=%r", self._folder, error)
        if not slots and not self._slabs.num_slots:
            raise StorageError(
                f"{self._folder} has no room for a slab within capacity_bytes {self._capacity_bytes}: spaces that "
                "other engines have open fill it; give each engine a folder of its own"
            )
        if not slots:
            self._is_full, self._num_until_growth = True, _WRITES_BEFORE_GROWTH
        self._index.add_slots(slots)

    def remove(self, hashes: Sequence[bytes]) -> int:
        """See `Storage`."""
        self._check_open()
        num_removed = self._index.remove(hashes)
        self._commits.notice(0)
        return num_removed

    def clear(self, weights_id: str) -> int:
        """See `Storage`. Spaces that other engines have open are left."""
        self._check_open()
        num_removed = 0
        with _failing(f"clear {self._folder}"):
            if weights_id == self._space.weights_id:
                num_removed = self._index.remove_all()
                self._commits.commit_removals()
            for path, space in find_spaces(self._disk, self._folder):
                if space.weights_id == weights_id and path != self._path:
                    replay = read_journal(self._disk, path / JOURNAL_NAME)
                    if remove_space(self._disk, path) and replay:
                        num_removed += len(replay.live)
        return num_removed

    def remove_owned(self, weights_id: str, owner: bytes) -> int:  # noqa: ARG002 (all weights are looked through)
        """See `Storage`; of other weights, too. A space of another layout, rank or key that has any goes whole, unless
        another engine has it open."""
        self._check_open()
        puts = self._index.owned_by(owner)
        with _failing(f"overwrite what is removed from {self._path}"):
            self._slabs.wipe([put.slot for put in puts])  # first: what is not wiped can be asked for again
            self._index.drop(puts)
            self._commits.commit_removals()
            num_removed = len(puts)
            for path, _ in find_spaces(self._disk, self._folder):
                replay = read_journal(self._disk, path / JOURNAL_NAME) if path != self._path else None
                num_there = sum(is_owned(put.block_hash, owner) for put in (puts_of(replay.live) if replay else ()))
                if num_there and remove_space(self._disk, path):
                    num_removed += num_there
        return num_removed

    def news(self, listener: int) -> News | None:
        """See `Storage`."""
        return self._index.news(listener)

    def stats(self) -> StorageStats:
        """See `Storage`."""
        return StorageStats(
            num_objects=len(self._index),
            num_bytes=len(self._index) * self._space.object_bytes,
            capacity_bytes=self._capacity_bytes,
            num_evicted=self._num_evicted,
            num_declined=self._admission.num_declined,
            num_damaged=self._num_damaged,
            num_other_weights=self._num_other_weights,
            num_full_disks=int(self._full.is_full),
        )

    def close(self) -> None:
        """See `Storage`. Raises `StorageError` if something could not be made durable; all is given back even so."""
        if self._is_closed:
            return
        self._is_closed = True
        self._commits.stop()
        try:
            with _failing(f"make {self._path} durable"):
                if not self._commits.is_gone:
                    self._commits.commit()
                    if self._index.was_touched:
                        self._journal.rewrite(self._index.journaled())
        finally:
            self._reader.close()
            self._writer.close()
            self._slabs.close()
            self._journal.close()
            self._disk.close(self._lock_fd)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageGoneError(f"the store in {self._path} is closed")
        if self._commits.is_gone:
            self._commits.raise_failure()


def _shares_of(options: Mapping[str, Any], num_slots: int) -> SlotShares | None:
    shares: Sequence[tuple[bytes, float, float]] = options.get("shares", ())
    return SlotShares([SlotShare(*share) for share in shares], num_slots) if shares else None


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Report what the disk says as ours."""
    try:
        yield
    except OSError as error:
        raise storage_error(what, error) from error
