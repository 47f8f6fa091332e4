"""Section: vLLM on the GPU, alone and with the connector, ranks killed; the answers have to be equal."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError, ModelLoadError
from fastdeploy_cache.launch.engines.hf_folder import write_hf_folder
from fastdeploy_cache.launch.engines.made_up_model import SMALL, write_made_up_model
from fastdeploy_cache.launch.engines.progress import StageLimits
from fastdeploy_cache.launch.engines.results import StageResult, answers, result_of, to_json
from fastdeploy_cache.launch.engines.stages import run_stage
from fastdeploy_cache.launch.engines.vllm_plan import StagePlan, pass_over
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.launch.reference_engine.weights import load_model_files

_STAGE = "fastdeploy_cache.launch.engines.vllm_stage"
_LIMITS = StageLimits(hard_seconds=95.0)  # of the section's 200
LENGTHS = (96, 192, 200, 384, 400, 480, 64, 127, 320, 352, 500, 33)  # with 32 tokens a block: full ones and cut ones
_CACHE: dict[str, Any] = {"num_cpu_blocks": 200, "min_prefetch_tokens": 32}
_MEMORY_SHARE = 0.5
# The second pass has hits before its kill; behind it a GPU may serve the rest before the rank is back.
_KILL_EVERY, _LEAST_HITS = 8, 0.25


def run(notes: Notes, options: GpuOptions) -> None:  # noqa: ARG001
    """vLLM alone, one pass; then with the connector, two passes, with the ranks killed in the second."""
    with tempfile.TemporaryDirectory(prefix="fastdeploy-gpu-") as name:
        folder = Path(name)
        notes.check("model", partial(_write_model, folder / "model"))
        notes.check("vLLM with the connector", partial(_compare, notes, folder))


def _write_model(folder: Path) -> str:
    try:
        write_hf_folder(folder, load_model_files())
    except ModelLoadError as error:
        write_made_up_model(folder)
        return f"a small one of made-up weights, as SmolLM2 is not here: {error}"
    return "SmolLM2-135M"


def _compare(notes: Notes, folder: Path) -> str:
    alone = _run_stage(folder, "alone", kills=(0,))
    notes.note("vLLM alone", f"version {alone.version}, up after {alone.up_seconds:.0f} s")
    cached = _run_stage(folder, "cache", kills=(0, _KILL_EVERY), connector="fastdeploy", cache=_CACHE)
    return judge(alone, cached)


def _run_stage(folder: Path, name: str, kills: Sequence[int], **options: Any) -> StageResult:
    """One pass for each of `kills`: the number of requests between two kills of the ranks in it."""
    result = folder / f"{name}.json"
    plan = StagePlan(
        model=str(folder / "model"),
        result=str(result),
        passes=tuple(pass_over(len(LENGTHS), kill_every=each) for each in kills),
        lengths=LENGTHS,
        vocabulary=SMALL.vocab_size,  # of the smaller of the two models
        gpu_memory_utilization=_MEMORY_SHARE,
        **options,
    )
    return result_of(run_stage(_STAGE, to_json(plan), result, log=result.with_suffix(".log"), limits=_LIMITS))


def judge(alone: StageResult, cached: StageResult) -> str:
    """What the runs show. Raises `LaunchError` where an answer differs, or little was cached."""
    wanted = answers(alone.passes)
    wrong = [sum(a != b for a, b in zip(answers([each]), wanted, strict=True)) for each in cached.passes]
    hits = [sum(served.num_cached_tokens for served in each.served) for each in cached.passes]
    text = (
        f"{len(wanted)} prompts of {sum(LENGTHS)} tokens in each pass; answers that differ from vLLM alone: {wrong}; "
        f"cached tokens: {hits}; ranks killed {cached.num_kills} times"
    )
    if any(wrong) or hits[-1] < _LEAST_HITS * sum(LENGTHS):
        raise LaunchError(text)
    return text
