"""vLLM's own scheduler and runner hooks over a model that is arithmetic: no GPU, no weights, real ranks."""

from __future__ import annotations

import copy
import json
import pickle
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.parallel import ParallelConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from fastdeploy_cache import KVMemory
from fastdeploy_cache.adapters.vllm.connector import FastDeployCacheConnector

BLOCK_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_DIM, VOCABULARY = 16, 3, 2, 4, 1000
MAX_STEPS = 200000
ABORTED = RequestStatus.FINISHED_ABORTED
LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(NUM_LAYERS)]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=NUM_HEADS, head_size=HEAD_DIM, dtype=torch.float16)


def new_vllm_config(folder: Path, tp_size: int, policy: str, **extra: Any) -> VllmConfig:
    """vLLM's configuration with the connector loaded as a user would."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="float16", max_model_len=512
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=128,
            max_model_len=512,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(tensor_parallel_size=tp_size, distributed_executor_backend="mp"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="FastDeployCacheConnector",
            kv_connector_module_path="fastdeploy_cache.adapters.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        ),
    )


def new_kv_cache_config(num_blocks: int, layout: KVCacheLayout = KVCacheLayout.LBNHC) -> KVCacheConfig:
    """As vLLM lays all layers out in one allocation."""
    layer_stride, block_stride, *_ = compute_layout_strides(SPEC, num_blocks, NUM_LAYERS, layout)
    num_bytes = SPEC.page_size_bytes * num_blocks * NUM_LAYERS
    tensor = KVCacheTensor(size=num_bytes, layers=LAYERS, layer_stride=layer_stride, block_stride=block_stride)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(LAYERS, SPEC)]
    )


def token_kv(tokens: Sequence[int], layer: int, rank: int) -> torch.Tensor:
    """What the last of these tokens leaves in a layer: other bytes for every prefix."""
    seed = zlib.crc32(f"{list(tokens)}|{layer}|{rank}".encode())
    noise = np.random.default_rng(seed).integers(0, 2**15, (NUM_HEADS, 2 * HEAD_DIM), dtype=np.int16)
    return torch.from_numpy(noise)


def sampled(kv: bytes) -> int:
    """The next token follows from all the KV that was read, so KV that is wrong gives a wrong token."""
    return zlib.crc32(kv) % (VOCABULARY - 10) + 5


def expected_output(prompt: Sequence[int], num_tokens: int, tp_size: int) -> list[int]:
    """What the model says where nothing is cached."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        kv = b"".join(
            token_kv(tokens[: i + 1], layer, rank).numpy().tobytes()
            for rank in range(tp_size)
            for layer in range(NUM_LAYERS)
            for i in range(len(tokens))
        )
        tokens.append(sampled(kv))
    return tokens[len(prompt) :]


class UniformModel:
    """All layers keep everything. A token depends on all that is read, of all tokens in front."""

    has_states = False
    sampled = staticmethod(sampled)
    expected_output = staticmethod(expected_output)
    kv_cache_config = staticmethod(new_kv_cache_config)

    @staticmethod
    def caches(raw: torch.Tensor, num_blocks: int, layout: KVCacheLayout) -> dict[str, torch.Tensor]:
        """vLLM's views of them, by layer."""
        [tensor] = new_kv_cache_config(num_blocks, layout).kv_cache_tensors
        return dict(zip(LAYERS, create_kv_cache_views(raw, SPEC, num_blocks, layout, tensor), strict=True))


class RigWorker:
    """A rank of vLLM: its KV caches as vLLM lays them out, and vLLM's hooks around the connector."""

    def __init__(
        self, vllm_config: VllmConfig, rank: int, num_blocks: int, layout: KVCacheLayout, model: Any = UniformModel
    ) -> None:
        config = copy.deepcopy(vllm_config)
        config.parallel_config.rank = rank
        self.rank, self.model = rank, model
        kv_cache_config = model.kv_cache_config(num_blocks, layout)
        self.connector: FastDeployCacheConnector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        self.memory = KVMemory.create(self.connector.worker.layout, num_blocks)  # at least as large as is needed
        raw = torch.from_numpy(self.memory.flat()[0].view(np.int8))
        self.caches = model.caches(raw, num_blocks, layout)
        self.connector.share_cpu_memory(self.memory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector)
            self.hooks = ActiveKVConnector(config, self.caches)

    def slot(self, layer: int, table: Sequence[int], position: int) -> torch.Tensor:
        """A token's place: [heads, content]."""
        cache = self.caches[LAYERS[layer]].view(torch.int16)
        return cache[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE]

    def forward(self, work: dict[str, tuple[list[int], list[list[int]], int]]) -> dict[str, bytes]:
        """Write what is new, layer by layer; returns all that each request has read."""
        if self.model is not UniformModel:
            found: dict[str, bytes] = self.model.forward(self.caches, self.rank, work)
            return found
        read = dict.fromkeys(work, b"")
        for layer in range(NUM_LAYERS):
            self.connector.wait_for_layer_load(LAYERS[layer])
            for request_id, (tokens, (table,), first) in work.items():
                for position in range(first, len(tokens)):
                    self.slot(layer, table, position)[...] = token_kv(tokens[: position + 1], layer, self.rank)
                kv = [self.slot(layer, table, position).numpy().tobytes() for position in range(len(tokens))]
                read[request_id] += b"".join(kv)
        return read


