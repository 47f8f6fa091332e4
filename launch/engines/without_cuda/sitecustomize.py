"""What lets SGLang run without CUDA: for the lane of `launch/engines.sh sglang`, and for nothing else. Python reads it
at the start of every interpreter that has this folder on PYTHONPATH.

SGLang imports packages that exist for GPUs only; on a CPU it calls nothing of them. They are empty here, and whoever
asks whether they are installed hears that they are not. Of HiCache, memory is not registered with CUDA, and the two
kernels that copy pages between device and host pools are copies by index. The attention that runs on CPUs writes to
pools of windows by their own slots, and reads by those of the full pool: here it reads by their own, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_MISSING = ("sgl_kernel", "torchvision", "flashinfer", "torchao")
_POOLS = "sglang.srt.mem_cache.pool_host"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend"


class _Nothing:
    """Can be named, called and inherited from; does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return _Nothing()

    def __getattr__(self, name: str) -> _Nothing:
        return _nothing(name)

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


def _nothing(name: str) -> _Nothing:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing()


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are missing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        is_missing = name.partition(".")[0] in _MISSING
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_missing else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = _nothing
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Changed(importlib.abc.Loader):
    """Loads a module and changes it."""

    def __init__(self, loader: importlib.abc.Loader, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class _Modules(importlib.abc.MetaPathFinder):
    """Finds those of SGLang's modules that are changed once they have been loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        changes = {
            f"{_POOLS}.common": _register_nothing,
            f"{_POOLS}.mha": _copy_by_index,
            _ATTENTION: _read_windows,
        }
        if name not in changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader, changes[name])
        return spec


def _register_nothing(module: Any) -> None:
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        setattr(module, name, lambda *_, **__: None)


def _copy_by_index(module: Any) -> None:
    module.transfer_kv_per_layer_direct_pf_lf = _load_layer
    module.transfer_kv_all_layer_direct_lf_pf = _store_layers


def _load_layer(
    *, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer of pages of host pools [page, layer, token, ...] into device arrays [token, ...]."""
    pages = src_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[pages, layer_id].flatten(0, 1)


def _store_layers(*, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """All layers the other way; `src_ptrs` has those of the first host pool, then those of the next."""
    pages, num_layers = dst_indices[::page_size] // page_size, len(src_ptrs) // len(dst_ptrs)
    for number, device in enumerate(src_ptrs):
        host, layer = dst_ptrs[number // num_layers], number % num_layers
        host[pages, layer] = device[src_indices].unflatten(0, (len(pages), page_size))


class _Slots:
    """Slots of requests in the pool of windows: `req_to_token` by request and position, as of the full pool."""

    def __init__(self, pools: Any, windows: Any) -> None:
        self._pools, self._windows, self.req_to_token = pools, windows, self

    def __getitem__(self, at: Any) -> Any:
        return self._windows.translate_loc_from_full_to_swa(self._pools.req_to_token[at])


def _read_windows(module: Any) -> None:
    backend = module.TorchNativeAttnBackend
    for name in ("forward_extend", "forward_decode"):
        setattr(backend, name, _by_own_slots(getattr(backend, name)))


def _by_own_slots(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, q: Any, k: Any, v: Any, layer: Any, *arguments: Any, **named: Any) -> Any:
        pools, kv = self.req_to_token_pool, self.token_to_kv_pool
        if self.use_sliding_window_kv_pool and kv.layers_mapping[layer.layer_id][1]:
            self.req_to_token_pool = _Slots(pools, kv)
        try:
            return forward(self, q, k, v, layer, *arguments, **named)
        finally:
            self.req_to_token_pool = pools

    return wrapped


def _install() -> None:
    sys.meta_path.append(_Empty())
    sys.meta_path.insert(0, _Modules())
    find = importlib.util.find_spec

    def find_installed(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if name.partition(".")[0] in _MISSING else find(name, package)

    importlib.util.find_spec = find_installed


if __name__ == "sitecustomize":  # not where it is only looked at
    _install()
