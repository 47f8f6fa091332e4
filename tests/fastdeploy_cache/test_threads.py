"""Verbs from many threads at once: the books add up and no block holds another prefix's content."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout

BLOCK_SIZE, NUM_THREADS, NUM_ROUNDS = 2, 8, 60
TEXTS = [[(11 * i * i + 3 * text * (i // 6)) % 50 for i in range(40)] for text in range(6)]


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads change places as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def mark(tokens: list[int]) -> int:
    """A number that stands for a prefix (of 53 bits: exact in the arrays)."""
    return hash(tuple(tokens)) % 2**53


class Worker:
    """One thread's requests; each block it may read is compared with the prefix that it stands for."""

    def __init__(self, cache: PrefixCacheManager, number: int) -> None:
        self.cache, self.number = cache, number
        self.choose = random.Random(number)
        self.marks = [array.view(np.int64) for layer in cache.ranks.kv_views(0) for array in layer.values()]
        self.num_hits = [0, 0]
        self.failure: BaseException | None = None

    def check(self, tokens: list[int], table: list[int]) -> None:
        for i, block_id in enumerate(table):
            wanted = mark(tokens[: (i + 1) * BLOCK_SIZE])
            assert all((array[block_id] == wanted).all() for array in self.marks), "wrong content served"

    def serve(self, number: int) -> None:
        tokens = self.choose.choice(TEXTS)[: self.choose.randint(1, 40)]
        tokens += [self.choose.randint(0, 3) for _ in range(self.choose.choice((0, 0, 4)))]
        request = Request(request_id=f"{self.number}-{number}", prompt_token_ids=tokens)
        match = self.cache.match(request)
        self.check(tokens, match.block_ids)
        if self.choose.random() < 0.7:
            match = match.wait(30)
            self.check(tokens, match.block_ids)
        try:
            new = self.cache.allocate(request, -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids))
        except OutOfBlocksError:
            self.cache.release(request)
            return
        self.compute(request, tokens, match.wait(0).block_ids, new)
        self.num_hits[0] += match.num_gpu_tokens
        self.num_hits[1] += match.num_cpu_tokens

    def compute(self, request: Request, tokens: list[int], matched: list[int], new: list[int]) -> None:
        table, num_full = matched + new, len(tokens) // BLOCK_SIZE
        num_full = min(num_full, len(table))
        for i in range(len(matched), num_full):
            for array in self.marks:
                array[table[i]] = mark(tokens[: (i + 1) * BLOCK_SIZE])
        for num_done in (num_full // 2, num_full):
            if num_done >= len(matched):
                self.cache.commit(request, num_done * BLOCK_SIZE)
        self.check(tokens, table[:num_full])
        self.cache.release(request)

    def run(self) -> None:
        try:
            for number in range(NUM_ROUNDS):
                self.serve(number)
        except BaseException as failure:
            self.failure = failure


def new_cache() -> PrefixCacheManager:
    # a layer's key of one head and four elements of two bytes is one mark of eight bytes for each token
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float16")
    return PrefixCacheManager(
        CacheConfig(
            block_size=BLOCK_SIZE, num_gpu_blocks=60, num_cpu_blocks=150, transfer_client="inline", layout=layout
        )
    )


def test_random_verbs_from_eight_threads(eager_switching: None) -> None:
    """Threads match, allocate, commit and release over full tiers and every readable block is compared."""
    with new_cache() as cache:
        workers = [Worker(cache, number) for number in range(NUM_THREADS)]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            cache.check_invariants()
            threads[0].join(0.05)
        assert [worker.failure for worker in workers if worker.failure is not None] == []
        cache.check_invariants()
        gpu = cache.stats().gpu
        assert gpu.num_private == gpu.num_protected == gpu.num_in_flight == cache.stats().num_requests == 0
        from_gpu, from_cpu = (sum(worker.num_hits[tier] for worker in workers) for tier in range(2))
        assert from_gpu > 1000 and from_cpu > 100, "the test is worth something: both tiers were hit"
