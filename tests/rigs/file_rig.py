"""What the tests of the file store share: a store over a few blocks, and disks that misbehave."""

from __future__ import annotations

import errno
import functools
import hashlib
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from fastdeploy_cache.transfer_manager.storage.base import Blocks
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk
from fastdeploy_cache.transfer_manager.storage.file_store import FileStorage
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace

OBJECT_BYTES = 4096


def space_of(weights_id: str = "llama@1", *, rank: int = 0, object_bytes: int = OBJECT_BYTES) -> KeySpace:
    return KeySpace(
        weights_id=weights_id, layout="test", object_bytes=object_bytes, block_size=16, rank=rank, tp_size=2
    )


def name_of(number: int) -> bytes:
    return hashlib.sha256(b"block %d" % number).digest()


@functools.lru_cache(maxsize=256)
def content_of(number: int, object_bytes: int = OBJECT_BYTES, version: int = 0) -> bytes:
    return random.Random(number * 1000 + version).randbytes(object_bytes)


class Rig:
    """A store, and blocks by number."""

    def __init__(
        self,
        folder: Path,
        *,
        space: KeySpace | None = None,
        num_slots: int = 8,
        slots_per_slab: int = 4,
        disk: Disk | None = None,
        in_background: bool = False,
        **options: Any,
    ) -> None:
        self.space = space or space_of()
        self.object_bytes = self.space.object_bytes
        self.slot_bytes = -(-self.object_bytes // 4096) * 4096 if self.object_bytes >= 4096 else self.object_bytes
        self.segment = np.zeros((32, self.object_bytes), dtype=np.uint8)
        given = {
            "folder": str(folder),
            "capacity_bytes": num_slots * self.slot_bytes,
            "slab_bytes": slots_per_slab * self.slot_bytes,
            "admission": "all",
            "min_priority": 50.0,
            "num_io_threads": 2,
        }
        self.store = FileStorage(given | options, self.space, self.segment, disk=disk, in_background=in_background)
        self.path = self.store._path

    def write(self, *numbers: int, priority: float | None = None, version: int = 0) -> tuple[int, int]:
        buffers = [memoryview(content_of(number, self.object_bytes, version)) for number in numbers]
        return self.store.write(
            Blocks(hashes=[name_of(number) for number in numbers], buffers=buffers, priority=priority)
        )

    def read(self, *numbers: int) -> int:
        """How many leading ones the store gave; that they are what was written is asserted."""
        num = self.read_any(*numbers)
        for i, number in enumerate(numbers[:num]):
            assert self.segment[i].tobytes() == content_of(number, self.object_bytes)
        return num

    def read_any(self, *numbers: int) -> int:
        self.segment[:] = 0xEE
        buffers = [memoryview(self.segment[i]) for i in range(len(numbers))]
        return self.store.read(Blocks(hashes=[name_of(number) for number in numbers], buffers=buffers))

    def there(self, *numbers: int) -> list[int]:
        """Which of them the store says it has."""
        return [n for n in numbers if self.store.count_leading(Blocks(hashes=[name_of(n)]))]

    def slot_of(self, number: int) -> int:
        (put,) = self.store._index.find_leading([name_of(number)])
        return put.slot

    def spoil(self, number: int, data: bytes = b"\x00" * 16, at: int = 100) -> None:
        """Change an object's bytes on the disk behind the store's back."""
        slab, slot = divmod(self.slot_of(number), self.store._geometry.slots_per_slab)
        with (self.path / f"slab-{slab:05}").open("r+b") as file:
            file.seek(slot * self.slot_bytes + at)
            file.write(data)

    def commit(self) -> None:
        self.store._commits.commit()

    def abandon(self) -> None:
        """What the end of a process does; the descriptors go with the disk."""
        self.store._is_closed = True
        self.store._reader.close()
        self.store._writer.close()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FailingDisk(Disk):
    """Methods named in `failing` raise that error; `after` calls of them still work."""

    def __init__(self, **failing: int) -> None:
        self.failing = failing
        self.after = 0

    def _check(self, name: str) -> None:
        if name in self.failing:
            if not self.after:
                raise OSError(self.failing[name], errno.errorcode[self.failing[name]])
            self.after -= 1

    def make_folder(self, path: Path) -> None:
        self._check("make_folder")
        super().make_folder(path)

    def open(self, path: Path, *, create: bool = False) -> int:
        self._check("open")
        return super().open(path, create=create)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self._check("read")
        super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self._check("write")
        super().write(fd, buffers, offset)

    def allocate(self, fd: int, size: int) -> None:
        self._check("allocate")
        super().allocate(fd, size)

    def sync(self, fd: int) -> None:
        self._check("sync")
        super().sync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._check("rename")
        super().rename(old, new)


class QuickDisk(Disk):
    """Waits for no device: for tests in which nothing loses its power."""

    def sync(self, fd: int) -> None:
        """Leave it to the kernel."""

    def sync_folder(self, path: Path) -> None:
        """Likewise."""


class PowerLossError(BaseException):
    """The machine is off: nobody may catch this and go on."""


class _File:
    """What of a file is on the disk for sure, and what was done to it since, in order."""

    def __init__(self, durable: bytes) -> None:
        self.durable = durable
        self.pending: list[tuple[str, int, bytes]] = []

    def after(self, chance: random.Random | None) -> bytes:
        """What is there when any of what was not synced may be lost or torn; without chance all of it is there."""
        content = bytearray(self.durable)
        for kind, at, data in self.pending:
            fate = chance.choice(("kept", "lost", "torn")) if chance else "kept"
            if fate == "lost":
                continue
            if kind == "allocate":
                content.extend(bytes(max(at - len(content), 0)))
            elif kind == "truncate":
                del content[at:]
            else:
                content.extend(bytes(max(at + len(data) - len(content), 0)))
                step = 32 if fate == "torn" else len(data)
                for start in range(0, len(data), step):
                    if fate == "kept" or (chance and chance.random() < 0.5):
                        piece = data[start : start + step]
                        content[at + start : at + start + len(piece)] = piece
        return bytes(content)


class LossyDisk(Disk):
    """Keeps to the letter of POSIX: what was not synced may be there, not there, or there in part, in any order; so may
    the names in a folder. After `fuse` changes the power goes."""

    def __init__(self) -> None:
        self.fuse = -1
        self._is_off = False
        self._files: dict[Path, _File] = {}
        self._names: dict[Path, _File | None] = {}  # as the disk has them for sure, where that is not as they are
        self._fds: dict[int, _File] = {}

    def _change(self) -> None:
        if self.fuse == 0:
            self._is_off = True
        if self._is_off:
            raise PowerLossError
        self.fuse -= 1

    def _file(self, path: Path) -> _File:
        if path not in self._files:
            self._files[path] = _File(path.read_bytes())
        return self._files[path]

    def make_folder(self, path: Path) -> None:
        self._change()
        if not path.exists():
            self._names.setdefault(path, None)
        super().make_folder(path)

    def open(self, path: Path, *, create: bool = False) -> int:
        self._change()
        if create and not path.exists():
            self._names.setdefault(path, None)
            self._files[path] = _File(b"")
        fd = super().open(path, create=create)
        self._fds[fd] = self._file(path)
        return fd

    def open_to_read(self, path: Path) -> int:
        fd = super().open_to_read(path)
        self._fds[fd] = self._file(path)
        return fd

    def close(self, fd: int) -> None:
        if self._fds.pop(fd, None):
            super().close(fd)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self._change()
        self._fds[fd].pending.append(("write", offset, b"".join(buffers)))
        super().write(fd, buffers, offset)

    def allocate(self, fd: int, size: int) -> None:
        self._change()
        self._fds[fd].pending.append(("allocate", size, b""))
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self._change()
        self._fds[fd].pending.append(("truncate", size, b""))
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._change()
        file = self._fds[fd]
        file.durable, file.pending = file.after(None), []

    def sync_folder(self, path: Path) -> None:
        self._change()
        for name in [name for name in self._names if name.parent == path]:
            del self._names[name]

    def rename(self, old: Path, new: Path) -> None:
        self._change()
        self._names.setdefault(old, self._file(old))
        self._names.setdefault(new, self._file(new) if new.exists() else None)
        super().rename(old, new)
        self._files[new] = self._files.pop(old)

    def remove(self, path: Path) -> None:
        self._change()
        if path.exists():
            self._names.setdefault(path, self._file(path))
            self._files.pop(path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._change()
        super().remove_folder(path)

    def end_process(self) -> None:
        """As by kill -9: the descriptors are closed; what was written is not lost yet."""
        for fd in list(self._fds):
            self.close(fd)
        self.fuse, self._is_off = -1, False

    def lose_power(self, chance: random.Random) -> None:
        """Lose or tear some of what was not synced."""
        self.end_process()
        for path, file in self._files.items():
            path.write_bytes(file.after(chance))
        for path, was in self._names.items():
            if chance.random() < 0.5:
                continue
            if was is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(was.after(chance))
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._files, self._names = {}, {}
