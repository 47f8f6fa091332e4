"""What our HiCache storage backend uses of SGLang 0.5.23, without SGLang: base class, descriptions, and host pools."""

from __future__ import annotations

import abc
import enum
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

MODEL = SimpleNamespace(kv_cache_dtype="auto", quantization=None, json_model_override_args="{}")
SPECULATION = SimpleNamespace(speculative_algorithm=None)


class HiCacheStorage(abc.ABC):
    """The base class, with its abstract verbs."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    @abc.abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abc.abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abc.abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abc.abstractmethod
    def exists(self, key: str) -> bool: ...


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


@dataclass
class HiCacheStorageConfig:
    """Of these the real one has more; the backend asks for the names here."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dp_rank: int = 0
    is_mla_model: bool = False
    extra_config: dict[str, Any] | None = None

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == 0


class HostPool:
    """A pool of pages of `page_size` tokens: keys and values in two arrays, in SGLang's `layout`."""

    def __init__(
        self,
        *,
        layout: str = "page_first",
        dtype: str = "torch.bfloat16",
        num_pages: int = 64,
        page_size: int = 4,
        num_layers: int = 3,
        token_bytes: int = 24,
    ) -> None:
        self.layout, self.dtype, self.page_size, self.layer_num = layout, dtype, page_size, num_layers
        self.head_num, self.head_dim, self.start_layer, self.end_layer = 2, 6, 0, num_layers
        self.size = num_pages * page_size
        layer_first = (2, num_layers, num_pages * page_size, token_bytes)
        page_first = (2, num_pages * page_size, num_layers, token_bytes)
        self.memory = np.zeros(layer_first if layout == "layer_first" else page_first, np.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Addresses and sizes: by page keys and values, in `layer_first` of each layer. As SGLang it computes them from
        the first page's, whether they lie in the pool or not."""
        first, stride = self.pieces(0), self.memory.strides[-2 if self.layout == "layer_first" else -3]
        addresses = [
            piece.__array_interface__["data"][0] + start * stride
            for start in indices.tolist()[:: self.page_size]
            for piece in first
        ]
        return addresses, [piece.nbytes for piece in first] * (len(indices) // self.page_size)

    def pieces(self, start: int) -> list[np.ndarray]:
        """The pieces of the page that begins at this place, each one run of memory."""
        tokens = slice(start, start + self.page_size)
        if self.layout == "layer_first":
            return [self.memory[part, layer, tokens] for layer in range(self.layer_num) for part in range(2)]
        return [self.memory[part, tokens] for part in range(2)]

    def page(self, start: int) -> bytes:
        """Its bytes, in that order."""
        return b"".join(piece.tobytes() for piece in self.pieces(start))

    def fill(self, starts: Sequence[int], seed: int = 1) -> list[bytes]:
        """Noise in these pages; what each is now."""
        noise = np.random.default_rng(seed)
        for start in starts:
            for piece in self.pieces(start):
                piece[...] = noise.integers(0, 256, piece.shape, np.uint8)
        return [self.page(start) for start in starts]

    def get_dummy_flat_data_page(self) -> FlatPage:
        return FlatPage(bytes(len(self.page(0))))


class MHATokenToKVPoolHost(HostPool):
    """Heads of its rank."""


class MLATokenToKVPoolHost(HostPool):
    """The same on all ranks."""


class MambaPoolHost(HostPool):
    """States of its rank."""


class LogicalPool:
    """An anchor without memory of its own."""

    page_size = 4

    def get_page_buffer_meta(self, indices: Any) -> None:
        return None


class FlatPage:
    """As much of a tensor as the backend asks for."""

    def __init__(self, data: bytes) -> None:
        self._bytes = np.frombuffer(data, np.uint8).copy()
        self.nbytes = len(data)

    def data_ptr(self) -> int:
        found: int = self._bytes.__array_interface__["data"][0]
        return found

    def is_contiguous(self) -> bool:
        return True

    def tobytes(self) -> bytes:
        return self._bytes.tobytes()


def load_over(parts: dict[str, dict[str, Any]], name: str) -> ModuleType:
    """A module of ours over stand-ins: names in modules below `sglang.srt`."""
    modules = {}
    for part, content in parts.items():
        path = f"sglang.srt.{part}".split(".")
        for end in range(1, len(path) + 1):
            modules.setdefault(".".join(path[:end]), ModuleType(".".join(path[:end])))
        vars(modules[".".join(path)]).update(content)
    sys.modules.update(modules)
    try:
        return importlib.import_module(name)
    finally:  # other tests ask whether SGLang is here
        for each in modules:
            del sys.modules[each]


def load_backend() -> ModuleType:
    """The backend's module, over SGLang where there is one, else over what is here."""
    name = "fastdeploy_cache.adapters.sglang.hicache_storage"
    if importlib.util.find_spec("sglang") is not None:
        config = importlib.import_module("fastdeploy_cache.adapters.sglang.hicache_config")
        vars(config).update(get_model=lambda: MODEL, get_spec=lambda: SPECULATION)  # no server has been started
        return importlib.import_module(name)
    parts = {
        "mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolHitPolicy": PoolHitPolicy,
            "PoolTransferResult": PoolTransferResult,
        },
        "observability.metrics_collector": {"StorageMetrics": StorageMetrics},
        "runtime_context": {"get_model": lambda: MODEL, "get_spec": lambda: SPECULATION},
    }
    return load_over(parts, name)
