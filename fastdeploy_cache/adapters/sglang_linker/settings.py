"""Our settings, made of SGLang's `linker_extra_config` and of its device pools."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_model, get_parallel

from fastdeploy_cache.adapters.known_versions import SGLANG, installed_version
from fastdeploy_cache.adapters.sglang_linker.device_pools import KV, PAGE_TOKENS, DevicePool
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.sizes import with_sizes

_VERSION = "0.5.23"
_FROM_POOLS = ("block_size", "num_gpu_blocks", "gpu_memory_bytes", "num_gpu_units", "layout", "num_cpu_blocks", "role")
_NOT_SERVED = ("peer", "transfer_client", "recompute_last_token", "state_copy", "cpu_to_gpu_ratio")
_TASK_SECONDS = 5.0  # that a copy may take: a rank that hangs holds SGLang's scheduler for so long
_OF_MODEL = ("kv_cache_dtype", "quantization", "json_model_override_args")


@dataclass(frozen=True)
class LinkerSettings:
    """`caches`: by pool. `prefetch_seconds`: that a look-up waits for storage. `load_seconds`: that a batch's loads may
    take, with what is begun again. `num_ranks`: that have to do the same, each with pages of its own."""

    caches: tuple[CacheConfig, ...]
    num_ranks: int
    prefetch_seconds: float
    load_seconds: float


def check_version() -> None:
    """Raise `ConfigError` for another SGLang than the one that this was written for."""
    found = installed_version(SGLANG.package)
    if found is not None and found != _VERSION:
        raise ConfigError(f"this is SGLang {found}; the linker needs {_VERSION}: pip install sglang=={_VERSION}")


def settings_of(extra: Mapping[str, Any], pools: Sequence[DevicePool], params: Any) -> LinkerSettings:
    """The settings of each pool's cache.

    Raises:
        ConfigError: an unknown name, an impossible value, or none where one is needed.
    """
    given = dict(with_sizes(extra))
    _check_names(given)
    if (num_stages := getattr(params, "pp_size", 1)) > 1:
        raise ConfigError(f"pipeline parallelism of {num_stages} stages is not served; use --pp-size 1")
    weights_id, memory_bytes = given.pop("weights_id", None), given.pop("cpu_memory_bytes", None)
    if not isinstance(weights_id, str) or not weights_id:
        raise ConfigError(
            "weights_id is missing in linker_extra_config; name the weights (a revision), since weights of the same "
            "name may differ, and new weights need a new id"
        )
    if type(memory_bytes) is not int:
        raise ConfigError(
            f"cpu_memory_bytes is {memory_bytes!r} in linker_extra_config; give the CPU tier's size, as '8GiB' or in "
            "whole bytes"
        )
    prefetch, load = (_seconds(given, name, default) for name, default in (("prefetch", 1.0), ("load", 30.0)))
    shares = _shares(given.pop("pool_shares", None), pools)
    owner = _Owner(weights_id, params)
    caches = [_cache_of(given, pool, int(memory_bytes * shares[pool.name]), owner, prefetch) for pool in pools]
    if load <= (task := caches[0].transfer.task_timeout_seconds):
        raise ConfigError(
            f"load_seconds is {load}, and a copy may take transfer.task_timeout_seconds, {task}, behind which its rank "
            "is started again; give more"
        )
    return LinkerSettings(tuple(caches), owner.num_ranks, prefetch, load)


def _check_names(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what is not to be given, or is no table."""
    for name in ("storage", "transfer"):
        if not isinstance(given.get(name, {}), Mapping):
            raise ConfigError(f"{name} is {given[name]!r} in linker_extra_config; give a table of settings")
    taken = [name for name in (*_FROM_POOLS, *_NOT_SERVED) if name in given]
    taken += [f"transfer.{name}" for name in ("tp_size", "kv_owner", "device") if name in given.get("transfer", {})]
    if taken:
        raise ConfigError(
            f"linker_extra_config sets {taken[0]}, which follows from SGLang or is not for it; leave it out"
        )


