"""What an operator does to a folder of file stores, also while engines have them open: list, verify, remove.

What a living engine has is only read. Only real folders that are named as
spaces are looked at: what else lies in the folder, and what links lead to, is not the store's.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.admin import Checked, Cleared, Space, SpaceSummary, unheard
from fastdeploy_cache.transfer_manager.storage.file_check import SpaceCheck
from fastdeploy_cache.transfer_manager.storage.file_disk import (
    FOR_THE_USER,
    Disk,
    is_file,
    is_folder,
    matching,
    mode_at,
    storage_error,
)
from fastdeploy_cache.transfer_manager.storage.file_journal import JOURNAL_NAME, TEMPORARY_SUFFIX, read_journal
from fastdeploy_cache.transfer_manager.storage.file_space import (
    LOCK_NAME,
    SLAB_GLOB,
    SPACE_NAME,
    is_locked,
    last_written,
    others_in,
    read_space,
    remove_space,
    slab_bytes,
    space_folders,
)
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace

_NUM_LOOKS = 3
_SLAB = re.compile(r"slab-\d{5,}")
_TEMPORARIES = {str(Path(name).with_suffix(TEMPORARY_SUFFIX)) for name in (JOURNAL_NAME, SPACE_NAME)}


class FileAdmin:
    """See `StorageAdmin`. A space is its folder."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Options: `folder`. Raises `StorageRefusedError` where that is no store's folder, nor an empty one, or is not
        this user's."""
        self._folder = Path(options["folder"])
        self._disk = Disk()
        self.where = f"folder {str(self._folder)!r}"
        with self._failures():
            if not is_folder(self._folder, follow_links=True):
                why = "" if mode_at(self._folder, follow_links=True) is None else ": it is a file"
                raise StorageRefusedError(f"there is no {self.where}{why}")
            self._disk.check_folder(self._folder, may_be_link=True)
            if others_in(self._folder):
                raise StorageRefusedError(f"{self.where} is no store: nothing in it is one's")

    def spaces(self) -> list[SpaceSummary]:
        """See `StorageAdmin`; those first that were written to the longest time ago."""
        found = list[SpaceSummary]()
        with self._failures():
            for path, key_space in self._spaces():
                with _foreign():
                    found.append(self._summary(path, key_space))
        return sorted(found, key=lambda summary: summary.last_written_seconds or 0.0)

    def damaged(self) -> list[str]:
        """See `StorageAdmin`."""
        with self._failures():
            return [str(path) for path in space_folders(self._folder) if self._is_damaged(path)]

    def unreadable(self) -> list[str]:
        """See `StorageAdmin`."""
        with self._failures():
            return [why for path in space_folders(self._folder) if (why := self._why_unreadable(path)) is not None]

    def _why_unreadable(self, path: Path) -> str | None:
        with _foreign() as found:
            self._disk.check_folder(path)
            for file in (*(path / name for name in (SPACE_NAME, JOURNAL_NAME, LOCK_NAME)), *matching(path, SLAB_GLOB)):
                with suppress(FileNotFoundError):
                    self._disk.close(self._disk.open_to_read(file))
        return found[0] if found else None

    def _is_damaged(self, path: Path) -> bool:
        """A space that an engine is just making has no name yet, and its lock is taken."""
        is_made = mode_at(path / SPACE_NAME) is not None
        with _foreign():
            is_made = is_made or not is_locked(self._disk, path)
        return is_made and self._is_nameless(path)

    def weights_ids(self) -> set[str]:
        """See `StorageAdmin`."""
        with self._failures():
            return {key_space.weights_id for _, key_space in self._spaces()}

    def free_bytes(self) -> int:
        """See `StorageAdmin`."""
        with self._failures():
            return shutil.disk_usage(self._folder).free

    def verify(
        self, weights_id: str | None = None, *, remove: bool = False, on_object: Callable[[], object] = unheard
    ) -> list[Checked]:
        """See `StorageAdmin`."""
        found = list[Checked]()
        with self._failures():
            for path, key_space in self._spaces():
                if weights_id is None or key_space.weights_id == weights_id:
                    with _foreign():
                        found.append(self._verify(path, key_space, remove, on_object))
        return found

    def clear(self, weights_id: str, *, dry_run: bool = False) -> Cleared:
        """See `StorageAdmin`."""
        with self._failures():
            chosen = [summary for summary in self.spaces() if summary.space.weights_id == weights_id]
            return self._remove(chosen, surplus_bytes=math.inf, dry_run=dry_run)

    def gc(self, capacity_bytes: int, *, dry_run: bool = False) -> Cleared:
        """See `StorageAdmin`. The size of the slabs counts."""
        with self._failures():
            folders = space_folders(self._folder)
            surplus_bytes = sum(map(slab_bytes, folders)) - capacity_bytes
            nameless = {path: slab_bytes(path) for path in folders if self._is_nameless(path)}
            kept = [path for path in nameless if not self._is_nameless_removed(path, dry_run)]
            nameless_bytes = sum(num_bytes for path, num_bytes in nameless.items() if path not in kept)
            cleared = self._remove(self.spaces(), surplus_bytes - nameless_bytes, dry_run)
            return dataclasses.replace(
                cleared,
                freed_bytes=nameless_bytes + (cleared.freed_bytes or 0),
                kept_nameless=tuple(str(path) for path in kept if not (_is_being_made(path) or _has_folders(path))),
            )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(f"look after {self.where}", error) from error

    def _spaces(self) -> Iterator[tuple[Path, KeySpace]]:
        for path in space_folders(self._folder):
            key_space = None
            with _foreign(), suppress(FileNotFoundError):  # removed meanwhile, or without a name
                key_space = read_space(self._disk, path)
            if key_space is not None:
                yield path, key_space

    def _is_nameless(self, path: Path) -> bool:
        """Whether there are a store's files, and nothing that says what for."""
        is_named = False
        with _foreign() as found, suppress(FileNotFoundError):
            is_named = read_space(self._disk, path) is not None
        if found:  # nobody can tell
            return False
        return not is_named and bool(_files_by_pattern(path) or is_file(path / JOURNAL_NAME))

    def _summary(self, path: Path, key_space: KeySpace) -> SpaceSummary:
        replay = read_journal(self._disk, path / JOURNAL_NAME)
        num_objects = len(replay.live) if replay else 0
        return SpaceSummary(
            space=_space(path, key_space),
            num_objects=num_objects,
            num_bytes=num_objects * key_space.object_bytes,
            num_pages=replay.num_pages if replay else 0,
            allocated_bytes=_allocated_bytes(path),
            last_written_seconds=last_written(path) or None,
            is_open=is_locked(self._disk, path),
        )

    def _verify(self, path: Path, key_space: KeySpace, remove: bool, on_object: Callable[[], object]) -> Checked:
        check = SpaceCheck(self._disk, path, key_space.object_bytes)
        check.look(on_object)
        damage = check.damage()
        return Checked(
            space=_space(path, key_space),
            num_objects=check.num_objects,
            damage=damage,
            num_gone=check.num_gone,
            is_listed=check.is_listed,
            is_mended=remove and (bool(damage) or not check.is_listed) and check.remove(),
        )

    def _remove(self, chosen: list[SpaceSummary], surplus_bytes: float, dry_run: bool) -> Cleared:
        """Remove one after the other until the surplus is gone; a dry run finds out which these would be."""
        num_objects = freed_bytes = 0
        removed, kept = list[Space](), list[Space]()
        for summary in chosen:
            if freed_bytes >= surplus_bytes:
                break
            path = Path(summary.space.where)
            if _has_folders(path):  # else it would be half removed when that is found out
                continue
            num_bytes = slab_bytes(path)
            if self._is_removable(path) if dry_run else self._is_removed(path):
                removed.append(summary.space)
                num_objects += summary.num_objects
                freed_bytes += num_bytes
            else:
                kept.append(summary.space)
        return Cleared(
            num_objects=num_objects,
            removed=tuple(removed),
            kept=tuple(kept) if freed_bytes < surplus_bytes else (),
            freed_bytes=freed_bytes,
        )

    def _is_removed(self, path: Path) -> bool:
        """Remove a space unless an engine has it. Who only looks whether it is locked holds the lock for a moment."""
        for _ in range(_NUM_LOOKS):
            if self._remove_space(path) or mode_at(path / SPACE_NAME) is None:
                return True
            if is_locked(self._disk, path):
                break
        return False

    def _is_nameless_removed(self, path: Path, dry_run: bool) -> bool:
        """Remove what is left of a space that got no name, or lost it, unless an engine has it. One that makes a new
        space has nothing in it before it has the lock."""
        with _foreign():
            return not _has_folders(path) and self._is_removable(path) and (dry_run or self._remove_space(path))
        return False

    def _is_removable(self, path: Path) -> bool:
        self._refuse_foreign_files(path)
        return not is_locked(self._disk, path)

    def _remove_space(self, path: Path) -> bool:
        self._refuse_foreign_files(path)
        return remove_space(self._disk, path)

    def _refuse_foreign_files(self, path: Path) -> None:
        """Raise `StorageRefusedError` where `remove_space`, which goes by patterns, would take others' for the
        store's."""
        for file in _files_by_pattern(path):
            if file.name not in _TEMPORARIES and not _SLAB.fullmatch(file.name):
                raise StorageRefusedError(f"{str(file)!r} is not the store's; move it away, and try again")


