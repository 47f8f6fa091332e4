"""A flight recording as a file: a header, and pieces of the ring, each with its length and a checksum.

::

    magic (15 bytes) | version (u16) | header: length (u32), CRC-32 (u32), JSON
    piece: "PIEC" | serial of the part (u64) | length of records, length of marks (u32 each) | CRC-32 of both (u32)
           | records | marks
    ...

Numbers are little-endian. What records are is in `records`. A file that was cut is whole up to its last piece.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastdeploy_cache.errors import RecordingError, reason_of
from fastdeploy_cache.insight.flight.header import has_rows
from fastdeploy_cache.insight.flight.recorder import RingPart
from fastdeploy_cache.insight.flight.records import Record, RecordKind, pack, unpack
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK

MAGIC: Final = b"\x89fdcache-flight"
# Of a hybrid model; those before are read, too: 3 since there is `POLICY`, 2 since there is `STEPPED`.
VERSION: Final = 4
_WITHOUT_ROWS: Final = 3
_VERSION, _HEAD, _PIECE = struct.Struct("<H"), struct.Struct("<II"), struct.Struct("<4sQIII")
_FIRST_WITH_POLICIES: Final = 3
_TAG: Final = b"PIEC"
_PIECE_NOTES: Final = 1024
Marks = np.ndarray[Any, np.dtype[np.uint32]]


def mixed(marks: bytes, secret: bytes) -> bytes:
    """The marks with a secret in them: equal ones stay equal, others stay others, and none is a checksum of tokens.

    A Feistel network of four rounds over the two halves of each mark, with multiplications by secret numbers.
    """
    values: Marks = np.frombuffer(marks, "<u4")
    left, right = (values >> 16).astype(np.uint64), (values & 0xFFFF).astype(np.uint64)
    for round_number in range(4):
        factor, added = struct.unpack_from("<II", secret, round_number * 8)
        turned = ((right * np.uint64(factor | 1) + np.uint64(added)) >> np.uint64(16)) & np.uint64(0xFFFF)
        left, right = right, left ^ turned
    return ((left << np.uint64(16)) | right).astype("<u4").tobytes()


def head(header: Mapping[str, Any]) -> bytes:
    """What a file begins with."""
    text = json.dumps(header).encode()
    version = VERSION if has_rows(header) else _WITHOUT_ROWS
    return MAGIC + _VERSION.pack(version) + _HEAD.pack(len(text), zlib.crc32(text)) + text


def pieces(part: RingPart, secret: bytes) -> Iterator[bytes]:
    """A part of the ring as it is written: in pieces, so that little is lost where a file is cut."""

    @functools.cache  # a namespace and an image come again and again
    def digest(name: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(name, digest_size=8, key=secret).digest(), "little") if name else 0

    notes = iter(part.notes)
    while some := list(islice(notes, _PIECE_NOTES)):
        packed = [pack(note, digest) for note in some]
        yield _piece(
            part.serial, b"".join([record for record, _ in packed]), b"".join([marks for _, marks in packed]), secret
        )


def _piece(serial: int, records: bytes, marks: bytes, secret: bytes) -> bytes:
    marks = mixed(marks, secret)
    checksum = zlib.crc32(marks, zlib.crc32(records))
    return _PIECE.pack(_TAG, serial, len(records), len(marks), checksum) + records + marks


def write_whole(path: Path, parts: Sequence[bytes], folder: int | None = None) -> None:
    """Write a file of mode 0600 under another name, and give it its own when all is there. It replaces a recording.

    `folder`: the path's, open; else it is opened here, once. Whatever is put in its place meanwhile gets nothing. Of
    several writers of one path the last to end has it.

    Raises:
        RecordingError: it cannot be written, or what is there is no recording; nothing is left of it.
    """
    if not path.name or "\0" in str(path):
        raise RecordingError(f"cannot write a flight recording to {str(path)!r}; give the name of a file")
    with contextlib.ExitStack() as stack:
        try:
            if folder is None:
                folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, folder)
            _check_target(path, folder)
            _write_beside(path.name, parts, folder)
        except OSError as error:
            raise RecordingError(f"cannot write the flight recording {path}: {reason_of(error)}") from error


def _write_beside(name: str, parts: Sequence[bytes], folder: int) -> None:
    beside = f".{name}.{SYSTEM_CLOCK.random_bytes(4).hex()}.part"  # no other writer of this name has it
    with open_private(beside, folder) as file:
        try:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside, dir_fd=folder)
            raise


def _check_target(path: Path, folder: int) -> None:
    """Nobody loses a file by it, or what a link points to: who asks for a recording may not know what is there."""
    try:
        mode = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode) or not is_recording(path.name, folder):
        raise RecordingError(
            f"cannot write a flight recording to {str(path)!r}: what is there is none, and stays; give the name of "
            "a new file, or of a recording to replace"
        )


def open_private(name: str, folder: int) -> Any:
    """A new file of mode 0600 in an open folder, to write bytes to. Raises `OSError`, also where there is one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb")


