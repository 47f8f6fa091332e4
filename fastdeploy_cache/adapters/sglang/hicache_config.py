"""What SGLang tells a HiCache storage backend, made into our settings and key spaces; the rest is refused here."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_model, get_spec

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.settings import meant
from fastdeploy_cache.transfer_manager.sizes import with_sizes
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig, slot_bytes_of
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

KV_POOL = "kv"  # SGLang's name for the pool of keys and values; the others are states, windows, indexers and drafts
_STATE_POOL = "mamba"  # has a part of its own on each rank, also where the KV is the same on all
_SGLANG_OPTIONS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
_HASH = re.compile(r"[0-9a-f]{64}")
_OF_MODEL = ("kv_cache_dtype", "quantization", "json_model_override_args")
_OF_DRAFT = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
)
_OF_POOL = (
    *("dtype", "layout", "page_size", "start_layer", "end_layer", "layer_num", "head_num", "head_dim", "v_head_dim"),
    *("head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "indexer_dtype", "num_mamba_layers"),
    *("conv_state_shapes", "conv_dtype", "temporal_state_shape", "temporal_dtype", "storage_format_tag"),
)


@dataclass(frozen=True)
class BackendSettings:
    """`storage` is ours. `by_index`: SGLang hands pages over by their places in its host pool, not as flat tensors."""

    storage: StorageConfig
    by_index: bool


def settings_of(config: HiCacheStorageConfig | None) -> BackendSettings:
    """The settings in `--hicache-storage-backend-extra-config`: ours lie beside SGLang's own.

    Raises:
        ConfigError: no options by name, an unknown one, no weights id, or a parallelism that the store cannot serve.
        LayoutError: an impossible setting of the store.
    """
    if config is None:
        raise ConfigError(
            "storage_config is None; give SGLang's HiCacheStorageConfig, with our options in extra_config"
        )
    if not isinstance(config.extra_config or {}, Mapping):
        raise ConfigError(
            f"extra_config is {config.extra_config!r}, a {type(config.extra_config).__name__}; give a mapping of "
            "options, as --hicache-storage-backend-extra-config is in JSON"
        )
    given = dict(config.extra_config or {})
    by_index = bool(given.get("interface_v1", False))
    ours = {name: value for name, value in given.items() if name not in _SGLANG_OPTIONS}
    _check_names(ours)
    if not ours.get("weights_id"):
        raise ConfigError(
            "weights_id is missing in --hicache-storage-backend-extra-config; name the weights (a revision, or "
            "weights_id_of(files)), since weights of the same name may differ, and new weights need a new id"
        )
    storage = StorageConfig(**{"admission": "all", **with_sizes(ours, "storage.")})
    if storage.kind == "file" and config.is_mla_model and config.tp_size > 1:
        raise ConfigError(
            f"kind is 'file' and tp_size {config.tp_size} with an MLA model; its ranks share their pages, and a file "
            "store serves one process: use kind 'valkey' or 'mooncake'"
        )
    return BackendSettings(storage, by_index)


def check_pool(config: HiCacheStorageConfig, pool: Any, name: str) -> None:
    """Refuse a pool that would never be found: each rank has a part of its pages, and SGLang, which takes the ranks of
    an MLA model for replicas, has only the first one write.

    Raises:
        ConfigError: it is such a pool.
    """
    if config.is_mla_model and config.tp_size > 1 and name != _STATE_POOL and not _is_replicated(config, pool, name):
        raise ConfigError(
            f"the pool {name!r} ({type(pool).__name__}) beside an MLA model has heads of its own on each of "
            f"{config.tp_size} tensor-parallel ranks, and SGLang writes those of the first one only, so that no prompt "
            "would be found. Use a draft model with MLA, or one rank for each replica (--enable-dp-attention with "
            "--dp-size as --tp-size), or run without the draft model or without this storage backend"
        )


def store_of(storage: StorageConfig, name: str, page_bytes: int, kv_page_bytes: int) -> StorageConfig:
    """The store of one pool. Of files, a pool beside the keys and values has a folder of its own, with room for as many
    pages: in one folder the first to fill it would leave the others nothing."""
    if storage.kind != "file" or name == KV_POOL:
        return storage
    capacity_bytes = storage.capacity_bytes * slot_bytes_of(page_bytes) // slot_bytes_of(kv_page_bytes)
    return dataclasses.replace(
        storage, folder=str(Path(str(storage.folder), f"pool-{name}")), capacity_bytes=max(1, capacity_bytes)
    )


def _check_names(given: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(StorageConfig)]
    for name in given:
        if name not in known:
            what = meant(name, known)
            raise ConfigError(f"unknown option {name!r} in --hicache-storage-backend-extra-config; {what}")


def space_of(
    config: HiCacheStorageConfig,
    storage: StorageConfig,
    pool: Any,
    *,
    name: str,
    piece_bytes: Sequence[int],
    image: str,
) -> KeySpace:
    """The key space of this rank's pages of one host pool: all that decides the bytes of a page beside its tokens.

    `image` says in which order a page's `piece_bytes` are put together.
    """
    shards, rank, num_ranks = _shards(config, pool, name), 0, 1
    for index, size in shards.values():
        rank, num_ranks = rank * size + index, num_ranks * size
    # A file store serves one process: of replicas under data-parallel attention each has a space of its own.
    replica = getattr(config, "dp_rank", 0) if storage.kind == "file" else 0
    model, draft = get_model(), get_spec()
    facts = {
        "image": image,
        "pool": f"{name} {type(pool).__name__}",
        "pieces": " ".join(map(str, piece_bytes)) if len(piece_bytes) < 8 else _digest(piece_bytes),
        **{field: getattr(pool, field) for field in _OF_POOL if getattr(pool, field, None) is not None},
        **{f"{axis} rank": f"{index} of {size}" for axis, (index, size) in shards.items()},
        "replica": replica,
        **{field: getattr(model, field, None) for field in _OF_MODEL},
    }
    if getattr(draft, "speculative_algorithm", None):  # draft layers may lie in the same pages
        facts |= {field: getattr(draft, field, None) for field in _OF_DRAFT}
    return KeySpace(
        weights_id=storage.weights_id,
        layout="sglang " + ", ".join(f"{field} {value}" for field, value in facts.items()),
        object_bytes=sum(piece_bytes),
        block_size=pool.page_size,
        rank=replica * num_ranks + rank,
        tp_size=num_ranks,
    )


def _shards(config: HiCacheStorageConfig, pool: Any, name: str) -> dict[str, tuple[int, int]]:
    """For each axis of parallelism, which part this rank has, of how many. Replicas have all the same."""
    axes = ("pp", "attn_cp", "dcp")
    shards = {axis: (getattr(config, f"{axis}_rank", 0), getattr(config, f"{axis}_size", 1)) for axis in axes}
    if not _is_replicated(config, pool, name):
        shards["tp"] = (config.tp_rank, config.tp_size)
    return shards


def _is_replicated(config: HiCacheStorageConfig, pool: Any, name: str) -> bool:
    """Whether every tensor-parallel rank has the same pages: so it is with MLA, but for states and for heads."""
    has_heads = any(kind.__name__.startswith(("MHA", "AsymmetricMHA")) for kind in type(pool).__mro__)
    return config.is_mla_model and name != _STATE_POOL and not has_heads


def is_writer(config: HiCacheStorageConfig, name: str) -> bool:
    """Whether this rank writes pages of the pool: of replicas only one does."""
    return name == _STATE_POOL or config.is_storage_writer


def hash_of(key: str) -> bytes:
    """32 bytes for a key of SGLang's: a page's hash as 64 hexadecimal digits, or any other text."""
    return bytes.fromhex(key) if _HASH.fullmatch(key) else hashlib.sha256(key.encode()).digest()


def _digest(piece_bytes: Sequence[int]) -> str:
    text = " ".join(map(str, piece_bytes))
    return (
        f"{len(piece_bytes)} of {math.fsum(piece_bytes):.0f} bytes ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
    )
