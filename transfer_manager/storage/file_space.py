"""The folders of key spaces: what they are called, who has them, and how room is made among them.

A space's folder has `space.json`, `lock`, `journal` and slabs. Whoever holds the lock owns the rest.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import structs

from fastdeploy_cache.errors import StorageError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk, is_folder, matching, mode_at
from fastdeploy_cache.transfer_manager.storage.file_journal import JOURNAL_NAME, TEMPORARY_SUFFIX
from fastdeploy_cache.transfer_manager.storage.keys import DIGEST, KeySpace

logger = logging.getLogger(__name__)

SPACE_NAME, LOCK_NAME = "space.json", "lock"
SLAB_GLOB = "slab-*"
_MAX_NAME_BYTES = 2**20


def slab_path(path: Path, slab: int) -> Path:
    """Where a space's slab is."""
    return path / f"slab-{slab:05}"


def space_folders(folder: Path) -> list[Path]:
    """What in a store's folder is called as spaces are; links are not. Raises OSError."""
    return sorted(path for path in folder.iterdir() if DIGEST.fullmatch(path.name) and is_folder(path))


def check_mine(folder: Path) -> None:
    """Raise ENOTEMPTY where `others_in` finds something; other OSErrors where the folder cannot be read."""
    if names := others_in(folder):
        text = (
            f"it is not empty, and what is in it, such as {names[0]!r}, is not a store's; "
            "name a folder that is empty, or one that does not exist yet"
        )
        raise OSError(errno.ENOTEMPTY, text, str(folder))


def others_in(folder: Path) -> list[str]:
    """What is in a folder that was made for something else: not empty, and nothing in it is called as spaces are.

    What file systems put into a new folder by themselves does not count: `lost+found`, and what is hidden. Raises
    OSError.
    """
    names = [path.name for path in folder.iterdir() if path.name != "lost+found" and not path.name.startswith(".")]
    return [] if any(map(DIGEST.fullmatch, names)) else sorted(names)


def read_space(disk: Disk, path: Path) -> KeySpace | None:
    """What a space is for; None where its name is damaged. Raises OSError, `FileNotFoundError` where it has none."""
    space = _read_name(disk, path)
    # The digest is the name's checksum: a changed bit may leave a name that can be read, of another space.
    return space if space is not None and space.digest == path.name else None


def _read_name(disk: Disk, path: Path) -> KeySpace | None:
    disk.check_folder(path)
    fd = disk.open_to_read(path / SPACE_NAME)
    try:
        data = bytearray(min(disk.size(fd), _MAX_NAME_BYTES))
        disk.read(fd, [memoryview(data)] if data else [], 0)
    finally:
        disk.close(fd)
    return KeySpace.parse(data)


def find_spaces(disk: Disk, folder: Path) -> Iterator[tuple[Path, KeySpace]]:
    """The spaces of a store's folder that can be told. What is wrong with another one's files is no reason for a space
    not to be opened. Raises OSError of the folder itself."""
    for path in space_folders(folder):
        try:
            space = read_space(disk, path)
        except FileNotFoundError:
            continue  # removed meanwhile, or just being made
        except OSError as error:
            logger.warning("event=space_not_readable path=%s error=%r", path, error)
            continue
        if space is None:
            logger.warning("event=space_damaged path=%s file=%s", path, SPACE_NAME)
        else:
            yield path, space


def other_weights(disk: Disk, own: Path, space: KeySpace) -> int:
    """The number of other names of weights under which the folder of this space keeps blocks that are alike in all
    else. Raises OSError."""
    others = find_spaces(disk, own.parent)
    alike = [
        path for path, other in others if path != own and other == structs.replace(space, weights_id=other.weights_id)
    ]
    return sum([slab_bytes(path) > 0 for path in alike])


def slab_bytes(path: Path) -> int:
    """What the slabs of a space take on the disk. Raises OSError."""
    total = 0
    for slab in matching(path, SLAB_GLOB):
        try:
            total += slab.lstat().st_size
        except FileNotFoundError:
            continue
    return total


