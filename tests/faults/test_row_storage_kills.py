"""A hybrid model whose checkpoints outlive it: everything is killed, and the next life hits with equal logits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from tests.rigs.float64_engine import WAIT_SECONDS
from tests.rigs.storage_servers import MooncakeLender, MooncakeMaster, ValkeyServer
from tests.rigs.stored_float64 import prompts, serve_one, storing, storing_in

pytestmark = pytest.mark.processes

NUM_KILLS = int(os.environ.get("FASTDEPLOY_CACHE_ROW_STORAGE_KILLS", "6"))  # 66 in .ci/night


def live(folder: Path, seed: int, num_requests: int) -> int:
    """One life of that program, until so many requests are served; how many tokens came from storage."""
    command = [sys.executable, "-m", "tests.rigs.stored_float64", str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        num_stored = 0
        for _ in range(num_requests):
            line = process.stdout.readline()
            if not line:
                raise AssertionError(process.stderr.read())
            num_stored += int(line.split()[1])
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return num_stored


@pytest.mark.timeout(60 + 12 * NUM_KILLS)
def test_everything_is_killed_again_and_again(tmp_path: Path) -> None:
    """Whatever it is doing. Each logit is that from scratch, and later lives hit what earlier ones wrote (what was
    written in the last half second may be lost)."""
    draw = random.Random(5)
    found = [live(tmp_path, seed, draw.randint(15, 60)) for seed in range(NUM_KILLS)]
    assert sum(number > 0 for number in found[1:]) >= (NUM_KILLS - 1) // 2, found


def test_a_restart_hits_what_a_run_without_one_would(tmp_path: Path) -> None:
    """At least 95 % of the tokens, and equal logits."""
    texts = prompts(2)
    engine = storing(str(tmp_path), 1)
    with engine.cache:
        for prompt in texts:
            serve_one(engine, prompt, 3)
        expected = sum([serve_one(engine, prompt, 3).num_hit for prompt in texts])
        assert engine.cache.storage.flush(20.0)
    engine = storing(str(tmp_path), 1)
    engine.is_patient = True
    with engine.cache:
        found = sum([serve_one(engine, prompt, 3).num_hit for prompt in texts])
        assert found >= 0.95 * expected > 0, (found, expected)
        assert engine.num_storage_tokens > 0.3 * found


def hits_again(store: StorageConfig) -> int:
    """Two lives over a store that outlives both; the tokens that the second has from it."""
    texts = prompts(4)
    for life in range(2):
        engine = storing_in(store, life)
        engine.is_patient = True
        with engine.cache:
            assert engine.cache.storage._tier is not None
            for prompt in texts:
                serve_one(engine, prompt, 3)
            assert engine.cache.wait_for_transfers(WAIT_SECONDS)
            assert engine.cache.storage.flush(20.0)
    return engine.num_storage_tokens


def test_over_a_valkey_server(tmp_path: Path) -> None:
    """Checkpoints come back over the socket, and logits are equal."""
    server = ValkeyServer(tmp_path)
    server.start()
    try:
        assert hits_again(StorageConfig(kind="valkey", server_url=server.unix_url, weights_id="rows")) > 50
    finally:
        server.kill()


@pytest.mark.leaks_allowed
def test_over_a_mooncake_cluster() -> None:
    """The same over a cluster of another process's memory."""
    master = MooncakeMaster()
    master.start()
    lender = MooncakeLender(master)
    try:
        store = StorageConfig(kind="mooncake", master_address=master.address, weights_id="rows", segment_bytes=0)
        assert hits_again(store) > 50
    finally:
        lender.kill()
        master.kill()


def test_weights_that_come_back_hit_again(tmp_path: Path) -> None:
    """Others never hit what was computed with these, and after them, as after a sleep, their own are found."""
    texts, engine = prompts(9), storing(str(tmp_path), 1)
    engine.is_patient = True

    def from_storage() -> int:
        before = engine.num_storage_tokens
        for prompt in texts:
            serve_one(engine, prompt, 2)
        assert engine.cache.storage.flush(20.0)
        return engine.num_storage_tokens - before

    with engine.cache as cache:
        from_storage()
        cache.reset(weights_id="others")
        assert from_storage() == 0
        cache.life.update_weights("float64")
        assert from_storage() > 50
        cache.life.sleep()
        cache.life.wake()
        assert from_storage() > 50
        cache.check_invariants()