@contextmanager
def _foreign() -> Iterator[list[str]]:
    """What others have put in the place of a store's file ends what is done to its space, and nothing else; what it was
    is in the list then. Other failures of the disk are raised."""
    found = list[str]()
    try:
        yield found
    except OSError as error:
        if error.errno not in FOR_THE_USER:
            raise
        found.append(f"{error.filename}: {error.strerror}")


def _has_folders(path: Path) -> bool:
    """Whether a folder lies where a file of the store would, which cannot be removed like one."""
    files = (*(path / name for name in (SPACE_NAME, JOURNAL_NAME, LOCK_NAME)), *_files_by_pattern(path))
    return any(map(is_folder, files))


def _files_by_pattern(path: Path) -> list[Path]:
    return [*matching(path, SLAB_GLOB), *matching(path, f"*{TEMPORARY_SUFFIX}")]


def _is_being_made(path: Path) -> bool:
    """Whether a nameless folder has nothing yet but what an engine names it with."""
    return all(mode_at(path / name) is None for name in (SPACE_NAME, JOURNAL_NAME)) and not any(
        matching(path, SLAB_GLOB)
    )


def _space(path: Path, key_space: KeySpace) -> Space:
    return Space(where=str(path), weights_digest=key_space.weights_digest, key_space=key_space)


def _allocated_bytes(path: Path) -> int:
    total = 0
    for file in matching(path, "*"):
        with suppress(FileNotFoundError):  # an engine has put another in its place
            total += file.lstat().st_blocks * 512
    return total
