"""Small models with made-up weights, and LoRA adapters: quick to compute, and other KV gives other answers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from fastdeploy_cache.launch.engines.hf_folder import llama_config, write_weights
from fastdeploy_cache.launch.reference_engine.weight_cache import Float32Array
from fastdeploy_cache.launch.reference_engine.weights import ModelSpec

SMALL = ModelSpec(
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=512,
    vocab_size=2_048,
    context_length=2_048,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
_RANK = 8  # of the adapters
_LATENT, _ROTARY = 512, 64  # of DeepSeek-V2's attention


def write_made_up_model(folder: Path, spec: ModelSpec = SMALL, seed: int = 1) -> None:
    """Write `config.json` and `model.safetensors` of a model whose attention weighs its whole context."""
    weight = _weights(seed)
    hidden, kv = spec.hidden_size, spec.num_kv_heads * spec.head_dim
    tensors = _ends(weight, spec)
    for layer in range(spec.num_layers):
        parts = {
            "self_attn.q_proj": weight(hidden, hidden),
            "self_attn.k_proj": weight(kv, hidden),
            "self_attn.v_proj": weight(kv, hidden, 4.0),
            "self_attn.o_proj": weight(hidden, hidden, 4.0),
            **_behind_attention(weight, spec),
        }
        tensors.update({f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()})
    write_weights(folder, "model", llama_config(spec), tensors)


def write_mla_model(folder: Path, spec: ModelSpec = SMALL, seed: int = 1) -> None:
    """Write a model of DeepSeek-V2's shape, with multi-head latent attention and without experts.

    The sizes of the latent are DeepSeek's own, since vLLM's kernels for CPUs know no others.
    """
    weight, hidden, heads, size = _weights(seed), spec.hidden_size, spec.num_heads, spec.head_dim
    tensors = _ends(weight, spec)
    tensors["lm_head.weight"] = weight(spec.vocab_size, hidden)  # vLLM ties none of this architecture's embeddings
    for layer in range(spec.num_layers):
        keys_and_values = weight(heads * 2 * size, _LATENT).reshape(heads, 2, size, _LATENT)
        keys_and_values[:, 1] *= 4.0
        parts = {
            "self_attn.q_proj": weight(heads * (size + _ROTARY), hidden),
            "self_attn.kv_a_proj_with_mqa": weight(_LATENT + _ROTARY, hidden),
            "self_attn.kv_a_layernorm": np.ones(_LATENT, np.float32),
            "self_attn.kv_b_proj": keys_and_values.reshape(heads * 2 * size, _LATENT),
            "self_attn.o_proj": weight(hidden, heads * size, 4.0),
            **_behind_attention(weight, spec),
        }
        tensors.update({f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()})
    write_weights(folder, "model", llama_config(spec) | _mla_config(spec), tensors)


def _mla_config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": spec.num_heads,
        "head_dim": _ROTARY,
        "q_lora_rank": None,
        "kv_lora_rank": _LATENT,
        "qk_nope_head_dim": spec.head_dim,
        "qk_rope_head_dim": _ROTARY,
        "tie_word_embeddings": False,
        "v_head_dim": spec.head_dim,
        "first_k_dense_replace": spec.num_layers,  # no layer has experts
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": spec.ffn_size,
    }


class _Weights(Protocol):
    def __call__(self, rows: int, columns: int, gain: float = 1.0) -> Float32Array: ...


def _weights(seed: int) -> _Weights:
    chance = np.random.default_rng(seed)

    def weight(rows: int, columns: int, gain: float = 1.0) -> Float32Array:
        values: Float32Array = chance.standard_normal((rows, columns), np.float32) * np.float32(gain / columns**0.5)
        return values

    return weight


def _ends(weight: _Weights, spec: ModelSpec) -> dict[str, Float32Array]:
    """What lies before the first layer and behind the last one."""
    embedding = weight(spec.vocab_size, spec.hidden_size, spec.hidden_size**0.5)
    return {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(spec.hidden_size, np.float32)}


def _behind_attention(weight: _Weights, spec: ModelSpec) -> dict[str, Float32Array]:
    """The rest of a layer."""
    ones, hidden = np.ones(spec.hidden_size, np.float32), spec.hidden_size
    return {
        "input_layernorm": ones,
        "post_attention_layernorm": ones,
        "mlp.gate_proj": weight(spec.ffn_size, hidden),
        "mlp.up_proj": weight(spec.ffn_size, hidden),
        "mlp.down_proj": weight(hidden, spec.ffn_size),
    }


def write_adapter(folder: Path, spec: ModelSpec = SMALL, seed: int = 1) -> None:
    """Write a LoRA adapter of the keys' and values' projections, so that its KV differs from the base model's."""
    chance = np.random.default_rng(seed)
    hidden, kv = spec.hidden_size, spec.num_kv_heads * spec.head_dim
    tensors = {}
    for layer in range(spec.num_layers):
        for name in ("k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = chance.standard_normal((_RANK, hidden), np.float32)
            up = chance.standard_normal((kv, _RANK), np.float32)
            tensors[f"{prefix}.lora_A.weight"] = down / np.float32(hidden**0.5)
            tensors[f"{prefix}.lora_B.weight"] = up
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["k_proj", "v_proj"],
    }
    write_weights(folder, "adapter_model", config, tensors)
