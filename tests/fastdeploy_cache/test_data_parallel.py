"""Several data-parallel caches on one host: apart in everything but the metrics endpoint."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request, TransferConfig
from fastdeploy_cache.errors import ConfigError
from metrics.remote import RemoteMetrics
from tests.faults.engine import BLOCK_SIZE, Engine, new_config

PROMPT = list(range(6 * BLOCK_SIZE + 1))


def scrape(url: str) -> dict[tuple[str, str], float]:
    """(series, dp) -> value of what carries no other label; a family that comes twice is an error."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family is shown twice"
    return {
        (sample.name, sample.labels["dp"]): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.keys() == {"dp"}
    }


def test_two_groups_share_a_host_and_an_endpoint() -> None:
    """Own ranks, pools and prefixes; one page with both, told apart by their label."""
    caches = [PrefixCacheManager(new_config(2, num_gpu=8, num_cpu=8, data_parallel_id=dp)) for dp in range(2)]
    try:
        pids = [status.pid for cache in caches for status in cache.stats().ranks]
        assert len(set(pids)) == 4
        engines = [Engine(cache, 2) for cache in caches]
        engines[0].serve(PROMPT)
        assert engines[1].serve(PROMPT).num_tokens == 0, "nothing is shared"
        assert engines[0].serve(PROMPT).num_tokens == 24
        values = scrape(caches[0].serve_metrics(also=[caches[1].metrics]))
        assert [values["fastdeploy_cache_requests_total", dp] for dp in "01"] == [2, 1]
        assert [values["fastdeploy_cache_requests_hit_total", dp] for dp in "01"] == [1, 0]
        with pytest.raises(ConfigError, match=r"data-parallel ids \[0, 0\]"):
            caches[0].serve_metrics(also=[caches[0].metrics])
    finally:
        for cache in caches:
            cache.close()


_OTHER = """
import sys
from fastdeploy_cache import CacheConfig, PrefixCacheManager, TransferConfig
config = CacheConfig(num_gpu_blocks=8, transfer_client="inline", transfer=TransferConfig(data_parallel_id=1))
with PrefixCacheManager(config) as cache:
    print(cache.serve_metrics(), flush=True)
    sys.stdin.read()
"""


def test_engines_in_several_processes_share_an_endpoint() -> None:
    """The other process's page is part of this one's; where it has gone, that shows, and the rest stays."""
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert other.stdout is not None and other.stdin is not None
    url = other.stdout.readline().strip()
    config = CacheConfig(block_size=4, num_gpu_blocks=8, transfer_client="inline", transfer=TransferConfig())
    with PrefixCacheManager(config) as cache:
        request = Request(request_id="a", prompt_token_ids=[1, 2, 3])
        cache.match(request)
        cache.allocate(request, 1)
        mine = cache.serve_metrics(also=[RemoteMetrics(url)])
        values = scrape(mine)
        assert [values["fastdeploy_cache_requests_total", dp] for dp in "01"] == [1, 0]
        other.stdin.close()
        other.wait(10)
        other.stdout.close()
        values = scrape(mine)
        assert values["fastdeploy_cache_requests_total", "0"] == 1
        assert ("fastdeploy_cache_requests_total", "1") not in values
        with urllib.request.urlopen(mine, timeout=5) as answer:
            assert f'fastdeploy_cache_remote_up{{url="{url}"}} 0.0' in answer.read().decode()
        cache.release(request)
