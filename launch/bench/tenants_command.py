"""The benchmark of tenants: a quiet one beside a flood, with shares and without them."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import thread_time_ns

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.tenants import TenantConfig
from fastdeploy_cache.launch.bench.report import Figure, Report, at_least, at_most
from fastdeploy_cache.launch.bench.workloads import Tokens
from fastdeploy_cache.transfer_manager.storage.base import Blocks
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.file_store import FileStorage
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace, owned, owner_mark

_BLOCK_SIZE, _NUM_GPU_BLOCKS, _NUM_CPU_BLOCKS = 16, 4096, 8192
_NUM_TALKS, _NUM_TURNS, _TURN_TOKENS = 12, 40, 16  # of the quiet tenant: they fit into its share
_TALK_TOKENS, _FLOOD_TOKENS, _FLOOD_PER_TURN = 1024, 2048, 8
_SHARE = 0.4  # of each tier, that the quiet tenant is guaranteed
_ROUNDS = 5
_STORE_SLOTS, _OBJECT_BYTES, _STORED_TALKS, _TALK_OBJECTS = 1024, 4096, 12, 24  # of a file store
_LEAST_OF_ALONE, _MOST_OF_PLAIN = 0.95, 1.6
_QUIET, _FLOOD = "quiet", "flood"


@dataclass
class _Served:
    """Tokens of a namespace's prompts, and how many of them were cached."""

    num_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def percent(self) -> float:
        """The token hit rate."""
        return 100 * self.num_hit_tokens / self.num_tokens


class _Run:
    """One cache and what it served; `nanoseconds` of the flood's requests, each in this thread's time."""

    def __init__(self, *tenants: TenantConfig, num_cpu_blocks: int) -> None:
        self._cache = PrefixCacheManager(
            CacheConfig(
                block_size=_BLOCK_SIZE,
                num_gpu_blocks=_NUM_GPU_BLOCKS,
                num_cpu_blocks=num_cpu_blocks,
                transfer_client="inline",
                load_policy="always",
                tenants=tenants,
            )
        )
        self.served = {_QUIET: _Served(), _FLOOD: _Served()}
        self.nanoseconds = list[int]()
        self._number = 0

    def close(self) -> None:
        """It is measured."""
        self._cache.close()

    def serve(self, namespace: str, prompt: Tokens) -> None:
        """One whole request."""
        cache, served = self._cache, self.served[namespace]
        self._number += 1
        begun = thread_time_ns()
        request = Request(request_id=str(self._number), prompt_token_ids=prompt, namespace=namespace)
        match = cache.match(request)
        if not match.ready:
            match = match.wait(1)
        cache.allocate(request, cache.blocks_for(len(prompt)) - len(match.block_ids))
        cache.commit(request, len(prompt))
        cache.release(request)
        spent = thread_time_ns() - begun
        if namespace == _FLOOD:
            self.nanoseconds.append(spent)
        served.num_tokens += len(prompt)
        served.num_hit_tokens += match.num_tokens


def _requests(*, has_flood: bool) -> Iterator[tuple[str, Tokens]]:
    """The quiet tenant's talks go on in turns; between two of its requests come several of the flood, each its own."""
    draw = np.random.default_rng(6)
    talks = [_text(draw, _TALK_TOKENS) for _ in range(_NUM_TALKS)]
    for _ in range(_NUM_TURNS):
        for number in range(_NUM_TALKS):
            talks[number] = np.concatenate([talks[number], _text(draw, _TURN_TOKENS)])
            yield _QUIET, talks[number]
            for _ in range(_FLOOD_PER_TURN):
                flood = _text(draw, _FLOOD_TOKENS)
                if has_flood:
                    yield _FLOOD, flood


def _text(draw: np.random.Generator, length: int) -> Tokens:
    return draw.integers(0, 50_000, length, dtype=np.int32)


def _run(*tenants: TenantConfig, has_flood: bool, num_cpu_blocks: int) -> _Run:
    run = _Run(*tenants, num_cpu_blocks=num_cpu_blocks)
    gc.collect()
    for namespace, prompt in _requests(has_flood=has_flood):
        run.serve(namespace, prompt)
    run.close()
    return run


