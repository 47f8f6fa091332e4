"""What a store's failures, its slowness and its wishes come to, over real processes."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk
from fastdeploy_cache.transfer_manager.storage.file_journal import JOURNAL_NAME, read_journal
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine
from tests.rigs.storage_engine import SECONDS, drained, file_storage, storage_config
from tests.rigs.storage_hearing import LONG, Heard, asked, names, serve
from tests.rigs.storage_servers import free_port
from tests.rigs.storage_trouble import Eventually, InTrouble, breaker, metric, prompt, spoiled, stored

pytestmark = pytest.mark.processes

SHORT = {"prefetch_policy": "timeout", "prefetch_timeout_seconds": 0.1, "prefetch_seconds_per_1024_tokens": 0.0}


def test_a_store_that_hangs_opens_the_breaker(tmp_path: Path, eventually: Eventually) -> None:
    """Also where requests wait shorter than the task's deadline, and have gone when its process is killed."""
    storage, orders = spoiled(tmp_path, task_timeout_seconds=0.5, breaker_failures=1)
    with PrefixCacheManager(storage_config(1, storage, **SHORT)) as cache:
        drained(cache)
        orders.give(hanging=True)
        engine, request = Engine(cache, 1), Request(request_id="a", prompt_token_ids=LONG)
        cache.prefetch(request)
        serve(cache, engine, request, LONG)
        eventually(lambda: asked(cache, "lookup") == 1)  # killed at its deadline
        assert breaker(cache, "read") == 2


def test_a_store_that_is_down_says_so_and_keeps_no_backlog() -> None:
    """Its server is away: what leaves the CPU tier unwritten is counted, and not kept."""
    url = f"valkey://127.0.0.1:{free_port()}/0"
    storage = StorageConfig(kind="valkey", weights_id="w1", server_url=url, start_timeout_seconds=0.5)
    with PrefixCacheManager(storage_config(1, storage)) as cache:
        engine = Engine(cache, 1)
        for number in range(30):
            engine.serve(prompt(number))
        tier = cache.storage._tier
        assert tier is not None and len(tier.writes._queue) <= 16, "more runs than the CPU tier has blocks"
        assert breaker(cache, "write") or metric(cache, "storage_blocks_total", fate="skipped")


def test_a_disk_that_cannot_be_written_is_read(tmp_path: Path, eventually: Eventually) -> None:
    """Probes that cannot write leave reading alone."""
    storage, orders = spoiled(tmp_path)
    config = storage_config(1, storage)
    stored(config, 1)
    with PrefixCacheManager(config) as cache:
        drained(cache)
        trouble = InTrouble(cache, eventually)
        orders.give(errors={"write": errno.EIO})
        trouble.serve_until(lambda: asked(cache, "probe") >= 4)
        assert breaker(cache, "read") == 0


def test_a_store_that_needs_token_ids_is_probed_with_some(tmp_path: Path) -> None:
    """One that refuses calls without would never be used again."""
    storage = StorageConfig(
        kind="tests.rigs.memory_storage:MemoryStorage",
        weights_id="w1",
        options={"needs_token_ids": "1"},
        breaker_failures=1,
    )
    with PrefixCacheManager(storage_config(1, storage)) as cache:
        drained(cache)
        assert (breaker(cache, "read"), breaker(cache, "write")) == (0, 0)


@pytest.mark.parametrize("policy", ["lru", "fifo", "slru", "reuse", "pin"])
def test_priority_reaches_the_store_with_every_eviction_policy(tmp_path: Path, policy: str) -> None:
    """It is the request's, whatever the policy here makes of it."""
    storage, _ = spoiled(tmp_path)
    storage = dataclasses.replace(storage, options={**storage.options, "needs_token_ids": "1"})
    with PrefixCacheManager(storage_config(1, storage, eviction_policy=policy)) as cache:
        serve(cache, Engine(cache, 1), Request(request_id="a", prompt_token_ids=LONG, priority=70), LONG)
        assert cache.wait_for_transfers(SECONDS)
        drained(cache)
        assert {line["priority"] for line in Heard(tmp_path / "record").new()} == {70}


