"""What every link is: its protocol, its records, and the checks that come before any byte is read.

Whoever owns the destination does the reading: a peer is never asked to write into our memory, so killing and reaping
our own process ends every write into our blocks. Between hosts this rests on a network that is trusted: the libraries
ask nobody who they are.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from fastdeploy_cache.errors import CodecError, TransferError
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.shared_array import SharedArray

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Int64Array = np.ndarray[Any, np.dtype[np.int64]]
Reason = Literal["gone", "late", "refused", "failed"]
INCARNATION_BYTES = 16
_DIGEST_BYTES = 8


class LinkError(TransferError):
    """A link could not do what was asked; nothing of a read counts, though some bytes may have been copied.

    Attributes:
        reason: "gone": the peer's process has ended, or has given its memory up; "late": the deadline has passed;
            "refused": what was asked cannot be, and asking again will not help; "failed": the library says no more.
        may_write_later: bytes of this read may still arrive in local memory. The blocks are safe to use only after
            this process has been killed and reaped.
    """

    def __init__(self, message: str, reason: Reason, *, may_write_later: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.may_write_later = may_write_later


_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the memory that a process has registered with its link; `bytes` of it go by any channel.

    `incarnation` is random: a process that is started again under the same name is another peer.
    `handles` name the segments, in order: descriptors of process `pid` (shm), addresses in it (others).
    `inodes` and `started` (shm) tell these descriptors and this process from later ones with the same numbers.
    `badge` is the address of the incarnation in the peer's own memory, `contact` what the library has to know (others).
    """

    kind: str
    incarnation: Annotated[bytes, msgspec.Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    host: str
    boot_id: str
    segment_bytes: tuple[_Size, ...]
    handles: tuple[_Size, ...]
    inodes: tuple[int, ...] = ()
    started: int = 0
    badge: _Size = 0
    contact: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} link of process {self.pid} on {self.host}"


class Pieces(NamedTuple):
    """What to read: int64 arrays of equal length, a piece at each index; offsets and sizes in bytes."""

    local_segment: Int64Array
    local_offset: Int64Array
    remote_segment: Int64Array
    remote_offset: Int64Array
    num_bytes: Int64Array


class Peer:
    """Another process's registered memory, as a link sees it. Made by `Link.connect`, of use to that link alone."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint


class Link(Protocol):
    """Memory of this process that others read, and reads out of theirs.

    `read` may be called by several threads at a time, all else by one. `disconnect` and `close` wait for nobody: no
    read of that peer may be under way, save one that was late.
    """

    kind: str

    def register(self, segments: Sequence[SharedArray]) -> None:
        """Name the memory that peers may read and that reads go into: once, before anything else.

        Raises:
            LinkError: memory was registered before, or the library does not take it.
        """

    def endpoint(self) -> bytes:
        """What peers `connect` with. It is good until this process ends or closes the link."""

    def connect(self, endpoint: bytes, timeout_seconds: float) -> Peer:
        """Reach another process's memory, once: `disconnect` comes before the same endpoint again.

        Raises:
            LinkError: it is of another kind, on another host (shm), gone, connected already, or no endpoint at all.
        """

    def read(self, peer: Peer, pieces: Pieces, timeout_seconds: float) -> int:
        """Copy the peer's pieces into local ones and return the bytes. All pieces have arrived, or it raises.

        Local pieces must not overlap. What the peer writes meanwhile is torn: users agree on who reads when.

        Raises:
            LinkError: see there; "refused" for a piece outside its segment, before anything is read.
        """

    def disconnect(self, peer: Peer) -> None:
        """Let go of the peer's memory. Safe to call twice."""

    def close(self) -> None:
        """Disconnect from every peer and end the link; registered memory stays valid. Safe to call twice."""


def this_process(kind: str, incarnation: bytes, segment_bytes: Sequence[int], **way: Any) -> Endpoint:
    """An endpoint of this process; `way` is what the link adds: how to get there."""
    return Endpoint(
        kind=kind,
        incarnation=incarnation,
        pid=os.getpid(),
        host=socket.gethostname(),
        boot_id=boot_id(),
        segment_bytes=tuple(segment_bytes),
        **{"handles": (), **way},
    )


