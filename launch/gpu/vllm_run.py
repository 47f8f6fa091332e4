"""Section: vLLM on the GPU, alone and with the connector, ranks killed; the answers have to be equal."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastdeploy_cache.errors import LaunchError, ModelLoadError
from fastdeploy_cache.launch.engines.hf_folder import write_hf_folder
from fastdeploy_cache.launch.engines.stages import run_stage
from fastdeploy_cache.launch.engines.vllm_plan import StagePlan, StageResult, answers, pass_over
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, ModelSpec, load_model_files

_STAGE = "fastdeploy_cache.launch.engines.vllm_stage"
_STAGE_SECONDS = 95.0  # of the section's 200
LENGTHS = (96, 192, 200, 384, 400, 480, 64, 127, 320, 352, 500, 33)  # with 32 tokens a block: full ones and cut ones
_CACHE: dict[str, Any] = {"num_cpu_blocks": 200, "min_prefetch_tokens": 32}
_MEMORY_SHARE = 0.5
# The second pass has hits before its kill; behind it a GPU may serve the rest before the rank is back.
_KILL_EVERY, _LEAST_HITS = len(LENGTHS) + 8, 0.25
_SPEC = ModelSpec(
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=512,
    vocab_size=49_152,
    context_length=2048,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)


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
        write_hf_folder(folder, random_model(_SPEC))
        return f"a made-up one of random weights, as SmolLM2 is not here: {error}"
    return "SmolLM2-135M"


def random_model(spec: ModelSpec) -> ModelFiles:
    """A model of that shape with random weights, the same ones each time."""
    chance = np.random.default_rng(5)

    def weight(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return chance.normal(0, 0.05, shape).astype(np.float32)

    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    tensors = {"embedding": weight(spec.vocab_size, hidden), "final_norm": np.ones(hidden, np.float32)}
    for layer in range(spec.num_layers):
        tensors |= {
            f"{layer}.attn_norm": np.ones(hidden, np.float32),
            f"{layer}.qkv": weight(heads + 2 * spec.num_kv_heads * spec.head_dim, hidden),
            f"{layer}.attn_output": weight(hidden, heads),
            f"{layer}.ffn_norm": np.ones(hidden, np.float32),
            f"{layer}.gate_up": weight(2 * spec.ffn_size, hidden),
            f"{layer}.ffn_down": weight(hidden, spec.ffn_size),
        }
    return ModelFiles(spec=spec, tensors=tensors, vocab=[], merges=[], token_types=[], chat_template="", digest="")


def _compare(notes: Notes, folder: Path) -> str:
    alone = _run_stage(folder, "alone", num_passes=1)
    notes.note("vLLM alone", f"version {alone.vllm}, up after {alone.up_seconds:.0f} s")
    options: dict[str, Any] = {"connector": "fastdeploy", "cache": _CACHE, "kill_every": _KILL_EVERY}
    return judge(alone, _run_stage(folder, "cache", num_passes=2, **options))


def _run_stage(folder: Path, name: str, num_passes: int, **options: Any) -> StageResult:
    result = folder / f"{name}.json"
    plan = StagePlan(
        model=str(folder / "model"),
        result=str(result),
        passes=(pass_over(len(LENGTHS)),) * num_passes,
        lengths=LENGTHS,
        gpu_memory_utilization=_MEMORY_SHARE,
        **options,
    )
    found = run_stage(_STAGE, msgspec.json.encode(plan).decode(), result, timeout_seconds=_STAGE_SECONDS)
    return msgspec.json.decode(found, type=StageResult)


def judge(alone: StageResult, cached: StageResult) -> str:
    """What the runs show. Raises `LaunchError` where an answer differs, or little was cached."""
    wanted = answers(alone.passes)
    wrong = [sum(a != b for a, b in zip(answers([each]), wanted, strict=True)) for each in cached.passes]
    hits = [sum(served.num_cached_tokens for served in each.served) for each in cached.passes]
    text = (
        f"{len(wanted)} prompts of {sum(LENGTHS)} tokens in each pass; answers that differ from vLLM alone: {wrong}; "
        f"cached tokens: {hits}; ranks restarted {cached.num_restarts} times"
    )
    if any(wrong) or hits[-1] < _LEAST_HITS * sum(LENGTHS):
        raise LaunchError(text)
    return text
