"""Small models of families whose layers do not all keep everything, with seeded weights: for a real vLLM, and one for a
real SGLang.

Their answers depend on their context, far and near. Hugging Face's own classes make them, from PyTorch, where the
engine is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 2_048
_LAYERS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_BASE: dict[str, Any] = {**_LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 4_096}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "query_pre_attn_scalar": 64,
            "architectures": ["Gemma3ForCausalLM"],
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "initializer_range": 0.15,
            "rope_scaling": None,
            "architectures": ["GptOssForCausalLM"],
            **_EXPERTS,
        },
    ),
    "Llama 4": (
        "Llama4Text",
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": 128,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 2,
            "initializer_range": 0.15,
            "architectures": ["Llama4ForCausalLM"],
            **_EXPERTS,
            "num_experts_per_tok": 1,
        },
    ),
    "Qwen3-Next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 8,
            "linear_key_head_dim": 128,  # vLLM's kernels for CPUs know no others
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "initializer_range": 0.15,
            "architectures": ["Qwen3NextForCausalLM"],
        },
    ),
}
HYBRID_MODELS = tuple(_FAMILIES)  # that vLLM's lane serves
SGLANG_MODEL = "Mellum 2"  # the one with windows whose layers SGLang 0.5.23 computes on a CPU
_FAMILIES[SGLANG_MODEL] = (
    "Mellum",
    {
        "num_hidden_layers": 6,
        "sliding_window": 64,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "mlp_layer_types": ["dense"] * 6,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("sliding_attention", "full_attention")
        },
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
)


def write_hybrid_model(folder: Path, family: str, *, seed: int = 1) -> None:
    """Write `config.json` and the weights of `SGLANG_MODEL` or one of `HYBRID_MODELS`, in bfloat16 where vLLM has no
    other kernel."""
    import transformers

    name, own = _FAMILIES[family]
    transformers.set_seed(seed)
    config = getattr(transformers, f"{name}Config")(**_BASE, **own)
    dtype = "bfloat16" if family == "Qwen3-Next" else "float32"
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
