"""The contract of links: exact bytes or an error within the deadline, whatever becomes of the peer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.peer.link import LinkError, Pieces, open_endpoint
from tests.rigs.link_rig import MIB, SECONDS, Rig, changed, error_of, pieces
from tests.rigs.needs import need_mooncake, need_nixl

pytestmark = pytest.mark.processes

SOON = 1.0  # seconds of reads that are to be late

# Over its shared memory UCX reads without the peer, as shm does; over TCP it is what it is between hosts.
# Mooncake leaves a library's sockets and event descriptors behind, once for each process.
KINDS = ["shm", "nixl", "nixl-tcp", pytest.param("mooncake", marks=pytest.mark.leaks_allowed)]


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    kind, _, transport = request.param.partition("-")
    if kind == "nixl":
        need_nixl()
    if kind == "mooncake":
        need_mooncake()
    # UCX's InfiniBand modules bring a libnl of their own; beside that of the system, the process ends in its destructor
    # with a segmentation fault, tests and all.
    monkeypatch.setenv("UCX_MODULES", "^ib")
    if transport:
        monkeypatch.setenv("UCX_TLS", transport)
    rig = Rig(kind, is_network=bool(transport) or kind == "mooncake")
    yield rig
    rig.close()


# bytes


def test_random_pieces_arrive_byte_for_byte_and_nothing_else_is_touched(rig: Rig) -> None:
    """Pieces of 1 byte to 8 MiB at any offsets, between several segments of both sides."""
    rng = np.random.default_rng(3)
    peer = rig.peer(9 * MIB, 4097, 3 * MIB)
    link, locals_ = rig.link(12 * MIB, 10 * MIB)
    there = link.connect(peer.endpoint, SECONDS)
    for sizes in ([8 * MIB, 1, 4096], [*rng.integers(1, 40_000, 60), 2 * MIB], [1] * 50):
        expected, rows, free = [view.copy() for view in locals_], [], [0, 0]
        for size in map(int, sizes):
            remote = int(rng.choice([i for i, whole in enumerate(peer.sizes) if whole >= size]))
            local = 0 if free[0] + size + 50 < len(locals_[0]) else 1
            start, source = free[local] + int(rng.integers(50)), int(rng.integers(peer.sizes[remote] - size + 1))
            free[local] = start + size
            rows.append((local, start, remote, source, size))
            expected[local][start : start + size] = peer.content(remote)[source : source + size]
        order = rng.permutation(len(rows))
        assert link.read(there, pieces(*(rows[i] for i in order)), SECONDS) == sum(sizes)
        for view, wanted in zip(locals_, expected, strict=True):
            assert np.array_equal(view, wanted)


def test_thousands_of_small_pieces(rig: Rig) -> None:
    """More pieces than any library queues at a time, in reverse, so that none are neighbours."""
    num, size = 5000, 700
    peer = rig.peer(num * size)
    link, (local,) = rig.link(num * size)
    index = np.arange(num)
    none = np.zeros(num, np.int64)
    backwards = Pieces(none, index * size, none, (num - 1 - index) * size, none + size)
    assert link.read(link.connect(peer.endpoint, SECONDS), backwards, SECONDS) == num * size
    assert np.array_equal(local.reshape(num, size), peer.content(0).reshape(num, size)[::-1])


def test_no_pieces_and_pieces_of_no_bytes(rig: Rig) -> None:
    """Nothing to do is done."""
    peer = rig.peer(4096)
    link, _ = rig.link(4096)
    there = link.connect(peer.endpoint, SECONDS)
    assert link.read(there, pieces(), SECONDS) == 0
    assert link.read(there, pieces((0, 4096, 0, 4096, 0), (0, 3, 0, 3, 0)), SECONDS) == 0


def test_an_empty_segment_has_its_number(rig: Rig) -> None:
    """A segment of no bytes is named like any other, on both sides."""
    peer = rig.peer(0, 4096)
    link, (local,) = rig.link(4096)
    there = link.connect(peer.endpoint, SECONDS)
    assert link.read(there, pieces((0, 0, 1, 0, 4096)), SECONDS) == 4096
    assert np.array_equal(local, peer.content(1))
    assert error_of(link.read, there, pieces((0, 0, 0, 0, 1)), SECONDS).reason == "refused"


def test_two_peers_at_a_time(rig: Rig) -> None:
    """Each peer's bytes, and the other goes on when one is disconnected."""
    peers = [rig.peer(MIB, seed=seed) for seed in (1, 2)]
    link, (local,) = rig.link(MIB)
    here = [link.connect(peer.endpoint, SECONDS) for peer in peers]
    for index in (0, 1, 0):
        link.read(here[index], pieces((0, 0, 0, 0, MIB)), SECONDS)
        assert np.array_equal(local, peers[index].content(0))
    assert error_of(link.connect, peers[0].endpoint, SECONDS).reason == "refused"  # connected already
    link.disconnect(here[0])
    link.disconnect(here[0])
    assert error_of(link.read, here[0], pieces((0, 0, 0, 0, 1)), SECONDS).reason == "refused"
    link.read(here[1], pieces((0, 0, 0, 0, MIB)), SECONDS)
    assert np.array_equal(local, peers[1].content(0))
    again = link.connect(peers[0].endpoint, SECONDS)
    link.read(again, pieces((0, 0, 0, 0, MIB)), SECONDS)
    assert np.array_equal(local, peers[0].content(0))


