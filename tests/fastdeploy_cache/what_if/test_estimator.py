"""Estimated hit rates beside those of whole caches, and the pieces that they are made of."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.books.leaves.policy import SessionHint
from fastdeploy_cache.books.references import HEADER
from fastdeploy_cache.insight.what_if.setup import setup_for
from fastdeploy_cache.launch.simulator.replay import Replay
from fastdeploy_cache.launch.simulator.trace import Trace, TraceRequest, read_trace
from fastdeploy_cache.what_if.estimator import Estimator
from fastdeploy_cache.what_if.records import Records, Reference
from fastdeploy_cache.what_if.sampling import BlockSubset

BESIDE = Path(__file__).parents[4] / "shared" / "traces"  # beside the checkout
TRACES = Path(os.environ.get("FASTDEPLOY_CACHE_TRACES", BESIDE))
NUM_REQUESTS = 1000
SIZE = 512


def reference_of(request: TraceRequest) -> Reference:
    num_asked = min(len(request.blocks), (request.num_tokens - 1) // SIZE)
    marks = request.blocks.astype("<u4").tobytes()
    return Reference(request.seconds, 7, request.num_tokens, num_asked, 0.0, 0.0, 0, marks)


def largest_error(trace: Trace, gpu: int, cpu: int, policy: str) -> float:
    """In points, over all plans. What no size hits more than is no estimate: it always holds."""
    config = CacheConfig(
        block_size=SIZE, num_gpu_blocks=gpu, num_cpu_blocks=cpu, eviction_policy=policy, transfer_client="inline"
    )
    setup = setup_for(config, 1e9)
    assert setup.sample_ratio < 1 and len(setup.plans) == (8 if policy == "lru" else 16)
    estimator = Estimator(setup)
    for request in trace.requests:
        estimator.feed(reference_of(request))
    result = estimator.result()
    assert result.num_window_requests == len(trace.requests) and result.num_window_tokens == trace.num_tokens
    errors, known, bound = [], dict[tuple[str, int, int], float](), result.seen_tokens / trace.num_tokens
    for plan, hit_tokens in zip(setup.plans, result.hit_tokens, strict=True):
        sizes = plan.num_gpu_blocks, plan.num_cpu_blocks
        if (plan.policy, *sizes) not in known:
            known[plan.policy, *sizes] = Replay(trace, *sizes, plan.policy).run(lambda *_: None).token_hit_rate
        assert known[plan.policy, *sizes] <= bound + 1e-9 and hit_tokens <= result.seen_tokens
        errors.append(abs(hit_tokens / trace.num_tokens - known[plan.policy, *sizes]) * 100)
    return max(errors)


@pytest.mark.parametrize(
    ("name", "gpu", "cpu", "policy"),
    [("mooncake_conversation", 1500, 6000, "reuse"), ("agentic_code", 2500, 6000, "lru")],
)
def test_estimates_are_close_to_whole_caches_on_recorded_traces(name: str, gpu: int, cpu: int, policy: str) -> None:
    """Within 1.5 points of a replay by the simulator, for each size of both tiers."""
    assert largest_error(recorded(name, NUM_REQUESTS), gpu, cpu, policy) < 1.5


def recorded(name: str, num_requests: int) -> Trace:
    file = TRACES / f"{name}.jsonl.gz"
    if not file.exists():
        pytest.skip(f"no recorded trace {file}; FASTDEPLOY_CACHE_TRACES names a folder of them")
    trace = read_trace(file, SIZE, SIZE)
    return dataclasses.replace(trace, requests=trace.requests[:num_requests])


@pytest.mark.parametrize("name", ["mooncake_conversation", "agentic_code"])
@pytest.mark.parametrize("gpu", [1500, 20_000])
def test_the_first_answers_are_close_too(name: str, gpu: int) -> None:
    """Within 5 points after 1,000 requests, for pools that hold a part of the trace or all of it; the bound holds from
    the tenth request on."""
    for num_requests, most in ((10, 100.0), (1000, 5.0)):
        assert largest_error(recorded(name, num_requests), gpu, 2 * gpu, "lru") < most


def conversations(num_requests: int) -> Trace:
    """Conversations behind one of a few long beginnings; each turn goes on where the one before ended."""
    rng = np.random.default_rng(11)
    beginnings = [list(range(i * 100, i * 100 + 20)) for i in range(5)]
    live = [list(beginnings[rng.integers(5)]) for _ in range(60)]
    next_id, requests = 1000, []
    for number in range(num_requests):
        which = int(rng.integers(60))
        if rng.random() < 0.2:
            live[which] = list(beginnings[rng.integers(5)])
        num_new = int(rng.integers(5, 25))
        live[which] += range(next_id, next_id + num_new)
        next_id += num_new
        blocks = np.array(live[which], np.int32)
        requests.append(TraceRequest(float(number), len(blocks) * SIZE + 1, blocks))
    return Trace(requests, SIZE, next_id, next_id, 0, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_estimates_are_close_to_whole_caches(policy: str) -> None:
    """The same on conversations made up here, of which four fifths of the blocks are not looked at."""
    assert largest_error(conversations(1500), 4000, 5000, policy) < 1.5


def test_the_window_forgets_what_is_older() -> None:
    """Only requests of the window count, whatever was before."""
    config = CacheConfig(block_size=SIZE, num_gpu_blocks=100, transfer_client="inline")
    estimator = Estimator(setup_for(config, 60.0))
    blocks = np.arange(10, dtype=np.int32)
    for seconds in (0.0, 1.0, 1000.0):
        estimator.feed(reference_of(TraceRequest(seconds, 10 * SIZE + 1, blocks)))
    result = estimator.result()
    assert (result.num_requests, result.num_window_requests, result.num_window_tokens) == (3, 1, 10 * SIZE + 1)
    assert set(result.hit_tokens) == {10.0 * SIZE}


def test_a_reset_empties_the_small_caches() -> None:
    """What was used before a reset is hit no more."""
    config = CacheConfig(block_size=SIZE, num_gpu_blocks=100, transfer_client="inline")
    estimator = Estimator(setup_for(config, 60.0))
    reference = reference_of(TraceRequest(0.0, 10 * SIZE + 1, np.arange(10, dtype=np.int32)))
    estimator.feed(reference)
    estimator.feed(next(Records().feed(HEADER.pack(HEADER.size, 1.0, 0, 0, 0, 0.0, 0.0, 16, 0, 0, 0, 0))))
    estimator.feed(reference)
    assert set(estimator.result().hit_tokens) == {0.0}


def test_what_nobody_has_used_before_is_counted() -> None:
    """Of all blocks, in the sample or not: used ones from the first on, as far as they were asked for; none after a
    reset."""
    config = CacheConfig(block_size=SIZE, num_gpu_blocks=100_000, transfer_client="inline")
    estimator, seen = Estimator(setup_for(config, 1e9)), 0
    paths = ([1, 2, 3], [1, 2, 4, 5], [1, 9, 3], [8, 2], [1, 2, 4, 5, 6])
    for path, num_seen in zip(paths, (0, 2, 1, 0, 4), strict=True):
        blocks = np.array(path, np.int32)
        estimator.feed(reference_of(TraceRequest(0.0, len(path) * SIZE + 1, blocks)))
        seen += num_seen * SIZE
        assert estimator.result().seen_tokens == seen
    estimator.feed(next(Records().feed(HEADER.pack(HEADER.size, 1.0, 0, 0, 0, 0.0, 0.0, 16, 0, 0, 0, 0))))
    estimator.feed(reference_of(TraceRequest(1.0, 3 * SIZE + 1, np.array([1, 2, 3], np.int32))))
    assert estimator.result().seen_tokens == seen


def test_equal_prefixes_have_equal_samples() -> None:
    """A longer path has the sample of a shorter one in front; another namespace has another one."""
    sampling, marks = BlockSubset(0.25), np.random.default_rng(3).integers(0, 2**32, 4000, np.uint32).tobytes()
    whole, places = sampling.tokens(marks, 5)
    part, _ = sampling.tokens(marks[: 4 * 1500], 5)
    assert 900 < len(whole) < 1100 and (whole[: len(part)] == part).all() and (places[: len(part)] < 1500).all()
    others, _ = sampling.tokens(marks, 6)
    assert len(np.intersect1d(whole, others)) < 5


def test_long_paths_are_hashed_in_pieces_alike() -> None:
    """A path longer than what is hashed at once goes on as it began."""
    marks = np.random.default_rng(4).integers(0, 2**32, 150_000, np.uint32)
    whole, _ = BlockSubset(1.0).tokens(marks.tobytes(), 5)
    part, _ = BlockSubset(1.0).tokens(marks[:70_000].tobytes(), 5)
    assert len(whole) == 150_000 and (whole[:70_000] == part).all()
    assert len(np.unique(whole)) > 149_900


def test_records_are_read_wherever_the_stream_is_cut() -> None:
    """One byte at a time, or all at once: the same records."""
    record = HEADER.pack(HEADER.size + 8, 1.5, 9, 100, 2, 3.0, 4.0, 3, 5, 4, 6, 7) + b"12345678"
    together = list(Records().feed(record * 3))
    records = Records()
    one_by_one = [each for byte in record * 3 for each in records.feed(bytes([byte]))]
    assert together == one_by_one == [Reference(1.5, 9, 100, 2, 3.0, 4.0, 3, b"12345678", SessionHint(5, 4, 6, 7))] * 3
