"""Real ranks with blocks of a MiB: copies take long enough for things to happen meanwhile, and loads have steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.device.strips import load_steps
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from tests.rigs.answers import Answers

NUM_LAYERS, NUM_GPU, NUM_CPU, BLOCK_SIZE = 4, 16, 20, 4
LAYOUT = KVLayout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16384 // 2, dtype="float16")
ALL = range(NUM_GPU)


@contextlib.contextmanager
def big_client(tp_size: int = 1, **transfer: object) -> Iterator[tuple[RankClient, Answers]]:
    """Started, with long deadlines; `transfer` settings may be overridden."""
    settings = {"tp_size": tp_size, "task_timeout_seconds": 1000.0, "restart_backoff_seconds": 0.01} | transfer
    layout = LAYOUT.for_rank(tp_size, BLOCK_SIZE)
    if tp_size == 1:
        assert len(load_steps(layout, layout.places(NUM_GPU))) == NUM_LAYERS, "each layer is a step of a load"
    client, answers = RankClient(TransferConfig(**settings), layout, NUM_GPU, NUM_CPU), Answers()  # type: ignore[arg-type]
    try:
        client.start(answers)
        yield client, answers
    finally:
        client.stop()


def arrays(client: RankClient, rank: int = 0) -> list[np.ndarray]:
    """Of all layers and parts, as numbers."""
    return [array.view(np.uint16) for layer in client.kv_views(rank) for array in layer.values()]


def fill(client: RankClient, rank: int = 0) -> list[np.ndarray]:
    """Other bytes in every block, layer and part; returns copies."""
    noise = np.random.default_rng(rank)
    for array in arrays(client, rank):
        array[...] = noise.integers(0, 2**16, array.shape, dtype=np.uint16)
    return [array.copy() for array in arrays(client, rank)]


def clear(client: RankClient, rank: int = 0) -> None:
    """Zeros everywhere on the GPU."""
    for array in arrays(client, rank):
        array[...] = 0
