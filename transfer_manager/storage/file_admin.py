"""What an operator does to a folder of file stores, also while engines have them open: list, verify, remove.

Nothing here opens a space for writing: what a living engine has is read only. All may raise OSError.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transfer_manager.storage.base import seal
from transfer_manager.storage.file_disk import Disk
from transfer_manager.storage.file_journal import JOURNAL_NAME, TEMPORARY_SUFFIX, Geometry, Put, read_journal
from transfer_manager.storage.file_space import (
    SLAB_GLOB,
    SPACE_NAME,
    find_spaces,
    is_locked,
    last_written,
    remove_space,
    slab_bytes,
    slab_path,
)
from transfer_manager.storage.keys import KeySpace

_NUM_LOOKS = 3


@dataclass(frozen=True, kw_only=True)
class SpaceInfo:
    """A space of a folder.

    Attributes:
        num_objects, num_bytes: as far as they are durable.
        allocated_bytes: what its files take on the disk.
        is_locked: a living engine has it.
    """

    path: Path
    space: KeySpace
    num_objects: int
    num_bytes: int
    allocated_bytes: int
    is_locked: bool


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What came of looking at every object of a space."""

    space: KeySpace
    num_checked: int
    num_damaged: int


def list_spaces(folder: Path) -> list[SpaceInfo]:
    """All spaces, those first that were written to the longest time ago."""
    found = sorted(find_spaces(folder), key=lambda item: last_written(item[0]))
    return [_info(path, space) for path, space in found]


def _info(path: Path, space: KeySpace) -> SpaceInfo:
    disk = Disk()
    num_objects = len(_objects(disk, path)[1])
    return SpaceInfo(
        path=path,
        space=space,
        num_objects=num_objects,
        num_bytes=num_objects * space.object_bytes,
        allocated_bytes=_allocated_bytes(path),
        is_locked=is_locked(disk, path),
    )


def _allocated_bytes(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _objects(disk: Disk, path: Path) -> tuple[Geometry, list[Put]]:
    replay = read_journal(disk, path / JOURNAL_NAME)
    return (replay.geometry, replay.puts()) if replay else (Geometry(1, 1), [])


def verify(folder: Path, weights_id: str | None = None) -> list[Verified]:
    """Read every durable object of these weights, or of all, and compare it with its checksum."""
    return [
        _verify(Disk(), path, space)
        for path, space in find_spaces(folder)
        if weights_id is None or space.weights_id == weights_id
    ]


def _verify(disk: Disk, path: Path, space: KeySpace) -> Verified:
    """An engine journals the end of an object before it writes to its slot: what was bad and is in the journal no more
    has been overwritten. If it is there, it may have been written anew, in full, since we read its bytes; so look
    again."""
    geometry, puts = _objects(disk, path)
    num_checked = len(puts)
    for _ in range(_NUM_LOOKS):
        if not puts:
            break
        doubtful = _mismatched(disk, path, geometry, space.object_bytes, puts)
        geometry, named = _objects(disk, path)
        puts = sorted(doubtful.intersection(named))
    return Verified(space=space, num_checked=num_checked, num_damaged=len(puts))


def _mismatched(disk: Disk, path: Path, geometry: Geometry, object_bytes: int, puts: list[Put]) -> set[Put]:
    buffer = memoryview(bytearray(object_bytes))
    bad: set[Put] = set()
    fds: dict[int, int] = {}
    try:
        for put in puts:
            slab, at = divmod(put.slot, geometry.slots_per_slab)
            try:
                if slab not in fds:
                    fds[slab] = disk.open_to_read(slab_path(path, slab))
                disk.read(fds[slab], [buffer], at * geometry.slot_bytes)
            except OSError:  # no such slab, cut short, or a bad spot of the disk
                bad.add(put)
                continue
            if seal(put.block_hash, buffer) != put.seal:
                bad.add(put)
    finally:
        for fd in fds.values():
            disk.close(fd)
    return bad


def remove_spaces(folder: Path, weights_id: str) -> list[SpaceInfo]:
    """Remove all spaces of these weights that no engine has open; returns them."""
    return [
        info for info in list_spaces(folder) if info.space.weights_id == weights_id and remove_space(Disk(), info.path)
    ]


def gc(folder: Path, capacity_bytes: int) -> list[SpaceInfo]:
    """Remove what crashes left, and then spaces that no engine has open until the folder's slabs fit; returns them.
    Those go first that were written to the longest time ago."""
    disk = Disk()
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        _remove_leavings(disk, path)
    infos = list_spaces(folder)
    sizes = {info.path: slab_bytes(info.path) for info in infos}
    removed = []
    for info in infos:
        if sum(sizes.values()) <= capacity_bytes:
            break
        if remove_space(disk, info.path):
            del sizes[info.path]
            removed.append(info)
    return removed


def _remove_leavings(disk: Disk, path: Path) -> None:
    """Temporary files, and slabs of a space without a name. An engine that has the space may be about to rename one."""
    is_named = (path / SPACE_NAME).exists()
    leavings = [*path.glob(f"*{TEMPORARY_SUFFIX}"), *(() if is_named else path.glob(SLAB_GLOB))]
    if leavings and not is_locked(disk, path):
        for file in leavings:
            disk.remove(file)