def test_eight_threads_read_at_once(rig: Rig) -> None:
    """Threads share a link and its peer."""
    peer = rig.peer(8 * MIB)
    link, (local,) = rig.link(8 * MIB)
    there = link.connect(peer.endpoint, SECONDS)

    def read(index: int) -> int:
        rows = [(0, start, 0, start, 50_000) for start in range(index * MIB, index * MIB + 1_000_000, 50_001)]
        return sum(link.read(there, pieces(*rows), SECONDS) for _ in range(5))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [5 * 20 * 50_000] * 8
    wanted = peer.content(0)
    for index in range(8):
        for start in range(index * MIB, index * MIB + 1_000_000, 50_001):
            assert np.array_equal(local[start : start + 50_000], wanted[start : start + 50_000])


# what is refused


def test_a_piece_outside_its_segment_is_refused_and_nothing_is_read(rig: Rig) -> None:
    """One bad piece among good ones, on either side, also where offset and size wrap around."""
    peer = rig.peer(4096, 100)
    link, (local, _) = rig.link(4096, 50)
    there = link.connect(peer.endpoint, SECONDS)
    far = 2**63 - 1
    good = (0, 0, 0, 0, 10)
    for bad in (
        (0, 4095, 0, 0, 2),
        (1, 45, 0, 0, 6),
        (0, 0, 0, 4090, 7),
        (0, 0, 1, 0, 101),
        (2, 0, 0, 0, 1),
        (-1, 0, 0, 0, 1),
        (0, 0, 2, 0, 1),
        (0, 0, -1, 0, 1),
        (0, -1, 0, 0, 1),
        (0, 0, 0, -1, 1),
        (0, 0, 0, 0, -1),
        (0, far, 0, 0, far),
        (0, 0, 0, far, far),
        (0, 0, 0, 1, far),
        (0, far, 0, far, far),
        (-2, 0, 0, 0, 1),
        (0, 0, -2, 0, 1),
    ):
        error = error_of(link.read, there, pieces(good, bad), SECONDS)
        assert (error.reason, error.may_write_later) == ("refused", False), bad
        assert "piece 1 is" in str(error)
    assert not local.any()


def test_arrays_that_do_not_fit_together_are_refused(rig: Rig) -> None:
    """Of another dtype or length."""
    peer = rig.peer(4096)
    link, _ = rig.link(4096)
    there, good = link.connect(peer.endpoint, SECONDS), pieces((0, 0, 0, 0, 10))
    for bad in (
        good._replace(num_bytes=good.num_bytes.astype(np.int32)),
        good._replace(local_offset=np.zeros(2, np.int64)),
        good._replace(remote_offset=np.zeros((1, 1), np.int64)),
    ):
        assert error_of(link.read, there, bad, SECONDS).reason == "refused"


def test_memory_is_registered_once(rig: Rig) -> None:
    """A second time is refused."""
    link, _ = rig.link(4096)
    segment = SharedArray.create("more", 4096)
    assert error_of(link.register, [segment]).reason == "refused"
    segment.close()


def test_what_is_no_endpoint_is_refused(rig: Rig) -> None:
    """Noise, and endpoints that are cut or have a flipped bit: a library would make of them what it will."""
    rng = np.random.default_rng(5)
    link, _ = rig.link(4096)
    whole = link.endpoint()
    for _ in range(60):
        flipped = bytearray(whole)
        flipped[int(rng.integers(len(whole)))] ^= 1 << int(rng.integers(8))
        for damaged in (rng.bytes(int(rng.integers(200))), whole[: int(rng.integers(len(whole)))], bytes(flipped)):
            assert error_of(link.connect, damaged, SECONDS).reason == "refused"


def test_an_endpoint_of_another_kind_is_refused(rig: Rig) -> None:
    """Both sides are named in the message."""
    link, _ = rig.link(4096)
    error = error_of(link.connect, changed(link.endpoint(), rig.kind, {"kind": "other"}), SECONDS)
    assert error.reason == "refused"
    assert f"{rig.kind} link of process {os.getpid()}" in str(error) and "the other link of process" in str(error)


# the peer's end


