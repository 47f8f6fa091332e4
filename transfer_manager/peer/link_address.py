"""Links over libraries that read a remote process's memory by its address."""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.peer.link import (
    INCARNATION_BYTES,
    Bytes,
    Endpoint,
    Int64Array,
    LinkError,
    Peer,
    Pieces,
    checked,
    flat_views,
    open_endpoint,
    seal_endpoint,
    this_process,
)

MAX_READS = 63  # at a time
_SLOT_BYTES = 64
_SPIN_SECONDS = 100e-6  # as long as the shortest sleep takes
_FIRST_NAP_SECONDS, _LAST_NAP_SECONDS = 20e-6, 1e-3


class ReadEngine(Protocol):
    """A library that moves bytes. Every method raises `LinkError`; deadlines are of `time.monotonic`."""

    def register(self, memory: Bytes) -> None:
        """Let peers read it and reads go into it."""

    def contact(self) -> bytes:
        """What peers need to reach this process."""

    def reach(self, there: Endpoint, deadline: float) -> None:
        """Prepare for reads from there; that it answers is found out by the first."""

    def fetch(
        self, there: Endpoint, local: Int64Array, remote: Int64Array, num_bytes: Int64Array, deadline: float
    ) -> None:
        """Copy from addresses there to addresses here; all of it has arrived on return. Any thread."""

    def leave(self, there: Endpoint) -> None:
        """Undo `reach`; says nothing where the peer is gone."""

    def close(self) -> None:
        """Give everything back."""


class AddressLink:
    """See `Link`. Up to `MAX_READS` reads at a time.

    An address means nothing to a process that was started again under the same name and port. So each process keeps
    its incarnation, a random number, in a *badge* that is registered too, and a read ends by reading the badge: it is
    still there, so it was there all the time, and every byte came from that process. The order matters: a badge that
    is read first could be the old process's and the data the new one's.
    """

    def __init__(self, kind: str, engine: ReadEngine) -> None:
        self.kind = kind
        self._engine = engine
        self._views: list[Bytes] = []
        self._peers: set[Peer] = set()
        self._incarnation = SYSTEM_CLOCK.random_bytes(INCARNATION_BYTES)
        # Libraries register whole pages, so the badge has one of its own. Peers' badges are read into its other slots.
        self._page = np.frombuffer(mmap.mmap(-1, (1 + MAX_READS) * _SLOT_BYTES), np.uint8)
        self._page[:INCARNATION_BYTES] = np.frombuffer(self._incarnation, np.uint8)
        self._free_slots: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in range(1, MAX_READS + 1):
            self._free_slots.put(slot)

    def register(self, segments: Sequence[SharedArray]) -> None:
        """See `Link`."""
        if self._views:
            raise LinkError(f"{len(self._views)} segments are registered already; open another link", "refused")
        self._views = flat_views(segments)
        for memory in (*self._views, self._page):
            if len(memory):
                self._engine.register(memory)

    def endpoint(self) -> bytes:
        """See `Link`."""
        here = this_process(
            self.kind,
            self._incarnation,
            [len(view) for view in self._views],
            handles=tuple(view.ctypes.data for view in self._views),
            badge=self._page.ctypes.data,
            contact=self._engine.contact(),
        )
        return seal_endpoint(here)

    def connect(self, endpoint: bytes, timeout_seconds: float) -> Peer:
        """See `Link`."""
        deadline = SYSTEM_CLOCK.now() + timeout_seconds
        peer = Peer(open_endpoint(endpoint, self.kind, self._peers))
        self._engine.reach(peer.endpoint, deadline)
        try:
            self._check_badge(peer.endpoint, deadline)
        except LinkError:
            self._engine.leave(peer.endpoint)
            raise
        self._peers.add(peer)
        return peer

    def read(self, peer: Peer, pieces: Pieces, timeout_seconds: float) -> int:
        """See `Link`."""
        deadline = SYSTEM_CLOCK.now() + timeout_seconds
        if peer not in self._peers:
            raise LinkError(f"the {peer.endpoint} is not connected", "refused")
        there = peer.endpoint
        pieces = checked(pieces, [len(view) for view in self._views], there)
        if not len(pieces.num_bytes):
            return 0
        local = np.asarray([view.ctypes.data for view in self._views], np.int64)[pieces.local_segment]
        remote = np.asarray(there.handles, np.int64)[pieces.remote_segment]
        self._engine.fetch(
            there, local + pieces.local_offset, remote + pieces.remote_offset, pieces.num_bytes, deadline
        )
        self._check_badge(there, deadline)
        return int(pieces.num_bytes.sum())

    def disconnect(self, peer: Peer) -> None:
        """See `Link`."""
        if peer in self._peers:
            self._peers.remove(peer)
            self._engine.leave(peer.endpoint)

    def close(self) -> None:
        """See `Link`."""
        for peer in tuple(self._peers):
            self.disconnect(peer)
        self._engine.close()
        self._views = []

    def _check_badge(self, there: Endpoint, deadline: float) -> None:
        """Raise `LinkError` unless the process behind this endpoint is the one that made it."""
        try:
            slot = self._free_slots.get(timeout=max(0.0, deadline - SYSTEM_CLOCK.now()))
        except queue.Empty:
            raise LinkError(f"{MAX_READS} reads are under way; the {there} has to wait", "late") from None
        badge = self._page[slot * _SLOT_BYTES :][:INCARNATION_BYTES]
        badge[:] = 0
        sizes = np.asarray([INCARNATION_BYTES], np.int64)
        try:
            self._engine.fetch(
                there, np.asarray([badge.ctypes.data], np.int64), np.asarray([there.badge], np.int64), sizes, deadline
            )
        except LinkError as error:
            if error.may_write_later:  # into the slot alone, which nobody gets again
                raise LinkError(str(error), error.reason) from error
            self._free_slots.put(slot)
            raise
        found = badge.tobytes()
        self._free_slots.put(slot)
        if found != there.incarnation:
            raise LinkError(f"the {there} is gone: another process answers in its place", "gone")


def wait_until(is_done: Callable[[], bool], deadline: float) -> bool:
    """Whether it was done before the deadline.

    Asks without a pause at first, then sleeps between questions, ever longer: these libraries have nothing to wait on,
    only states to ask for, and their own blocking calls spin on a core for as long as it takes.
    """
    nap_seconds, spin_end = _FIRST_NAP_SECONDS, SYSTEM_CLOCK.now() + _SPIN_SECONDS
    while not is_done():
        now = SYSTEM_CLOCK.now()
        if now >= deadline:
            return False
        if now > spin_end:
            SYSTEM_CLOCK.sleep(min(nap_seconds, deadline - now))
            nap_seconds = min(2 * nap_seconds, _LAST_NAP_SECONDS)
    return True