def _seconds(given: dict[str, Any], name: str, default: float) -> float:
    value = given.pop(f"{name}_seconds", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3600:
        raise ConfigError(f"{name}_seconds is {value!r}; give seconds, more than 0 and less than 3,600")
    return float(value)


def _shares(given: Any, pools: Sequence[DevicePool]) -> dict[str, float]:
    """Shares of the CPU tier's memory, by pool: equal ones where none are given."""
    names = [pool.name for pool in pools]
    if given is None:
        return dict.fromkeys(names, 1 / len(names))
    is_known = isinstance(given, Mapping) and sorted(given) == sorted(names)
    if not is_known or not all(isinstance(each, int | float) and 0 < each < math.inf for each in given.values()):
        raise ConfigError(f"pool_shares is {given!r}; give a number above 0 for each of {', '.join(names)}")
    total = sum(given.values())
    return {name: given[name] / total for name in names}


class _Owner:
    """Whose pages these are: what decides their bytes beside the tokens."""

    def __init__(self, weights_id: str, params: Any) -> None:
        self._weights_id = weights_id
        rank, num_ranks = _place_in(params)
        cp_rank, cp_size = getattr(params, "attn_cp_rank", 0), getattr(params, "attn_cp_size", 1)
        self.rank, self.num_ranks = cp_rank * num_ranks + rank, cp_size * num_ranks
        model, parallel = get_model(), get_parallel()
        self.replicas = [getattr(parallel, name, None) or 0 for name in ("dp_rank", "attn_dp_rank")]
        self._facts = [f"{name}={getattr(model, name, None)}" for name in _OF_MODEL]
        self._facts += [f"tp={rank}/{num_ranks}", f"cp={cp_rank}/{cp_size}"]

    def weights_of(self, pool: DevicePool) -> str:
        """The weights' id with all that is not in the layout."""
        kinds = sorted({f"{array.dtype} {tuple(array.shape[1:])}" for in_layer in pool.arrays for array in in_layer})
        facts = [*self._facts, pool.name, f"page={pool.page_slots}", f"layers={pool.layers}", *kinds]
        return f"{self._weights_id} sglang {hashlib.sha256('|'.join(facts).encode()).hexdigest()[:32]}"


def _place_in(params: Any) -> tuple[int, int]:
    """This rank's place among the tensor-parallel ranks of its attention."""
    group = getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None)
    if group is None:
        return 0, 1
    return int(group.rank()), int(group.size())


def _cache_of(
    given: Mapping[str, Any], pool: DevicePool, memory_bytes: int, owner: _Owner, prefetch_seconds: float
) -> CacheConfig:
    num_pages = memory_bytes // pool.page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"cpu_memory_bytes leaves {memory_bytes} for the pool {pool.name!r}, whose pages have {pool.page_bytes}"
        )
    more = dict(given)
    if (storage := more.pop("storage", None)) is not None:
        more["storage"] = _storage_of(dict(storage), pool, owner)
    if pool.name != KV:  # an address is one cache's
        more.pop("insight", None)
    device = pool.arrays[0][0].device.type
    return CacheConfig.load(
        None,
        **{
            "load_policy": "always",
            "min_prefetch_tokens": 1,
            "max_prefetch_share": 0.9,
            "prefetch_timeout_seconds": prefetch_seconds,
            **more,
            "block_size": PAGE_TOKENS,
            "num_gpu_blocks": pool.num_pages,
            "num_cpu_blocks": num_pages,
            "layout": pool.layout(),
            "transfer": {
                "task_timeout_seconds": _TASK_SECONDS,
                **more.get("transfer", {}),
                "tp_size": 1,
                "kv_owner": "worker",
                "device": device,
            },
        },
    )


def _storage_of(given: dict[str, Any], pool: DevicePool, owner: _Owner) -> dict[str, Any]:
    """The store of a pool. With files, each pool of each rank and replica has a folder of its own, since a folder is
    one process's."""
    given = {**with_sizes(given, "storage."), "weights_id": owner.weights_of(pool)}
    given.setdefault("admission", "all")
    if given.get("kind", "file") == "file" and given.get("folder"):
        names = [f"replica-{'-'.join(map(str, owner.replicas))}"] * any(owner.replicas)
        names += [f"rank-{owner.rank}"] * (owner.num_ranks > 1) + [f"pool-{pool.name}"] * (pool.name != KV)
        given["folder"] = str(Path(str(given["folder"]), *names))
    return given