def test_priority_reaches_the_store_with_reads(tmp_path: Path) -> None:
    """With look-ups, too."""
    storage, _ = spoiled(tmp_path)
    storage = dataclasses.replace(storage, options={**storage.options, "needs_token_ids": "1"})
    with PrefixCacheManager(storage_config(1, storage, eviction_policy="priority")) as cache:
        drained(cache)
        request = Request(request_id="a", prompt_token_ids=LONG, priority=70)
        cache.prefetch(request).wait(SECONDS)
        assert {line["priority"] for line in Heard(tmp_path / "record").new()} == {70}


def test_a_store_grows_again_once_there_is_room(tmp_path: Path, eventually: Eventually) -> None:
    """A full disk is tried again now and then."""
    storage, orders = spoiled(tmp_path)
    with PrefixCacheManager(storage_config(1, storage)) as cache:
        drained(cache)
        trouble = InTrouble(cache, eventually)
        orders.give(errors={"allocate": errno.ENOSPC})
        for _ in range(15):  # 90 blocks; a slab has 56
            trouble.serve()
        drained(cache)
        orders.give()
        # how many prompts that takes depends on how many of them are written before the disk is tried again
        trouble.serve_until(lambda: len(list((tmp_path / "folder").glob("*/slab-*"))) > 1)


def test_a_store_with_slow_look_ups_is_not_asked(tmp_path: Path) -> None:
    """Once one has been seen to take longer than computing, under `auto`."""
    storage, orders = spoiled(tmp_path)
    with PrefixCacheManager(storage_config(1, storage, load_policy="auto", prefill_tokens_per_second=240.0)) as cache:
        drained(cache)
        orders.give(slow_seconds=0.5)  # computing takes 100 ms
        engine = Engine(cache, 1)
        for number in range(8):
            request = Request(request_id=f"{number}", prompt_token_ids=prompt(number))
            cache.prefetch(request)
            serve(cache, engine, request, prompt(number))
        assert asked(cache, "lookup") <= 2


def test_priority_of_a_prompt_that_is_written_before_its_release(tmp_path: Path, eventually: Eventually) -> None:
    """64 blocks and more are copied, and written, at commit."""
    storage, _ = spoiled(tmp_path)
    tokens = list(range(64 * 4 + 1))
    config = dataclasses.replace(storage_config(1, storage, 160, eviction_policy="priority"), num_gpu_blocks=80)
    with PrefixCacheManager(config) as cache:
        drained(cache)
        engine, request = Engine(cache, 1), Request(request_id="a", prompt_token_ids=tokens, priority=70)
        table = cache.match(request).block_ids + cache.allocate(request, 65)
        engine.compute(tokens, table, 0)
        cache.commit(request, len(tokens))
        assert cache.wait_for_transfers(SECONDS)
        drained(cache)
        cache.release(request)
        lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
        assert {line["priority"] for line in lines if len(line["hashes"]) > 8} == {70}  # a probe has 8


def test_a_damaged_object_is_a_miss_and_is_counted(tmp_path: Path) -> None:
    """A bit flips on the disk: the blocks before it are served, it is removed, and Prometheus hears of it."""
    config = storage_config(1, file_storage(tmp_path))
    stored(config, 1)
    (slab,) = tmp_path.glob("*/slab-*")
    replay = read_journal(Disk(), slab.parent / JOURNAL_NAME)
    assert replay is not None
    slots = {put.block_hash.hex(): put.slot for put in replay.puts()}  # not in order: a probe may have had the first
    data = bytearray(slab.read_bytes())
    data[replay.geometry.slot_bytes * slots[names(prompt(1))[2]] + 5] ^= 1
    slab.write_bytes(data)
    with PrefixCacheManager(config) as cache:
        drained(cache)
        assert (metric(cache, "storage_up"), metric(cache, "storage_lost_objects_total", reason="damaged")) == (1, 0)
        request = Request(request_id="a", prompt_token_ids=prompt(1))
        cache.prefetch(request).wait(SECONDS)
        assert serve(cache, Engine(cache, 1), request, prompt(1)).num_storage_tokens == 2 * BLOCK_SIZE
        assert metric(cache, "storage_lost_objects_total", reason="damaged") == 1