def bench_tenants(json_file: Path | None) -> bool:
    """Measure all in turn; whether a share keeps what it promises, at the promised cost.

    Raises:
        LaunchError: the file cannot be written.
    """
    shares = TenantConfig(namespace=_QUIET, guaranteed_gpu_share=_SHARE, guaranteed_cpu_share=_SHARE)
    with Report(json_file) as report:
        lines = {}
        for name, num_cpu_blocks in (("GPU alone", 0), ("with a CPU tier", _NUM_CPU_BLOCKS)):
            alone = _run(has_flood=False, num_cpu_blocks=num_cpu_blocks).served[_QUIET].percent
            plain = _run(has_flood=True, num_cpu_blocks=num_cpu_blocks).served[_QUIET].percent
            shared = _run(shares, has_flood=True, num_cpu_blocks=num_cpu_blocks).served[_QUIET].percent
            lines[name] = _beside_a_flood(name, alone, plain, shared)
        lines["file store"] = _of_a_store()
        report.table("Token hit rate of a quiet tenant beside a flood", lines)
        report.table("A request of the flood", {"GPU alone": _costs(shares)}, about="in its thread's time, all evict")
        return report.end()


def _beside_a_flood(name: str, alone: float, plain: float, shared: float) -> list[Figure]:
    base = Figure("alone", alone, "%")
    promise = at_least(f"{name}: hit rate of a quiet tenant with its share, of that alone", _LEAST_OF_ALONE)
    with_shares = Figure("with shares", shared, "%", baseline=base, promise=promise)
    return [base, Figure("without shares", plain, "%", baseline=base), with_shares]


def _of_a_store() -> list[Figure]:
    """The same of a file store's objects, real files: what is read again and again, and what is written once."""
    shares = [(owner_mark(_QUIET), _SHARE, 1.0)]
    alone, plain = _stored_percent([], has_flood=False), _stored_percent([], has_flood=True)
    return _beside_a_flood("file store", alone, plain, _stored_percent(shares, has_flood=True))


def _stored_percent(shares: list[tuple[bytes, float, float]], *, has_flood: bool) -> float:
    """How many of the objects of a quiet tenant's talks are found, each talk in its turn, and written where not."""
    space = KeySpace(weights_id="w", layout="bench", object_bytes=_OBJECT_BYTES, block_size=16, rank=0, tp_size=1)
    segment, draw = np.zeros((_TALK_OBJECTS, _OBJECT_BYTES), np.uint8), np.random.default_rng(7)
    num_bytes, num_asked, num_found = _STORE_SLOTS * _OBJECT_BYTES, 0, 0
    config = StorageConfig(weights_id="w", folder="unused", admission="all", capacity_bytes=num_bytes)
    buffers = [memoryview(row.data) for row in segment]

    def blocks(namespace: str, hashes: list[bytes]) -> Blocks:
        mark = owner_mark(namespace)
        return Blocks(hashes=[owned(name, mark) for name in hashes], buffers=buffers, owner=mark)

    with tempfile.TemporaryDirectory() as folder:
        store = FileStorage(config.store_options(1) | {"folder": folder, "shares": shares}, space, segment)
        talks = [blocks(_QUIET, [draw.bytes(32) for _ in range(_TALK_OBJECTS)]) for _ in range(_STORED_TALKS)]
        for _ in range(_ROUNDS):
            for talk in talks:
                num_asked, num_found = num_asked + _TALK_OBJECTS, num_found + store.read(talk)
                store.write(talk)
                for _ in range(_FLOOD_PER_TURN if has_flood else 0):
                    store.write(blocks(_FLOOD, [draw.bytes(32) for _ in range(_TALK_OBJECTS)]))
        store.close()
    return 100 * num_found / num_asked


def _costs(shares: TenantConfig) -> list[Figure]:
    """What a request costs with shares and without them: runs in alternation, medians of medians."""
    plain, shared = list[float](), list[float]()
    for _ in range(_ROUNDS):
        for into, tenants in ((plain, ()), (shared, (shares,))):
            into.append(median(_run(*tenants, has_flood=True, num_cpu_blocks=0).nanoseconds) / 1000)
    base = Figure("without shares", median(plain), "us")
    promise = at_most("a request that evicts, with shares, of one without", _MOST_OF_PLAIN)
    return [base, Figure("with shares", median(shared), "us", baseline=base, promise=promise)]