@dataclass(frozen=True)
class FlightRecording:
    """A file that was read.

    Attributes:
        header: what the cache was, and why the file was written.
        pieces: the records and the marks of each piece, in order.
        note: what is missing at its end; empty where nothing is.
        num_bytes: of the file.
        version: of its form.
    """

    header: dict[str, Any]
    pieces: list[tuple[bytes, Marks]]
    note: str
    num_bytes: int
    version: int = VERSION

    @property
    def has_policies(self) -> bool:
        """Whether it would tell of a change of the eviction policy."""
        return self.version >= _FIRST_WITH_POLICIES

    def records(self) -> Iterator[Record]:
        """The records in order; those with marks have them as `marks`, an array of 32-bit numbers.

        Raises:
            RecordingError: a record that cannot be.
        """
        for number, (records, marks) in enumerate(self.pieces, start=1):
            at = 0
            try:
                for record in unpack(records):
                    if "num_marks" in record:
                        end = at + record["num_marks"]
                        if end > len(marks):
                            raise ValueError("it names more marks than it has")
                        record["marks"], at = marks[at:end], end
                    yield record
            except ValueError as error:
                raise RecordingError(f"piece {number} of the recording is damaged: {error}") from None

    def of_kind(self, *kinds: RecordKind) -> Iterator[Record]:
        """The records of some kinds."""
        return (record for record in self.records() if record["kind"] in kinds)


def is_recording(path: Path | str, folder: int | None = None) -> bool:
    """Whether a file begins as one does; False, too, where it cannot be read. `folder`: an open one that it is in."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_recording(path: Path) -> FlightRecording:
    """Read a file; of one that was cut, what is whole before its end.

    Raises:
        RecordingError: it cannot be read, is none, is of a newer version, or is damaged; the message says where.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {reason_of(error)}") from error
    if not data.startswith(MAGIC):
        raise RecordingError(
            f"{path} is no flight recording; `insight.write_flight` and `insight.record_folder` make one"
        )
    try:
        (version,) = _VERSION.unpack_from(data, len(MAGIC))
        if not 1 <= version <= VERSION:
            raise RecordingError(
                f"{path} is a flight recording of version {version}, and this program reads version {VERSION}; use the "
                "program that wrote it"
            )
        at = len(MAGIC) + _VERSION.size
        size, checksum = _HEAD.unpack_from(data, at)
    except struct.error:
        raise RecordingError(f"{path} ends inside its header; nothing of it can be read") from None
    at += _HEAD.size
    text = data[at : at + size]
    if len(text) < size:
        raise RecordingError(f"{path} ends inside its header; nothing of it can be read")
    if zlib.crc32(text) != checksum:
        raise RecordingError(f"{path} is damaged: the checksum of its header is not that of its bytes")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path} has a header that cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise RecordingError(f"{path} has a header that is no table")
    pieces, note = _pieces(path, data, at + size)
    return FlightRecording(header, pieces, note, len(data), version)


def _pieces(path: Path, data: bytes, at: int) -> tuple[list[tuple[bytes, Marks]], str]:
    pieces = list[tuple[bytes, Marks]]()
    while at < len(data):
        if len(data) - at < _PIECE.size:
            return pieces, _cut(path, len(data) - at)
        tag, _, num_records, num_marks, checksum = _PIECE.unpack_from(data, at)
        if tag != _TAG:
            raise RecordingError(f"{path} is damaged at byte {at}: no piece begins there")
        begin, end = at + _PIECE.size, at + _PIECE.size + num_records + num_marks
        if end > len(data):
            return pieces, _cut(path, len(data) - at)
        if zlib.crc32(data[begin:end]) != checksum:
            raise RecordingError(f"{path} is damaged behind byte {at}: the checksum is not that of its bytes")
        records, marks = data[begin : begin + num_records], data[begin + num_records : end]
        if len(marks) % 4:
            raise RecordingError(f"{path} is damaged behind byte {at}: half a mark")
        pieces.append((records, np.frombuffer(marks, "<u4")))
        at = end
    return pieces, ""


def _cut(path: Path, num_bytes: int) -> str:
    return f"{path} was cut: its last {num_bytes} bytes are no whole piece, and are left out"
