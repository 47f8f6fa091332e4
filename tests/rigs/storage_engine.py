"""Engines over a store of real processes: their configuration, and what they find in it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request, StorageConfig
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine, new_config

PROMPT = list(range(50, 50 + 6 * BLOCK_SIZE + 1))
SECONDS = 30.0


def storage_config(tp_size: int, storage: StorageConfig, num_cpu: int = 16, **settings: object) -> CacheConfig:
    settings = {
        "storage": storage,
        "min_prefetch_tokens": 1,
        "load_policy": "always",
        "prefetch_policy": "wait_complete",
    } | settings
    return dataclasses.replace(new_config(tp_size, 12, num_cpu), **settings)  # type: ignore[arg-type]


def file_storage(folder: Path, weights_id: str = "w1") -> StorageConfig:
    return StorageConfig(
        folder=str(folder), weights_id=weights_id, admission="all", capacity_bytes=2**24, slab_bytes=2**20
    )


def drained(cache: PrefixCacheManager) -> None:
    """Wait until nothing is being written."""
    deadline = time.monotonic() + SECONDS
    while True:
        tier = cache.storage._tier
        assert tier is not None and time.monotonic() < deadline
        with cache._books:
            if tier.is_idle:
                return
        time.sleep(0.005)


def fetched(cache: PrefixCacheManager, engine: Engine, tokens: list[int]) -> tuple[int, int]:
    """Prefetch, match and check the bytes; tokens that came from storage, and all that were found."""
    request = Request(request_id="fetched", prompt_token_ids=tokens)
    assert cache.prefetch(request).wait(SECONDS)
    match = cache.match(request).wait(SECONDS)
    engine.check(tokens, match.block_ids)
    cache.release(request)
    return match.num_storage_tokens, match.num_tokens
