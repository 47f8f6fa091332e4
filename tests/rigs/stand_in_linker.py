"""What our linker uses of SGLang 0.5.23, without SGLang and PyTorch: its base class, device pools and their tensors."""

from __future__ import annotations

import abc
import enum
import hashlib
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fastdeploy_cache.ipc.shared_array import SharedArray
from tests.rigs.stand_in_sglang import MODEL, load_over

PARALLEL = SimpleNamespace(dp_rank=None, attn_dp_rank=0)
_LINKER = "mem_cache.unified_cache.unified_cache_linker"


class UnifiedCacheLinker(abc.ABC):
    """The base class, with its ten verbs."""

    @abc.abstractmethod
    def lookup(self, rid: str, transfers: Any) -> list[int]: ...
    @abc.abstractmethod
    def load(self, rid: str, transfers: Any) -> bool: ...
    @abc.abstractmethod
    def start_layer_wise_loading(self) -> int: ...
    @abc.abstractmethod
    def finish_layer_wise_loading(self, counter_index: int) -> bool: ...
    @abc.abstractmethod
    def cancel_queued_load(self, rid: str) -> bool: ...
    @abc.abstractmethod
    def offload(self, transfers: Any, session_id: str | None = None) -> bool: ...
    @abc.abstractmethod
    def num_completed_offloads(self) -> int: ...
    @abc.abstractmethod
    def pop_completed_offload(self) -> bool: ...
    @abc.abstractmethod
    def reset(self) -> None: ...
    @abc.abstractmethod
    def close(self) -> None: ...


class Component(enum.IntEnum):
    """SGLang's `ComponentType`."""

    FULL = 0
    SWA = 1
    MAMBA = 2
    C128 = 3


class Tensor:
    """As much of a PyTorch tensor as the linker asks for, in shared memory that is moved nowhere."""

    def __init__(self, memory: SharedArray, array: np.ndarray, offset_bytes: int = 0) -> None:
        self._memory, self.array, self._offset = memory, array, offset_bytes
        self.shape, self.dtype = array.shape, f"torch.{array.dtype}"
        self.device = SimpleNamespace(type="cpu", index=None)

    @classmethod
    def new(cls, *shape: int, dtype: Any = np.float32) -> Tensor:
        memory = SharedArray.create("device-pool", int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return cls(memory, memory.view(np.dtype(dtype), shape))

    def __getitem__(self, index: int) -> Tensor:
        part = self.array[index]
        return Tensor(self._memory, part, self._offset + index * self.array.strides[0])

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def stride(self, dimension: int | None = None) -> Any:
        strides = tuple(each // self.array.itemsize for each in self.array.strides)
        return strides if dimension is None else strides[dimension]

    def data_ptr(self) -> int:
        found: int = self.array.__array_interface__["data"][0]
        return found

    def untyped_storage(self) -> Any:
        base = self.data_ptr() - self._offset
        return SimpleNamespace(
            data_ptr=lambda: base,
            nbytes=lambda: self._memory.num_bytes,
            is_shared=lambda: True,
            _share_fd_cpu_=lambda: (self._memory.fd, self._memory.num_bytes),
        )


class Slots:
    """A tensor of indices."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._slots = list(slots)

    def flatten(self) -> Slots:
        return self

    def tolist(self) -> list[int]:
        return self._slots


def attention_pool(num_layers: int, num_slots: int, seed: int) -> SimpleNamespace:
    """Keys and values of layers, filled with noise."""
    sides = [[Tensor.new(num_slots, 2, 8) for _ in range(num_layers)] for _ in range(2)]
    noise = np.random.default_rng(seed)
    for tensor in (*sides[0], *sides[1]):
        tensor.array[:] = noise.random(tensor.shape)
    return SimpleNamespace(k_buffer=sides[0], v_buffer=sides[1], k_scale_buffer=None, start_layer=0)


def windows_pool(num_slots: int) -> SimpleNamespace:
    """Layers 1 and 3 keep everything, 0 and 2 a window."""
    mapping = {0: (0, True), 1: (0, False), 2: (1, True), 3: (1, False)}
    return SimpleNamespace(
        full_kv_pool=attention_pool(2, num_slots, 1),
        swa_kv_pool=attention_pool(2, num_slots // 2, 2),
        layers_mapping=mapping,
        start_layer=0,
    )


def states_pool(num_slots: int) -> SimpleNamespace:
    """States of layers 4 and 6, in a pool of requests."""
    cache = SimpleNamespace(temporal=Tensor.new(2, num_slots, 4, 8), conv=[Tensor.new(2, num_slots, 16)])
    noise = np.random.default_rng(3)
    for tensor in (cache.temporal, *cache.conv):
        tensor.array[:] = noise.random(tensor.shape)
    return SimpleNamespace(
        mamba_pool=SimpleNamespace(mamba_cache=cache, num_mamba_layers=2),
        mamba_map={4: 0, 6: 1},
        counters=[],
        register_layer_transfer_counter=lambda counter: None,
    )


def params_of(kvcache: Any, page_size: int, states: Any = None, **more: Any) -> SimpleNamespace:
    """SGLang's `CacheInitParams`."""
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kvcache),
        req_to_token_pool=states,
        page_size=page_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        tp_cache_group=None,
        **more,
    )


def transfer(name: str, keys: Sequence[str], slots: Sequence[int] | None = None) -> SimpleNamespace:
    """SGLang's `PoolTransfer`."""
    return SimpleNamespace(name=name, keys=list(keys), device_indices=Slots(slots) if slots is not None else None)


def keys_of(num: int, prompt: str = "a prompt") -> list[str]:
    """Hashes of its first pages."""
    return [hashlib.sha256(f"{prompt} {page}".encode()).hexdigest() for page in range(num)]


def load_linker() -> ModuleType:
    """The linker's module over what is here."""
    parts = {
        _LINKER: {"UnifiedCacheLinker": UnifiedCacheLinker},
        "runtime_context": {"get_model": lambda: MODEL, "get_parallel": lambda: PARALLEL},
    }
    return load_over(parts, "fastdeploy_cache.adapters.sglang_linker.linker")