def last_written(path: Path) -> float:
    """When the journal of a space was written, in seconds; 0 where it has none."""
    try:
        return (path / JOURNAL_NAME).lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def open_space(disk: Disk, folder: Path, space: KeySpace) -> tuple[Path, int]:
    """Make and take a space's folder; returns it and the descriptor that holds its lock. Raises OSError, also that of
    `check_mine`, `StorageRefusedError` while another engine has it, `StorageError` when a passer-by holds it for a
    moment."""
    path = folder / space.digest
    disk.make_folder(folder)
    disk.check_folder(folder, may_be_link=True)
    check_mine(folder)
    if not _has_named_space(folder):
        # Not only when we have just made it: whoever did may have been killed before it got here.
        with suppress(PermissionError):  # we may enter what is above, but not read it
            disk.sync_folder(folder.parent)
    disk.make_folder(path)
    disk.check_folder(path)
    fd = take_space(disk, path)
    if fd is None:
        if is_locked(disk, path):
            raise StorageRefusedError(f"{path} is in use by another engine; give each engine a folder of its own")
        raise StorageError(f"{path} was being looked at or removed by another process; try again")
    try:
        for temporary in matching(path, f"*{TEMPORARY_SUFFIX}"):
            disk.remove(temporary)
        _describe(disk, path, space)
        disk.sync_folder(folder)
    except OSError:
        disk.close(fd)
        raise
    return path, fd


def _has_named_space(folder: Path) -> bool:
    """Where one cannot be looked into, it is another user's: no reason for ours not to be opened."""
    for path in space_folders(folder):
        with suppress(OSError):
            if mode_at(path / SPACE_NAME) is not None:
                return True
    return False


def _describe(disk: Disk, path: Path, space: KeySpace) -> None:
    with suppress(FileNotFoundError):
        found = _read_name(disk, path)
        if found == space:
            return
        if found is not None:
            # Somebody may have moved another space's folder here. Its objects go by the same hashes, and their
            # checksums say nothing of weights or ranks: they would be found, and they are wrong.
            logger.warning("event=space_of_others path=%s weights_id=%r rank=%d", path, found.weights_id, found.rank)
            with suppress(FileNotFoundError):
                disk.remove(path / JOURNAL_NAME)
    data = msgspec.json.format(msgspec.json.encode(space), indent=2)
    name = path / SPACE_NAME
    temporary = name.with_suffix(TEMPORARY_SUFFIX)
    fd = disk.open(temporary, create=True)
    try:
        disk.write(fd, [memoryview(data)], 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(temporary, name)
    disk.sync_folder(path)


def take_space(disk: Disk, path: Path) -> int | None:
    """A descriptor that holds a space's lock; None while somebody has it. Raises OSError."""
    fd = disk.open(path / LOCK_NAME, create=True)
    try:
        # A: opens the file. B: holds its lock, removes the space and with it the file, lets go. A: gets the lock of a
        # file that no one will ever open again, beside C, who makes a new one.
        if disk.lock(fd) and disk.identity(path / LOCK_NAME) == disk.identity_of(fd):
            return fd
    except OSError:
        disk.close(fd)
        raise
    disk.close(fd)
    return None


def is_locked(disk: Disk, path: Path) -> bool:
    """Whether a living process has the space. Raises OSError."""
    try:
        fd = disk.open_to_read(path / LOCK_NAME)
    except FileNotFoundError:
        return False
    try:
        return not disk.lock_shared(fd)
    finally:
        disk.close(fd)


def remove_space(disk: Disk, path: Path) -> bool:
    """Remove a space with all that is in it, unless somebody has it; returns whether. Raises OSError.

    The journal goes first and the name last: a crash leaves a space without objects that still is found and removed.
    """
    try:
        fd = take_space(disk, path)
    except FileNotFoundError:  # someone else has removed it
        return False
    if fd is None:
        return False
    try:
        for name in (JOURNAL_NAME, *sorted(file.name for file in matching(path, SLAB_GLOB)), SPACE_NAME):
            disk.remove(path / name)
        for temporary in matching(path, f"*{TEMPORARY_SUFFIX}"):
            disk.remove(temporary)
        disk.remove(path / LOCK_NAME)
    finally:
        disk.close(fd)
    with suppress(OSError):  # an engine may be opening it again: not empty
        disk.remove_folder(path)
    return True


def make_room(disk: Disk, own: Path, rank: int, capacity_bytes: int, num_bytes: int) -> bool:
    """Whether a rank's own space may grow by so much; removes the rank's other spaces for it that no one has, those
    first that were written to the longest time ago. Raises OSError."""
    spaces = {path: space for path, space in find_spaces(disk, own.parent) if space.rank == rank}
    others = [path for path in spaces if path != own]
    sizes = {path: slab_bytes(path) for path in (*others, own)}
    for path in sorted(others, key=last_written):
        if sum(sizes.values()) + num_bytes <= capacity_bytes:
            break
        try:
            is_removed = remove_space(disk, path)
        except OSError as error:  # such as a link in its place: not a matter of the one that grows
            logger.warning("event=space_not_removable path=%s error=%r", path, error)
            continue
        if is_removed:
            logger.warning("event=space_removed reason=room weights_id=%r path=%s", spaces[path].weights_id, path)
            del sizes[path]
    return sum(sizes.values()) + num_bytes <= capacity_bytes
