"""A device that cannot be here is refused before anything is started."""

from __future__ import annotations

import types
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec

import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, TransferConfig
from fastdeploy_cache.errors import CacheError, DeviceError
from fastdeploy_cache.transfer_manager.device import presence


def config() -> CacheConfig:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16")
    transfer = TransferConfig(device="cuda")
    return CacheConfig(block_size=4, num_gpu_blocks=4, num_cpu_blocks=4, layout=layout, transfer=transfer)


def test_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, from the manager's constructor."""
    monkeypatch.setattr(presence, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="pip install 'cuda-bindings"):
        PrefixCacheManager(config())


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real bindings without libcuda: the machine lacks the driver."""
    real = ModuleSpec("cuda.bindings.driver", None, origin=f"driver{EXTENSION_SUFFIXES[0]}")
    monkeypatch.setattr(presence, "find_spec", lambda name: real)

    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(presence, "ctypes", types.SimpleNamespace(CDLL=refuse))
    with pytest.raises(CacheError, match=r"no NVIDIA driver can be loaded .*libcuda"):
        PrefixCacheManager(config())
