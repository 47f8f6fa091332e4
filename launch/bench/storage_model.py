"""Loading against computing, for a real model: the same prompt by an engine without and by one with a store."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np

from fastdeploy_cache import CacheConfig, StorageConfig
from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import GenerationError
from fastdeploy_cache.launch.reference_engine.serving import layout_of, running_engine
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, load_model_files

_NUM_TOKENS = 1024
_BLOCK_SIZE = 16
_FLUSH_SECONDS = 30.0


def load_or_compute(folder: Path) -> dict[str, float]:
    """Seconds from submission to the first token: computed, and by a fresh engine that finds the prompt on disk.

    Raises:
        ModelLoadError: the model or its packages are missing.
    """
    files = load_model_files()
    blocks = _NUM_TOKENS // _BLOCK_SIZE + 16
    config = CacheConfig(
        layout=layout_of(files.spec),
        block_size=_BLOCK_SIZE,
        num_gpu_blocks=blocks,
        num_cpu_blocks=2 * blocks,
        storage=StorageConfig(folder=str(folder), weights_id=files.digest, admission="all"),
    )
    plain = dataclasses.replace(config, storage=None, enable_prefix_caching=False)
    prompt = np.random.default_rng(1).integers(10, 10000, _NUM_TOKENS).astype(np.int32)
    computed, _ = _seconds_to_first_token(files, plain, prompt, warm_up=True)
    _seconds_to_first_token(files, config, prompt, warm_up=False)
    loaded, num_loaded = _seconds_to_first_token(files, config, prompt, warm_up=True)
    return {
        "num_tokens": float(_NUM_TOKENS),
        "computed_seconds": computed,
        "loaded_seconds": loaded,
        "num_loaded_tokens": float(num_loaded),
    }


def _seconds_to_first_token(
    files: ModelFiles, config: CacheConfig, prompt: np.ndarray, *, warm_up: bool
) -> tuple[float, int]:
    """The seconds that a new engine takes, and how many tokens it found cached.

    What it has computed is in storage when this returns.
    """
    with running_engine(files, config) as engine:
        if warm_up:
            _answer(engine, prompt[::-1][: 4 * _BLOCK_SIZE])
        started = time.perf_counter()
        num_cached = _answer(engine, prompt)
        seconds = time.perf_counter() - started
        engine.cache.wait_for_transfers(_FLUSH_SECONDS)
        engine.cache.storage.flush(_FLUSH_SECONDS)
    return seconds, num_cached


def _answer(engine: Engine, prompt: np.ndarray) -> int:
    """One token; how many of the prompt's were cached."""
    generation = engine.intake.submit(prompt, 1)
    while engine.step():
        pass
    if generation.error is not None:
        raise GenerationError(generation.error)
    return generation.num_cached_tokens
