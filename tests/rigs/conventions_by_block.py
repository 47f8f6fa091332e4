"""Engines that think in blocks: our own verbs, FastDeploy's two sequences, vLLM's block pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.adapters.fastdeploy import manager as fastdeploy
from fastdeploy_cache.adapters.vllm import manager as vllm


class Native:
    """`match`, `allocate`, `commit`, `release`."""

    name = "native"

    def __init__(self, config: CacheConfig) -> None:
        self.cache, self.token_granularity = PrefixCacheManager(config), config.block_size
        self._num_requests = 0

    def begin(self, prompt: list[int]) -> int:
        self._num_requests += 1
        self._request = Request(request_id=str(self._num_requests), prompt_token_ids=prompt)
        match = self.cache.match(self._request).wait()
        self._ids = list(match.block_ids)
        return match.num_tokens

    def blocks(self, num_tokens: int) -> Sequence[int]:
        self._ids += self.cache.allocate(self._request, -(-num_tokens // self.token_granularity) - len(self._ids))
        return self._ids

    def computed(self, tokens: list[int], num_computed: int) -> None:
        self._request.append_output(tokens[self._request.num_tokens :])
        self.cache.commit(self._request, num_computed)

    def end(self, tokens: list[int]) -> None:
        self.cache.release(self._request)

    def close(self) -> None:
        self.cache.close()


@dataclass
class _Task:
    """A request as FastDeploy's and vLLM's caches read it."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    block_tables: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_computed_tokens: int = 0

    @property
    def all_token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def follow(self, tokens: list[int]) -> None:
        """These are its tokens by now."""
        self.output_token_ids = tokens[len(self.prompt_token_ids) :]


class FastDeployV1:
    """`request_match_blocks`, then `allocate_gpu_blocks` and `update_cache_blocks` for each chunk."""

    name = "FastDeploy v1"

    def __init__(self, config: CacheConfig, suffix: str) -> None:
        self.token_granularity, self._num_requests = config.block_size, 0
        self.manager = launched(config, suffix)
        self.cache = self.manager.cache

    def begin(self, prompt: list[int]) -> int:
        self._num_requests += 1
        self._task = _Task(str(self._num_requests), prompt[:])
        self.manager.can_allocate_gpu_blocks(self.manager.get_required_block_num(len(prompt), self.token_granularity))
        ids, num_tokens, _ = self.manager.request_match_blocks(self._task, self.token_granularity)
        self._task.block_tables = ids
        return num_tokens

    def blocks(self, num_tokens: int) -> Sequence[int]:
        missing = self.manager.get_required_block_num(num_tokens, self.token_granularity)
        missing -= len(self._task.block_tables)
        if missing > 0:
            self.manager.can_allocate_gpu_blocks(missing)
            self._task.block_tables += self.manager.allocate_gpu_blocks(missing, self._task.request_id)
        return self._task.block_tables

    def computed(self, tokens: list[int], num_computed: int) -> None:
        self._task.follow(tokens)
        if num_computed == len(self._task.prompt_token_ids):
            self.manager.update_cache_blocks(self._task, self.token_granularity, num_computed)

    def end(self, tokens: list[int]) -> None:
        self._task.follow(tokens)
        self.manager.cache_output_blocks(self._task, self.token_granularity)
        self.manager.release_block_ids(self._task)
        self.manager.recycle_gpu_blocks(self._task.block_tables[self._task.num_cached_blocks :])

    def close(self) -> None:
        self.manager.close()


class FastDeployV0:
    """`request_block_ids` for all at once, `release_block_ids`."""

    name = "FastDeploy v0"

    def __init__(self, config: CacheConfig, suffix: str, num_new_tokens: int) -> None:
        self.token_granularity, self._num_requests, self._num_new_tokens = config.block_size, 0, num_new_tokens
        self.manager = launched(config, suffix)
        self.cache = self.manager.cache

    def begin(self, prompt: list[int]) -> int:
        self._num_requests += 1
        self._task = _Task(str(self._num_requests), prompt[:])
        common, own, _ = self.manager.request_block_ids(self._task, self.token_granularity, self._num_new_tokens)
        self._task.block_tables = common + own
        return len(common) * self.token_granularity

    def blocks(self, num_tokens: int) -> Sequence[int]:
        return self._task.block_tables

    def computed(self, tokens: list[int], num_computed: int) -> None:
        pass

    def end(self, tokens: list[int]) -> None:
        self._task.follow(tokens)
        self.manager.release_block_ids(self._task)

    def close(self) -> None:
        self.manager.close()


def launched(config: CacheConfig, suffix: str) -> fastdeploy.PrefixCacheManager:
    """FastDeploy's manager with this configuration, its ranks started."""
    num_gpu, num_cpu = config.pool_sizes()
    theirs = SimpleNamespace(
        total_block_num=num_gpu,
        num_cpu_blocks=num_cpu,
        block_size=config.block_size,
        enable_prefix_caching=True,
        enable_output_caching=True,
        fastdeploy_cache={
            "layout": config.layout,
            "load_policy": config.load_policy,
            "cpu_write_policy": config.cpu_write_policy,
        },
    )
    tp_size = config.transfer.tp_size
    manager = fastdeploy.PrefixCacheManager(SimpleNamespace(cache_config=theirs), tp_size)
    manager.launch_cache_manager(theirs, tp_size, list(range(tp_size)), "127.0.0.1", suffix, suffix)
    return manager


class VllmPool:
    """`get_computed_blocks`, `allocate_slots` for each step, `free`."""

    name = "vLLM block pool"

    def __init__(self, config: CacheConfig) -> None:
        self.cache, self.token_granularity = PrefixCacheManager(config), config.block_size
        self._view, self._num_requests = vllm.KVCacheManager(self.cache), 0

    def begin(self, prompt: list[int]) -> int:
        self._num_requests += 1
        self._task = _Task(str(self._num_requests), prompt[:])
        self._found: vllm.KVCacheBlocks | None
        self._found, num_tokens = self._view.get_computed_blocks(self._task)
        self._task.num_computed_tokens = num_tokens
        return num_tokens

    def blocks(self, num_tokens: int) -> Sequence[int]:
        found, self._found = self._found, None
        new = self._view.allocate_slots(self._task, num_tokens - self._task.num_computed_tokens, found)
        if new is None:
            raise MemoryError("no room for one sequence alone")
        return self._view.get_block_ids(self._task.request_id)[0]

    def computed(self, tokens: list[int], num_computed: int) -> None:
        self._task.follow(tokens)
        self._task.num_computed_tokens = num_computed

    def end(self, tokens: list[int]) -> None:
        self._task.follow(tokens)
        self._view.free(self._task)

    def close(self) -> None:
        self.cache.close()
