"""Configurations for chaos: small pools, short deadlines, ranks that are started again and again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.config.cache import WRITE_POLICIES
from tests.rigs.faulty_engine import new_config
from tests.rigs.storage_engine import file_storage

NUM_GPU, NUM_CPU, TP_SIZE = 24, 48, 2
SEEDS = range(2)
PATIENT = {"max_restarts": 1000, "restart_backoff_seconds": 0.0, "task_timeout_seconds": 0.75}
IMPATIENT_STORE: dict[str, Any] = {"task_timeout_seconds": 0.5, "breaker_failures": 1000}  # never left alone


def chaos_config(seed: int, folder: Path | None = None, **transfer: Any) -> CacheConfig:
    """Small pools, short deadlines, ranks that are started again however often they die. `folder`: a store in it, below
    a CPU tier that holds less than the GPU's."""
    changes: dict[str, Any] = {"cpu_write_policy": WRITE_POLICIES[seed % 3], "recompute_last_token": seed % 2 == 1}
    if folder is not None:
        store = dataclasses.replace(file_storage(folder), **IMPATIENT_STORE)
        changes |= {"storage": store, "min_prefetch_tokens": 1, "num_cpu_blocks": 16}
    return dataclasses.replace(new_config(TP_SIZE, NUM_GPU, NUM_CPU, **{**PATIENT, **transfer}), **changes)
