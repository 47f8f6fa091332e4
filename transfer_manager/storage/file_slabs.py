"""The file store's slabs: files of whole slots that grow as they are needed, and the way of bytes into them and out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from fastdeploy_cache.transfer_manager.crew import Crew
from fastdeploy_cache.transfer_manager.storage.base import new_seal, seal
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk, matching
from fastdeploy_cache.transfer_manager.storage.file_journal import Geometry, Put
from fastdeploy_cache.transfer_manager.storage.file_space import SLAB_GLOB, slab_path

_INLINE_BYTES = 256 * 2**10  # so little is moved faster than handed to a thread
_PIECE_BYTES = 2**19  # of one call, so that the checksum finds it in the processor's cache
_PART_BYTES = 2**20  # of small objects that a thread takes at a time
# Room is taken on the disk before it is written to, so that a full disk refuses a growth and never an object. It is
# taken in steps: a large step would hold room that a small store never fills, a small one would be taken too often.
_LEAST_GROWTH_BYTES = 32 * 2**20
_GROWTH_SHARE = 2  # a store grows by half of what it has
_T = TypeVar("_T")


class Slabs:
    """Slots 0 to `num_slots`, in files of `slots_per_slab`. One thread writes and grows, one reads, one syncs."""

    def __init__(self, disk: Disk, path: Path, geometry: Geometry, num_slots: int) -> None:
        self._disk = disk
        self._path = path
        self._geometry = geometry
        self._num_slots = num_slots
        self._fds: list[int] = []
        self._sizes: list[int] = []  # in slots

    def open(self) -> list[range]:
        """Open the slabs that are there; returns the slots that they really have. Raises OSError."""
        slab = 0
        while slab * self._geometry.slots_per_slab < self._num_slots:
            path = slab_path(self._path, slab)
            if self._disk.identity(path) is None:
                break
            self._fds.append(self._disk.open(path))
            size = self._disk.size(self._fds[slab]) // self._geometry.slot_bytes
            self._sizes.append(min(size, self._target(slab)))
            slab += 1
        return [range(first, first + size) for first, size in zip(self._firsts(), self._sizes, strict=False)]

    def cut(self) -> None:
        """Give back what is beyond the capacity, now that the journal names none of it. Raises OSError."""
        kept = {slab_path(self._path, slab) for slab in range(len(self._fds))}
        for path in sorted(set(matching(self._path, SLAB_GLOB)) - kept):
            self._disk.remove(path)
        for slab, fd in enumerate(self._fds):
            if self._disk.size(fd) > self._target(slab) * self._geometry.slot_bytes:
                self._disk.truncate(fd, self._target(slab) * self._geometry.slot_bytes)

    def _target(self, slab: int) -> int:
        return min(self._geometry.slots_per_slab, self._num_slots - slab * self._geometry.slots_per_slab)

    def _firsts(self) -> range:
        return range(0, self._num_slots, self._geometry.slots_per_slab)

    @property
    def num_slots(self) -> int:
        """Slots that there are on the disk now."""
        return sum(self._sizes)

    def grow(self, has_room: Callable[[int], bool]) -> range:
        """Take room for some more slots, at the end of a slab or in a new one; returns them: none, when all are there
        or `has_room` (which gets the bytes more) says no. Raises OSError, of a full disk too."""
        slab = next((i for i, size in enumerate(self._sizes) if size < self._target(i)), len(self._fds))
        first = slab * self._geometry.slots_per_slab
        if first >= self._num_slots:
            return range(0)
        step = max(_LEAST_GROWTH_BYTES // self._geometry.slot_bytes, self.num_slots // _GROWTH_SHARE, 1)
        old = self._sizes[slab] if slab < len(self._fds) else 0
        new = min(self._target(slab), old + step)
        if not has_room((new - old) * self._geometry.slot_bytes):
            return range(0)
        path = slab_path(self._path, slab)
        fd = self._fds[slab] if slab < len(self._fds) else self._disk.open(path, create=True)
        try:
            self._disk.allocate(fd, new * self._geometry.slot_bytes)
            # Another engine with another space here grew at the same moment, and both had seen room: both go back.
            if not has_room(0):
                self._shrink(slab, fd, old)
                return range(0)
            if slab == len(self._fds):
                self._disk.sync_folder(self._path)
        except OSError:
            self._shrink(slab, fd, old)
            raise
        if slab == len(self._fds):
            self._fds.append(fd)
            self._sizes.append(0)
        self._sizes[slab] = new
        return range(first + old, first + new)

    def _shrink(self, slab: int, fd: int, size: int) -> None:
        if slab < len(self._fds):
            self._disk.truncate(fd, size * self._geometry.slot_bytes)
        else:
            self._disk.close(fd)
            self._disk.remove(slab_path(self._path, slab))

    def place(self, slot: int) -> tuple[int, int]:
        """A slot's file and offset."""
        slab, at = divmod(slot, self._geometry.slots_per_slab)
        return self._fds[slab], at * self._geometry.slot_bytes

    def wipe(self, slots: Iterable[int]) -> None:
        """Overwrite these slots with zeros, and make that durable. What is read from one meanwhile fails its checksum.
        Raises OSError."""
        wiped, nothing = sorted(slots), memoryview(bytes(self._geometry.slot_bytes))
        for slot in wiped:
            fd, offset = self.place(slot)
            self._disk.write(fd, [nothing], offset)
        self.sync(wiped)

    def sync(self, slots: Iterable[int]) -> None:
        """Make what is in these slots durable. Raises OSError."""
        for slab in sorted({slot // self._geometry.slots_per_slab for slot in slots}):
            self._disk.sync(self._fds[slab])

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in self._fds:
            self._disk.close(fd)
        self._fds.clear()


class Mover:
    """Moves objects between memory and slots in one direction, several at a time. One thread calls."""

    def __init__(self, disk: Disk, slabs: Slabs, geometry: Geometry, object_bytes: int, num_threads: int) -> None:
        self._disk = disk
        self._slabs = slabs
        self._slots_per_slab = geometry.slots_per_slab
        self._object_bytes = object_bytes
        # Small objects in neighbouring slots go in one call, where no padding is between them.
        self._num_in_part = max(_PART_BYTES // object_bytes, 1)
        self._max_run = max(_PIECE_BYTES // object_bytes, 1) if geometry.slot_bytes == object_bytes else 1
        self._is_large = object_bytes > _PIECE_BYTES
        self._num_threads = num_threads
        self._crew = Crew(num_threads, "kv-file")

    def write(self, hashes: Sequence[bytes], slots: Sequence[int], buffers: Sequence[memoryview]) -> list[Put]:
        """Write objects to slots. Raises OSError; then what the slots hold is undefined."""

        def write_part(start: int, end: int) -> list[Put]:
            seals: list[bytes] = []
            for first, last in self._runs(slots, start, end):
                if self._is_large:
                    seals.append(self._write_large(hashes[first], slots[first], buffers[first]))
                    continue
                seals += map(seal, hashes[first:last], buffers[first:last])
                self._disk.write(*self._call(slots[first], buffers[first:last]))
            return list(map(Put, slots[start:end], seals, hashes[start:end]))

        return [put for part in self._in_parts(len(slots), write_part) for put in part]

    def read(self, puts: Sequence[Put], buffers: Sequence[memoryview]) -> list[int]:
        """Read objects; returns the positions, in no order, of those whose bytes are not what was written."""
        slots = [put.slot for put in puts]

        def read_part(start: int, end: int) -> list[int]:
            bad: list[int] = []
            for first, last in self._runs(slots, start, end):
                if self._is_large:
                    bad += [] if self._read_large(puts[first], buffers[first]) else [first]
                    continue
                unread = self._read_run(slots, buffers, first, last)
                bad += unread
                bad += [
                    i
                    for i in range(first, last)
                    if i not in unread and seal(puts[i].block_hash, buffers[i]) != puts[i].seal
                ]
            return bad

        return [i for part in self._in_parts(len(puts), read_part) for i in part]

    def _read_run(self, slots: Sequence[int], buffers: Sequence[memoryview], first: int, last: int) -> list[int]:
        """Read neighbours; returns the positions of those that cannot be read."""
        try:
            self._disk.read(*self._call(slots[first], buffers[first:last]))
        except OSError:
            if last - first == 1:
                return [first]
            return [bad for i in range(first, last) for bad in self._read_run(slots, buffers, i, i + 1)]
        return []

    def _write_large(self, block_hash: bytes, slot: int, buffer: memoryview) -> bytes:
        """Write in pieces, which are still in the processor's cache when they are copied. Returns the seal."""
        sealed, (fd, offset) = new_seal(block_hash), self._slabs.place(slot)
        for start in range(0, self._object_bytes, _PIECE_BYTES):
            piece = buffer[start : start + _PIECE_BYTES]
            sealed.update(piece)
            self._disk.write(fd, (piece,), offset + start)
        return sealed.digest()

    def _read_large(self, put: Put, buffer: memoryview) -> bool:
        """Read in such pieces; whether the bytes are those that were written."""
        sealed, (fd, offset) = new_seal(put.block_hash), self._slabs.place(put.slot)
        read, update = self._disk.read, sealed.update
        try:
            for start in range(0, self._object_bytes, _PIECE_BYTES):
                piece = buffer[start : start + _PIECE_BYTES]
                read(fd, (piece,), offset + start)
                update(piece)
        except OSError:
            return False
        return sealed.digest() == put.seal

    def _call(self, slot: int, buffers: Sequence[memoryview]) -> tuple[int, Sequence[memoryview], int]:
        fd, offset = self._slabs.place(slot)
        return fd, buffers, offset

    def _runs(self, slots: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int]]:
        """First and behind the last of neighbours within one slab."""
        first = start
        for i in range(start + 1, end + 1):
            if (
                i == end
                or i - first == self._max_run
                or slots[i] != slots[i - 1] + 1
                or not slots[i] % self._slots_per_slab
            ):
                yield first, i
                first = i

    def _in_parts(self, num: int, do_part: Callable[[int, int], _T]) -> list[_T]:
        """Have the threads do parts, of objects in a row, as they are free. Raises what one of them raised."""
        is_little = num * self._object_bytes <= _INLINE_BYTES
        per_part = num if is_little else min(self._num_in_part, -(-num // self._num_threads))
        firsts = range(0, num, max(1, per_part))
        parts: list[_T | None] = [None] * len(firsts)

        def do(number: int) -> None:
            parts[number] = do_part(firsts[number], min(firsts[number] + firsts.step, num))

        self._crew.run([partial(do, number) for number in range(len(firsts))])
        return cast("list[_T]", parts)

    def close(self) -> None:
        """End the threads."""
        self._crew.close()
