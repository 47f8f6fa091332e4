"""Decode steps of many running requests, a token for each and step."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time_ns

import numpy as np

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.launch.bench.serving import bench_config, take_step
from fastdeploy_cache.launch.bench.vllm_manager import Vllm, VllmServer
from fastdeploy_cache.launch.bench.workloads import Tokens

NUM_RUNNING = 64
_PROMPT_TOKENS = 1000
_POOL_BLOCKS = 20_000
_WARM_UP_STEPS = 64
Step = Callable[[list[list[int]]], None]  # these tokens have been sampled, of each request


def our_step(block_size: int) -> Step:
    """A step of as many requests, over a manager of ours."""
    cache = PrefixCacheManager(bench_config(block_size, _POOL_BLOCKS))
    requests = [Request(request_id=str(number), prompt_token_ids=prompt) for number, prompt in enumerate(_prompts())]
    for request in requests:
        cache.match(request)
        cache.allocate(request, -(-request.num_tokens // block_size))
    return lambda sampled: take_step(cache, zip(requests, sampled, strict=True))


def vllm_step(vllm: Vllm, block_size: int) -> Step:
    """The same, over vLLM's manager."""
    server = VllmServer(vllm, block_size, _POOL_BLOCKS, NUM_RUNNING)
    requests = [server.start(prompt.tolist()) for prompt in _prompts()]

    def step(sampled: list[list[int]]) -> None:
        for request, tokens in zip(requests, sampled, strict=True):
            server.decode(request, tokens)

    return step


def step_cost(step: Step, num_steps: int) -> float:
    """Microseconds for each request and step, the mean over so many steps."""
    sampled = [[number] for number in range(NUM_RUNNING)]
    for _ in range(_WARM_UP_STEPS):
        step(sampled)
    started = thread_time_ns()
    for _ in range(num_steps):
        step(sampled)
    return (thread_time_ns() - started) / 1000 / num_steps / NUM_RUNNING


def _prompts() -> list[Tokens]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 50_000, _PROMPT_TOKENS, dtype=np.int32) for _ in range(NUM_RUNNING)]
