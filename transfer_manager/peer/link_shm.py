"""A link between processes of one user on one host: the peer's memory is mapped and copied from."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
from collections.abc import Iterator, Sequence

import numpy as np

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.process_start import started_ticks
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.peer.link import (
    INCARNATION_BYTES,
    Bytes,
    Endpoint,
    LinkError,
    Peer,
    Pieces,
    boot_id,
    checked,
    flat_views,
    open_endpoint,
    seal_endpoint,
    this_process,
)

_CHECK_BYTES = 16 * 2**20  # the clock is looked at after copying so many


class _ShmPeer(Peer):
    """Mappings of a living process's segments, read-only."""

    def __init__(self, endpoint: Endpoint, process_fd: int) -> None:
        super().__init__(endpoint)
        self.sources: list[Bytes] = []
        self._process_fd = process_fd

    def check_alive(self) -> None:
        poll = select.poll()  # one each time: a poll object serves one thread
        poll.register(self._process_fd, select.POLLIN)
        if poll.poll(0):
            raise LinkError(f"the {self.endpoint} is gone: its process has ended", "gone")

    def close(self) -> None:
        self.sources = []
        os.close(self._process_fd)


class ShmLink:
    """See `Link`. Nothing is asked of the peer, so a stopped or busy one is read as fast as any.

    The peer's descriptors are opened and mapped for reading only. A page that its owner has given back to the system
    (`SharedArray.release`) reads as zeros; segments never shrink, so no access can miss.
    """

    kind = "shm"

    def __init__(self) -> None:
        self._incarnation = SYSTEM_CLOCK.random_bytes(INCARNATION_BYTES)
        self._segments: tuple[SharedArray, ...] = ()
        self._views: list[Bytes] = []
        self._peers: set[_ShmPeer] = set()

    def register(self, segments: Sequence[SharedArray]) -> None:
        """See `Link`."""
        if self._segments:
            raise LinkError(f"{len(self._segments)} segments are registered already; open another link", "refused")
        self._segments, self._views = tuple(segments), flat_views(segments)

    def endpoint(self) -> bytes:
        """See `Link`."""
        here = this_process(
            self.kind,
            self._incarnation,
            [len(view) for view in self._views],
            handles=tuple(segment.fd for segment in self._segments),
            inodes=tuple(os.fstat(segment.fd).st_ino for segment in self._segments),
            started=started_ticks(os.getpid()),
        )
        return seal_endpoint(here)

    def connect(self, endpoint: bytes, timeout_seconds: float) -> Peer:  # noqa: ARG002  nothing here waits
        """See `Link`."""
        there = open_endpoint(endpoint, self.kind, self._peers)
        if there.boot_id != boot_id():
            here = this_process(self.kind, self._incarnation, ())
            raise LinkError(
                f"the {there} (boot {there.boot_id}) and process {here.pid} on {here.host} (boot {here.boot_id}) "
                "share no memory; use another kind of link between hosts",
                "refused",
            )
        try:
            peer = _ShmPeer(there, os.pidfd_open(there.pid))
        except ProcessLookupError as error:
            raise LinkError(f"the {there} is gone: there is no such process", "gone") from error
        with contextlib.ExitStack() as undo:
            undo.callback(peer.close)
            peer.check_alive()
            if started_ticks(there.pid) != there.started:
                raise LinkError(f"the {there} is gone: another process has its number", "gone")
            peer.sources = [_mapped(there, index) for index in range(len(there.handles))]
            # A process that ended meanwhile may have had its number, and with it /proc/PID, taken over. One that
            # still lives had it all the time.
            peer.check_alive()
            undo.pop_all()
        self._peers.add(peer)
        return peer

    def read(self, peer: Peer, pieces: Pieces, timeout_seconds: float) -> int:
        """See `Link`. NumPy copies, without the interpreter's lock; `may_write_later` is never set."""
        deadline = SYSTEM_CLOCK.now() + timeout_seconds
        if not isinstance(peer, _ShmPeer) or peer not in self._peers:
            raise LinkError(f"the {peer.endpoint} is not connected", "refused")
        pieces = checked(pieces, [len(view) for view in self._views], peer.endpoint)
        peer.check_alive()
        unchecked, views, sources = 0, self._views, peer.sources
        for local, start, remote, source, num_bytes in _cut(pieces):
            views[local][start : start + num_bytes] = sources[remote][source : source + num_bytes]
            unchecked += num_bytes
            if unchecked >= _CHECK_BYTES:
                _check_time(peer, deadline, timeout_seconds)
                unchecked = 0
        _check_time(peer, deadline, timeout_seconds)
        peer.check_alive()  # its death may have been that of a process that was still writing
        return int(pieces.num_bytes.sum())

    def disconnect(self, peer: Peer) -> None:
        """See `Link`."""
        if isinstance(peer, _ShmPeer) and peer in self._peers:
            self._peers.remove(peer)
            peer.close()

    def close(self) -> None:
        """See `Link`."""
        for peer in tuple(self._peers):
            self.disconnect(peer)
        self._segments, self._views = (), []


def _cut(pieces: Pieces) -> Iterator[tuple[int, int, int, int, int]]:
    """The pieces one by one, large ones in several."""
    rows = zip(*(array.tolist() for array in pieces), strict=True)
    if not len(pieces.num_bytes) or pieces.num_bytes.max() <= _CHECK_BYTES:
        yield from rows
        return
    for local, start, remote, source, num_bytes in rows:
        for done in range(0, num_bytes, _CHECK_BYTES):
            yield local, start + done, remote, source + done, min(_CHECK_BYTES, num_bytes - done)


def _check_time(peer: Peer, deadline: float, timeout_seconds: float) -> None:
    if SYSTEM_CLOCK.now() > deadline:
        raise LinkError(f"a read from the {peer.endpoint} took more than {timeout_seconds} s", "late")


def _mapped(there: Endpoint, index: int) -> Bytes:
    """A segment of the peer as read-only bytes; raises `LinkError`."""
    num_bytes, number = there.segment_bytes[index], there.handles[index]
    try:
        fd = os.open(f"/proc/{there.pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as error:
        raise LinkError(f"the {there} belongs to another user: {error}", "refused") from error
    except OSError as error:
        raise LinkError(f"the {there} has closed segment {index} (descriptor {number}): {error}", "gone") from error
    try:
        status = os.fstat(fd)
        if there.inodes[index : index + 1] != (status.st_ino,) or status.st_size < num_bytes:
            raise LinkError(f"descriptor {number} of the {there} is no longer segment {index}", "gone")
        if not num_bytes:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)