def boot_id() -> str:
    """Names this host and this run of its kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def seal_endpoint(endpoint: Endpoint) -> bytes:
    """The endpoint as bytes, a digest in front: a flipped bit in a contact ends in a segmentation fault inside NIXL."""
    body = encode(endpoint)
    return _digest(body) + body


def open_endpoint(data: bytes, kind: str, connected: Collection[Peer] = ()) -> Endpoint:
    """Raises `LinkError` ("refused") unless `data` is a whole endpoint of this kind, and of none of these peers."""
    body = data[_DIGEST_BYTES:]
    if data[:_DIGEST_BYTES] != _digest(body):
        raise LinkError(f"{len(data)} bytes are no endpoint of a link, or are damaged", "refused")
    try:
        endpoint: Endpoint = decode(body, Endpoint)
    except CodecError as error:
        raise LinkError(f"{len(data)} bytes are no endpoint of a link: {error}", "refused") from error
    if endpoint.kind != kind:
        raise LinkError(f"a {kind} link of process {os.getpid()} cannot reach the {endpoint}: use one kind", "refused")
    if len(endpoint.handles) != len(endpoint.segment_bytes):
        sizes = f"{len(endpoint.segment_bytes)} segments by {len(endpoint.handles)} handles"
        raise LinkError(f"the endpoint of the {endpoint} names {sizes}", "refused")
    if any(peer.endpoint.incarnation == endpoint.incarnation for peer in connected):
        raise LinkError(f"the {endpoint} is connected already: disconnect first", "refused")
    return endpoint


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def flat_views(segments: Sequence[SharedArray]) -> list[Bytes]:
    """Each segment as bytes; an empty one, too."""
    return [s.view(np.uint8, (s.num_bytes,)) if s.num_bytes else np.empty(0, np.uint8) for s in segments]


def checked(pieces: Pieces, local_bytes: Sequence[int], peer: Endpoint) -> Pieces:
    """The pieces that hold any bytes, neighbours on both sides joined, once all are known to lie in their segments.

    Raises:
        LinkError: "refused": arrays that do not fit together, or a piece outside its segment.
    """
    num = len(pieces.num_bytes)
    if any(array.dtype != np.int64 or array.shape != (num,) for array in pieces):
        shapes = ", ".join(f"{array.dtype}{array.shape}" for array in pieces)
        raise LinkError(f"pieces are int64 arrays of equal length, not {shapes}", "refused")
    _check_side("local", pieces.local_segment, pieces.local_offset, pieces.num_bytes, local_bytes)
    _check_side(f"{peer}:", pieces.remote_segment, pieces.remote_offset, pieces.num_bytes, peer.segment_bytes)
    return _joined(pieces)


def _check_side(
    side: str, segments: Int64Array, offsets: Int64Array, num_bytes: Int64Array, segment_bytes: Sequence[int]
) -> None:
    sizes = np.asarray([*segment_bytes, 0], np.int64)  # the last is for pieces of no segment
    known = (segments >= 0) & (segments < len(segment_bytes))
    rest = sizes[np.where(known, segments, -1)] - offsets
    # Compared with what is left behind the offset: the sum of two large numbers would wrap and pass.
    inside = known & (offsets >= 0) & (num_bytes >= 0) & (num_bytes <= rest)
    if not inside.all():
        index = int(np.argmin(inside))
        raise LinkError(
            f"{side} piece {index} is {num_bytes[index]} bytes at {offsets[index]} of segment {segments[index]}; "
            f"segments have {list(segment_bytes)} bytes",
            "refused",
        )


def _joined(pieces: Pieces) -> Pieces:
    """A library's cost for each piece is that of copying some 10 KiB; layers of a block often lie side by side."""
    pieces = Pieces(*(array[pieces.num_bytes > 0] for array in pieces))
    if not len(pieces.num_bytes):
        return pieces
    local_end, remote_end = pieces.local_offset + pieces.num_bytes, pieces.remote_offset + pieces.num_bytes
    goes_on = (
        (pieces.local_segment[1:] == pieces.local_segment[:-1])
        & (pieces.remote_segment[1:] == pieces.remote_segment[:-1])
        & (pieces.local_offset[1:] == local_end[:-1])
        & (pieces.remote_offset[1:] == remote_end[:-1])
    )
    firsts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    sizes = np.add.reduceat(pieces.num_bytes, firsts)
    return Pieces(*(array[firsts] for array in pieces))._replace(num_bytes=sizes)
