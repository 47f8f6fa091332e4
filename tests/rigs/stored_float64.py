"""The float64 model over a folder that outlives it, as a program that is killed: `python -m tests.rigs.stored_float64
FOLDER SEED`. It prints its processes, then a line for each request: tokens of the prompt, and those from storage."""

from __future__ import annotations

import random
import sys
from typing import Any

from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from tests.rigs.float64_engine import WAIT_SECONDS, Float64Engine, Served
from tests.rigs.float64_model import VOCABULARY

NUM_PROMPTS = 12


def storing(folder: str, seed: int, **fields: Any) -> Float64Engine:
    """An engine with a folder."""
    store = StorageConfig(folder=folder, weights_id="float64", admission="all", capacity_bytes=2**27)
    return storing_in(store, seed, **fields)


def storing_in(store: StorageConfig, seed: int, *, num_cpu_blocks: int = 120, **fields: Any) -> Float64Engine:
    """An engine that prefetches each prompt, and writes all through."""
    return Float64Engine(
        seed=seed,
        num_gpu_blocks=60,
        num_gpu_units=(9, 24, 30),
        num_cpu_blocks=num_cpu_blocks,
        cpu_write_policy="write_through",
        storage=store,
        prefetch_policy="wait_complete",
        min_prefetch_tokens=1,
        max_prefetch_share=0.9,
        max_load_share=1.0,
        load_policy="always",
        **fields,
    )


def prompts(seed: int) -> list[list[int]]:
    """Some share their beginnings."""
    draw = random.Random(seed)
    systems = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (13, 22)]
    return [
        [*draw.choice(systems), *(draw.randrange(VOCABULARY) for _ in range(draw.randint(4, 20)))]
        for _ in range(NUM_PROMPTS)
    ]


def serve_one(engine: Float64Engine, prompt: list[int], num_outputs: int) -> Served:
    """Fetch, match, compute and compare each logit with that from scratch."""
    served = engine.begin(prompt, num_outputs)
    while not engine.step(served):
        pass
    engine.check(served)
    engine.end(served)
    return served


def main() -> None:
    """Serve until somebody ends it."""
    folder, seed = sys.argv[1], int(sys.argv[2])
    transfer = TransferConfig(tp_size=2, stop_timeout_seconds=2.0)
    engine = storing(folder, seed, transfer_client="processes", transfer=transfer)
    engine.is_patient = True
    with engine.cache as cache:
        processes = [*cache._movement.client.statuses(), *cache.storage.statuses()]
        print(*(each.pid for each in processes), flush=True)
        texts = prompts(1)
        while True:
            prompt = texts[engine.random.randrange(len(texts))]
            before = engine.num_storage_tokens
            serve_one(engine, prompt, engine.random.randint(0, 9))
            assert cache.wait_for_transfers(WAIT_SECONDS)
            cache.check_invariants()
            print(len(prompt), engine.num_storage_tokens - before, flush=True)


if __name__ == "__main__":
    main()