class Rig:
    """An engine core without its processes."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 24,
        tp_size: int = 1,
        policy: str = "recompute",
        layout: KVCacheLayout = KVCacheLayout.LBNHC,
        model: Any = UniformModel,
        is_ahead: bool = False,
        **extra: Any,
    ) -> None:
        """`is_ahead`: a step is scheduled while the one before it has not been computed."""
        self.model, self._is_ahead = model, is_ahead
        extra.setdefault("num_cpu_blocks", 64)
        extra["transfer"] = {"device": "cpu", "restart_backoff_seconds": 0.01} | extra.get("transfer", {})
        config = new_vllm_config(folder, tp_size, policy, **extra)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        config.cache_config.num_gpu_blocks = num_blocks
        if model.has_states:
            config.cache_config.mamba_cache_mode = "align"
        kv_cache_config = model.kv_cache_config(num_blocks, KVCacheLayout.LBNHC)
        config.scheduler_config.async_scheduling = is_ahead
        kind = AsyncScheduler if is_ahead else Scheduler
        self.scheduler = kind(config, kv_cache_config, StructuredOutputManager(config), BLOCK_SIZE, log_stats=True)
        self._scheduled: deque[SchedulerOutput] = deque()
        self._requests: dict[str, Request] = {}
        self.stats: list[SchedulerStats] = []  # what vLLM would log and export, step by step
        self.connector: FastDeployCacheConnector = self.scheduler.get_kv_connector()
        self.cache = self.connector.scheduler.cache
        self.workers: list[RigWorker] = []
        self._aggregator = KVOutputAggregator(tp_size)
        self._tables: dict[str, list[list[int]]] = {}
        self.num_computed_tokens = 0
        self.failed_blocks: list[set[int]] = []
        try:
            for rank in range(tp_size):
                self.workers.append(RigWorker(config, rank, num_blocks, layout, model))
            found = {(0, worker.rank): travelled(worker.connector.get_handshake_metadata()) for worker in self.workers}
            self.connector.set_xfer_handshake_metadata_pp_aware(found)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Safe to call twice."""
        if not self.__dict__:
            return
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.memory.close()
        self.__dict__.clear()

    def add(self, request_id: str, prompt: Sequence[int], num_tokens: int = 2, **names: Any) -> Request:
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            **names,
        )
        self._requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def run(self) -> None:
        """Step until nothing is left to do, not even for the connector."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests() and not self._scheduled:
                return
            self.step()
        raise AssertionError("vLLM's scheduler does not come to an end")

    def serve(self, request_id: str, prompt: Sequence[int], num_tokens: int = 2, **names: Any) -> Request:
        """One request from its start to its end; `num_computed_tokens` counts what the model computed."""
        self.num_computed_tokens = 0
        request = self.add(request_id, prompt, num_tokens, **names)
        self.run()
        return request

    def step(self) -> None:
        """One step is computed; of those that are scheduled ahead, the first."""
        if self.scheduler.has_requests():
            self._scheduled.append(self.scheduler.schedule())
            if self._is_ahead and len(self._scheduled) < 2:
                return
        self.execute(self._scheduled.popleft())

    def execute(self, output: SchedulerOutput) -> None:
        """The workers' part of a step, and what vLLM makes of it."""
        self._follow_tables(output)
        self.num_computed_tokens += output.total_num_scheduled_tokens
        work = self._work_of(output)
        metadata = output.kv_connector_metadata
        read: dict[str, bytes] = dict.fromkeys(work, b"")
        results = []
        for worker in self.workers:
            output.kv_connector_metadata = travelled(metadata)
            worker.hooks.pre_forward(output)
            for request_id, kv in worker.forward(work).items():
                read[request_id] += kv
            worker.hooks.finish_forward()
            kv_output = worker.hooks.post_forward(output.finished_req_ids)
            ids = list(work)
            sampled_ids = [
                [] if len(tokens) < self._requests[request_id].num_tokens else [self.model.sampled(read[request_id])]
                for request_id, (tokens, _, _) in work.items()
            ]
            index = {request_id: i for i, request_id in enumerate(ids)}
            results.append(ModelRunnerOutput(ids, index, sampled_ids, kv_connector_output=travelled(kv_output)))
        result = self._aggregator.aggregate(results, output_rank=len(results) - 1)
        assert result is not None
        if result.kv_connector_output is not None and result.kv_connector_output.invalid_block_ids:
            self.failed_blocks.append(result.kv_connector_output.invalid_block_ids)
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None:
                self.stats.append(outputs.scheduler_stats)

    def _follow_tables(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
        old = output.scheduled_cached_reqs
        for request_id, block_ids in zip(old.req_ids, old.new_block_ids, strict=True):
            if request_id in old.resumed_req_ids:
                self._tables[request_id] = [[] for _ in self._tables[request_id]]
            for known, ids in zip(self._tables[request_id], block_ids or (), strict=False):
                known.extend(ids)

    def _work_of(self, output: SchedulerOutput) -> dict[str, tuple[list[int], list[list[int]], int]]:
        """Of each request its tokens up to the end of the step, its block tables, and the first token to compute."""
        old, firsts = output.scheduled_cached_reqs, dict[str, int]()
        firsts.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        firsts.update(zip(old.req_ids, old.num_computed_tokens, strict=True))
        return {
            name: (self._requests[name].all_token_ids[: firsts[name] + num_tokens], self._tables[name], firsts[name])
            for name, num_tokens in output.num_scheduled_tokens.items()
        }


def travelled(message: Any) -> Any:
    """What arrives where vLLM's workers are other processes."""
    return pickle.loads(pickle.dumps(message))
