"""The endpoint, scraped over real HTTP."""

from __future__ import annotations

import re
import socket
import socketserver
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from http.client import HTTPException

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_cache.errors import ConfigError, MetricsError, PortInUseError
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.metrics.exporter import MetricsExporter, Page
from fastdeploy_cache.metrics.remote import BoundedSocket


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


def connect(exporter: MetricsExporter) -> socket.socket:
    host, port = exporter.url.split("/")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_a_client_that_says_nothing_gives_its_thread_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After its time, without a traceback; others are answered meanwhile."""
    monkeypatch.setattr("fastdeploy_cache.metrics.exporter._HEAD_SECONDS", 0.05)
    exporter = MetricsExporter(CacheMetrics())
    with connect(exporter) as silent:
        assert urllib.request.urlopen(exporter.url, timeout=10).status == 200
        assert silent.recv(1) == b""
    exporter.close()
    assert "Traceback" not in capfd.readouterr().err


def test_clients_that_drip_give_their_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places say a byte now and then, without end: who comes after them is answered."""
    monkeypatch.setattr("fastdeploy_cache.metrics.exporter._HEAD_SECONDS", 1.0)
    exporter, is_answered = MetricsExporter(CacheMetrics(), max_connections=3), threading.Event()

    def drip(clients: list[socket.socket]) -> None:
        while not is_answered.wait(0.05):
            for client in clients:
                with suppress(OSError):  # it has been cut
                    client.send(b"a")

    with ExitStack() as stack:
        clients = [stack.enter_context(connect(exporter)) for _ in range(3)]
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        dripping = threading.Thread(target=drip, args=(clients,))
        dripping.start()
        try:
            assert scrape(exporter.url)
        finally:
            is_answered.set()
            dripping.join()
            exporter.close()


def test_nothing_is_read_after_the_deadline() -> None:
    """Not even what is there: of a client that drips fast there always is a byte."""
    ours, theirs = socket.socketpair()
    with theirs, BoundedSocket(ours.detach(), -1.0, 10, 1.0) as late:
        theirs.sendall(b"a")
        with pytest.raises(HTTPException, match="too slow"):
            late.recv_into(bytearray(1))


def test_who_does_not_take_the_answer_is_cut(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After its time, without a traceback: the one place is free for others then."""
    monkeypatch.setattr("fastdeploy_cache.metrics.exporter._ANSWER_SECONDS", 0.2)
    page = Page("text/plain", lambda: bytes(2**26))
    exporter = MetricsExporter(CacheMetrics(), pages={"/": page}, max_connections=1)
    try:
        with connect(exporter) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert scrape(exporter.url)
    finally:
        exporter.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_head_has_a_size() -> None:
    """However many long fields it has, and before its end is there: what it takes of the engine's memory is bounded."""
    exporter = MetricsExporter(CacheMetrics())
    head = b"GET /metrics HTTP/1.0\r\n" + 3 * (b"X: " + 60_000 * b"x" + b"\r\n")
    try:
        for sent, status in ((head[:50_000] + b"\r\n\r\n", b"200"), (head[: 2**17 + 1], b"431")):
            with connect(exporter) as client:
                client.sendall(sent)
                assert client.recv(12) == b"HTTP/1.0 " + status
    finally:
        exporter.close()


def test_the_first_answer_is_a_guarded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To who connects as soon as the port is open, before the exporter is made: names are looked at already."""
    activate, start = socketserver.TCPServer.server_activate, threading.Thread.start
    early, answers = list[socket.socket](), list[bytes]()

    def open_port(server: socketserver.TCPServer) -> None:
        activate(server)
        early.append(socket.create_connection(server.server_address[:2], timeout=20))
        early[0].sendall(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n")

    def start_thread(thread: threading.Thread) -> None:
        start(thread)
        if threading.current_thread() is threading.main_thread():  # it was the server's
            answers.append(early[0].recv(12))

    monkeypatch.setattr(socketserver.TCPServer, "server_activate", open_port)
    monkeypatch.setattr(threading.Thread, "start", start_thread)
    exporter = MetricsExporter(CacheMetrics())
    exporter.close()
    early[0].close()
    assert answers == [b"HTTP/1.0 403"]


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
