"""The endpoint, scraped over real HTTP."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_cache.errors import ConfigError, MetricsError, PortInUseError
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.metrics.exporter import MetricsExporter


def scrape(url: str) -> dict[str, dict[tuple[str, ...], float]]:
    """By series name: the values by label values, in the order of the labels' names."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.status == 200
        text = answer.read().decode()
    return {
        family.name: {tuple(v for _, v in sorted(s.labels.items())): s.value for s in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_a_scrape_parses_and_shows_what_happened() -> None:
    """Prometheus' own parser reads the page; a later scrape shows later numbers."""
    metrics = CacheMetrics(tp_size=2)
    exporter = MetricsExporter(metrics)
    try:
        assert scrape(exporter.url)["fastdeploy_cache_requests"] == {("0",): 0.0}
        metrics.record_request(64, (0, 32, 0))
        metrics.record_task("swap_in", 1, 4096, 0.5, failed=False)
        families = scrape(exporter.url)
    finally:
        exporter.close()
    assert families["fastdeploy_cache_requests"] == {("0",): 1.0}
    assert families["fastdeploy_cache_tokens_hit"][("0", "cpu")] == 32.0
    assert families["fastdeploy_cache_task_bytes"][("0", "swap_in", "1")] == 4096.0
    assert families["fastdeploy_cache_rank_up"] == {("0", "0"): 0.0, ("0", "1"): 0.0}


def test_only_our_series_are_served() -> None:
    """The registry is private: neither Python's nor another library's series are on the page."""
    exporter = MetricsExporter(CacheMetrics())
    try:
        names = scrape(exporter.url)
    finally:
        exporter.close()
    assert names and all(name.startswith("fastdeploy_cache_") for name in names)


def test_a_port_in_use_is_named() -> None:
    """The error names address and remedy and is one of ours; nothing is left open (the leak fixture looks)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port}.*another port") as refusal:
            MetricsExporter(CacheMetrics(), port=port)
    assert isinstance(refusal.value, MetricsError)


@pytest.mark.parametrize("port", [99999, -1, "9400", None])
def test_a_port_that_is_none(port: object) -> None:
    """It is told so, and not to be in use."""
    with pytest.raises(MetricsError, match=re.escape(f"port {port!r}; use 1 to 65535, or 0")) as refusal:
        MetricsExporter(CacheMetrics(), port=port)  # type: ignore[arg-type]
    assert not isinstance(refusal.value, PortInUseError)


def test_two_exporters_can_run_side_by_side() -> None:
    """Two engines of one process do not share series: each page shows its own."""
    first, second = CacheMetrics(data_parallel_id=0), CacheMetrics(data_parallel_id=1)
    exporters = [MetricsExporter(first), MetricsExporter(second)]
    second.record_request(1, (0, 0, 0))
    try:
        pages = [scrape(exporter.url) for exporter in exporters]
    finally:
        for exporter in exporters:
            exporter.close()
    assert [page["fastdeploy_cache_requests"] for page in pages] == [{("0",): 0.0}, {("1",): 1.0}]


def test_close_ends_the_thread_and_frees_the_port() -> None:
    """After `close` nobody listens and no thread is left."""
    before = threading.active_count()
    exporter = MetricsExporter(CacheMetrics())
    exporter.close()
    with pytest.raises(urllib.error.URLError):
        scrape(exporter.url)
    assert threading.active_count() == before


def test_a_client_that_says_nothing_gives_its_thread_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After its time, without a traceback; others are answered meanwhile."""
    monkeypatch.setattr("fastdeploy_cache.metrics.exporter._IDLE_SECONDS", 0.05)
    exporter = MetricsExporter(CacheMetrics())
    host, port = exporter.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=20) as silent:
        assert urllib.request.urlopen(exporter.url, timeout=10).status == 200
        assert silent.recv(1) == b""
    exporter.close()
    assert "Traceback" not in capfd.readouterr().err


def test_who_asks_under_another_name_gets_403() -> None:
    """One line, on every path: a page of another site could read it by DNS rebinding."""
    exporter = MetricsExporter(CacheMetrics(), allow_hosts=["cache.example:443"])
    try:
        for host, status in (
            ("evil.example", 403),
            ("cache.example:443", 200),
            ("cache.example", 200),  # a browser leaves out the port of https
            ("cache.example:8443", 403),
            ("localhost", 200),
        ):
            asked = urllib.request.Request(exporter.url, headers={"Host": host})
            if status == 200:
                assert urllib.request.urlopen(asked, timeout=10).status == 200
                continue
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=10)
            with refused.value as answer:
                assert answer.code == 403 and answer.read().decode().count("\n") == 1
    finally:
        exporter.close()
    with pytest.raises(ConfigError, match="--allow-host is 'a b'"):
        MetricsExporter(CacheMetrics(), allow_hosts=["a b"])
