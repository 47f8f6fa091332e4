"""The file store's journal: which slot holds which object, as of the last group commit.

A file of a header and frames; a frame is a header and records of 48 bytes: "slot S holds K with this checksum", "slot S
holds nothing". The last record about a slot holds. A frame's CRC goes on from the one before, and the first from a
number drawn for this file: what an earlier life of the disk's blocks left behind the end never passes for a frame.

Nothing is ever changed in place. When much of the file is history, or an append failed and nobody knows how far it
came, a new file of the present state takes its place.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.transfer_manager.storage.base import SEAL_BYTES
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk
from fastdeploy_cache.transfer_manager.storage.keys import PAGE_MARK

JOURNAL_NAME = "journal"
TEMPORARY_SUFFIX = ".new"
HASH_BYTES = 32
_HEADER = struct.Struct("<8sQIII")  # magic, slot_bytes, slots_per_slab, drawn number, CRC of these
_FRAME = struct.Struct("<III")  # magic, number of records, CRC
_MAGIC, _FRAME_MAGIC = b"FDCJRNL1", 0x4D415246
_HOLDS, _EMPTY = 1, 2
_RECORD = np.dtype(
    [("kind", "u1"), ("none", "V3"), ("slot", "<u4"), ("seal", f"V{SEAL_BYTES}"), ("hash", f"V{HASH_BYTES}")]
)
Records = np.ndarray[Any, Any]


class Put(NamedTuple):
    """An object that is in a slot: one record."""

    slot: int
    seal: bytes
    block_hash: bytes


class Geometry(NamedTuple):
    """How slots lie in slabs; a space keeps the one that it began with."""

    slot_bytes: int
    slots_per_slab: int


@dataclass(frozen=True, kw_only=True)
class JournalReplay:
    """What a journal says.

    Attributes:
        live: the records that hold, oldest first.
        end, chain, num_records: where the next frame goes, what its CRC goes on from, how many there are before it.
        is_whole: the file ends with its last good frame.
    """

    geometry: Geometry
    live: Records
    end: int
    chain: int
    num_records: int
    is_whole: bool

    @property
    def num_pages(self) -> int:
        """Objects that are pages of checkpoints."""
        names = np.frombuffer(np.ascontiguousarray(self.live["hash"]).tobytes(), np.uint8).reshape(-1, HASH_BYTES)
        mark = np.frombuffer(PAGE_MARK, np.uint8)
        return int((names[:, -len(mark) :] == mark).all(axis=1).sum())

    def puts(self) -> list[Put]:
        """The objects, oldest first."""
        return puts_of(self.live)


def puts_of(live: Records) -> list[Put]:
    """Records as objects; there may be millions, so no Python runs per record."""
    fields = zip(live["slot"].tolist(), live["seal"].tolist(), live["hash"].tolist(), strict=True)
    return list(map(tuple.__new__, repeat(Put), fields))


def read_journal(disk: Disk, path: Path) -> JournalReplay | None:
    """Read a journal up to its first bad frame; None where there is none, or not even its header is good."""
    try:
        fd = disk.open_to_read(path)
    except FileNotFoundError:
        return None
    try:
        data = bytearray(disk.size(fd))
        disk.read(fd, [memoryview(data)] if data else [], 0)
    finally:
        disk.close(fd)
    return _replay(bytes(data))


def sort_out(replay: JournalReplay | None, slots: Sequence[range]) -> tuple[Records, list[int]]:
    """What of a journal can be believed, given the slots that there really are, and the slots that are free then."""
    is_free = np.zeros(max((part.stop for part in slots), default=0), dtype=bool)
    for part in slots:
        is_free[part.start : part.stop] = True
    live = replay.live if replay else np.zeros(0, dtype=_RECORD)
    live = live[live["slot"] < len(is_free)]
    live = live[is_free[live["slot"]]]
    is_free[live["slot"]] = False
    return live, np.flatnonzero(is_free).tolist()


def _replay(data: bytes) -> JournalReplay | None:
    if len(data) < _HEADER.size:
        return None
    magic, slot_bytes, slots_per_slab, _, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC or crc != zlib.crc32(data[: _HEADER.size - 4]) or not slot_bytes or not slots_per_slab:
        return None
    end, chain, frames, view = _HEADER.size, crc, [], memoryview(data)
    while end + _FRAME.size <= len(data):
        frame_magic, count, crc = _FRAME.unpack_from(data, end)
        body = view[end + _FRAME.size : end + _FRAME.size + count * _RECORD.itemsize]
        if frame_magic != _FRAME_MAGIC or len(body) != count * _RECORD.itemsize or crc != _crc(body, chain):
            break
        frames.append(np.frombuffer(body, dtype=_RECORD))
        end, chain = end + _FRAME.size + len(body), crc
    records = np.concatenate(frames) if frames else np.zeros(0, dtype=_RECORD)
    return JournalReplay(
        geometry=Geometry(slot_bytes, slots_per_slab),
        live=_last_of_each_slot(records),
        end=end,
        chain=chain,
        num_records=len(records),
        is_whole=end == len(data),
    )


def _last_of_each_slot(records: Records) -> Records:
    if not len(records):
        return records
    _, from_behind = np.unique(records["slot"][::-1], return_index=True)
    last = np.sort(len(records) - 1 - from_behind)
    last = last[records["kind"][last] == _HOLDS]
    live: Records = records[last]
    return live


def _crc(body: bytes | memoryview, chain: int) -> int:
    return zlib.crc32(body, zlib.crc32(len(body).to_bytes(8, "little"), chain))


def _frame(puts: Sequence[Put], emptied: Sequence[int], chain: int) -> tuple[bytes, int]:
    """A frame's bytes and its CRC."""
    records = np.zeros(len(emptied) + len(puts), dtype=_RECORD)
    records["kind"][: len(emptied)] = _EMPTY
    records["slot"][: len(emptied)] = emptied
    if puts:
        held = records[len(emptied) :]
        slots, seals, hashes = zip(*puts, strict=True)
        held["kind"] = _HOLDS
        held["slot"] = slots
        held["seal"] = np.frombuffer(b"".join(seals), dtype=f"V{SEAL_BYTES}")
        held["hash"] = np.frombuffer(b"".join(hashes), dtype=f"V{HASH_BYTES}")
    body = records.tobytes()
    crc = _crc(body, chain)
    return _FRAME.pack(_FRAME_MAGIC, len(records), crc) + body, crc


