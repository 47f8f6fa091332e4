"""Where the vLLM connector shows its numbers, and how it takes them in steps; no vLLM is needed."""

from __future__ import annotations

import io
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_cache.adapters.vllm.counters import MEANINGS, Counters
from fastdeploy_cache.adapters.vllm.log import show_log
from fastdeploy_cache.adapters.vllm.metrics_address import MetricsAddress
from fastdeploy_cache.adapters.vllm.sequences import ExternalHit, Sequence
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.requests.match import Prefetch


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


@pytest.mark.parametrize(
    ("num_fetched", "num_vllm", "num_tokens", "hit"),
    [
        (None, 0, 64, ExternalHit(64, 0)),
        (0, 0, 63, ExternalHit(63, 0)),  # nothing came from storage, and the last token is left to compute
        (2, 0, 64, ExternalHit(32, 32)),
        (2, 0, 63, ExternalHit(32, 31)),
        (1, 16, 40, ExternalHit(24, 16)),  # another request has brought what lies behind
        (2, 48, 16, ExternalHit(0, 16)),
    ],
)
def test_promised_tokens_are_split_by_where_they_are_from(
    num_fetched: int | None, num_vllm: int, num_tokens: int, hit: ExternalHit
) -> None:
    """Of 64 tokens the CPU tier had 32 when storage was asked, which has sent so many blocks of 16 since."""
    sequence = Sequence(SimpleNamespace(), None, 0, num_vllm_tokens=num_vllm)  # type: ignore[arg-type]
    if num_fetched is not None:
        fetch = SimpleNamespace(num_landed=num_fetched, deadline=0.0, done=threading.Event())
        sequence.prefetch = Prefetch(num_gpu_tokens=0, num_cpu_tokens=32, num_missing_tokens=32).with_fetch(fetch)  # type: ignore[arg-type]
    assert sequence.split(num_tokens, 16) == hit


def test_our_log_goes_where_the_engines_goes() -> None:
    """A logger that nobody has set up writes as the engine's does, once; one that somebody has set up is left alone."""
    out = io.StringIO()
    theirs, ours = logging.getLogger("an-engine"), logging.getLogger("a-cache")
    ours.propagate = theirs.propagate = False
    theirs.addHandler(logging.StreamHandler(out))
    theirs.setLevel(logging.INFO)
    for _ in range(2):
        show_log("a-cache", "an-engine")
    ours.info("event=metrics")
    ours.debug("event=detail")
    assert out.getvalue() == "event=metrics\n" and len(ours.handlers) == 1
