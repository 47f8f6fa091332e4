"""What a model with a window and states costs more than one whose layers all keep everything, verb by verb."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Sequence
from time import thread_time_ns

import numpy as np

from fastdeploy_cache import CacheConfig, KVGroup, KVLayout, PrefixCacheManager, Request, StatePart
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.launch.bench.control import medians
from fastdeploy_cache.launch.bench.serving import PHASES, STEP_TOKENS, Server, serve_in_flight, times_of
from fastdeploy_cache.launch.bench.workloads import Tokens, Work, Workload

WINDOW_TOKENS = 1024
_GROUPS = (
    KVGroup(kind="full", layers=(0,)),
    KVGroup(kind="window", reach_tokens=WINDOW_TOKENS, layers=(1,)),
    KVGroup(kind="state", layers=(2,), parts=(StatePart(name="state", shape=(16,)),)),
)
_LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, groups=_GROUPS)
_NUM_STATES = 4096
Live = tuple[Request, Tokens, list[int]]


class RowServer:
    """An engine of such a model. It computes nothing, and notes what the verbs cost it: see `Serving`."""

    def __init__(self, config: CacheConfig, num_in_flight: int) -> None:
        self.cache, self._size, self._num_in_flight = PrefixCacheManager(config), config.block_size, num_in_flight
        self._num_served = self.num_hit_tokens = 0
        self.nanoseconds = dict.fromkeys(PHASES, 0)

    def serve(self, works: Iterable[Work]) -> None:
        """See `Serving`."""
        serve_in_flight(works, self._num_in_flight, self._start, self._finish)

    def _start(self, work: Work) -> Live:
        cache, spent = self.cache, self.nanoseconds
        self._num_served += 1
        started = thread_time_ns()
        request = Request(request_id=str(self._num_served), prompt_token_ids=work.prompt)
        made = thread_time_ns()
        match = cache.match(request)
        matched = thread_time_ns()
        new = cache.rows.allocate(request, -(-request.num_tokens // self._size) - len(match.block_ids))
        allocated = thread_time_ns()
        slots: Sequence[int] = new.tables[1].block_ids
        for end in match.checkpoint_tokens:
            slots = cache.rows.snapshot(request, end, slots) or slots
            cache.commit(request, end)
        cache.commit(request, request.num_tokens)
        spent["commit"] += thread_time_ns() - allocated
        spent["allocate"] += allocated - matched
        spent["match"] += matched - made
        spent["request"] += made - started
        self.num_hit_tokens += match.num_tokens
        return request, work.output, list(slots)

    def _finish(self, live: Live) -> None:
        request, output, slots = live
        pieces = [output[first : first + STEP_TOKENS] for first in range(0, len(output), STEP_TOKENS)]
        started = thread_time_ns()
        for tokens in pieces:
            before = request.num_tokens
            (done,) = self.cache.rows.step([(request, tokens, before)])
            if isinstance(done, BaseException):
                raise done
            end = request.num_tokens // self._size * self._size
            if end > before:
                slots = list(self.cache.rows.snapshot(request, end, slots) or slots)
        self.cache.commit(request, request.num_tokens)
        committed = thread_time_ns()
        self.cache.release(request)
        self.nanoseconds["release"] += thread_time_ns() - committed
        self.nanoseconds["decode"] += committed - started


def row_times(workload: Workload, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds per request by phase, of both kinds of model, interleaved; medians. Without the flight recorder."""
    runs: dict[str, list[dict[str, float]]] = {"uniform": [], "rows": []}
    for _ in range(repeats):
        for name, times in runs.items():
            config = _config(workload.block_size, workload.pool_tokens // workload.block_size, has_rows=name == "rows")
            make: type[Server | RowServer] = RowServer if name == "rows" else Server
            server = make(config, workload.num_in_flight)
            gc.collect()  # what the server before has left is not this one's
            server.serve(workload.works)
            times.append(times_of(server, workload))
            server.cache.close()
    return {name: medians(times) for name, times in runs.items()}


def long_match(repeats: int = 41) -> dict[str, float]:
    """Microseconds of a match of a cached prompt of 128k tokens, of both kinds of model; medians, interleaved."""
    prompt = np.random.default_rng(6).integers(0, 50_000, 131_072, dtype=np.int32)
    config = {name: _config(64, 10_000, has_rows=name == "rows") for name in ("uniform", "rows")}
    servers: dict[str, Server | RowServer] = {
        "uniform": Server(config["uniform"], 1),
        "rows": RowServer(config["rows"], 1),
    }
    spent: dict[str, list[int]] = {"uniform": [], "rows": []}
    for server in servers.values():
        server.serve([Work(prompt, prompt[:0])])
    for number in range(repeats):
        for name, server in servers.items():
            request = Request(request_id=f"again {number}", prompt_token_ids=prompt)
            started = thread_time_ns()
            match = server.cache.match(request)
            spent[name].append(thread_time_ns() - started)
            assert match.num_tokens == len(prompt) - 64
            server.cache.release(request)
    for server in servers.values():
        server.cache.close()
    return {name: statistics.median(times) / 1000 for name, times in spent.items()}


def _config(block_size: int, num_gpu_blocks: int, *, has_rows: bool) -> CacheConfig:
    return CacheConfig(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        num_gpu_units=(2 * num_gpu_blocks, _NUM_STATES) if has_rows else (),
        layout=_LAYOUT if has_rows else None,
        transfer_client="inline",
        insight=InsightConfig(flight_recorder_bytes=0),
    )
