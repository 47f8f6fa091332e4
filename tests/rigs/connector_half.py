"""The scheduler's half of the vLLM connector, called as vLLM calls it for one chat after another. Without vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.adapters.vllm import scheduler
from fastdeploy_cache.adapters.vllm.groups import GroupMap
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.simulated_client import SimulatedClient

SIZE, CHUNK, NUM_BLOCKS = 16, 512, 2000
_GROUPS = (
    KVGroup(kind="full", layers=(0, 1)),
    KVGroup(kind="window", reach_tokens=128, layers=(2, 3), own_units=True),
)


class _Pool:
    """As much of vLLM's block pool as is called."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=1) for number in range(NUM_BLOCKS)]

    def touch(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def reset_prefix_cache(self) -> bool:
        return True


class ConnectorHalf:
    """One, of a model with one group or with a window beside it. `call` makes each call, and may measure it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_window: bool) -> None:
        groups = _GROUPS if has_window else ()
        layout = KVLayout(num_layers=4, num_kv_heads=1, head_dim=8, value_head_dim=0, dtype="float16", groups=groups)
        config = CacheConfig(
            block_size=SIZE, num_gpu_blocks=NUM_BLOCKS, num_cpu_blocks=NUM_BLOCKS, layout=layout,
            transfer_client="inline", num_gpu_units=(NUM_BLOCKS,) * has_window,
        )  # fmt: skip
        self.client = SimulatedClient(NUM_BLOCKS, NUM_BLOCKS, int(has_window))
        monkeypatch.setattr(scheduler, "PrefixCacheManager", partial(PrefixCacheManager, client=self.client))
        of = GroupMap(0, (1,), frozenset()) if has_window else scheduler.ONE_GROUP
        self.half = scheduler.SchedulerHalf(config, "stand-in", is_layerwise=False, groups=of)
        self.half.bind_block_pool(_Pool())
        self._num_groups, self._num_served = 1 + has_window, 0
        self._free = deque(range(1, NUM_BLOCKS))
        self.call: Callable[..., Any] = lambda verb, *given: verb(*given)
        self.hints: Any = None  # of the requests from now on

    def serve(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """A request from its match to its end; returns the tokens that were loaded."""
        self._num_served += 1
        request = SimpleNamespace(
            request_id=str(self._num_served), prompt_token_ids=prompt, all_token_ids=list(prompt),
            num_tokens=len(prompt), num_prompt_tokens=len(prompt), num_computed_tokens=0, num_in_flight_tokens=0,
            prompt_embeds=None, resumable=False, mm_features=[], lora_request=None, cache_salt=None,
            skip_reading_prefix_cache=False, kv_hints=self.hints,
        )  # fmt: skip
        num_loaded, _ = self.call(self.half.match, request, 0)
        num_blocks = -(-(len(prompt) + len(output)) // SIZE)
        tables = [[self._free.popleft() for _ in range(num_blocks)] for _ in range(self._num_groups)]
        self.call(self.half.allocated, request, tables, num_loaded)
        if num_loaded:
            self.client.land_all()
            self.call(self.half.step, {})
            request.num_computed_tokens = num_loaded
        waiting = deque(output)
        while request.num_computed_tokens < len(prompt) + len(output):
            num_tokens = min(CHUNK, request.num_tokens - request.num_computed_tokens)
            works = self.call(self.half.works, {request.request_id: num_tokens}, {})
            self.call(self.half.step, {name: (work, tables) for name, work in works.items()})
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens == request.num_tokens and waiting:
                request.all_token_ids.append(waiting.popleft())
                request.num_tokens += 1
            self.client.land_all()
        self.call(self.half.finish, request, tables)
        self.client.land_all()
        self.call(self.half.step, {})
        for table in tables:
            self._free.extend(table)
        return int(num_loaded)
