"""One run of a real vLLM, in its own virtual environment and process: `python -m ... SETTINGS`, as JSON, in and out."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_OUTPUT_TOKENS = 8
_CONNECTOR = "fastdeploy_cache.adapters.vllm.connector"


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What a run serves, and with what."""

    model: str  # folder
    result: str  # file that is written
    lengths: tuple[int, ...]  # tokens of each prompt
    num_passes: int = 2
    block_size: int = 32
    num_gpu_blocks: int = 28
    cache: dict[str, Any] | None = None  # kv_connector_extra_config; None: vLLM alone
    kill_every: int = 0  # requests between two kills of a rank
    seed: int = 1


@dataclass(frozen=True)
class Served:
    """One request."""

    tokens: list[int]
    num_cached_tokens: int
    seconds: float  # of the whole answer


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a run found; `num_restarts` are of our ranks."""

    vllm: str
    served: list[list[Served]]  # by pass
    up_seconds: float
    cpu_seconds: float
    num_restarts: int = 0


def main() -> None:
    """Run what the first argument says."""
    settings = StageSettings(**json.loads(sys.argv[1]))
    os.environ.update(  # before vLLM is imported: on two cores anything else takes five times as long
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    Path(settings.result).write_text(json.dumps(asdict(run(settings))))


def run(settings: StageSettings) -> StageResult:
    """Serve all prompts, one after the other, pass by pass."""
    import vllm
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if settings.cache is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="FastDeployCacheConnector",
            kv_connector_module_path=_CONNECTOR,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings.cache,
        )
    started = time.monotonic()
    engine = LLM(
        model=settings.model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=max(settings.lengths) + _OUTPUT_TOKENS,
        enforce_eager=True,
        block_size=settings.block_size,
        num_gpu_blocks_override=settings.num_gpu_blocks,
        max_num_seqs=4,
        disable_log_stats=True,
        **options,
    )
    up_seconds = time.monotonic() - started
    count, prompts = itertools.count(1), _prompts(settings)
    served = [[_serve(engine, prompt, settings, next(count)) for prompt in prompts] for _ in range(settings.num_passes)]
    manager = _manager(engine) if settings.cache is not None else None
    num_restarts = 0
    if manager is not None:
        num_restarts = sum(status.num_restarts for status in manager.stats().ranks)
        manager.storage.flush(60.0)
    cpu_seconds = sum(os.times()[:4])
    engine.llm_engine.engine_core.shutdown()
    return StageResult(
        vllm=vllm.__version__, served=served, up_seconds=up_seconds, cpu_seconds=cpu_seconds, num_restarts=num_restarts
    )


def _prompts(settings: StageSettings) -> list[list[int]]:
    chance = random.Random(settings.seed)  # noqa: S311 (made-up prompts)
    return [[chance.randrange(5, 49_000) for _ in range(length)] for length in settings.lengths]


def _serve(engine: Any, prompt: list[int], settings: StageSettings, number: int) -> Served:
    from vllm import SamplingParams

    if settings.kill_every and number % settings.kill_every == 0:
        for status in _manager(engine).stats().ranks:
            if status.pid is not None:
                os.kill(status.pid, signal.SIGKILL)
    sampling = SamplingParams(temperature=0, max_tokens=_OUTPUT_TOKENS, detokenize=False)
    started = time.monotonic()
    [answer] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    seconds = time.monotonic() - started
    return Served(list(answer.outputs[0].token_ids), answer.num_cached_tokens or 0, seconds)


def _manager(engine: Any) -> Any:
    """Our manager, in vLLM's scheduler in this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.cache


if __name__ == "__main__":
    main()
