"""What the faults of a Mooncake cluster come to: an error or a miss, and never a wrong byte."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import StorageError, StorageGoneError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage import open_storage
from fastdeploy_cache.transfer_manager.storage.base import Storage
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from tests.rigs.places import Prompt
from tests.rigs.storage_servers import MooncakeLender, MooncakeMaster, free_port

SPACE = KeySpace(weights_id="tests", layout="bytes", object_bytes=300_000, block_size=4, rank=0, tp_size=1)
Opener = Callable[..., tuple[Storage, Prompt]]
# Mooncake's client leaves sockets and event descriptors behind when it is closed
pytestmark = [pytest.mark.processes, pytest.mark.leaks_allowed]


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    """A master of the test's own."""
    master = MooncakeMaster()
    master.start()
    yield master
    master.kill()


@pytest.fixture
def lender(master: MooncakeMaster) -> Iterator[MooncakeLender]:
    """The memory's owner, a process of its own."""
    lender = MooncakeLender(master, 64 * 2**20)
    yield lender
    lender.kill()


@pytest.fixture
def open_store(master: MooncakeMaster) -> Iterator[Opener]:
    """Opens stores that lend nothing, unless told so, and closes them."""
    stores: list[Storage] = []

    def new(num_blocks: int = 12, **settings: Any) -> tuple[Storage, Prompt]:
        given = {"master_address": master.address, "segment_bytes": 0} | settings
        config = StorageConfig(kind="mooncake", weights_id="any", **given)  # type: ignore[arg-type]
        prompt = Prompt(np.zeros((num_blocks, SPACE.object_bytes), np.uint8))
        stores.append(open_storage("mooncake", config.store_options(tp_size=1), SPACE, prompt.segment))
        prompt.fill()
        return stores[-1], prompt

    yield new
    for store in stores:
        store.close()


def check_leading(store: Storage, prompt: Prompt) -> int:
    """Read, and check what is said to be read; an error is none."""
    prompt.wipe()
    try:
        num_read = store.read(prompt.blocks())
    except StorageError:
        return 0
    np.testing.assert_array_equal(prompt.segment[:num_read], prompt.data[:num_read])
    return num_read


def test_lending_to_oneself(open_store: Opener) -> None:
    """A single rank that lends memory has a store with nobody else."""
    store, prompt = open_store(segment_bytes=64 * 2**20)
    assert store.write(prompt.blocks()).num_leading == len(prompt.hashes)
    assert check_leading(store, prompt) == len(prompt.hashes)


def test_a_full_cluster_declines(open_store: Opener) -> None:
    """What finds no space is declined and what was taken comes back; the write raises nothing."""
    store, prompt = open_store(num_blocks=120, segment_bytes=16 * 2**20)
    written = store.write(prompt.blocks())
    assert written.num_leading < len(prompt.hashes)
    assert store.stats().num_declined == len(prompt.hashes) - written.num_leading
    assert check_leading(store, prompt) <= written.num_leading


def test_the_master_is_killed(master: MooncakeMaster, lender: MooncakeLender, open_store: Opener) -> None:
    """Without a master nothing is counted, read or written, and each call is an error."""
    store, prompt = open_store()
    store.write(prompt.blocks())
    master.kill()
    with pytest.raises(StorageError, match=r"-90[01]"):
        store.count_leading(prompt.blocks())
    with pytest.raises(StorageError, match=r"-90[01]"):
        store.write(prompt.blocks())
    assert check_leading(store, prompt) == 0


def test_the_master_hangs(master: MooncakeMaster, lender: MooncakeLender, open_store: Opener) -> None:
    """Calls to a stopped master end in an error by themselves; when it goes on, so does the store."""
    store, prompt = open_store()
    store.write(prompt.blocks())
    master.pause()
    with pytest.raises(StorageError, match=r"-90[01]"):
        store.count_leading(prompt.blocks())
    assert check_leading(store, prompt) == 0
    master.resume()
    assert check_leading(store, prompt) == len(prompt.hashes)


def test_the_memory_s_owner_is_killed(lender: MooncakeLender, open_store: Opener) -> None:
    """Objects whose memory is gone are misses, whatever the master says of them, and not called damaged."""
    store, prompt = open_store()
    store.write(prompt.blocks())
    lender.kill()
    assert store.count_leading(prompt.blocks()) in (0, len(prompt.hashes))
    assert check_leading(store, prompt) == 0
    assert store.stats().num_damaged == 0
    prompt.fill()
    with contextlib.suppress(StorageError):  # the master may still give out the memory that is gone
        assert store.write(prompt.blocks()).num_leading in (0, len(prompt.hashes))
    assert check_leading(store, prompt) == 0


def test_no_master(open_store: Opener) -> None:
    """A set-up without a master comes back with an error that may pass."""
    with pytest.raises(StorageError, match="is it running") as caught:
        open_store(master_address=f"127.0.0.1:{free_port()}")
    assert not isinstance(caught.value, StorageRefusedError)


def test_a_closed_store_is_gone(lender: MooncakeLender, open_store: Opener) -> None:
    """After `close` every call says that the store has to be opened anew."""
    store, prompt = open_store()
    store.close()
    with pytest.raises(StorageGoneError, match="closed"):
        store.read(prompt.blocks())


def test_the_package_is_missing(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, or what it links to, the message names both packages."""
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StorageRefusedError, match=r"mooncake-transfer-engine-non-cuda.*libibverbs1"):
        open_store()


def test_time_limits_of_the_environment_stay(
    lender: MooncakeLender, open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time limits that a user has set for Mooncake are kept; others get the store's."""
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "900")
    monkeypatch.delenv("MC_RPC_CONNECT_TIMEOUT_MS", raising=False)
    open_store()
    assert (os.environ["MC_RPC_TIMEOUT_MS"], os.environ["MC_RPC_CONNECT_TIMEOUT_MS"]) == ("900", "300")
