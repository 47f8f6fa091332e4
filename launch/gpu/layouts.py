"""The layouts and block ids with which a device's copies are held against their contract, here and in the tests."""

from __future__ import annotations

import dataclasses

from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout
from fastdeploy_cache.transfer_manager.kv.parts import STORAGE_DTYPES, KVPart

NUM_GPU_BLOCKS, NUM_CPU_BLOCKS = 12, 17
_MODEL: dict[str, object] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8}
_KINDS: dict[str, dict[str, object]] = {
    "latent": {"num_kv_heads": 1, "head_dim": 12, "value_head_dim": 0, "dtype": "bfloat16"},
    "values of another size": {"value_head_dim": 6},
    "scales": {"dtype": "float8_e4m3", "scale_dtype": "float32", "scale_elements": 4},
    "latent with scales": {"num_kv_heads": 1, "value_head_dim": 0, "dtype": "int8", "scale_dtype": "float16"},
    "int4, heads first": {"dtype": "int4", "scale_dtype": "bfloat16", "heads_first": True},
    "heads first": {"heads_first": True},
    "extra layers": {"num_extra_layers": 2, "extra_layer_block_ratio": 1.5},
    "block first": {"device_order": "block_first", "num_extra_layers": 1},
    "block first, scales, heads first": {
        "device_order": "block_first",
        "dtype": "uint8",
        "scale_dtype": "float32",
        "heads_first": True,
    },
}
_UNEVEN = (KVPart("key", (3, 2, 5), "float16"), KVPart("scale", (3,), "float32", None), KVPart("value", (7,), "int8"))
LAYOUTS: dict[str, RankLayout] = {
    dtype: KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype).for_rank(1, 4) for dtype in STORAGE_DTYPES
}
LAYOUTS |= {name: KVLayout(**(_MODEL | kind)).for_rank(1, 4) for name, kind in _KINDS.items()}  # type: ignore[arg-type]
LAYOUTS["replicated head"] = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4).for_rank(8, 4)
# several layers fill a step of a load only where layers are as large as this
LAYOUTS["steps"] = KVLayout(num_layers=5, num_kv_heads=4, head_dim=1024, dtype="float32").for_rank(1, 8)
LAYOUTS["uneven"] = RankLayout(num_layers=4, parts=_UNEVEN)
LAYOUTS["one byte"] = RankLayout(num_layers=1, parts=(KVPart("latent", (1,), "uint8", None),))
# of hybrid models: rows behind the full one, whose layers stand between its own
NUM_UNITS = 7
_STATE = KVGroup(
    kind="state", layers=(0, 5), parts=(StatePart(name="a", shape=(13,)), StatePart(name="b", shape=(2, 20)))
)
_WINDOW = KVGroup(kind="window", reach_tokens=9, layers=(3,), head_dim=6)
_CHUNK = KVGroup(kind="chunk", reach_tokens=16, layers=(2,))
_HYBRID: dict[str, dict[str, object]] = {
    "a state and a window": {"groups": (KVGroup(kind="full", layers=(1, 2, 4)), _STATE, _WINDOW)},
    "every kind of row": {"groups": (KVGroup(kind="full", layers=(1, 4)), _WINDOW, _STATE, _CHUNK)},
    "uneven": {
        "dtype": "int8",
        "scale_dtype": "float16",
        "heads_first": True,
        "num_extra_layers": 1,
        "groups": (_STATE, KVGroup(kind="full", layers=(1, 4)), _CHUNK, _WINDOW),
    },
}


def _hybrid(fields: dict[str, object]) -> RankLayout:
    layout = KVLayout(**({"num_layers": 6, "num_kv_heads": 2, "head_dim": 4} | fields)).for_rank(1, 4)  # type: ignore[arg-type]
    return dataclasses.replace(layout, num_units=(NUM_UNITS,) * (len(layout.rows) - 1))


HYBRID_LAYOUTS = {name: _hybrid(fields) for name, fields in _HYBRID.items()}
# (device ids, CPU ids): neighbours, permutations, strides, backwards, one, none, all
ID_PAIRS: list[tuple[list[int], list[int]]] = [
    ([0, 1, 2, 3], [4, 5, 6, 7]),
    ([7, 2, 11, 0, 5], [16, 0, 3, 8, 1]),
    ([1, 3, 5, 7, 9, 11], [0, 1, 2, 3, 4, 5]),
    ([5, 4, 3, 2], [2, 3, 4, 5]),
    ([3, 4, 5, 9, 10, 1], [8, 9, 10, 11, 2, 3]),
    ([11], [16]),
    ([], []),
    (list(range(NUM_GPU_BLOCKS)), list(range(NUM_CPU_BLOCKS - NUM_GPU_BLOCKS, NUM_CPU_BLOCKS))),
]
