"""Engines with block tables over FastDeploy's and vLLM's calls, for the stories of `chaos_rig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.adapters.fastdeploy import manager as fastdeploy
from fastdeploy_cache.adapters.fastdeploy.manager import NotEnoughBlocksError
from fastdeploy_cache.adapters.vllm import manager as vllm
from tests.rigs.chaos_rig import Driver, Prompt


@dataclass(eq=False)
class Task:
    """A request with the attributes that FastDeploy's manager reads and writes."""

    request_id: str
    prompt_token_ids: list[int]
    namespace: str
    output_token_ids: list[int] = field(default_factory=list)
    block_tables: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_total_tokens: int = 0
    num_cached_tokens: int = 0  # that were cut off its prompt


class FastDeployV0(Driver):
    """All blocks of a task at once, its answer's too; then the cached part is cut off its prompt.

    Every other task is shown before its end, by `mark_computed`.
    """

    def __init__(self, manager: fastdeploy.PrefixCacheManager) -> None:
        super().__init__(manager.cache)
        self._manager, self._num_asked = manager, 0

    def admit(self, prompt: Prompt) -> bool:
        task = prompt.engine = Task(prompt.name, list(prompt.tokens), prompt.space)
        try:
            common, own, _ = self._manager.request_block_ids(task, self.kv.size, prompt.num_output)
        except NotEnoughBlocksError:
            return False
        self._num_asked += 1
        prompt.table, prompt.num_computed = [*common, *own], len(common) * self.kv.size
        task.num_cached_tokens = prompt.num_computed
        del task.prompt_token_ids[: prompt.num_computed]
        return True

    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        task = prompt.engine
        self.kv.write(prompt, prompt.num_computed + num_tokens)
        prompt.num_computed += num_tokens
        task.output_token_ids = prompt.tokens[task.num_cached_tokens + len(task.prompt_token_ids) :]
        if self._num_asked % 2:
            self._manager.mark_computed(task, prompt.num_computed)
        return True

    def end(self, prompt: Prompt) -> None:
        if prompt.num_computed < len(prompt.tokens):
            self._manager.mark_computed(prompt.engine, prompt.num_computed)
        self._manager.release_block_ids_async(prompt.engine).result()

    def reset(self) -> None:
        self._manager.reset()


class FastDeployV1(Driver):
    """Blocks chunk by chunk. With `schedules_ahead` a chunk is the cache's before it is computed."""

    def __init__(self, manager: fastdeploy.PrefixCacheManager, *, schedules_ahead: bool) -> None:
        super().__init__(manager.cache)
        self._manager, self._schedules_ahead = manager, schedules_ahead

    def admit(self, prompt: Prompt) -> bool:
        task = prompt.engine = prompt.engine or Task(prompt.name, list(prompt.tokens), prompt.space)
        task.output_token_ids = prompt.tokens[len(task.prompt_token_ids) :]
        if not self._manager.can_allocate_gpu_blocks(self.num_blocks(len(prompt.tokens))):
            return False
        ids, prompt.num_computed, _ = self._manager.request_match_blocks(task, self.kv.size)
        prompt.table = task.block_tables = list(ids)
        return True

    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        manager, task, end = self._manager, prompt.engine, prompt.num_computed + num_tokens
        task.output_token_ids = prompt.tokens[len(task.prompt_token_ids) :]
        if (num_missing := self.num_blocks(end) - len(task.block_tables)) > 0:
            if not manager.can_allocate_gpu_blocks(num_missing):
                return False
            task.block_tables += manager.allocate_gpu_blocks(num_missing, task.request_id)
        is_prefill = end <= len(task.prompt_token_ids)
        if self._schedules_ahead and is_prefill:
            manager.update_cache_blocks(task, self.kv.size, end)
        self.kv.write(prompt, end)
        prompt.num_computed = end
        if self._schedules_ahead:
            manager.mark_computed(task, end)
        elif is_prefill:
            manager.update_cache_blocks(task, self.kv.size, end)
        return True

    def end(self, prompt: Prompt) -> None:
        manager, task = self._manager, prompt.engine
        if prompt.num_computed == len(prompt.tokens) and not prompt.num_output:
            task.num_total_tokens = len(prompt.tokens)
            manager.cache_output_blocks(task, self.kv.size)
            manager.write_cache_to_storage(task)
        manager.release_block_ids(task)
        manager.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
        task.block_tables, task.num_cached_blocks, prompt.table = [], 0, []

    def reset(self) -> None:
        self._manager.reset()


class BlockPool(Driver):
    """vLLM's KV cache manager: what a step has computed is published by the next one, or by `cache_blocks`."""

    def __init__(self, cache: PrefixCacheManager, *, schedules_ahead: bool, load_timeout_seconds: float) -> None:
        super().__init__(cache)
        self._manager = vllm.KVCacheManager(
            cache, load_timeout_seconds=load_timeout_seconds, schedules_ahead=schedules_ahead
        )
        self._schedules_ahead = schedules_ahead

    def admit(self, prompt: Prompt) -> bool:
        request = prompt.engine = prompt.engine or SimpleNamespace(
            request_id=prompt.name, prompt_token_ids=list(prompt.tokens), cache_salt=prompt.space, num_preemptions=0
        )
        request.all_token_ids, request.num_computed_tokens = prompt.tokens, 0
        blocks, num_found = self._manager.get_computed_blocks(request)
        if self._manager.allocate_slots(request, len(prompt.tokens) - num_found, blocks) is None:
            return False
        request.num_computed_tokens = num_found
        [prompt.table], prompt.num_computed = self._manager.get_block_ids(prompt.name), num_found
        return True

    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        if self._manager.allocate_slots(prompt.engine, num_tokens) is None:
            return False
        [prompt.table] = self._manager.get_block_ids(prompt.name)
        self.kv.write(prompt, prompt.num_computed + num_tokens)
        prompt.num_computed = prompt.engine.num_computed_tokens = prompt.num_computed + num_tokens
        if self._schedules_ahead:
            self._manager.cache_blocks(prompt.engine, prompt.num_computed)
        return True

    def end(self, prompt: Prompt) -> None:
        self._manager.free(prompt.engine)
        prompt.engine.num_preemptions += 1  # should it come back

    def reset(self) -> None:
        if not self._manager.reset_prefix_cache():  # refused while a request has slots
            self.cache.reset()
