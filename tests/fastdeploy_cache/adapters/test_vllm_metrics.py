"""Where the vLLM connector shows its numbers, and how it takes them in steps; no vLLM is needed."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_cache.adapters.vllm.counters import MEANINGS, Counters
from fastdeploy_cache.adapters.vllm.metrics_address import MetricsAddress
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics


@pytest.mark.parametrize(
    ("extra", "index", "found"),
    [
        ({}, 0, None),
        ({"metrics_port": 9000}, 0, MetricsAddress("127.0.0.1", 9000)),
        ({"metrics_port": 9000, "metrics_host": "::"}, 3, MetricsAddress("::", 9003)),
        ({"metrics_port": 0}, 3, MetricsAddress("127.0.0.1", 0)),
    ],
)
def test_each_engine_of_a_group_has_a_port(extra: dict[str, Any], index: int, found: MetricsAddress | None) -> None:
    """Data-parallel engines count up from the port that was given; a free one is free for each."""
    extra["num_cpu_blocks"] = 8
    assert MetricsAddress.take(extra, index) == found
    assert extra == {"num_cpu_blocks": 8}


@pytest.mark.parametrize(
    "extra", [{"metrics_port": -1}, {"metrics_port": 65535}, {"metrics_port": "9000"}, {"metrics_port": True},
              {"metrics_host": "::"}, {"metrics_port": 1, "metrics_host": 5}]
)  # fmt: skip
def test_what_is_no_address_is_refused(extra: dict[str, Any]) -> None:
    """The message names the key."""
    with pytest.raises(ConfigError, match=r"metrics_(port|host) is"):
        MetricsAddress.take(extra, 1)


def test_counters_tell_what_was_added() -> None:
    """Each question is answered with what has come since the last one, without zeros."""
    metrics = CacheMetrics(tp_size=2)
    counters = Counters(metrics)
    assert counters.take() == {}
    metrics.record_request(10, (1, 4, 3))
    for rank in range(2):
        metrics.record_task("swap_in", rank, 100, 0.25, failed=rank == 1)
    assert counters.take() == {
        "cpu_hit_tokens": 4, "storage_hit_tokens": 3, "loaded_bytes": 200, "load_seconds": 0.5, "failed_loads": 1,
    }  # fmt: skip
    metrics.record_task("swap_out", 0, 7, 0.5, failed=True)
    assert counters.take() == {"stored_bytes": 7, "store_seconds": 0.5, "failed_stores": 1}
    assert counters.take() == {}
    assert set(counters._read()) == set(MEANINGS)
