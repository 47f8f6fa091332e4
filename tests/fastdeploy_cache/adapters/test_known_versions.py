"""Which versions of another engine its adapter takes."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import pytest

from fastdeploy_cache.adapters.known_versions import SGLANG, VLLM, KnownVersions, installed_version
from fastdeploy_cache.errors import ConfigError
from tests.rigs.sglang_storage import BACKEND
from tests.rigs.stand_in_sglang import HiCacheStorageConfig


@pytest.mark.parametrize(
    ("known", "version", "said"),
    [
        (VLLM, "0.28.1", r"this is vLLM 0.28.1; the connector needs 0\.29 or newer: pip install -U vllm"),
        (VLLM, "0.9.0rc1", r"this is vLLM 0.9.0rc1; the connector needs 0\.29 or newer"),
        (
            SGLANG,
            "0.5.22",
            r"this is SGLang 0.5.22; the storage backend needs 0\.5\.23 or newer: pip install -U sglang",
        ),
        (SGLANG, "0.4.10.post2", r"this is SGLang 0.4.10.post2; the storage backend needs 0\.5\.23 or newer"),
    ],
)
def test_an_old_engine_is_refused_by_name(known: KnownVersions, version: str, said: str) -> None:
    """What an adapter cannot work with says so at start, and not by a missing name later."""
    with pytest.raises(ConfigError, match=said):
        known.check(version)


@pytest.mark.parametrize(
    ("known", "version", "is_known"),
    [
        (VLLM, "0.29.0", True),
        (VLLM, "0.33.2+cpu", True),
        (VLLM, "0.34.0", False),
        (VLLM, "dev", False),
        (SGLANG, "0.5.23", True),
        (SGLANG, "0.5.23.post1", True),
        (SGLANG, "0.5.24", False),
        (SGLANG, "0.6.0rc1", False),
        (SGLANG, "0.0.0.dev0", False),  # a checkout without tags
        (SGLANG, None, True),  # nothing to warn of
    ],
)
def test_a_new_engine_is_tried(
    caplog: pytest.LogCaptureFixture, known: KnownVersions, version: str | None, is_known: bool
) -> None:
    """One that nobody has tried is served with a warning; where no version is told there is nothing to say."""
    known.check(version)
    assert (f"event=unknown_{known.package}" in caplog.text) is not is_known


def test_what_is_not_installed_has_no_version() -> None:
    """A package that runs from a folder has no metadata: it is tried."""
    assert installed_version("no-such-package") is None
    assert installed_version("pytest") == pytest.__version__


def test_an_old_sglang_is_refused_before_its_names_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's module says it at its import, as older ones lack what it imports; else the class does."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.22")
    with pytest.raises(ConfigError, match=r"this is SGLang 0\.5\.22"):
        BACKEND.FastDeployCacheStorage(HiCacheStorageConfig(extra_config={"weights_id": "w", "folder": "/x"}), {})
    for part in ("hicache_storage", "hicache_config"):
        monkeypatch.delitem(sys.modules, f"fastdeploy_cache.adapters.sglang.{part}")
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", None)
    with pytest.raises(ConfigError, match=r"this is SGLang 0\.5\.22"):
        importlib.import_module("fastdeploy_cache.adapters.sglang.hicache_storage")
