"""One run of a real SGLang, in its own virtual environment: `python -m ... SETTINGS`, as JSON, in and out."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy_cache.launch.engines.results import Passed, Served, StageResult, to_json
from fastdeploy_cache.launch.engines.stages import made_up_prompts

_OUTPUT_TOKENS, _GPU_TOKENS, _SEED = 8, 1024, 1
_KILL_WITHIN_SECONDS = 0.05
_STORAGE_PROCESS, _RANK = "fastdeploy_cache.transfer_manager.storage", "fastdeploy_cache.transfer_manager"
_INJECTOR = "SGLANG_TEST_HICACHE_BACKEND_RANDOM_"


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What a run serves, and with what."""

    model: str  # folder
    result: str  # file that is written
    lengths: tuple[int, ...]  # tokens of each prompt
    num_passes: int = 2
    page_size: int = 32
    vocabulary: int = 49_000
    storage: dict[str, Any] | None = None  # our options of HiCache's backend; None: no HiCache
    linker: dict[str, Any] | None = None  # our options of the linker; None: no linker
    kill_every: int = 0  # requests between two kills of the storage process, or of the linker's ranks
    random_delay_seconds: float = 0.0  # SGLang's own wrapper delays each call of the backend by up to this
    failure_probability: float = 0.0  # and fails so many of them


def main() -> None:
    """Run what the first argument says."""
    settings = EngineRun(**json.loads(sys.argv[1]))
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if settings.random_delay_seconds:
        os.environ[f"{_INJECTOR}DELAY"] = str(settings.random_delay_seconds)
    if settings.failure_probability:
        os.environ[f"{_INJECTOR}FAILURE"] = str(settings.failure_probability)
    Path(settings.result).write_text(to_json(run(settings)))


def run(settings: EngineRun) -> StageResult:
    """Serve all prompts, one after the other, pass by pass."""
    import sglang

    started = time.monotonic()
    engine = sglang.Engine(
        model_path=settings.model,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        mem_fraction_static=0.2,
        max_total_tokens=_GPU_TOKENS,
        page_size=settings.page_size,
        log_level="warning",
        **_hicache(settings),
        **_linker(settings),
    )
    up_seconds = time.monotonic() - started
    passes: list[Passed] = []
    num_requests, kills = 0, _Kills(_RANK if settings.linker is not None else _STORAGE_PROCESS)
    for _ in range(settings.num_passes):
        served, hits = [], []
        for prompt in made_up_prompts(settings.lengths, settings.vocabulary, _SEED):
            num_requests += 1
            is_due = settings.kill_every > 0 and num_requests % settings.kill_every == 0
            with kills.while_it_is_served() if is_due else nullcontext():
                answer, by_tier = _serve(engine, prompt)
            served.append(answer)
            hits.append(by_tier)
        passes.append(Passed(served=tuple(served), hit_tokens=tuple(map(sum, zip(*hits, strict=True)))))
    if settings.storage is not None:  # in order: what is written is on the disk then
        engine.loop.run_until_complete(engine.tokenizer_manager.detach_hicache_storage())
    if settings.linker is not None:  # the same
        engine.flush_cache()
    engine.shutdown()
    return StageResult(version=sglang.__version__, passes=tuple(passes), up_seconds=up_seconds, num_kills=kills.num)


def _hicache(settings: EngineRun) -> dict[str, Any]:
    """SGLang's options for its hierarchical cache. The tier in memory is twice the device's."""
    if settings.storage is None:
        return {}
    extra = {
        "backend_name": "fastdeploy_cache",
        "module_path": "fastdeploy_cache.adapters.sglang.hicache_storage",
        "class_name": "FastDeployCacheStorage",
        "interface_v1": True,
        "prefetch_threshold": settings.page_size,
        **settings.storage,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_write_policy": "write_through",
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def _linker(settings: EngineRun) -> dict[str, Any]:
    """SGLang's options for a linker."""
    if settings.linker is None:
        return {}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker_module_path": "fastdeploy_cache.adapters.sglang_linker.linker",
            "linker": "FastDeployCacheLinker",
            "linker_extra_config": settings.linker,
        },
    }


def _serve(engine: Any, prompt: list[int]) -> tuple[Served, list[int]]:
    """The answer, and where SGLang says that its cached tokens came from: its device, its host pool, our storage."""
    sampling = {"temperature": 0, "max_new_tokens": _OUTPUT_TOKENS, "ignore_eos": True}
    started = time.monotonic()
    answer = engine.generate(input_ids=prompt, sampling_params=sampling)
    seconds = time.monotonic() - started
    found = answer["meta_info"]
    by_source = found.get("cached_tokens_details") or {}
    cached = found.get("cached_tokens") or 0
    served = Served(tokens=tuple(answer["output_ids"]), num_cached_tokens=cached, seconds=seconds)
    return served, [by_source.get(source) or 0 for source in ("device", "host", "storage")]


class _Kills:
    """Kills the processes of this engine that run a module of ours, within the first moments of a request, in which its
    prompt is looked up and loaded."""

    def __init__(self, module: str) -> None:
        self._module, self._draw, self.num = module, random.Random(_SEED), 0  # noqa: S311  nothing secret

    @contextmanager
    def while_it_is_served(self) -> Iterator[None]:
        """One more, while this goes on."""
        timer = threading.Timer(self._draw.random() * _KILL_WITHIN_SECONDS, self._kill)
        timer.start()
        yield
        timer.join()

    def _kill(self) -> None:
        self.num += _kill(self._module)


def _kill(module: str) -> int:
    """SIGKILL for the processes of this engine that run a module of ours; how many there were."""
    import psutil

    children = psutil.Process().children(recursive=True)
    pids = [child.pid for child in children if module in child.cmdline()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


if __name__ == "__main__":
    main()
