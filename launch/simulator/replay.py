"""One trace through one cache: the real manager and its in-process client; no bytes move."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastdeploy_cache import CacheConfig, Match, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.books.leaves.policy import EvictionPolicy
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import PromptTooLongError
from fastdeploy_cache.launch.simulator.hybrid import HybridModel
from fastdeploy_cache.launch.simulator.store import SimulatedStore
from fastdeploy_cache.launch.simulator.trace import Trace, TraceRequest
from fastdeploy_cache.policies import new_policy

_KIND = "fastdeploy_cache.launch.simulator.store:SimulatedStore"


@dataclass(frozen=True)
class Replayed:
    """What one cache did with a trace. Hit rates are in tokens, 0 to 1."""

    policy: str
    gpu_blocks: int
    cpu_blocks: int
    storage_blocks: int
    token_hit_rate: float
    gpu_token_hit_rate: float
    cpu_token_hit_rate: float
    storage_token_hit_rate: float
    gpu_evicted_blocks: int
    cpu_evicted_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    stored_blocks: int
    fetched_blocks: int
    storage_evicted_blocks: int
    too_long_requests: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """The store below the CPU tier. `write_policy` and `admission` are settings of the cache with these names."""

    num_blocks: int = 0  # 0: there is none
    write_policy: str = CacheConfig.storage_write_policy
    admission: str = StorageConfig.admission


class Replay:
    """Serves each request of a trace at its time, whole and at once, before the next comes.

    One token stands for a block, so the manager's blocks are of one token: every decision is the same, and nothing is
    spent on comparing and hashing made-up tokens. A prompt that ends inside a block brings one more, never cached. Each
    request waits for all that storage has of it.
    """

    def __init__(
        self,
        trace: Trace,
        gpu_blocks: int,
        cpu_blocks: int,
        policy: str | EvictionPolicy = "lru",
        *,
        write_policy: str = CacheConfig.cpu_write_policy,
        storage: StorePlan = StorePlan(),
        model: HybridModel | None = None,
    ) -> None:
        """`policy`: a name, or an object in its place. A store needs CPU blocks to go through. `model`: a hybrid one,
        whose sizes are blocks of the full row."""
        self._trace, self._model = trace, model
        self._now = 0.0
        self._policy = policy if isinstance(policy, str) else type(policy).__name__
        config = CacheConfig(
            block_size=1,
            num_gpu_blocks=gpu_blocks,
            num_cpu_blocks=cpu_blocks,
            cpu_write_policy=write_policy,  # type: ignore[arg-type]
            storage_write_policy=storage.write_policy,  # type: ignore[arg-type]
            prefetch_policy="wait_complete",
            min_prefetch_tokens=-(-CacheConfig.min_prefetch_tokens // trace.block_size),
            transfer_client="inline",
            insight=InsightConfig(what_if=False, flight_recorder_bytes=0),
            **(model.settings(gpu_blocks) if model is not None else {}),  # type: ignore[arg-type]
        )
        if isinstance(policy, str):  # it has to know how many tokens a block really stands for
            size = max(gpu_blocks, cpu_blocks)
            policy = new_policy(
                policy, lambda: self._now, num_blocks=size, block_tokens=trace.block_size, tree_tokens=1
            )
        self.cache = PrefixCacheManager(config, clock=lambda: self._now, policy=policy)
        self._store: SimulatedStore | None = None
        if storage.num_blocks:
            self._store = SimulatedStore(storage.num_blocks, storage.admission)
            self.cache.storage.attach(StorageConfig(kind=_KIND, weights_id="trace"), client=self._store)
        self._hits = [0, 0, 0]  # blocks from GPU, CPU and storage
        self._num_too_long = 0

    def run(self, on_request: Callable[[int, TraceRequest], None]) -> Replayed:
        """Replay all of it; `on_request` hears of each request before it is served."""
        started = time.perf_counter()
        for number, request in enumerate(self._trace.requests):
            on_request(number, request)
            self._now = request.seconds
            self._serve(str(number), request)
        return self._result(time.perf_counter() - started)

    def _serve(self, name: str, traced: TraceRequest) -> None:
        size = self._trace.block_size
        num_blocks = len(traced.blocks)
        tokens = traced.blocks
        if traced.num_tokens > num_blocks * size:
            tokens = np.append(tokens, np.int32(0))  # stands for the rest of the prompt; never committed
        request = Request(request_id=name, prompt_token_ids=tokens)
        request.take_session_hint(traced.hint)
        try:
            match = self._match(request)
        except PromptTooLongError:
            self._num_too_long += 1
            return
        self._hits[0] += match.num_gpu_tokens
        self._hits[1] += match.num_cpu_tokens
        self._hits[2] += match.num_storage_tokens
        if self._model is not None:
            self._model.compute(self.cache, request, match, num_blocks)
        else:
            self.cache.allocate(request, len(tokens) - match.num_tokens)
            self.cache.commit(request, num_blocks)
        self.cache.release(request)

    def _match(self, request: Request) -> Match:
        """What is found of a request, with what comes from storage. Raises `PromptTooLongError`."""
        if self._store is None:
            match = self.cache.match(request)
            return match.poll() if match.num_coming_tokens else match
        self.cache.prefetch(request)
        try:
            return self.cache.match(request).wait(0)  # every task has ended by now
        except PromptTooLongError:
            self.cache.end_prefetch(request)
            raise

    def _result(self, seconds: float) -> Replayed:
        stats, size, total = self.cache.stats(), self._trace.block_size, self._trace.num_tokens
        gpu, cpu, storage = (hits * size / total for hits in self._hits)
        return Replayed(
            policy=self._policy,
            gpu_blocks=stats.gpu.num_blocks,
            cpu_blocks=stats.cpu.num_blocks,
            storage_blocks=self._store.num_blocks if self._store is not None else 0,
            token_hit_rate=gpu + cpu + storage,
            gpu_token_hit_rate=gpu,
            cpu_token_hit_rate=cpu,
            storage_token_hit_rate=storage,
            gpu_evicted_blocks=stats.gpu.num_evicted,
            cpu_evicted_blocks=stats.cpu.num_evicted,
            swapped_out_blocks=stats.num_swapped_out_blocks,
            swapped_in_blocks=stats.num_swapped_in_blocks,
            stored_blocks=stats.storage.num_written_blocks if stats.storage is not None else 0,
            fetched_blocks=stats.storage.num_fetched_blocks if stats.storage is not None else 0,
            storage_evicted_blocks=self._store.num_evicted if self._store is not None else 0,
            too_long_requests=self._num_too_long,
            seconds=seconds,
        )
