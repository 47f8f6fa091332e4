"""Whether every object of a file store's space is what was written, also while an engine has it open; and what becomes
of those that are not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import groupby
from pathlib import Path

from fastdeploy_cache.transfer_manager.storage.admin import WRONG_BYTES, Damage, unheard
from fastdeploy_cache.transfer_manager.storage.base import seal
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk, matching
from fastdeploy_cache.transfer_manager.storage.file_journal import (
    JOURNAL_NAME,
    Geometry,
    Journal,
    JournalReplay,
    Put,
    read_journal,
)
from fastdeploy_cache.transfer_manager.storage.file_space import SLAB_GLOB, is_locked, slab_path, take_space

_NUM_LOOKS = 3


class SpaceCheck:
    """A look at the objects of one space. One thread; every method may raise OSError.

    Attributes:
        num_objects: that there were when it began.
        damaged: of them, whose bytes are not those that were written, and why that is thought.
        num_gone: of them, that have been evicted meanwhile.
        is_listed: the journal could be read to its end; an engine that has it may be in the middle of a line.
    """

    def __init__(self, disk: Disk, path: Path, object_bytes: int) -> None:
        self._disk, self._path, self._object_bytes = disk, path, object_bytes
        self.num_objects = self.num_gone = 0
        self.damaged: dict[Put, str] = {}
        self.is_listed = True
        self._geometry = Geometry(1, 1)

    def look(self, on_object: Callable[[], object]) -> None:
        """Read every object, with a call after each.

        An engine journals the end of an object before it writes to its slot: what was bad and is in the journal no more
        has been overwritten. If it is there, it may have been written anew, in full, since we read its bytes; so look
        again.
        """
        self._geometry, puts = self._objects()
        self.num_objects = len(puts)
        for number in range(_NUM_LOOKS):
            if not puts:
                break
            doubtful = self._mismatched(self._geometry, puts, on_object if number == 0 else unheard)
            self._geometry, named = self._objects()
            self.damaged = {put: doubtful[put] for put in sorted(doubtful.keys() & set(named))}
            self.num_gone += len(doubtful) - len(self.damaged)
            puts = list(self.damaged)
        self.is_listed = self._is_listed()

    def remove(self) -> bool:
        """Take what is damaged out of the journal, and with it a journal's unreadable end; False where somebody has the
        space. The slots are free for the next engine."""
        try:
            lock_fd = take_space(self._disk, self._path)
        except FileNotFoundError:  # the whole space has been removed
            return True
        if lock_fd is None:
            return False
        try:
            replay = self._replay()
            if replay is None:  # nobody can tell what is where in the slabs
                for name in (JOURNAL_NAME, *sorted(slab.name for slab in matching(self._path, SLAB_GLOB))):
                    self._disk.remove(self._path / name)
                return True
            # nobody writes any more: what is whole by now may stay
            doubtful = [put for put in replay.puts() if put in self.damaged]
            bad = self._mismatched(replay.geometry, doubtful, unheard)
            journal = Journal(self._disk, self._path / JOURNAL_NAME, replay.geometry)
            try:
                journal.rewrite([put for put in replay.puts() if put not in bad])
            finally:
                journal.close()
        finally:
            self._disk.close(lock_fd)
        return True

    def damage(self) -> tuple[Damage, ...]:
        """What is damaged, for people."""
        slots_per_slab = self._geometry.slots_per_slab
        return tuple(
            Damage(
                where=f"slot {put.slot % slots_per_slab} of {slab_path(self._path, put.slot // slots_per_slab)}",
                block_hash=put.block_hash.hex(),
                reason=reason,
            )
            for put, reason in self.damaged.items()
        )

    def _replay(self) -> JournalReplay | None:
        return read_journal(self._disk, self._path / JOURNAL_NAME)

    def _objects(self) -> tuple[Geometry, list[Put]]:
        replay = self._replay()
        return (replay.geometry, replay.puts()) if replay else (Geometry(1, 1), [])

    def _is_listed(self) -> bool:
        if is_locked(self._disk, self._path):
            return True
        if _size(self._path / JOURNAL_NAME) == 0:  # an engine writes one before it has slabs
            return not any(map(_size, matching(self._path, SLAB_GLOB)))
        replay = self._replay()
        return replay is not None and replay.is_whole

    def _mismatched(self, geometry: Geometry, puts: Collection[Put], on_object: Callable[[], object]) -> dict[Put, str]:
        """Those of the objects that are not what was written, and why. There may be more slabs than descriptors."""
        bad: dict[Put, str] = {}
        buffer = memoryview(bytearray(self._object_bytes))
        for slab, of_slab in groupby(sorted(puts), key=lambda put: put.slot // geometry.slots_per_slab):
            try:
                fd = self._disk.open_to_read(slab_path(self._path, slab))
            except FileNotFoundError:
                bad.update(dict.fromkeys(of_slab, "the file is missing"))
                continue
            try:
                for put in of_slab:
                    fault = self._fault(fd, put, geometry, buffer)
                    if fault is not None:
                        bad[put] = fault
                    on_object()
            finally:
                self._disk.close(fd)
        return bad

    def _fault(self, fd: int, put: Put, geometry: Geometry, buffer: memoryview) -> str | None:
        try:
            self._disk.read(fd, [buffer], put.slot % geometry.slots_per_slab * geometry.slot_bytes)
        except OSError as error:  # the slab is cut short, or a bad spot of the disk
            return f"it cannot be read: {error.strerror}"
        return None if seal(put.block_hash, buffer) == put.seal else WRONG_BYTES


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
