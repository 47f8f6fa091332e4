"""Real storage processes below real ranks: bytes survive the engine; stores that hang or die cost misses only."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager, Request, StorageConfig, TenantConfig
from fastdeploy_cache.errors import StorageRefusedError
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine, new_config
from tests.rigs.storage_engine import PROMPT, SECONDS, drained, fetched, file_storage, storage_config
from tests.rigs.storage_servers import free_port

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("tp_size", "num_cpu"), [(1, 16), (2, 16), (2, 0)])
def test_a_new_engine_finds_what_the_last_one_computed(tmp_path: Path, tp_size: int, num_cpu: int) -> None:
    """Written through the ranks' CPU blocks (or staging), closed, started anew: every byte of every rank is right."""
    config = storage_config(tp_size, file_storage(tmp_path), num_cpu)
    with PrefixCacheManager(config) as cache:
        Engine(cache, tp_size).serve(PROMPT)
        drained(cache)
    with PrefixCacheManager(config) as cache:
        assert fetched(cache, Engine(cache, tp_size), PROMPT) == (6 * BLOCK_SIZE, 6 * BLOCK_SIZE)
        cache.check_invariants()


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    """What older weights wrote never hits, nor once the newer ones have written; the old ones find their own."""
    for weights_id, expected in (("w1", 0), ("w2", 0), ("w1", 24)):
        with PrefixCacheManager(storage_config(1, file_storage(tmp_path, weights_id))) as cache:
            engine = Engine(cache, 1)
            assert fetched(cache, engine, PROMPT)[0] == expected
            engine.serve(PROMPT)
            drained(cache)


