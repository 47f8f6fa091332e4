"""What FastDeploy's scheduler does with its cache manager, in both sequences, over real bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager

SUFFIX = f"test{os.getpid()}"
PROMPT = list(range(100, 122))  # 5 blocks of 4, and 2 tokens


@dataclass
class Task:
    """A request with the attributes that are read."""

    request_id: str
    prompt_token_ids: Any
    output_token_ids: list[int] = field(default_factory=list)
    block_tables: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    multimodal_inputs: Any = None

    @property
    def num_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


def images(*spans: tuple[int, int, str]) -> dict[str, list[object]]:
    """`multimodal_inputs` with these (offset, length, hash)."""
    positions: list[object] = [SimpleNamespace(offset=offset, length=length) for offset, length, _ in spans]
    return {"mm_positions": positions, "mm_hashes": [name for *_, name in spans]}


def new_config(
    num_gpu: int = 32,
    num_cpu: int = 0,
    block_size: int = 4,
    *,
    caching: bool = True,
    outputs: bool = True,
    **extra: Any,
) -> Any:
    """The attributes of FastDeploy's configuration that are read; `extra`: settings of ours."""
    cache = SimpleNamespace(
        total_block_num=num_gpu,
        prefill_kvcache_block_num=num_gpu,
        num_cpu_blocks=num_cpu,
        enable_prefix_caching=caching,
        enable_output_caching=outputs,
        block_size=block_size,
        cache_dtype="bfloat16",
        kvcache_storage_backend=extra.pop("kvcache_storage_backend", None),
        write_policy="write_through",
        bytes_per_token_per_layer=64,
        model_cfg=SimpleNamespace(num_hidden_layers=2),
        fastdeploy_cache={"cpu_write_policy": "write_through", "load_policy": "always", **extra},
    )
    model = SimpleNamespace(
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, dtype="bfloat16", max_model_len=4096, model="tiny"
    )
    return SimpleNamespace(
        cache_config=cache,
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        quant_config=None,
        speculative_config=SimpleNamespace(to_json_string=lambda: "{}"),
    )


def launch(manager: PrefixCacheManager, suffix: Any, tp_size: int = 1) -> list[Any]:
    """Start the ranks as FastDeploy's engine does; `suffix` is the port behind the names of its signals."""
    cache_config = manager.parts.current.their_config.cache_config
    devices = list(range(tp_size))
    return manager.launch_cache_manager(cache_config, tp_size, devices, "127.0.0.1", suffix, "unused", True)


def with_cpu(num_gpu: int = 8, num_cpu: int = 8, tp_size: int = 1, **settings: object) -> PrefixCacheManager:
    """Launched; `transfer_client="inline"` copies in this process."""
    config = new_config(num_gpu, num_cpu, **settings)
    made = PrefixCacheManager(config, tp_size, load_timeout_seconds=2.0, schedules_ahead=False)
    launch(made, SUFFIX, tp_size)
    return made


def push_out(manager: PrefixCacheManager) -> None:
    """Leave nothing cached on the GPU but what has a copy below."""
    assert manager.cache.wait_for_transfers(10)
    manager.free_block_ids(manager.num_gpu_blocks)


