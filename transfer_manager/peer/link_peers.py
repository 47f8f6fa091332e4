"""The peers that a link is connected to, shared by receives."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.transfer_manager.peer.link import Link, LinkError, Peer

_IDLE_SECONDS = 10.0  # a mapping of a peer that has ended keeps its memory alive


@dataclass
class _Entry:
    peer: Peer
    num_users: int
    idle_since: float = 0.0

    def is_idle(self, now: float) -> bool:
        """Nobody has used it for a while."""
        return not self.num_users and now - self.idle_since > _IDLE_SECONDS


class LinkPeers:
    """Connecting costs more than a small read, so a connection outlives the receive that made it, for a while.

    Any thread; connects are one at a time.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()  # of the entries
        self._connecting = threading.Lock()  # held as long as a connect or disconnect takes
        self._entries: dict[bytes, _Entry] = {}

    def acquire(self, endpoint: bytes, timeout_seconds: float) -> Peer:
        """The peer, until `release`. Raises `LinkError`."""
        deadline = SYSTEM_CLOCK.now() + timeout_seconds
        if (peer := self._use(endpoint)) is not None:
            return peer
        if not self._connecting.acquire(timeout=timeout_seconds):
            raise LinkError("another connect takes too long", "late")
        try:
            if (peer := self._use(endpoint)) is not None:  # who held the lock has connected to it
                return peer
            peer = self._link.connect(endpoint, max(0.0, deadline - SYSTEM_CLOCK.now()))
            with self._lock:
                self._entries[endpoint] = _Entry(peer, 1)
            return peer
        finally:
            self._connecting.release()

    def _use(self, endpoint: bytes) -> Peer | None:
        with self._lock:
            entry = self._entries.get(endpoint)
            if entry is not None:
                entry.num_users += 1
            return entry.peer if entry is not None else None

    def release(self, peer: Peer) -> None:
        """One user less."""
        with self._lock:
            entry = next(each for each in self._entries.values() if each.peer is peer)
            entry.num_users -= 1
            entry.idle_since = SYSTEM_CLOCK.now()

    def drop_idle(self) -> bool:
        """Disconnect from those that nobody has used for a while; whether any is left. Never waits for a connect."""
        if not self._connecting.acquire(blocking=False):
            return True
        try:
            now = SYSTEM_CLOCK.now()
            with self._lock:
                idle = [e for e, each in self._entries.items() if each.is_idle(now)]
                gone = [self._entries.pop(endpoint).peer for endpoint in idle]
                num_left = len(self._entries)
            for peer in gone:
                self._link.disconnect(peer)
            return num_left > 0
        finally:
            self._connecting.release()
