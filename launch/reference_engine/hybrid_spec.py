"""A hybrid model that anybody can start: SmolLM2's weights in layers that do not all keep everything.

No free hybrid model is as small as SmolLM2. So every second layer sees a window of 128 tokens, three keep a state by
the gated delta rule, and the others keep everything. The weights are SmolLM2's own, and the gates of states are drawn
from a seed. Nobody has trained it like that, and yet it answers in sentences.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np

from fastdeploy_cache import CacheConfig, KVGroup, KVLayout, StatePart
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.launch.reference_engine.weight_cache import Float32Array
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, ModelSpec

LayerKind = Literal["window", "state", "full"]
WINDOW_TOKENS = 128
WINDOW, STATE = 0, 1  # its rows behind the full one
STEP_TOKENS = 256  # of one step, at most
_STATE_EVERY = 8  # layers
_SEED = 1
_BLOCKS_PER_CHECKPOINT = 8  # of the GPU pool


def kinds_of(spec: ModelSpec) -> tuple[LayerKind, ...]:
    """What each layer keeps; the last one everything."""
    kinds: list[LayerKind] = ["full" if layer % 2 else "window" for layer in range(spec.num_layers)]
    kinds[_STATE_EVERY - 1 : -1 : _STATE_EVERY] = ["state"] * len(kinds[_STATE_EVERY - 1 : -1 : _STATE_EVERY])
    return (*kinds[:-1], "full")


def hybrid_layout_of(spec: ModelSpec) -> KVLayout:
    """float32, as for the model itself; a state is a square matrix for each KV head."""
    layers = {kind: tuple(n for n, each in enumerate(kinds_of(spec)) if each == kind) for kind in get_args(LayerKind)}
    shape = (spec.num_kv_heads, spec.head_dim, spec.head_dim)
    groups = (
        KVGroup(kind="full", layers=layers["full"]),
        KVGroup(kind="window", layers=layers["window"], reach_tokens=WINDOW_TOKENS),
        KVGroup(kind="state", layers=layers["state"], parts=(StatePart(name="state", shape=shape, split_axis=0),)),
    )
    return KVLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype="float32",
        groups=groups,
    )


def weights_id_of(files: ModelFiles, layout: KVLayout) -> str:
    """What storage knows the model by: the same weights in other layers, or with other gates, give other KV."""
    return f"{files.digest}-hybrid-{_SEED}" if layout.groups else files.digest


def gates_of(spec: ModelSpec) -> dict[int, Float32Array]:
    """The gates of each layer with a state, [2, kv heads, hidden]: for how much is kept, and how much is written."""
    gates = {}
    for layer in [number for number, kind in enumerate(kinds_of(spec)) if kind == "state"]:
        noise = np.random.default_rng((_SEED, layer)).standard_normal((2, spec.num_kv_heads, spec.hidden_size))
        gates[layer] = (noise / np.sqrt(spec.hidden_size)).astype(np.float32)
    return gates


def with_units(config: CacheConfig, max_running: int) -> CacheConfig:
    """The same with units for so many requests at a time, of which each computes up to a step, and for checkpoints.

    Raises:
        ConfigError: blocks are longer than what a step computes, or units are given that no request comes to its end
            with.
    """
    size = config.block_size
    if size > STEP_TOKENS:
        raise ConfigError(
            f"block_size is {size}, and a step of this engine computes {STEP_TOKENS} tokens: a state behind a block "
            "could not be had; use a smaller one"
        )
    num_windows = -(-(WINDOW_TOKENS - 1) // size)
    least = num_windows + -(-STEP_TOKENS // size) + 1 + num_windows, 2
    if config.num_gpu_units:
        short = [
            number for number, (has, needs) in enumerate(zip(config.num_gpu_units, least, strict=False)) if has < needs
        ]
        if short:
            given, needed = list(config.num_gpu_units), list(least)
            raise ConfigError(f"num_gpu_units is {given}, and one request of this engine needs {needed}; give as many")
        return config
    num_checkpoints = max(2, config.pool_sizes()[0] // _BLOCKS_PER_CHECKPOINT)
    units = max_running * least[0] + num_checkpoints * num_windows, max_running * least[1] + num_checkpoints
    return dataclasses.replace(config, num_gpu_units=units)