class Kernel:
    """Computes a block as numbers that follow from all tokens up to its end, and checks what it reads."""

    def __init__(self, manager: PrefixCacheManager) -> None:
        self.manager = manager

    def _value(self, tokens: list[int], block: int) -> int:
        size = self.manager.cache.config.block_size
        return hash(tuple(tokens[: size * (block + 1)])) % 60000 + 1

    def compute(self, tokens: list[int], table: list[int], first_token: int, num_tokens: int) -> None:
        """Write tokens [first_token, num_tokens) of the sequence; a block is whole when its last token is."""
        size = self.manager.cache.config.block_size
        blocks = range(first_token // size, num_tokens // size)
        arrays = self._arrays() if blocks else []
        for block in blocks:
            value = self._value(tokens, block)
            for _, array in arrays:
                array[table[block]] = value

    def check(self, tokens: list[int], table: list[int], num_blocks: int, *, first_block: int = 0) -> None:
        """The blocks from the first one on hold what they should, on every rank, in every layer and part."""
        arrays = self._arrays() if first_block < num_blocks else []
        for block in range(first_block, num_blocks):
            value = self._value(tokens, block)
            for name, array in arrays:
                assert (array[table[block]] == value).all(), f"wrong {name} in {block}"

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        """Each part of each layer of each rank, as they are now."""
        ranks = range(self.manager.cache.config.transfer.tp_size)
        views = [layer for rank in ranks for layer in self.manager.cache.ranks.kv_views(rank)]
        return [named for layer in views for named in layer.items()]


def serve_v1(
    manager: PrefixCacheManager, task: Task, answer: list[int], kernel: Kernel | None = None, chunk: int = 8
) -> int:
    """A whole request by the v1 sequence; returns the matched tokens. AssertionError where there is no room: nothing
    is held then."""
    cache, size = manager, manager.cache.config.block_size
    prompt = list(task.prompt_token_ids)
    if not cache.can_allocate_gpu_blocks(cache.get_required_block_num(len(prompt), size)):
        raise AssertionError("no room for the prompt")
    ids, num_matched, details = cache.request_match_blocks(task, size)
    assert num_matched == sum(details[f"{tier}_match_token_num"] for tier in ("gpu", "cpu", "storage"))
    task.block_tables = list(ids)
    if kernel:
        kernel.check(prompt, task.block_tables, len(ids))
    num_computed = num_matched
    while num_computed < len(prompt):
        num_tokens = min(num_computed + chunk, len(prompt))
        _grow(cache, task, num_tokens)
        if kernel:
            kernel.compute(prompt, task.block_tables, num_computed, num_tokens)
        num_computed = num_tokens
        cache.update_cache_blocks(task, size, num_computed)
    for token in answer:
        task.output_token_ids.append(token)
        if token is answer[-1]:
            break
        num_computed += 1
        _grow(cache, task, num_computed)
        if kernel:
            kernel.compute(prompt + task.output_token_ids, task.block_tables, num_computed - 1, num_computed)
    finish_v1(manager, task)
    return num_matched


def _grow(manager: PrefixCacheManager, task: Task, num_tokens: int) -> None:
    missing = manager.get_required_block_num(num_tokens, manager.cache.config.block_size) - len(task.block_tables)
    if missing > 0:
        try:
            task.block_tables += manager.allocate_gpu_blocks(missing, task.request_id)
        except AssertionError:
            give_up_v1(manager, task)
            raise


def finish_v1(manager: PrefixCacheManager, task: Task) -> None:
    """The end of a request."""
    if manager.cache.config.cache_outputs:
        manager.cache_output_blocks(task, manager.cache.config.block_size)
    manager.write_cache_to_storage(task)
    give_up_v1(manager, task)


def give_up_v1(manager: PrefixCacheManager, task: Task) -> None:
    """Everything goes home."""
    manager.release_block_ids(task)
    manager.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
    task.block_tables, task.num_cached_blocks = [], 0


def serve_v0(
    manager: PrefixCacheManager, task: Task, answer: list[int], kernel: Kernel | None = None
) -> tuple[int, list[int]]:
    """A whole request by the v0 sequence; returns the matched tokens and the blocks it used."""
    size, prompt = manager.cache.config.block_size, list(task.prompt_token_ids)
    common, unique, details = manager.request_block_ids(task, size, len(answer))
    assert details["gpu_cache_blocks"] + details["cpu_cache_blocks"] == len(common)
    table, num_matched = common + unique, len(common) * size
    if kernel:
        kernel.check(prompt, table, len(common))
        kernel.compute(prompt, table, num_matched, len(prompt))
        kernel.compute(prompt + answer, table, len(prompt), len(prompt) + len(answer) - 1)
    task.output_token_ids += answer  # says that what is before the last of them is computed
    manager.release_block_ids_async(task).result()
    return num_matched, table