def test_a_peer_that_was_killed_is_gone(rig: Rig) -> None:
    """Before a read and before a connection; no byte of such a read is left to come."""
    peer, other = rig.peer(MIB), rig.peer(MIB)
    link, _ = rig.link(MIB)
    there = link.connect(peer.endpoint, SECONDS)
    link.read(there, pieces((0, 0, 0, 0, MIB)), SECONDS)
    peer.kill()
    other.kill()
    for _ in range(2):
        error = error_of(link.read, there, pieces((0, 0, 0, 0, MIB)), SECONDS)
        assert error.reason == "gone"
    assert not error.may_write_later
    link.disconnect(there)
    assert error_of(link.connect, other.endpoint, SECONDS).reason in ("gone", "failed")
    assert error_of(link.connect, peer.endpoint, SECONDS).reason in ("gone", "failed")


def test_a_peer_that_is_killed_during_a_read_is_gone(rig: Rig) -> None:
    """Reads go on until one fails; the others brought the right bytes."""
    size = 64 * MIB
    peer = rig.peer(size)
    link, (local,) = rig.link(size)
    there, wanted = link.connect(peer.endpoint, SECONDS), peer.content(0)
    begun = threading.Event()

    def kill() -> None:
        begun.wait(SECONDS)
        peer.process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    rows = pieces(*((0, start, 0, size - MIB - start, MIB) for start in range(0, size, MIB)))
    deadline = time.monotonic() + SECONDS
    with pytest.raises(LinkError) as caught:
        while time.monotonic() < deadline:
            local[:] = 0
            begun.set()
            link.read(there, rows, SECONDS)
            assert np.array_equal(local.reshape(-1, MIB), wanted.reshape(-1, MIB)[::-1])
    killer.join(SECONDS)
    assert caught.value.reason == "gone"


def test_a_stopped_peer_is_read_without_it_or_late(rig: Rig) -> None:
    """Shared memory needs nobody's help; over a network the deadline ends the read, and bytes may come later."""
    peer = rig.peer(16 * MIB)
    link, (local,) = rig.link(16 * MIB)
    there, whole = link.connect(peer.endpoint, SECONDS), pieces((0, 0, 0, 0, 16 * MIB))
    peer.pause()
    if not rig.is_network:
        link.read(there, whole, SECONDS)
        assert np.array_equal(local, peer.content(0))
        return
    start = time.monotonic()
    error = error_of(link.read, there, whole, SOON)
    assert (error.reason, error.may_write_later) == ("late", True)
    assert SOON <= time.monotonic() - start < SOON + SECONDS
    error = error_of(link.connect, rig_paused(rig), SOON)
    assert (error.reason, error.may_write_later) == ("late", False)
    peer.resume()
    assert link.read(there, whole, SECONDS) == 16 * MIB
    assert np.array_equal(local, peer.content(0))


def rig_paused(rig: Rig) -> bytes:
    """The endpoint of a new peer that is stopped."""
    peer = rig.peer(4096)
    peer.pause()
    return peer.endpoint


def test_a_restarted_peer_is_another(rig: Rig) -> None:
    """The old one's connection and endpoint stay dead, the new one's bytes are its own."""
    old = rig.peer(MIB, seed=1)
    link, (local,) = rig.link(MIB)
    there, whole = link.connect(old.endpoint, SECONDS), pieces((0, 0, 0, 0, MIB))
    link.read(there, whole, SECONDS)
    old.kill()
    new = rig.peer(MIB, seed=2)
    here = link.connect(new.endpoint, SECONDS)
    assert error_of(link.read, there, whole, SECONDS).reason in ("gone", "failed")
    link.disconnect(there)
    assert error_of(link.connect, old.endpoint, SECONDS).reason in ("gone", "failed")
    link.read(here, whole, SECONDS)
    assert np.array_equal(local, new.content(0))


def test_another_process_in_the_peers_place_is_noticed(rig: Rig) -> None:
    """It answers where the peer did: under its number (shm), or at its port and address (the others)."""
    peer = rig.peer(MIB)
    link, _ = rig.link(MIB)
    whole = pieces((0, 0, 0, 0, MIB))
    if rig.kind == "shm":
        there = open_endpoint(peer.endpoint, rig.kind)
        for fields in ({"started": there.started - 1}, {"inodes": (there.inodes[0] + 1,)}, {"inodes": ()}):
            false = changed(peer.endpoint, rig.kind, fields)
            assert error_of(link.connect, false, SECONDS).reason == "gone"
        return
    here = link.connect(peer.endpoint, SECONDS)
    link.read(here, whole, SECONDS)
    peer.do("become")
    error = error_of(link.read, here, whole, SECONDS)
    assert (error.reason, error.may_write_later) == ("gone", False)
    link.disconnect(here)
    assert error_of(link.connect, peer.endpoint, SECONDS).reason == "gone"
    stranger = changed(peer.endpoint, rig.kind, {"incarnation": bytes(16)})
    # Mooncake goes by the name alone, and would look where the first process had its memory
    assert error_of(link.connect, stranger, SECONDS).reason == ("refused" if rig.kind == "mooncake" else "gone")
