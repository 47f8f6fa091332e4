"""Several data-parallel caches on one host: apart in everything but the metrics endpoint."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request, TransferConfig
from fastdeploy_cache.adapters.fastdeploy import manager as fastdeploy
from fastdeploy_cache.errors import ConfigError, MetricsError
from fastdeploy_cache.metrics.remote import RemoteMetrics
from tests.rigs.fastdeploy_engine import new_config as fastdeploy_config
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine, new_config

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


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes  # the estimate of other sizes
def test_fastdeploys_names_of_two_managers_are_told_apart() -> None:
    """With the label each has its own series; without it, and of one id twice, a series is shown once."""
    managers = [fastdeploy.PrefixCacheManager(fastdeploy_config(8 * (dp + 1)), 1, "mixed", dp) for dp in range(2)]
    first, second = (manager.cache for manager in managers)
    try:
        named = [manager.fastdeploy_names(with_dp=True) for manager in managers]
        values = scrape(first.serve_metrics(also=[second.metrics, *named]))
        assert [values["fastdeploy:max_gpu_block_num", dp] for dp in "01"] == [8, 16]
        plain = [manager.fastdeploy_names() for manager in managers]
        with urllib.request.urlopen(first.serve_metrics(also=plain), timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        assert [line for line in lines if line.startswith("fastdeploy:max_gpu_block_num ")] == [
            "fastdeploy:max_gpu_block_num 8.0"
        ]
    finally:
        for manager in managers:
            manager.close()


@pytest.mark.processes  # as above
@pytest.mark.parametrize("habit", ["resets", "drips", "drips from the first", "garbage"])
def test_a_bad_page_elsewhere_does_not_spoil_ours(habit: str) -> None:
    """A peer that breaks off, is slow for ever, or talks nonsense shows as down; our own series are there."""
    stopping = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if habit != "drips from the first":
                self.end_headers()
                self.wfile.write(b"no metrics {\n" if habit == "garbage" else b"# ")
            if habit == "resets":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            while habit.startswith("drips") and not stopping.wait(0.05):
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = CacheConfig(block_size=4, num_gpu_blocks=8, transfer_client="inline")
    try:
        with PrefixCacheManager(config) as cache:
            remote = RemoteMetrics(f"http://127.0.0.1:{server.server_port}/metrics", timeout_seconds=0.3)
            with urllib.request.urlopen(cache.serve_metrics(also=[remote]), timeout=10) as answer:
                page = answer.read().decode()
    finally:
        stopping.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
    assert "fastdeploy_cache_requests_total" in page
    assert 'remote_up{url="http://127.0.0.1' in page and page.split("remote_up{", 1)[1].splitlines()[0].endswith(" 0.0")


def test_a_remote_page_is_http() -> None:
    """Nothing else is opened."""
    with pytest.raises(MetricsError, match="begins with http://"):
        RemoteMetrics("file:///etc/passwd")