def test_a_damaged_space_of_others_keeps_no_engine_from_starting(tmp_path: Path) -> None:
    """Nor does one of its own, which it names anew: it finds its blocks."""
    for weights_id in ("w1", "w2"):
        with PrefixCacheManager(storage_config(1, file_storage(tmp_path, weights_id))) as cache:
            Engine(cache, 1).serve(PROMPT)
            drained(cache)
    for name in tmp_path.glob("*/space.json"):
        name.write_bytes(re.sub(rb'"w(\d)"', b'"\xff\\1"', name.read_bytes()))
    with PrefixCacheManager(storage_config(1, file_storage(tmp_path, "w1"))) as cache:
        assert fetched(cache, Engine(cache, 1), PROMPT) == (24, 24)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_second_engine_on_one_folder_is_refused(
    tmp_path: Path, log_format: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its start, in one line that begins with the reason, said once; and nothing stays behind."""
    monkeypatch.setenv("FASTDEPLOY_CACHE_LOG_FORMAT", log_format)
    config = storage_config(1, file_storage(tmp_path))
    with PrefixCacheManager(config), caplog.at_level(logging.WARNING):
        with pytest.raises(StorageRefusedError) as refused:
            PrefixCacheManager(config)
        reason = (
            rf"{re.escape(str(tmp_path))}/[0-9a-f]+ is in use by another engine; give each engine a folder of its own"
        )
        assert re.fullmatch(rf"storage of kind 'file' cannot be opened: rank 0: {reason}", str(refused.value))
        assert not caplog.records


def test_a_killed_storage_process_costs_a_miss(tmp_path: Path) -> None:
    """SIGKILL: the ranks go on, the process comes back, and what was durable is found again."""
    config = storage_config(2, file_storage(tmp_path))
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, 2)
        engine.serve(PROMPT)
        drained(cache)
        tier = cache.storage._tier
        assert tier is not None
        pid = tier.link.client.statuses()[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert engine.serve(PROMPT).num_gpu_tokens == 6 * BLOCK_SIZE
        assert all(status.up for status in cache.stats().ranks)
        deadline = time.monotonic() + SECONDS
        while tier.link.client.statuses()[1].num_restarts == 0 or not tier.link.client.available:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        cache.check_invariants()


def test_a_hung_store_delays_nobody_beyond_the_policy(tmp_path: Path) -> None:
    """Its process is killed at the task's deadline; the match waits no longer than the prefetch policy, and the rank
    of the CPU tier never stops."""
    hang = tmp_path / "hang"
    storage = StorageConfig(
        kind="tests.rigs.slow_store:HangingStore",
        weights_id="w1",
        options={"hang": str(hang)},
        task_timeout_seconds=1.0,
    )
    config = storage_config(
        1, storage, prefetch_policy="timeout", prefetch_timeout_seconds=0.2, prefetch_seconds_per_1024_tokens=0.0
    )
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, 1)
        drained(cache)
        tier = cache.storage._tier
        assert tier is not None
        pid = tier.link.client.statuses()[0].pid
        hang.touch()
        request = Request(request_id="waits", prompt_token_ids=PROMPT)
        prefetch = cache.prefetch(request)
        assert cache.match(request).wait(SECONDS).num_tokens == 0
        assert not prefetch._fetch.done.is_set()  # type: ignore[union-attr]  # it was the policy that ended the wait
        cache.release(request)
        engine.serve(PROMPT)
        assert prefetch._fetch.done.wait(SECONDS)  # type: ignore[union-attr]  # the process was killed and reaped
        hang.unlink()
        assert engine.serve(PROMPT).num_gpu_tokens == 6 * BLOCK_SIZE
        assert tier.link.client.statuses()[0].pid != pid
        cache.check_invariants()


def test_a_store_that_is_not_there_yet_keeps_no_engine_from_starting() -> None:
    """The engine starts without it, at the deadline."""
    url = f"valkey://127.0.0.1:{free_port()}/0"
    storage = StorageConfig(kind="valkey", weights_id="w1", server_url=url, start_timeout_seconds=0.5)
    with PrefixCacheManager(storage_config(1, storage)) as cache:
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        assert fetched(cache, engine, PROMPT) == (0, 24)
        tier = cache.storage._tier
        assert tier is not None and not tier.link.client.available


@pytest.mark.parametrize("place", ["file", "file/below", "open"])
def test_a_folder_that_cannot_be_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The engine refuses it before it starts a process or takes memory for one, and so does a later attachment."""
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    storage = file_storage(tmp_path / place)
    config = storage_config(1, storage)
    with PrefixCacheManager(dataclasses.replace(config, storage=None)) as cache:
        with pytest.raises(StorageRefusedError, match=r"storage\.folder is"):
            cache.storage.attach(storage)
        assert Engine(cache, 1).serve(PROMPT).num_tokens == 0
        cache.storage.attach(file_storage(tmp_path / "store"))
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(StorageRefusedError, match=r"storage\.folder is"):
        PrefixCacheManager(config)


@pytest.mark.parametrize(("num_cpu", "policy"), [(16, "write_back"), (4, "write_back"), (0, "write_through")])
def test_a_planned_end_leaves_everything_in_storage(tmp_path: Path, num_cpu: int, policy: str) -> None:
    """Flushed in as many rounds as the CPU tier needs; the next engine finds every block, also what was on the GPU
    only."""
    config = storage_config(
        2,
        file_storage(tmp_path),
        num_cpu,
        storage_write_policy=policy,
        cpu_write_policy="write_back",
        max_prefetch_share=1.0,
    )
    prompts = [PROMPT[:17], list(range(300, 300 + 5 * BLOCK_SIZE + 1))]
    with PrefixCacheManager(config) as cache:
        for prompt in prompts:
            Engine(cache, 2).serve(prompt)
        assert cache.storage.flush(SECONDS)
        cache.check_invariants()
    with PrefixCacheManager(config) as cache:
        for prompt in prompts:
            num_tokens = len(prompt) - 1  # of what had no room in the CPU tier, the match fetches the rest
            assert fetched(cache, Engine(cache, 2), prompt) == (num_tokens, num_tokens)


def test_flush_says_when_storage_has_not_all(tmp_path: Path) -> None:
    """No store; one whose filter declines what it sees for the first time."""
    with PrefixCacheManager(new_config(1, 12, 16)) as cache:
        assert not cache.storage.flush(SECONDS)
    storage = dataclasses.replace(file_storage(tmp_path), admission="second_use")
    with PrefixCacheManager(storage_config(1, storage, storage_write_policy="write_back")) as cache:
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        assert not cache.storage.flush(SECONDS)
        cache.check_invariants()


def test_what_a_caller_uses_again_is_admitted(tmp_path: Path) -> None:
    """A caller with a GPU cache of its own notes its requests: what the filter declined at first, it takes then."""
    storage = dataclasses.replace(file_storage(tmp_path), admission="second_use")
    with PrefixCacheManager(storage_config(1, storage)) as cache:
        engine = Engine(cache, 1)
        request = Request(request_id="names tokens", prompt_token_ids=PROMPT)
        ids = cache.blocks.allocate(6)
        engine.compute(PROMPT[:-1], ids, 0)
        num_stored = []
        for num_found in (0, 6):
            if num_found:
                assert cache.blocks.copies.swap_in(request, ids).wait(SECONDS)
            else:
                assert cache.blocks.copies.swap_out(request, ids).wait(SECONDS)
            assert cache.blocks.note_use(request, num_found_blocks=num_found) == 6
            assert cache.wait_for_transfers(SECONDS)
            drained(cache)
            stats = cache.stats().storage
            assert stats is not None
            num_stored.append(stats.num_written_blocks)
            cache.check_invariants()
        assert num_stored == [0, 6]
        cache.blocks.free(ids)


@pytest.mark.parametrize("how", ["capacity", "disk"])
def test_flush_says_when_the_store_has_dropped_blocks(tmp_path: Path, how: str) -> None:
    """Within its capacity, and on a disk that is full, a store takes every block, and drops earlier ones for it: no."""
    block_bytes = storage_config(1, file_storage(tmp_path)).block_bytes()
    slot_bytes = block_bytes if block_bytes < 4096 else -(-block_bytes // 4096) * 4096
    num_slots = 4 if how == "capacity" else 1000
    storage = dataclasses.replace(
        file_storage(tmp_path / "store"), capacity_bytes=num_slots * slot_bytes, slab_bytes=2 * slot_bytes
    )
    config = storage_config(1, storage)
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, 1)
        drained(cache)  # the probe, which takes two slabs
        if how == "disk":  # a third one is not to be had
            (space,) = [path.parent for path in (tmp_path / "store").glob("*/space.json")]
            (space / "slab-00002").mkdir()
        engine.serve(PROMPT)
        assert not cache.storage.flush(SECONDS)
        stats = cache.stats().storage
        assert stats is not None and stats.num_evicted_objects > 0 and stats.num_written_blocks == 6
        cache.check_invariants()


@pytest.mark.parametrize("num_cpu", [16, 0])
def test_an_instance_without_a_prefix_cache_writes_for_others(tmp_path: Path, num_cpu: int) -> None:
    """A decode instance matches nothing itself, and writes under the keys by which a mixed one finds prompt and
    answer."""
    config = storage_config(1, file_storage(tmp_path), num_cpu, enable_prefix_caching=False)
    answer = [900, 901, 902, 903]
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, 1)
        for number in range(2):
            request = Request(request_id=f"decode-{number}", prompt_token_ids=PROMPT)
            assert cache.match(request).wait().num_tokens == 0
            table = cache.allocate(request, 8)
            request.append_output(answer)
            engine.compute(PROMPT + answer, table, 0)
            cache.commit(request, request.num_tokens)
            cache.write_to_storage(request)
            cache.check_invariants()
            cache.release(request)
            assert cache.wait_for_transfers(SECONDS)  # before the next one needs the room
        drained(cache)
        cache.check_invariants()
        tier = cache.storage._tier
        assert tier is not None and tier.writes.num_written_blocks == 7
    with PrefixCacheManager(storage_config(1, file_storage(tmp_path), num_cpu)) as cache:
        longer = PROMPT + answer + [5]
        assert fetched(cache, Engine(cache, 1), longer) == (28, 28)


