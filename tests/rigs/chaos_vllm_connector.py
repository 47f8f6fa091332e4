"""The two halves of vLLM's connector, called as vLLM's scheduler and workers call them, for the stories of `chaos_rig`.

vLLM itself is not needed: its blocks, its own prefix cache, its requests and its tensors are stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.adapters.vllm.scheduler import SchedulerHalf
from fastdeploy_cache.adapters.vllm.worker import WorkerHalf
from fastdeploy_cache.transfer_manager.kv.memory import KVMemory
from tests.rigs.chaos_rig import SECONDS, Driver, Prompt


@dataclass
class Tensor:
    """As much of a CPU tensor as is looked at."""

    array: np.ndarray
    device = SimpleNamespace(type="cpu", index=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def numel(self) -> int:
        return self.array.size

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(self.array[index])


@dataclass(eq=False)
class Block:
    """One of vLLM's."""

    block_id: int
    ref_cnt: int = 0
    key: object = None


class Pool:
    """vLLM's blocks, and what it finds in them itself. Free ones go first that were freed first."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.blocks, self._size = [Block(i) for i in range(num_blocks)], size
        self.free = dict.fromkeys(range(num_blocks))
        self.known: dict[object, Block] = {}

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.free.pop(block.block_id, None)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is freed twice"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free[block.block_id] = None

    def take(self, num_blocks: int) -> list[int] | None:
        if num_blocks > len(self.free):
            return None
        ids = list(self.free)[:num_blocks]
        for block in self.of(ids):
            if self.known.get(block.key) is block:
                del self.known[block.key]
            block.key = None
        self.touch(self.of(ids))
        return ids

    def of(self, block_ids: Sequence[int]) -> list[Block]:
        return [self.blocks[block_id] for block_id in block_ids]

    def reset_prefix_cache(self) -> bool:
        """Refused while somebody holds a block."""
        is_idle = len(self.free) == len(self.blocks)
        if is_idle:
            self.known.clear()
        return is_idle

    def find(self, prompt: Prompt) -> list[Block]:
        found = []
        for key in self._keys(prompt, (len(prompt.tokens) - 1) // self._size):
            if key not in self.known:
                break
            found.append(self.known[key])
        return found

    def publish(self, prompt: Prompt) -> None:
        """What it has computed or loaded can be found."""
        keys = self._keys(prompt, prompt.num_computed // self._size)
        for key, block in zip(keys, self.of(prompt.table), strict=False):
            if block.key is None:
                block.key = key
                self.known.setdefault(key, block)

    def _keys(self, prompt: Prompt, num_blocks: int) -> list[object]:
        return [(prompt.space, tuple(prompt.tokens[: (i + 1) * self._size])) for i in range(num_blocks)]


class Request(SimpleNamespace):
    """One of vLLM's, with the attributes that are read. A prompt that comes back after its end is another one."""

    prompt_embeds = lora_request = None
    resumable = skip_reading_prefix_cache = False
    mm_features: tuple[Any, ...] = ()
    num_computed_tokens = num_in_flight_tokens = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class VLLMConnector(Driver):
    """Loads between steps, or layer by layer in the step that computes on them; failed ones are computed."""

    def __init__(self, config: CacheConfig, *, is_layerwise: bool) -> None:
        self.half = SchedulerHalf(config, "rows", is_layerwise=is_layerwise)
        self._is_layerwise, self.num_kept_blocks = is_layerwise, config.pool_sizes()[0]
        self._pool = Pool(self.num_kept_blocks, config.block_size)
        self.half.bind_block_pool(self._pool)
        self._workers = [WorkerHalf(config, rank) for rank in range(config.transfer.tp_size)]
        self._memory = [KVMemory.create(worker.layout, self.num_kept_blocks) for worker in self._workers]
        for worker, memory in zip(self._workers, self._memory, strict=True):
            worker.share(memory)
            worker.register(dict(_tensors(memory)))
        found = {rank: worker.kv for rank, worker in enumerate(self._workers)}
        self.half.attach({rank: kv for rank, kv in found.items() if kv is not None})
        self._loading: dict[str, Prompt] = {}
        self._ended: dict[str, list[int]] = {}  # blocks of requests that have ended while they were loading
        self._waiting: dict[str, Request] = {}
        self._num_admitted = self.num_loaded = self.num_failed = 0
        super().__init__(self.half.cache)

    def close(self) -> None:
        self.half.close()
        self.kv.views = []
        for memory in self._memory:
            memory.close()

    # -- the scheduler

    def admit(self, prompt: Prompt) -> bool:
        request = prompt.engine or self._new_request(prompt)
        found = self._pool.find(prompt)
        num_external, _ = self.half.match(request, len(found) * self.kv.size)
        if num_external is None:
            return False
        self._pool.touch(found)
        new = self._pool.take(self.num_blocks(len(prompt.tokens)) - len(found))
        if new is None:
            self._pool.free_blocks(reversed(found))
            return False
        prompt.table = [block.block_id for block in found] + new
        self.half.allocated(request, [prompt.table], num_external)
        del self._waiting[request.request_id]
        prompt.num_computed = request.num_computed_tokens = len(found) * self.kv.size
        if num_external:
            self._loading[request.request_id] = prompt
            request.num_computed_tokens += num_external
            self.num_loaded += num_external
        return True

    def _new_request(self, prompt: Prompt) -> Request:
        self._num_admitted += 1
        request = prompt.engine = Request(
            request_id=f"{prompt.name}-{self._num_admitted}", prompt_token_ids=list(prompt.tokens),
            all_token_ids=prompt.tokens, num_prompt_tokens=len(prompt.tokens), cache_salt=prompt.space or None,
        )  # fmt: skip
        self._waiting[request.request_id] = request
        return request

    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        request = prompt.engine
        if request.request_id in self._loading:
            if not self._is_layerwise:
                self.cache.wait_for_transfers(self.patience)
            self._step()
            if request.request_id in self._loading:
                return True  # other requests have had this step
        end = prompt.num_computed + min(num_tokens, len(prompt.tokens) - prompt.num_computed)
        new = self._pool.take(max(0, self.num_blocks(end) - len(prompt.table)))
        if new is None:
            return False
        prompt.table += new
        request.num_in_flight_tokens, request.num_computed_tokens = end - prompt.num_computed, end
        self._step(prompt)
        self.kv.write(prompt, end)
        prompt.num_computed, request.num_in_flight_tokens = end, 0
        self._pool.publish(prompt)
        return True

    def end(self, prompt: Prompt) -> None:
        request, is_whole = prompt.engine, prompt.num_computed == len(prompt.tokens) and not prompt.num_output
        if self._is_layerwise and request.request_id in self._loading:
            self._step()  # nothing ends inside of a step
        is_loading = self._loading.pop(request.request_id, None) is not None
        if is_whole or is_loading:
            prompt.engine = None
            self.half.finish(request, [prompt.table])
        else:
            self._waiting[request.request_id] = request
        if is_loading:
            self._ended[request.request_id] = prompt.table
        else:
            self._pool.free_blocks(reversed(self._pool.of(prompt.table)))
        request.num_computed_tokens = 0

    def reset(self) -> None:
        self._pool.reset_prefix_cache()
        assert not self.half.kept.is_busy, "a reset waits for copies, which end by their deadline"
        self.half.reset()
        self._pool.known.clear()

    def rest(self) -> None:
        """Requests that wait are aborted; blocks that were kept for copies are free."""
        for request in self._waiting.values():
            self.half.finish(request, [[]])
        self._waiting.clear()
        while self.half.kept.is_busy or self._ended:
            assert self.cache.wait_for_transfers(SECONDS)
            self._step()
        assert len(self._pool.free) == self.num_kept_blocks, "vLLM's blocks are left behind"

    # -- a step

    def _step(self, *scheduled: Prompt) -> None:
        """The scheduler's plan, what each worker makes of it, and what the scheduler makes of that."""
        tables = {prompt.engine.request_id: prompt.table for prompt in scheduled}
        works = self.half.works(dict.fromkeys(tables, 0), {})
        plan = self.half.step({name: (work, [tables[name]]) for name, work in works.items()})
        received, failed = set(self._loading if plan.loads else ()), set[int]()
        for worker in self._workers:
            worker.begin(plan)
            for name in self._layers:
                worker.wait_layer(name)
            worker.wait_all()
            received |= worker.take_received()
            failed |= worker.take_failed()
        for name in received:
            if name in self._loading:
                self._arrived(self._loading.pop(name), failed)
            else:
                self._pool.free_blocks(reversed(self._pool.of(self._ended.pop(name))))
        if plan.loads or plan.failed_block_ids:
            self.half.processed(plan.number)

    @property
    def _layers(self) -> list[str]:
        return [f"layers.{layer}" for layer in range(len(self.kv.views[0]))]

    def _arrived(self, prompt: Prompt, failed: set[int]) -> None:
        """Of what was promised, as much as is there: vLLM computes the rest again."""
        request = prompt.engine
        promised = prompt.table[: request.num_computed_tokens // self.kv.size]
        num_good = next((i for i, block_id in enumerate(promised) if block_id in failed), len(promised))
        self.num_failed += num_good < len(promised)
        prompt.num_computed = request.num_computed_tokens = num_good * self.kv.size
        self.kv.check(prompt, prompt.num_computed)
        self._pool.publish(prompt)


def _tensors(memory: KVMemory) -> Iterable[tuple[str, Tensor]]:
    """Layers as vLLM has them: [blocks, heads, tokens, content]."""
    for layer, parts in enumerate(memory.views()):
        [array] = parts.values()
        yield f"layers.{layer}", Tensor(array.transpose(0, 2, 1, 3))
