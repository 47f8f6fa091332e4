"""A small engine over a `PrefixCacheManager`, for tests: serves requests and knows what every block must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fastdeploy_cache import CacheConfig, Match, PrefixCacheManager, Request
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout

BLOCK_SIZE = 4
LAYOUT = KVLayout(num_layers=3, num_kv_heads=6, head_dim=4, dtype="float16")


def new_config(tp_size: int, num_gpu: int, num_cpu: int, kind: str = "processes", **transfer: object) -> CacheConfig:
    """Small pools and short deadlines; `transfer` settings may be overridden."""
    settings = {"tp_size": tp_size, "task_timeout_seconds": 10.0, "restart_backoff_seconds": 0.01} | transfer
    return CacheConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_gpu,
        num_cpu_blocks=num_cpu,
        transfer_client=kind,  # type: ignore[arg-type]
        cpu_write_policy="write_through",
        load_policy="always",  # what is computed here takes no time
        layout=LAYOUT,
        transfer=TransferConfig(**settings),  # type: ignore[arg-type]
    )


def content(tokens: Sequence[int], shape: tuple[int, ...], layer: int, part: str, rank: int) -> np.ndarray:
    """What a block that ends the prefix `tokens` holds: other bytes for every prefix, layer, part and rank."""
    name = f"{list(tokens)}|{layer}|{part}|{rank}".encode()
    noise = np.random.default_rng(int.from_bytes(hashlib.sha256(name).digest()[:8], "little"))
    return noise.integers(0, 2**16, shape, dtype=np.uint16)


class Engine:
    """Writes and compares the bytes of every layer, part and rank."""

    def __init__(self, cache: PrefixCacheManager, tp_size: int) -> None:
        self.cache = cache
        self._views = [cache.ranks.kv_views(rank) for rank in range(tp_size)]
        self._num_requests = 0

    def block(self, tokens: Sequence[int], block_id: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs (the block's memory, what it must hold), for all ranks, layers and parts."""
        return [
            (array[block_id].view(np.uint16), content(tokens, array.shape[1:], layer, part, rank))
            for rank, views in enumerate(self._views)
            for layer, parts in enumerate(views)
            for part, array in parts.items()
        ]

    def compute(self, tokens: Sequence[int], table: Sequence[int], first_block: int) -> None:
        """Write the blocks from `first_block` on."""
        for i in range(first_block, len(tokens) // BLOCK_SIZE):
            for memory, wanted in self.block(tokens[: (i + 1) * BLOCK_SIZE], table[i]):
                memory[...] = wanted

    def check(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Every block of the table holds the prefix that it stands for."""
        for i, block_id in enumerate(table):
            for memory, wanted in self.block(tokens[: (i + 1) * BLOCK_SIZE], block_id):
                assert np.array_equal(memory, wanted), f"wrong bytes in block {i} (id {block_id})"

    def match(self, tokens: Sequence[int], timeout_seconds: float | None = None) -> tuple[Request, Match]:
        """Match and wait; what is readable is checked."""
        self._num_requests += 1
        request = Request(request_id=f"r{self._num_requests}", prompt_token_ids=list(tokens))
        match = self.cache.match(request).wait(timeout_seconds)
        self.check(tokens, match.block_ids)
        return request, match

    def serve(self, tokens: Sequence[int], timeout_seconds: float | None = None) -> Match:
        """A whole request, from match to release; waits until its copies down have ended."""
        request, match = self.match(tokens, timeout_seconds)
        table = match.block_ids + self.cache.allocate(request, -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids))
        self.compute(tokens, table, len(match.block_ids))
        self.cache.commit(request, len(tokens))
        self.check(tokens, table[: len(tokens) // BLOCK_SIZE])
        self.cache.release(request)
        assert self.cache.wait_for_transfers(30)
        return match
