"""An engine for `test_two_hosts`: settings are its argument; a line of JSON on its standard input is an order.

Orders: {"do": "serve", "tokens": [...]}, {"do": "fetch", "tokens": [...]}, {"do": "forget"}. One line of JSON answers
each; a first one has the process ids of its ranks and storage processes. It closes its cache when its input ends.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.faulty_engine import Engine, new_config

TP_SIZE = 2
LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, head_dim=512, dtype="float16")  # 64 KiB for a block of a rank
SECONDS = 30.0  # for what takes one or two: no order waits longer for any one thing


def config(local_hostname: str, master_address: str, log_dir: str) -> CacheConfig:
    """Everything is written; a request waits until storage has answered."""
    storage = StorageConfig(
        kind="mooncake",
        weights_id="two hosts",
        local_hostname=local_hostname,
        master_address=master_address,
        segment_bytes=64 * 2**20,
        start_timeout_seconds=SECONDS,
        task_timeout_seconds=3.0,
        breaker_seconds=1.0,
    )
    return dataclasses.replace(
        new_config(TP_SIZE, num_gpu=40, num_cpu=64, log_dir=log_dir),
        layout=LAYOUT,
        storage=storage,
        prefetch_policy="wait_complete",
        min_prefetch_tokens=1,
    )


class TwoHostsEngine:
    """One end of the test."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        assert cache.storage.is_attached
        self._cache, self._tier = cache, cache.storage._tier
        self._engine = Engine(cache, TP_SIZE)

    @property
    def pids(self) -> list[int | None]:
        """Of its ranks and storage processes."""
        return [status.pid for status in (*self._cache.stats().ranks, *self._tier.link.client.statuses())]

    def serve(self, tokens: list[int]) -> dict[str, Any]:
        """Compute what is not cached, commit, release, and wait until it is written, or given up."""
        before = self._tier.writes.num_written_blocks
        self._engine.serve(tokens)
        self.wait_until_idle()
        return {"num_written_blocks": self._tier.writes.num_written_blocks - before}

    def fetch(self, tokens: list[int]) -> dict[str, Any]:
        """Prefetch, wait until that is ready, match, and check every byte."""
        request = Request(request_id="fetch", prompt_token_ids=tokens)
        assert self._cache.prefetch(request).wait(SECONDS), "the prefetch hangs"
        match = self._cache.match(request).wait(SECONDS)
        assert match.ready and len(match.block_ids) * self._cache.config.block_size == match.num_tokens
        self._engine.check(tokens, match.block_ids)
        self._cache.release(request)
        return {"num_tokens": match.num_tokens, "num_storage_tokens": match.num_storage_tokens}

    def forget(self) -> dict[str, Any]:
        """Nothing is cached in this engine any more; what storage holds stays."""
        self._cache.reset()
        return {}

    def wait_until_idle(self) -> None:
        """Until nothing is on its way to or from storage; what is queued for a store that is down stays queued."""
        deadline, tier = time.monotonic() + SECONDS, self._tier
        while True:
            with self._cache._books:
                if tier.is_idle:
                    return
            assert time.monotonic() < deadline, "a write hangs"
            time.sleep(0.005)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """What came of an order: its result or the whole error."""
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "serve": self.serve,
            "fetch": self.fetch,
            "forget": self.forget,
        }
        try:
            result = verbs[order.pop("do")](**order)
            self._cache.check_invariants()
        except Exception:
            return {"error": traceback.format_exc()}
        return result


def wait_until_open(tier: StorageTier) -> None:
    """The cache starts without a store that is late."""
    deadline = time.monotonic() + SECONDS
    while not tier.link.client.available:
        assert time.monotonic() < deadline, "the store does not open; see its log"
        time.sleep(0.05)


def main(settings: dict[str, str]) -> None:
    """Obey until standard input ends."""
    with PrefixCacheManager(config(**settings)) as cache:
        engine = TwoHostsEngine(cache)
        wait_until_open(engine._tier)
        engine.wait_until_idle()
        print(json.dumps({"pids": engine.pids}), flush=True)
        for line in sys.stdin:
            print(json.dumps(engine.obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
