"""Events of a store on disk: real ranks, real files, and a mirror that knows what is there."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.events import Mirror
from tests.rigs.event_rig import mirror_of, pid_of_publisher
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine
from tests.rigs.storage_engine import PROMPT, drained, fetched, file_storage, storage_config

pytestmark = pytest.mark.processes
_SECONDS = 20.0
_NUM_BLOCKS = len(PROMPT) // BLOCK_SIZE


@contextmanager
def publishing(folder: Path, tp_size: int = 1, capacity_bytes: int = 2**24) -> Iterator[PrefixCacheManager]:
    """An engine's cache with a store in a folder."""
    events = EventsConfig(endpoint=f"ipc://{folder}/kv", heartbeat_seconds=0.2)
    storage = dataclasses.replace(file_storage(folder / "store"), capacity_bytes=capacity_bytes)
    config = dataclasses.replace(storage_config(tp_size, storage), events=events)
    with PrefixCacheManager(config) as cache:
        yield cache


def wait_on_disk(mirror: Mirror, num_blocks: int) -> None:
    """Until so many blocks are said to be there."""
    with mirror._lock:
        mirror._lock.wait_for(lambda: mirror.is_current and mirror.num_blocks("DISK") == num_blocks, _SECONDS)
    assert mirror.num_blocks("DISK") == num_blocks, mirror.counts()


def wait_known(mirror: Mirror, tokens: list[int]) -> None:
    """Until a prompt is said to be cached, wherever."""
    with mirror._lock:
        assert mirror._lock.wait_for(lambda: mirror.find(tokens).num_tokens == len(tokens) - 1, _SECONDS)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_is_written_is_told(tmp_path: Path, tp_size: int) -> None:
    """A prompt is in the store of every rank: a mirror finds it there when the tiers have been cleared, and it is
    fetched. A tenant that is forgotten is found no more."""
    with publishing(tmp_path, tp_size) as cache, mirror_of(cache) as mirror:
        assert mirror.wait_current(_SECONDS)
        engine = Engine(cache, tp_size)
        engine.serve(PROMPT)
        drained(cache)
        wait_on_disk(mirror, _NUM_BLOCKS)
        cache.life.clear()
        with mirror._lock:
            mirror._lock.wait_for(lambda: mirror.is_current and mirror.num_blocks("GPU") == 0, _SECONDS)
        wait_on_disk(mirror, _NUM_BLOCKS)
        found = mirror.find(PROMPT)
        assert (found.num_tokens, found.num_disk_tokens) == (_NUM_BLOCKS * BLOCK_SIZE,) * 2
        assert fetched(cache, engine, PROMPT)[0] == _NUM_BLOCKS * BLOCK_SIZE


def test_what_the_store_evicts_is_told(tmp_path: Path) -> None:
    """More prompts than its files have room for: what is said to be there is what it has."""
    with publishing(tmp_path, capacity_bytes=2**19) as cache, mirror_of(cache) as mirror:
        assert mirror.wait_current(_SECONDS)
        engine = Engine(cache, 1)
        for number in range(120):
            tokens = [token + 1000 * (number + 1) for token in PROMPT]
            engine.serve(tokens)
            drained(cache)
            wait_known(mirror, tokens)  # what has left the tiers before it was told is not told of the store
        stats = cache.stats().storage
        assert stats is not None and stats.num_evicted_objects > 0 and stats.num_written_blocks == 120 * _NUM_BLOCKS
        wait_on_disk(mirror, 120 * _NUM_BLOCKS - stats.num_evicted_objects)


def test_after_a_death(tmp_path: Path) -> None:
    """Of the publisher, and of the storage process: what the tree has is told anew, though nobody asks the store for
    anything. Detached, nothing is."""
    with publishing(tmp_path) as cache, mirror_of(cache) as mirror:
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        assert cache.storage.flush(_SECONDS)
        wait_on_disk(mirror, _NUM_BLOCKS)
        for pid in (pid_of_publisher(cache), cache.insight.processes()["storage"][0].pid):
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with mirror._lock:
                mirror._lock.wait_for(lambda: not mirror.num_blocks("DISK"), 2.0)
            wait_on_disk(mirror, _NUM_BLOCKS)
        cache.storage.detach()
        wait_on_disk(mirror, 0)
        assert mirror.find(PROMPT).num_tokens == _NUM_BLOCKS * BLOCK_SIZE
