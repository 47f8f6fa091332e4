"""What our linker for SGLang refuses, by name, before anything is moved."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_cache.errors import ConfigError
from tests.rigs.linked_engine import (
    LINKER,
    OPTIONS,
    PAGE,
    SETTINGS,
    Linked,
    NewLinked,
)
from tests.rigs.stand_in_linker import Component, Tensor, attention_pool, keys_of, params_of, transfer, windows_pool

pytestmark = pytest.mark.processes


def refused(kvcache: Any, *components: Component, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Linked(params=params_of(kvcache, PAGE, **more))  # of a uniform model
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights_id": ""}, "weights_id is missing"),
        ({"cpu_memory_bytes": None}, "cpu_memory_bytes is None"),
        ({"cpu_memory_bytes": 1.5e9}, "cpu_memory_bytes is 1500000000.0"),
        ({"cpu_memory_bytes": 100}, "cpu_memory_bytes leaves 100 for the pool 'kv'"),
        ({"cpu_memory": 100}, "cpu_memory"),
        ({"load_seconds": 0}, "load_seconds is 0"),
        ({"load_seconds": 7200}, "less than 3,600"),
        ({"load_seconds": 4.0}, "a copy may take transfer.task_timeout_seconds, 5.0"),
        ({"transfer": {"tp_size": 4}}, "sets transfer.tp_size, which follows"),
        ({"storage": True}, "storage is True"),
        ({"prefetch_seconds": "soon"}, "prefetch_seconds is 'soon'"),
        ({"pool_shares": {"swa": 1}}, "give a number above 0 for each of kv"),
        ({"pool_shares": {"kv": float("inf")}}, "give a number above 0"),
        ({"block_size": 4}, "sets block_size, which follows from SGLang"),
        ({"peer": {}}, "sets peer"),
        ({"storage": {"kind": "tape"}}, "tape"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    """SGLang does not start, with one line."""
    with pytest.raises(ConfigError) as caught:
        Linked(**options)
    assert words in str(caught.value)


def test_pools_that_cannot_be_restored() -> None:
    """Scales beside keys, a kind without pages, a draft model: each by its name, before anything is started."""
    scaled = attention_pool(2, 16, 1)
    scaled.k_scale_buffer = [Tensor.new(16)]
    assert "has scales beside its keys (k_scale_buffer)" in refused(scaled)
    unknown = type("HiSparsePool", (), {"start_layer": 0})()
    assert "HiSparsePool has no pages in memory" in refused(unknown)
    drafts = attention_pool(2, 16, 1)
    assert "mtp_draft_device_pools" in refused(drafts, mtp_draft_device_pools=(drafts,))


def test_a_component_that_is_not_known() -> None:
    """By its name."""
    with pytest.raises(ConfigError, match="component 'c128' cannot be restored; known: full, mamba, swa"):
        LINKER.FastDeployCacheLinker(
            None, params_of(windows_pool(32), PAGE), components={Component.FULL, Component.C128}, extra_config=OPTIONS
        )


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older and newer ones: the door may have moved."""
    for version in ("0.5.22", "0.5.24"):
        monkeypatch.setattr(SETTINGS, "installed_version", lambda _, found=version: found)
        with pytest.raises(ConfigError, match=f"this is SGLang {version}; the linker needs 0.5.23"):
            Linked()


def test_slots_that_lie_apart_are_refused(new_linked: NewLinked) -> None:
    """An error of SGLang's, or of a plug-in of it: nothing is moved."""
    linked, keys = new_linked(), keys_of(2)
    for slots in ([4, 5, 6, 7, 8, 9, 11, 10], [5, 6, 7, 8, 12, 13, 14, 15], list(range(1000, 1008)), [4, 5, 6, 7]):
        with pytest.raises(ConfigError, match="lie apart or outside"):
            linked.linker.offload([transfer("kv", keys, slots)])
    assert not linked.linker.offload([]) and linked.lookup(keys) == []
