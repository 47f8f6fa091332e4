"""The lane of a real engine, as far as it can be seen without one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache.launch.engines import vllm_lane
from fastdeploy_cache.launch.engines.hf_folder import write_hf_folder
from fastdeploy_cache.launch.engines.vllm_lane import Line
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, ModelSpec

SPEC = ModelSpec(
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=6,
    vocab_size=10,
    context_length=64,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)


def test_a_model_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    """Joined rows are parted again, and those of a head that rotate together stand half a head apart."""
    load_file = pytest.importorskip("safetensors.numpy", reason="needs safetensors").load_file
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return rng.random(shape, np.float32)

    layer = {"attn_norm": weight(8), "qkv": weight(16, 8), "attn_output": weight(8, 8), "ffn_norm": weight(8)}
    layer |= {"gate_up": weight(12, 8), "ffn_down": weight(8, 6)}
    tensors = {f"0.{name}": value for name, value in layer.items()}
    tensors |= {"embedding": weight(10, 8), "final_norm": weight(8)}
    files = ModelFiles(spec=SPEC, tensors=tensors, vocab=[], merges=[], token_types=[], chat_template="", digest="")
    write_hf_folder(tmp_path / "model", files)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_key_value_heads"] == 1
    found = load_file(tmp_path / "model" / "model.safetensors")
    attention = "model.layers.0.self_attn."
    assert np.array_equal(found[f"{attention}q_proj.weight"], layer["qkv"][[0, 2, 1, 3, 4, 6, 5, 7]])
    assert np.array_equal(found[f"{attention}k_proj.weight"], layer["qkv"][[8, 10, 9, 11]])
    assert np.array_equal(found[f"{attention}v_proj.weight"], layer["qkv"][12:])
    assert np.array_equal(found["model.layers.0.mlp.up_proj.weight"], layer["gate_up"][6:])
    assert len(found) == 11


def _line(run: str, **changed: int) -> Line:
    given = {"requests": 4, "equal": 4, "prompt_tokens": 100, "cached_tokens": 90, "num_restarts": 1, **changed}
    return Line(run=run, median_seconds=0.1, cpu_seconds=1.0, **given)


RUNS = ("with this cache, pass 2", "ranks killed, pass 2", "after a restart, from disk")


@pytest.mark.parametrize(
    ("run", "changed", "finding"),
    [
        (RUNS[0], {}, None),
        (RUNS[1], {"equal": 3}, "ranks killed, pass 2: 1 answers differ"),
        (RUNS[0], {"cached_tokens": 79}, "with this cache, pass 2: only 79 tokens came from the cache"),
        (RUNS[2], {"cached_tokens": 0}, "after a restart, from disk: only 0 tokens came from the cache"),
        (RUNS[1], {"num_restarts": 0}, "ranks killed: no rank was restarted"),
    ],
)
def test_what_the_lane_finds_fault_with(run: str, changed: dict[str, int], finding: str | None) -> None:
    """An answer that differs, a cache that is not hit, and a kill that reached nobody fail the lane, by name."""
    lines = [_line(each, **(changed if each == run else {})) for each in RUNS]
    assert vllm_lane._findings(lines) == ([finding] if finding else [])
