"""FastDeploy's configuration, by the attributes that its cache manager reads, as a configuration of ours."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fastdeploy_cache.adapters.fastdeploy.peer_config import peer_config
from fastdeploy_cache.config.cache import ROLES, SETTING_KINDS, WRITE_POLICIES, CacheConfig, check_keys
from fastdeploy_cache.config.sources import Sources
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.ipc.codec import taken_apart
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.sizes import with_sizes
from fastdeploy_cache.transfer_manager.storage.config import STORES, StorageConfig

DOOR_SETTINGS = "FDCACHE_DOOR_SETTINGS"  # environment: settings of ours as JSON, see `run`
_V1_SCHEDULER = "ENABLE_V1_KVCACHE_SCHEDULER"
_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "uint8": "uint8",
    "int8": "uint8",
    "int4": "int4",
    "float8_e4m3fn": "float8_e4m3",
}


def num_gpu_blocks(config: Any, splitwise_role: str) -> int:
    """The size of the GPU pool."""
    if splitwise_role not in ROLES:
        raise ConfigError(f"splitwise_role is {splitwise_role!r}; use one of {', '.join(ROLES)}")
    return pool_size(config.cache_config)


def pool_size(cache: Any) -> int:
    """The size of the GPU pool by a `cache_config`. With the v0 scheduler that is its prefill share: its workers hand
    out the rest themselves."""
    names = ("total_block_num", "prefill_kvcache_block_num")
    for name in names if has_v1_scheduler() else reversed(names):
        if (size := getattr(cache, name, None)) is not None:
            return int(size)
    raise ConfigError("cache_config has no total_block_num and no prefill_kvcache_block_num; give one")


def has_v1_scheduler() -> bool:
    """FastDeploy's ENABLE_V1_KVCACHE_SCHEDULER. Where FastDeploy is loaded its own module has the word: it switches the
    scheduler off there for platforms that it does not support, and leaves the environment as it is.

    Raises:
        ConfigError: no number.
    """
    theirs = getattr(sys.modules.get("fastdeploy.envs"), _V1_SCHEDULER, None)
    value = os.environ.get(_V1_SCHEDULER, "1") if theirs is None else theirs
    try:
        return bool(int(value))
    except ValueError as error:
        raise ConfigError(f"{_V1_SCHEDULER} is {value!r}; use 0 or 1") from error


def cache_config(
    config: Any,
    *,
    tp_size: int,
    num_blocks: int,
    data_parallel_id: int,
    device_ids: Sequence[int] | None = None,
    splitwise_role: str = "mixed",
    pod_ip: str = "127.0.0.1",
    launched: bool = False,
) -> CacheConfig:
    """Ours, from FastDeploy's. Before it is launched there are no ranks, and so no tier below the GPU and no peers.

    `config.cache_config.fastdeploy_cache`, a mapping, may hold further settings of `CacheConfig`; they win.

    Raises:
        ConfigError: a value that cannot be, or a storage backend or peers of which settings are missing.
    """
    theirs = config.cache_config
    ours: dict[str, Any] = {
        "block_size": int(theirs.block_size),
        "num_gpu_blocks": num_blocks,
        "num_cpu_blocks": int(getattr(theirs, "num_cpu_blocks", 0) or 0),
        "enable_prefix_caching": bool(getattr(theirs, "enable_prefix_caching", True)),
        "cache_outputs": bool(getattr(theirs, "enable_output_caching", False)),
        "min_prefetch_tokens": int(theirs.block_size),
    }
    extra = extra_settings(theirs)
    transfer: dict[str, Any] = {"tp_size": tp_size, "data_parallel_id": data_parallel_id}
    by_door = _by_door(theirs, extra, splitwise_role)
    if launched:
        ours |= _write_policy(theirs) | (by_door or ({} if "layout" in extra else {"layout": layout_of(config)}))
    given = dict(extra.pop("transfer", {}))
    if device_ids is not None and launched and given.get("device") == "cuda":  # on the CPU they mean nothing
        transfer["device_ids"] = tuple(int(i) for i in device_ids)
    transfer |= given
    settings = extra.pop("storage", None)
    check_keys({"storage": settings} if settings is not None else {})
    storage, peers = _storage(theirs, settings), extra.pop("peer", None)
    check_keys({key: value for key, value in extra.items() if key != "layout"} | {"transfer": transfer})
    ours |= with_sizes(extra) | {"transfer": TransferConfig(**transfer)}
    if not launched:
        ours |= {"num_cpu_blocks": 0, "transfer_client": "inline", "layout": None}
    else:
        weights = storage.weights_id if storage is not None else None
        peer = peer_config(theirs, splitwise_role, peers, weights_id=weights, tp_size=tp_size, pod_ip=pod_ip)
        ours |= {"storage": storage, "role": splitwise_role, "peer": peer}
        _check_arrays(theirs, num_blocks, ours)
    return CacheConfig(**ours).check_uniform("the adapter for FastDeploy")


def _by_door(theirs: Any, extra: Mapping[str, Any], splitwise_role: str) -> dict[str, Any]:
    """Settings that follow from the door (see `run`): the KV arrays are always FastDeploy's workers', so no rank is
    needed where nothing is moved; where something is, it has to be said how they come here.

    Raises:
        ConfigError: it is not said.
    """
    if not _is_by_door(theirs) or "transfer" in extra or "layout" in extra:
        return {}
    asking = [name for name in ("num_cpu_blocks", "kvcache_storage_backend") if getattr(theirs, name, None)]
    asking += [f"the setting {name}" for name in ("num_cpu_blocks", "storage", "peer") if extra.get(name)]
    asking += [f"splitwise_role {splitwise_role!r}"] if splitwise_role != "mixed" else []
    if asking:
        raise ConfigError(
            f"{' and '.join(asking)} asks for copies of KV arrays, but these are FastDeploy's workers', and no setting "
            "says how they come here. Run without it, or see 'The bytes' in docs/adapters/fastdeploy.md"
        )
    return {"transfer_client": "inline", "layout": None}


def _check_arrays(theirs: Any, num_blocks: int, ours: dict[str, Any]) -> None:
    """Workers of the v0 scheduler use blocks behind the pool, which arrays that are made here do not have."""
    num_used = int(getattr(theirs, "total_block_num", None) or 0)
    if num_used > num_blocks and ours["layout"] is not None and ours["transfer"].owner_of_kv != "worker":
        raise ConfigError(
            f"workers of the v0 scheduler use {num_used} blocks, but KV arrays that are made here have the "
            f"{num_blocks} of prefill_kvcache_block_num; let the workers make them, and attach_kv: "
            "cache_config.fastdeploy_cache = {'transfer': {'kv_owner': 'worker'}}"
        )


def _write_policy(theirs: Any) -> dict[str, str]:
    policy = getattr(theirs, "write_policy", None)
    if policy is not None and policy not in WRITE_POLICIES:
        raise ConfigError(f"write_policy (to storage) is {policy!r}; use one of {', '.join(WRITE_POLICIES)}")
    return {"storage_write_policy": policy} if policy is not None else {}


def _is_by_door(theirs: Any) -> bool:
    return getattr(theirs, "fastdeploy_cache", None) is None and DOOR_SETTINGS in os.environ


def extra_settings(theirs: Any) -> dict[str, Any]:
    """A copy of `cache_config.fastdeploy_cache`; where there is none, of the settings that `run` was given."""
    given = json.loads(os.environ[DOOR_SETTINGS]) if _is_by_door(theirs) else None
    extra = dict(given or getattr(theirs, "fastdeploy_cache", None) or {})
    if "role" in extra:
        raise ConfigError(f"cache_config.fastdeploy_cache has role {extra['role']!r}; the role is splitwise_role")
    return extra


def worker_port(config: Any) -> int | str | None:
    """Where workers hand over their KV arrays, as the cache's settings say that they do; None where they do not, or
    where this FastDeploy has no `local_engine_worker_queue_port`."""
    settings = extra_settings(config.cache_config).get("transfer") or {}
    owner = settings.get("kv_owner") or ("worker" if settings.get("device") == "cuda" else None)
    port: int | str | None = getattr(getattr(config, "parallel_config", None), "local_engine_worker_queue_port", None)
    return port if owner == "worker" else None


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check settings of ours by themselves, before FastDeploy is there to be asked. Its own settings may still not go
    with them: that is said when the manager is made.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or an impossible one. LayoutError: an impossible value.
    """
    check_keys(settings)
    for name, where in (("role", "splitwise_role"), ("layout", "the layout of the workers' KV arrays")):
        if name in settings:
            raise ConfigError(f"{name} is {settings[name]!r}, and is no setting here: it is FastDeploy's own, {where}")
    transfer, storage = (dict(settings.get(name, {})) for name in ("transfer", "storage"))
    if isinstance(device_ids := transfer.get("device_ids"), list):
        transfer.setdefault("tp_size", max(1, len(device_ids)))
    # What FastDeploy says, or may say where the settings do not, stands in for it: here its kind of store.
    given: dict[str, Any] = {"layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8}}
    given |= {"num_gpu_blocks": 1, "num_cpu_blocks": 0, **settings, "transfer": transfer}
    if "storage" in settings:
        given["storage"] = {"kind": "file" if "folder" in storage else "valkey", **storage}
        if "peer" in settings and "weights_id" in storage:
            given["peer"] = {"weights_id": storage["weights_id"], **settings["peer"]}
    try:
        msgspec.convert(with_sizes(given), taken_apart(CacheConfig))
    except msgspec.ValidationError as error:
        raise Sources(given).blame(error, SETTING_KINDS) from error


def _storage(theirs: Any, settings: Any) -> StorageConfig | None:
    backend = getattr(theirs, "kvcache_storage_backend", None)
    if backend is None and settings is None:
        return None
    if settings is None:
        raise ConfigError(
            f"kvcache_storage_backend is {backend!r}, but which weights it is for is not said; give "
            "cache_config.fastdeploy_cache = {'storage': {'weights_id': ..., ...}}"
        )
    if backend is not None and backend not in STORES and ":" not in backend:
        known = f"{', '.join(STORES)}, or module:Class of your own"
        raise ConfigError(f"kvcache_storage_backend is {backend!r}; known: {known}")
    ours: dict[str, Any] = {"kind": backend or "file", **with_sizes(settings, "storage.")}
    if ours["kind"] == "file":
        ours.setdefault("admission", "all")  # what they call write_through
    return StorageConfig(**ours)


def layout_of(config: Any) -> KVLayout:
    """The model's keys and values.

    Raises:
        ConfigError: a `cache_dtype` that is unknown.
    """
    model, theirs = getattr(config, "model_config", None), config.cache_config
    if model is None:
        raise ConfigError("config has no model_config; ranks need num_key_value_heads, head_dim and the layers' number")
    dtype, scale_dtype = getattr(theirs, "cache_dtype", None) or getattr(model, "dtype", "bfloat16"), None
    if dtype == "block_wise_fp8":  # a scale for each head of each token, in the model's own dtype
        dtype, scale_dtype = "uint8", _DTYPES.get(getattr(model, "dtype", "bfloat16"), "bfloat16")
    if dtype not in _DTYPES:
        raise ConfigError(f"cache_dtype is {dtype!r}; known: {', '.join((*_DTYPES, 'block_wise_fp8'))}")
    layers = getattr(getattr(theirs, "model_cfg", None), "num_hidden_layers", None)
    num_layers = layers if layers is not None else model.num_hidden_layers
    return KVLayout(
        num_layers=int(num_layers),
        num_kv_heads=int(model.num_key_value_heads),
        head_dim=int(model.head_dim),
        dtype=_DTYPES[dtype],
        scale_dtype=scale_dtype,
        heads_first=True,
    )