def test_write_to_storage_now_whatever_the_policy(tmp_path: Path) -> None:
    """Under `write_back` nothing would be written of a small cache; a request's own blocks are, when asked for."""
    config = storage_config(1, file_storage(tmp_path), storage_write_policy="write_back", cpu_write_policy="write_back")
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, 1)
        engine.serve(list(range(600, 613)))
        request, _ = engine.match(PROMPT)
        engine.compute(PROMPT, cache.allocate(request, 7), 0)
        cache.commit(request, len(PROMPT))
        cache.write_to_storage(request)
        assert cache.wait_for_transfers(SECONDS)
        drained(cache)
        tier = cache.storage._tier
        assert tier is not None and tier.writes.num_written_blocks == 6
        cache.release(request)
        cache.check_invariants()


@pytest.mark.parametrize(("tp_size", "num_cpu"), [(1, 3), (2, 3), (1, 0)])
def test_a_prompt_longer_than_the_cpu_tier_goes_through_it(tmp_path: Path, tp_size: int, num_cpu: int) -> None:
    """Written in steps as storage takes them, read in steps as the GPU does: nothing is lost for want of CPU blocks."""
    storage = dataclasses.replace(file_storage(tmp_path), staging_bytes=1)  # eight blocks at least
    tokens = list(range(1000, 1000 + 20 * BLOCK_SIZE + 1))
    config = dataclasses.replace(storage_config(tp_size, storage, num_cpu, max_prefetch_share=1.0), num_gpu_blocks=24)
    with PrefixCacheManager(config) as cache:
        Engine(cache, tp_size).serve(tokens)
        deadline = time.monotonic() + SECONDS
        while [run for run in cache._books.tree.runs() if run.stored.num_blocks < run.num_blocks]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        cache.check_invariants()
    with PrefixCacheManager(config) as cache:
        request = Request(request_id="long", prompt_token_ids=tokens)
        cache.prefetch(request)
        match = cache.match(request).wait(SECONDS)
        Engine(cache, tp_size).check(tokens, match.block_ids)
        assert (match.num_storage_tokens, match.num_tokens) == (80, 80)
        cache.release(request)
        cache.check_invariants()


def test_a_tenant_has_its_share_of_a_store(tmp_path: Path) -> None:
    """Real processes: of a tenant's prompt as much is stored as its most allows, and of another one all."""
    capped = TenantConfig(namespace="capped", max_store_share=0.02)  # of 108 slots
    storage = dataclasses.replace(file_storage(tmp_path), capacity_bytes=108 * 1152, slab_bytes=4096)
    config = storage_config(1, storage, tenants=(capped,))
    with PrefixCacheManager(config) as cache:
        assert cache.stats().tenants == ()  # of the tiers it has none
        for namespace, num_blocks in (("capped", 2), ("free", 6)):
            request = Request(request_id=namespace, prompt_token_ids=PROMPT, namespace=namespace)
            cache.match(request)
            cache.allocate(request, cache.blocks_for(len(PROMPT)))
            cache.commit(request, len(PROMPT))
            cache.release(request)
            assert cache.wait_for_transfers(SECONDS)
            drained(cache)
            assert cache.life.forget_namespace(namespace).num_stored_objects == num_blocks
