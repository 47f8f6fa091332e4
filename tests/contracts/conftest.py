"""Servers and places for the contract of stores. A server lives as long as the tests, so that no test leaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.places import EncryptedPlace, FilePlace, MemoryPlace, MooncakePlace, Place, ValkeyPlace
from tests.rigs.storage_servers import MooncakeLender, MooncakeMaster, ValkeyServer


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One that all tests share; keys never collide, as each test has weights of its own."""
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake_cluster() -> Iterator[tuple[MooncakeMaster, MooncakeLender]]:
    """A master, and a process that lends memory."""
    master = MooncakeMaster()
    master.start()
    lender = MooncakeLender(master)
    yield master, lender
    lender.kill()
    master.kill()


# Mooncake's client leaves sockets and event descriptors behind when it is closed
KINDS = [
    "memory",
    "file",
    "encrypted",
    pytest.param("valkey", marks=pytest.mark.processes),
    pytest.param("mooncake", marks=[pytest.mark.processes, pytest.mark.leaks_allowed]),
]


@pytest.fixture(scope="session", params=KINDS)
def new_place(request: pytest.FixtureRequest) -> Callable[[Path], Place]:
    """Makes an empty place of a kind. Of the session: its server is there before a test looks for leaks."""
    if request.param == "valkey":
        server = request.getfixturevalue("valkey_server")
        return lambda folder: ValkeyPlace(server)
    if request.param == "mooncake":
        cluster = request.getfixturevalue("mooncake_cluster")
        return lambda folder: MooncakePlace(*cluster)
    if request.param == "file":
        return FilePlace
    return lambda folder: EncryptedPlace() if request.param == "encrypted" else MemoryPlace()


@pytest.fixture
def place(new_place: Callable[[Path], Place], tmp_path: Path) -> Iterator[Place]:
    """Where the test's stores live; they are closed after it."""
    place = new_place(tmp_path / "store")
    yield place
    place.close()
