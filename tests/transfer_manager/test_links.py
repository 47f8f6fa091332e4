"""What only one kind of link has, and what all do before they read."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.transfer_manager.peer import link_shm, open_link
from fastdeploy_cache.transfer_manager.peer.link import Endpoint, Pieces, checked
from tests.rigs.link_rig import MIB, SECONDS, Rig, Row, changed, error_of, pieces


def test_a_link_of_no_known_kind() -> None:
    """Says which kinds there are."""
    error = error_of(open_link, "pigeon", {})
    assert error.reason == "refused" and "shm, nixl, mooncake" in str(error)


@pytest.mark.parametrize(("kind", "package"), [("nixl", "nixl-cu12"), ("mooncake", "mooncake-transfer-engine")])
def test_a_missing_library_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    error = error_of(open_link, kind, {})
    assert error.reason == "refused" and f"pip install {'--no-deps ' * (kind == 'nixl')}{package}" in str(error)


@pytest.fixture
def shm() -> Iterator[Rig]:
    rig = Rig("shm")
    yield rig
    rig.close()


def test_shared_memory_of_another_host_is_refused(shm: Rig) -> None:
    """Both hosts are named."""
    link, _ = shm.link(4096)
    error = error_of(link.connect, changed(link.endpoint(), "shm", {"host": "far", "boot_id": "other"}), SECONDS)
    assert error.reason == "refused"
    assert "far (boot other)" in str(error) and os.uname().nodename in str(error)


@pytest.mark.processes
def test_released_memory_reads_as_zeros_and_dropped_memory_is_gone(shm: Rig) -> None:
    """Pages that the owner gave back end nobody; descriptors that it closed cannot be connected to."""
    peer = shm.peer(MIB)
    link, (local,) = shm.link(MIB)
    there = link.connect(peer.endpoint, SECONDS)
    local[:] = 1
    peer.do("release")
    link.read(there, pieces((0, 0, 0, 0, MIB)), SECONDS)
    assert not local.any()
    peer.do("drop")
    other, _ = shm.link(MIB)
    assert error_of(other.connect, peer.endpoint, SECONDS).reason == "gone"
    link.read(there, pieces((0, 0, 0, 0, MIB)), SECONDS)  # the mapping lives on


@pytest.mark.processes
def test_a_dead_peers_memory_is_not_copied(shm: Rig) -> None:
    """Though it is still mapped."""
    peer = shm.peer(4096)
    link, (local,) = shm.link(4096)
    there = link.connect(peer.endpoint, SECONDS)
    peer.kill()
    assert error_of(link.read, there, pieces((0, 0, 0, 0, 4096)), SECONDS).reason == "gone"
    assert not local.any()


@pytest.mark.processes
def test_a_peer_that_dies_while_it_is_copied_from_is_gone(shm: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last writes may be missing from what was copied."""
    peer = shm.peer(4096)
    link, _ = shm.link(4096)
    there = link.connect(peer.endpoint, SECONDS)
    monkeypatch.setattr(link_shm, "_check_time", lambda *_: peer.kill())
    assert error_of(link.read, there, pieces((0, 0, 0, 0, 4096)), SECONDS).reason == "gone"


@pytest.mark.processes
def test_the_peers_memory_cannot_be_written(shm: Rig) -> None:
    """It is mapped for reading only."""
    peer = shm.peer(4096)
    link, _ = shm.link(4096)
    there = link.connect(peer.endpoint, SECONDS)
    with pytest.raises(ValueError):
        there.sources[0][0] = 1  # type: ignore[attr-defined]


@pytest.mark.processes
def test_a_copy_past_its_deadline_is_late(shm: Rig) -> None:
    """Nothing of it comes later."""
    peer = shm.peer(MIB)
    link, _ = shm.link(MIB)
    there = link.connect(peer.endpoint, SECONDS)
    error = error_of(link.read, there, pieces((0, 0, 0, 0, MIB)), 0.0)
    assert (error.reason, error.may_write_later) == ("late", False)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4, st.integers(0, 3)), max_size=12))
def test_joined_pieces_are_the_same_bytes(rows: list[Row]) -> None:
    """Joining neighbours changes neither where a byte comes from nor where it goes."""
    there = Endpoint(
        kind="any", incarnation=bytes(16), pid=1, host="", boot_id="", segment_bytes=(6,) * 4, handles=(0,) * 4
    )

    def bytes_of(pieces_: Pieces) -> list[Row]:
        return [(a, b + i, c, d + i, 1) for a, b, c, d, n in zip(*map(list, pieces_), strict=True) for i in range(n)]

    joined = checked(pieces(*rows), (6,) * 4, there)
    assert bytes_of(joined) == bytes_of(pieces(*rows))
    assert len(joined.num_bytes) <= sum(row[4] > 0 for row in rows)
    sides = [(a, b + n, c, d + n) for a, b, c, d, n in zip(*map(list, joined), strict=True)]
    assert all(end != start for end, start in zip(sides, list(zip(*map(list, joined), strict=True))[1:], strict=False))