class Journal:
    """The journal of an open store. One thread at a time; every method may raise OSError."""

    def __init__(self, disk: Disk, path: Path, geometry: Geometry) -> None:
        self._disk = disk
        self._path = path
        self._geometry = geometry
        self._fd = -1
        self._end = self._chain = self._num_records = 0
        self.is_sound = False  # whether it says what it was told; if not, it has to be written anew

    def resume(self, replay: JournalReplay) -> None:
        """Go on behind what was read of it."""
        self._fd = self._disk.open(self._path)
        # What a killed process wrote may be in the page cache only. We act upon it: we write to slots that it says are
        # empty. Were it lost after that, the record before it would claim those slots.
        self._disk.sync(self._fd)
        self._disk.sync_folder(self._path.parent)
        self._end, self._chain, self._num_records = replay.end, replay.chain, replay.num_records
        self.is_sound = replay.is_whole

    def wants_rewrite(self, num_slots: int) -> bool:
        """Whether `rewrite` has to come before the next append: most of it is history, or its end is unknown."""
        return not self.is_sound or self._num_records > 4 * num_slots + 1024

    def append(self, puts: Sequence[Put], emptied: Sequence[int]) -> None:
        """Add a durable frame."""
        data, crc = _frame(puts, emptied, self._chain)
        self.is_sound = False  # until we know better
        self._disk.write(self._fd, [memoryview(data)], self._end)
        self._disk.sync(self._fd)
        self._end, self._chain, self.is_sound = self._end + len(data), crc, True
        self._num_records += len(puts) + len(emptied)

    def rewrite(self, puts: Sequence[Put]) -> None:
        """Put a file that says just this in its place."""
        self.is_sound = False
        header = _HEADER.pack(_MAGIC, *self._geometry, int.from_bytes(SYSTEM_CLOCK.random_bytes(4), "little"), 0)
        crc = zlib.crc32(header[:-4])
        frame, chain = _frame(puts, (), crc)
        data = header[:-4] + crc.to_bytes(4, "little") + frame
        temporary = self._path.with_suffix(TEMPORARY_SUFFIX)
        self._disk.remove(temporary)
        fd = self._disk.open(temporary, create=True)
        try:
            self._disk.write(fd, [memoryview(data)], 0)
            self._disk.sync(fd)
            self._disk.rename(temporary, self._path)
            self._disk.sync_folder(self._path.parent)
        except OSError:
            self._disk.close(fd)
            raise
        self.close()
        self._fd, self._end, self._chain, self._num_records = fd, len(data), chain, len(puts)
        self.is_sound = True

    def close(self) -> None:
        """Give its descriptor back."""
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self.is_sound = -1, False
