"""Layouts of hybrid models: four shapes of real ones, and a small one with every kind of row."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout


def read_tokens(kind: str, reach: int, num_tokens: int) -> set[int]:
    """The tokens whose keys or states a kernel reads when it computes the token at `num_tokens`: by the definition of
    each kind, token by token."""
    if kind == "state":
        return {num_tokens - 1} if num_tokens else set()
    if kind == "window":
        return {token for token in range(num_tokens) if num_tokens - token < reach}
    if kind == "chunk":
        return {token for token in range(num_tokens) if token // reach == num_tokens // reach}
    return set(range(num_tokens))


def read_blocks(kind: str, reach: int, end: int, block_size: int) -> list[int]:
    """The blocks in which these lie, behind a boundary."""
    return sorted({token // block_size for token in read_tokens(kind, reach, end * block_size)})


def _others(num_layers: int, full: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(range(num_layers)) - set(full)))


def windowed(
    num_layers: int, full: range, reach_tokens: int, *, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16"
) -> KVLayout:
    """Some full layers, and windows of one reach."""
    groups = (
        KVGroup(kind="window", reach_tokens=reach_tokens, layers=_others(num_layers, full)),
        KVGroup(kind="full", layers=tuple(full)),
    )
    return KVLayout(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, groups=groups)


def with_states(
    num_layers: int, full: range, parts: tuple[StatePart, ...], *, num_kv_heads: int, head_dim: int
) -> KVLayout:
    """Some full layers, and recurrent states in all others."""
    groups = (
        KVGroup(kind="full", layers=tuple(full)),
        KVGroup(kind="state", layers=_others(num_layers, full), parts=parts),
    )
    return KVLayout(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="bfloat16", groups=groups
    )


GPT_OSS = windowed(24, range(1, 24, 2), 128, num_kv_heads=8, head_dim=64)
GEMMA_3 = windowed(62, range(5, 62, 6), 1024, num_kv_heads=16, head_dim=128)
QWEN3_NEXT = with_states(
    48,
    range(3, 48, 4),
    (
        StatePart(name="conv", shape=(8192, 3), dtype="bfloat16", split_axis=0),
        StatePart(name="ssm", shape=(32, 128, 128), dtype="bfloat16", split_axis=0),
    ),
    num_kv_heads=2,
    head_dim=256,
)
NEMOTRON_H = with_states(
    28,
    range(3, 28, 7),
    (
        StatePart(name="conv", shape=(10240, 3), dtype="bfloat16", split_axis=0),
        StatePart(name="ssm", shape=(128, 64, 128), dtype="float32", split_axis=0),
    ),
    num_kv_heads=8,
    head_dim=128,
)
SMALL = KVLayout(
    num_layers=6,
    num_kv_heads=2,
    head_dim=4,
    groups=(
        KVGroup(kind="full", layers=(0, 5)),
        KVGroup(kind="window", reach_tokens=10, layers=(1,)),
        KVGroup(kind="state", layers=(2, 4), parts=(StatePart(name="state", shape=(2, 3), split_axis=0),)),
        KVGroup(kind="chunk", reach_tokens=12, layers=(3,), num_kv_heads=4, dtype="float32"),
    ),
)
TABLES = """
num_gpu_blocks = 64
transfer_client = "inline"
block_size = 4
max_running = 2
[layout]
num_layers = 3
num_kv_heads = 2
head_dim = 4
[[layout.groups]]
kind = "full"
layers = [0]
[[layout.groups]]
kind = "window"
reach_tokens = 10
layers = [1]
[[layout.groups]]
kind = "state"
layers = [2]
[[layout.groups.parts]]
name = "conv"
shape = [4]
[[layout.groups.parts]]
name = "ssm"
shape = [4, 2]
"""
