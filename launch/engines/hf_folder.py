"""The quickstart's model as a folder that Hugging Face's loaders, and so vLLM, understand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weight_cache import Float32Array
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, ModelSpec, load_model_files


def write_hf_folder(folder: Path, files: ModelFiles | None = None) -> None:
    """Write configuration, weights (float32, some 540 MB) and tokeniser, if it has one, of a Llama model.

    Raises:
        ModelLoadError: the model is not installed.
        OSError: the folder cannot be written.
    """
    files = files or load_model_files()
    write_weights(folder, "model", llama_config(files.spec), _tensors(files))
    ChatTokenizer(files).write_hf_files(folder, files.chat_template)


def write_weights(folder: Path, of: str, config: Mapping[str, object], tensors: dict[str, Float32Array]) -> None:
    """Write a folder with weights, `of` a "model" or an "adapter_model", and the configuration that goes with them."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{of.removesuffix('model')}config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / f"{of}.safetensors", metadata={"format": "pt"})


def llama_config(spec: ModelSpec) -> dict[str, object]:
    """What `config.json` says of a Llama model of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_length,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": True,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "torch_dtype": "float32",
    }


def _tensors(files: ModelFiles) -> dict[str, Float32Array]:
    spec, found = files.spec, files.tensors
    tensors = {"model.embed_tokens.weight": found["embedding"], "model.norm.weight": found["final_norm"]}
    for layer in range(spec.num_layers):
        ours, theirs = f"{layer}.", f"model.layers.{layer}."
        sizes = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
        q, k, v = np.split(found[ours + "qkv"], (sizes[0], sum(sizes)))
        gate, up = np.split(found[ours + "gate_up"], 2)
        parts = {
            "input_layernorm": found[ours + "attn_norm"],
            "self_attn.q_proj": _by_halves(q, spec.head_dim),
            "self_attn.k_proj": _by_halves(k, spec.head_dim),
            "self_attn.v_proj": v,
            "self_attn.o_proj": found[ours + "attn_output"],
            "post_attention_layernorm": found[ours + "ffn_norm"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": found[ours + "ffn_down"],
        }
        tensors.update({f"{theirs}{name}.weight": weight for name, weight in parts.items()})
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _by_halves(weight: Float32Array, head_dim: int) -> Float32Array:
    """Rows of a head as Hugging Face rotates them, (0, n/2), (1, n/2 + 1), ...; llama.cpp's go (0, 1), (2, 3), ..."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    halves: Float32Array = pairs.swapaxes(1, 2).reshape(weight.shape)
    return halves
