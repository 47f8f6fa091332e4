"""Connections that receives share: made once, kept for a while, and in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.transfer_manager.peer.link import LinkError, Peer, this_process
from fastdeploy_cache.transfer_manager.peer.link_peers import LinkPeers

SECONDS = 20.0


class SlowLink:
    """Connects when it is let to; notes what it was asked."""

    def __init__(self) -> None:
        self.connected: list[bytes] = []
        self.disconnected: list[Peer] = []
        self.timeouts: list[float] = []
        self.may_connect = threading.Event()
        self.is_connecting = threading.Event()
        self.may_connect.set()
        self.error: LinkError | None = None

    def connect(self, endpoint: bytes, timeout_seconds: float) -> Peer:
        self.timeouts.append(timeout_seconds)
        self.is_connecting.set()
        assert self.may_connect.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.connected.append(endpoint)
        return Peer(this_process("slow", bytes(16), ()))

    def disconnect(self, peer: Peer) -> None:
        self.disconnected.append(peer)


@pytest.fixture
def link() -> SlowLink:
    return SlowLink()


@pytest.fixture
def peers(link: SlowLink) -> LinkPeers:
    return LinkPeers(link)  # type: ignore[arg-type]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock that `LinkPeers` looks at."""
    now = [1000.0]
    monkeypatch.setattr(SYSTEM_CLOCK, "now", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_peer_is_connected_to_once(peers: LinkPeers, link: SlowLink) -> None:
    """However many want it, at a time or one after the other."""
    first = peers.acquire(b"a", 1.0)
    assert peers.acquire(b"a", 1.0) is first
    assert peers.acquire(b"b", 1.0) is not first
    peers.release(first)
    peers.release(first)
    assert peers.acquire(b"a", 1.0) is first
    assert link.connected == [b"a", b"b"] and not link.disconnected


def test_threads_that_come_together_share_one_connection(
    peers: LinkPeers, link: SlowLink, threads: ThreadPoolExecutor
) -> None:
    """The later ones wait for the first one's connect."""
    link.may_connect.clear()
    found = [threads.submit(peers.acquire, b"a", SECONDS) for _ in range(4)]
    assert link.is_connecting.wait(SECONDS)
    link.may_connect.set()
    assert len({each.result(SECONDS) for each in found}) == 1
    assert link.connected == [b"a"]


def test_what_nobody_uses_is_left_after_a_while(
    peers: LinkPeers, link: SlowLink, later: Callable[[float], None]
) -> None:
    """Counted from its last use; what somebody uses never."""
    used, idle = peers.acquire(b"used", 1.0), peers.acquire(b"idle", 1.0)
    for _ in range(3):
        peers.release(idle)
        later(6.0)
        assert peers.drop_idle()
        assert peers.acquire(b"idle", 1.0) is idle
    peers.release(idle)
    later(10.1)
    assert peers.drop_idle()
    assert link.disconnected == [idle]
    peers.release(used)
    later(10.1)
    assert not peers.drop_idle()
    assert link.disconnected == [idle, used]
    assert peers.acquire(b"idle", 1.0) is not idle


def test_a_connect_that_fails_leaves_nothing(peers: LinkPeers, link: SlowLink) -> None:
    """The next one tries anew."""
    link.error = LinkError("no way", "gone")
    with pytest.raises(LinkError, match="no way"):
        peers.acquire(b"a", 1.0)
    assert not peers.drop_idle()
    link.error = None
    assert peers.acquire(b"a", 1.0) in (entry.peer for entry in peers._entries.values())


def test_who_waits_too_long_for_anothers_connect_is_late(
    peers: LinkPeers, link: SlowLink, threads: ThreadPoolExecutor
) -> None:
    """It says so within its own time."""
    link.may_connect.clear()
    first = threads.submit(peers.acquire, b"a", SECONDS)
    assert link.is_connecting.wait(SECONDS)
    try:
        with pytest.raises(LinkError) as caught:
            peers.acquire(b"a", 0.05)
        assert caught.value.reason == "late" and not caught.value.may_write_later
    finally:
        link.may_connect.set()
    assert first.result(SECONDS) is peers.acquire(b"a", 1.0)


def test_the_time_for_a_connect_is_what_is_left(peers: LinkPeers, link: SlowLink) -> None:
    """Never more than was given."""
    peers.acquire(b"a", 3.0)
    assert 0 < link.timeouts[0] <= 3.0


def test_a_connect_that_hangs_holds_up_nobody_else(
    peers: LinkPeers, link: SlowLink, threads: ThreadPoolExecutor
) -> None:
    """The process's own thread looks for idle peers all the time, and other receives end theirs meanwhile."""
    other = peers.acquire(b"other", 1.0)
    link.may_connect.clear()
    link.is_connecting.clear()
    first = threads.submit(peers.acquire, b"hangs", SECONDS)
    assert link.is_connecting.wait(SECONDS)
    calls: list[Future[Any]] = [threads.submit(peers.drop_idle), threads.submit(peers.release, other)]
    try:
        for call in calls:
            call.result(1.0)
    finally:
        link.may_connect.set()
        first.result(SECONDS)
