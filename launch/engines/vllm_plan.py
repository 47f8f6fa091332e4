"""What one run of a real vLLM is asked, which travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fastdeploy_cache.launch.engines.stages import made_up_prompts

ENVIRONMENT: Mapping[str, str] = {  # before vLLM is imported: on two cores anything else takes five times as long
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


CONNECTOR: Mapping[str, str] = {  # of this cache, beside its `kv_connector_extra_config`
    "kv_connector": "FastDeployCacheConnector",
    "kv_connector_module_path": "fastdeploy_cache.adapters.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    prompt: int  # its number in `StagePlan.lengths`
    salt: str | None = None
    adapter: str | None = None  # a folder of `StagePlan.adapters`
    abort_after_steps: int = 0  # 0: it is served to its end


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in a row, `num_concurrent` at a time."""

    visits: tuple[Visit, ...]
    num_concurrent: int = 1
    is_reset: bool = False  # vLLM is told to forget everything before, the connector's cache included
    kill_every: int = 0  # requests between two kills of all ranks; 0: none, and it begins when all ranks are up


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run: an engine, and what it serves."""

    model: str  # a folder
    result: str  # the file that is written
    passes: tuple[Pass, ...]
    lengths: tuple[int, ...]  # tokens of each prompt
    connector: str = ""  # "": vLLM alone; "fastdeploy", "lmcache"
    cache: dict[str, Any] = {}  # kv_connector_extra_config
    adapters: tuple[str, ...] = ()
    num_output_tokens: int = 8
    block_size: int = 32
    num_gpu_blocks: int = 28
    vocabulary: int = 49_000
    dtype: str = "float32"
    attention_backend: str = ""  # by its name in vLLM; "": vLLM's own choice for this processor
    tp_size: int = 1
    num_logprobs: int = 0  # the best ones of each token, which are told with the answers; 0: none
    max_num_batched_tokens: int | None = None  # of one step
    mamba_cache_mode: str = ""  # "": vLLM's own choice
    has_hybrid_manager: bool = True  # False: vLLM is told to keep all layers as if they kept everything
    min_groups: int = 1  # KV cache groups that vLLM has to make of the model: else it shows nothing
    gpu_memory_utilization: float | None = None  # of a GPU; None: vLLM's own
    is_poisoned: bool = False  # before the last pass the bytes of the CPU tier are changed
    is_killed: bool = False  # the process kills itself behind its last answer
    schedules_ahead: bool = False  # a step is scheduled while the one before it runs
    may_be_refused: bool = False  # that the connector refuses the model is a result, and no error
    beside_pid: int = 0  # a process whose processor time counts, too
    seed: int = 1

    def prompts(self) -> list[list[int]]:
        """Made-up tokens, the same in every run."""
        return made_up_prompts(self.lengths, self.vocabulary, self.seed)


def pass_over(num_prompts: int, *, salt: str | None = None, adapter: str | None = None, kill_every: int = 0) -> Pass:
    """Every prompt once, in order."""
    visits = tuple(Visit(prompt=number, salt=salt, adapter=adapter) for number in range(num_prompts))
    return Pass(visits=visits, kill_every=kill_every)


def plan_of(text: str) -> StagePlan:
    """The reverse of `to_json`."""
    return msgspec.json.decode(text, type=StagePlan)
