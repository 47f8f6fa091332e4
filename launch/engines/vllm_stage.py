"""One run of a real vLLM, in its own virtual environment and process: `python -m ... PLAN`, as JSON, in and out."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.launch.engines.progress import LIMITS
from fastdeploy_cache.launch.engines.results import Passed, StageResult, to_json
from fastdeploy_cache.launch.engines.vllm_loop import VLLMLoop, manager_of, scheduler_of
from fastdeploy_cache.launch.engines.vllm_plan import CONNECTOR, ENVIRONMENT, Pass, StagePlan, plan_of

_WAIT_SECONDS = LIMITS.hard_seconds  # who started this process ends it before, where it hangs
_CONNECTORS: dict[str, Mapping[str, str]] = {
    "fastdeploy": CONNECTOR,
    "lmcache": {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"},
}


def main() -> None:
    """Run what the first argument says."""
    plan = plan_of(sys.argv[1])
    os.environ.update(ENVIRONMENT)
    try:
        stage = Stage(plan)
    except ConfigError as error:
        if not plan.may_be_refused:
            raise
        _write(plan, passes=(), up_seconds=0.0, refused=str(error))
    else:
        stage.run()


class Stage:
    """An engine, and what became of its passes."""

    def __init__(self, plan: StagePlan) -> None:
        started = time.monotonic()
        self._plan, self._engine = plan, _new_engine(plan)
        self._up_seconds = time.monotonic() - started
        num_groups = len(scheduler_of(self._engine).kv_cache_config.kv_cache_groups)
        if num_groups < plan.min_groups:
            raise RuntimeError(
                f"vLLM has made {num_groups} KV cache groups of this model; {plan.min_groups} are needed"
            )
        if plan.schedules_ahead and self._engine.llm_engine.engine_core.engine_core.batch_queue is None:
            raise RuntimeError("vLLM does not schedule ahead, although this was forced: it has changed")
        self._has_manager = plan.connector == "fastdeploy"
        self._passed: list[Passed] = []
        self._num_kills = 0

    def run(self) -> None:
        """Serve all passes, write the result, end the engine."""
        plan = self._plan
        loop = VLLMLoop(self._engine, plan, self._kill_ranks)
        for number, wanted in enumerate(plan.passes, 1):
            if plan.is_poisoned and number == len(plan.passes):
                self._poison()
            self._serve(loop, wanted)
        if plan.is_killed:
            self._write()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._has_manager and (storage := manager_of(self._engine).storage).is_attached:
            storage.flush(_WAIT_SECONDS)
        self._write()
        self._engine.llm_engine.engine_core.shutdown()

    def _serve(self, loop: VLLMLoop, wanted: Pass) -> None:
        if wanted.is_reset:
            is_reset = self._engine.reset_prefix_cache(reset_connector=True)
            if not is_reset:
                raise RuntimeError("vLLM could not reset its caches while nothing was running")
        if self._has_manager and not wanted.kill_every:
            is_up = manager_of(self._engine).ranks.wait_ready(_WAIT_SECONDS)
            if not is_up:
                raise RuntimeError(f"the ranks have not come up in {_WAIT_SECONDS:.0f} s")
        before, cpu_before = self._hit_tokens(), _cpu_seconds(self._plan.beside_pid)
        served = loop.serve(wanted)
        cpu_seconds = _cpu_seconds(self._plan.beside_pid) - cpu_before
        hits = tuple(now - then for now, then in zip(self._hit_tokens(), before, strict=True))
        self._passed.append(Passed(served=served, hit_tokens=hits, cpu_seconds=cpu_seconds))

    def _hit_tokens(self) -> tuple[int, ...]:
        return tuple(manager_of(self._engine).metrics.token_counts()[1]) if self._has_manager else ()

    def _kill_ranks(self) -> None:
        for status in manager_of(self._engine).stats().ranks:
            if status.pid is not None:
                os.kill(status.pid, signal.SIGKILL)
                self._num_kills += 1

    def _poison(self) -> None:
        """Turn every byte of the CPU tier over: who compares answers must see it."""
        manager = manager_of(self._engine)
        manager.wait_for_transfers(_WAIT_SECONDS)
        for segment in manager._movement.client.cpu_segments():  # noqa: SLF001 (no verb damages a cache)
            blocks = segment.view(np.uint8, (segment.num_bytes,))
            np.invert(blocks, out=blocks)

    def _write(self) -> None:
        is_chunked = bool(self._engine.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill)
        found: dict[str, Any] = {"up_seconds": self._up_seconds, "num_kills": self._num_kills}
        found["is_prefill_chunked"] = is_chunked
        if self._has_manager:
            manager = manager_of(self._engine)
            tier = manager.stats().cpu
            found["cpu_bytes"] = (tier.num_blocks - tier.num_free) * manager.config.block_bytes()
        _write(self._plan, passes=tuple(self._passed), **found)


def _write(plan: StagePlan, **found: Any) -> None:
    import vllm

    Path(plan.result).write_text(to_json(StageResult(version=vllm.__version__, **found)))


def _new_engine(plan: StagePlan) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if plan.connector == "lmcache":
        _mend_dispatcher()
    if plan.connector:
        options["kv_transfer_config"] = KVTransferConfig(
            **_CONNECTORS[plan.connector], kv_connector_extra_config=plan.cache
        )
    if plan.schedules_ahead:
        _force_ahead()
    if plan.gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = plan.gpu_memory_utilization
    if plan.attention_backend:
        options["attention_backend"] = plan.attention_backend
    if plan.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = plan.max_num_batched_tokens
    if plan.mamba_cache_mode:
        options["mamba_cache_mode"] = plan.mamba_cache_mode
    if not plan.has_hybrid_manager:
        options["disable_hybrid_kv_cache_manager"] = True
    if plan.adapters:
        options |= {"enable_lora": True, "max_loras": len(plan.adapters), "max_lora_rank": 8}
    return LLM(
        model=plan.model,
        skip_tokenizer_init=True,
        dtype=plan.dtype,
        max_model_len=max(plan.lengths) + plan.num_output_tokens,
        enforce_eager=True,
        block_size=plan.block_size,
        num_gpu_blocks_override=plan.num_gpu_blocks,
        max_num_seqs=max(wanted.num_concurrent for wanted in plan.passes),
        tensor_parallel_size=plan.tp_size,
        disable_log_stats=True,
        **options,
    )


def _force_ahead() -> None:
    """vLLM's platform for CPUs switches it off for everybody, whatever is asked for."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_switch_on(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(check_and_switch_on)


def _mend_dispatcher() -> None:
    """vLLM's build for CPUs looks through the attributes of every loaded module, and fails on objects of LMCache's
    whose `__dict__` is no mapping."""
    from vllm.triton_utils import dispatcher

    def safe_vars(value: object) -> dict[str, object]:
        found = vars(value)
        return dict(found) if hasattr(found, "items") else {}

    dispatcher.vars = safe_vars


def _cpu_seconds(beside_pid: int) -> float:
    """Processor time so far, of this process, of its children that live, and of the one beside."""
    import psutil

    me = psutil.Process()
    wanted = [me, *me.children(recursive=True)]
    if beside_pid:
        wanted.append(psutil.Process(beside_pid))
    times = []
    for process in wanted:
        try:
            times.append(process.cpu_times())
        except psutil.Error:  # it has ended meanwhile
            continue
    own = float(sum(each.user + each.system for each in times))
    return own + float(times[0].children_user + times[0].children_system)  # of children that have ended


if __name__ == "__main__":
    main()
