"""The peers that a link is connected to, shared by receives."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from transfer_manager.peer.link import Link, LinkError, Peer

_IDLE_SECONDS = 10.0  # a mapping of a peer that has ended keeps its memory alive


@dataclass
class _Entry:
    peer: Peer
    num_users: int
    idle_since: float = 0.0


class LinkPeers:
    """Connecting costs more than a small read, so a connection outlives the receive that made it, for a while.

    Any thread; connects are one at a time.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}

    def acquire(self, endpoint: bytes, timeout_seconds: float) -> Peer:
        """The peer, until `release`. Raises `LinkError`."""
        deadline = time.monotonic() + timeout_seconds
        if not self._lock.acquire(timeout=timeout_seconds):
            raise LinkError("another connect takes too long", "late")
        try:
            entry = self._entries.get(endpoint)
            if entry is None:
                peer = self._link.connect(endpoint, max(0.0, deadline - time.monotonic()))
                entry = self._entries[endpoint] = _Entry(peer, 0)
            entry.num_users += 1
            return entry.peer
        finally:
            self._lock.release()

    def release(self, peer: Peer) -> None:
        """One user less."""
        with self._lock:
            entry = next(each for each in self._entries.values() if each.peer is peer)
            entry.num_users -= 1
            entry.idle_since = time.monotonic()

    def drop_idle(self) -> bool:
        """Disconnect from those that nobody has used for a while; whether any is left."""
        now = time.monotonic()
        with self._lock:
            for endpoint, entry in list(self._entries.items()):
                if not entry.num_users and now - entry.idle_since > _IDLE_SECONDS:
                    del self._entries[endpoint]
                    self._link.disconnect(entry.peer)
            return bool(self._entries)
