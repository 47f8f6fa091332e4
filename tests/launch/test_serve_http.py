"""The server's HTTP before an engine that does what a test says: what clients do to it leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationBusyError
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from tests.rigs.http_rig import SECONDS, said, served

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


class Api:
    """Stands in for `ChatApi`."""

    def __init__(self) -> None:
        self.may_begin, self.is_cancelled = threading.Event(), threading.Event()
        self.may_begin.set()

    async def submit(self, request: Any, *, name: str) -> Any:
        assert self.may_begin.wait(SECONDS)  # all that comes meanwhile waits, too
        return [Generation(Request(request_id=name, prompt_token_ids=[1]), 1)]

    async def stream(self, request: Any, generations: Any, *, name: str) -> AsyncIterator[dict[str, Any]]:
        yield {"text": "\u4e2d"}
        yield {"text": "b"}

    def cancel(self, *generations: Any) -> None:
        self.is_cancelled.set()


class Server(NamedTuple):
    """One that runs."""

    api: Any
    config: SimpleNamespace
    port: int


@pytest.fixture
def server() -> Iterator[Server]:
    api, config = Api(), SimpleNamespace(role="mixed", peer=None)
    app = InstanceApp(api, SimpleNamespace(config=config))  # type: ignore[arg-type]
    with served(app.build()) as port:
        yield Server(api, config, port)


def connected(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)


def test_a_stream_is_sent_in_chunks(server: Server) -> None:
    """So that its end can be told from a death; a client of HTTP/1.0 gets it without."""
    connection = connected(server)
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT))
    response = connection.getresponse()
    assert response.chunked
    text = response.read()
    assert text == 'data: {"text":"\u4e2d"}\n\ndata: {"text":"b"}\n\ndata: [DONE]\n\n'.encode()
    connection.close()
    body = json.dumps(CHAT).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as old:
        old.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        with old.makefile("rb") as file:
            assert file.read().partition(b"\r\n\r\n")[2] == text


@pytest.mark.parametrize("metrics_url", ["http://127.0.0.1:9400/metrics", ""])
def test_who_asks_the_api_for_metrics_is_told_their_port(metrics_url: str) -> None:
    """Where there are any: the 404 names the pages that are here, and then their address."""
    cache = SimpleNamespace(config=SimpleNamespace(role="mixed", peer=None))
    with served(InstanceApp(Api(), cache, metrics_url).build()) as port:  # type: ignore[arg-type]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = json.loads(answer.read())["error"]["message"]
        connection.close()
    assert answer.status == 404 and "/health, /ready and /status" in text
    assert text.endswith(f"; metrics are at {metrics_url}" if metrics_url else "/status")


def test_a_client_that_resets_before_the_first_byte_is_computed_for_no_longer(server: Server) -> None:
    """The headers of its stream find nobody: the generation is cancelled, and the server goes on."""
    api = server.api
    api.may_begin.clear()
    body = json.dumps(CHAT).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    api.may_begin.set()
    assert api.is_cancelled.wait(SECONDS)
    assert asked(server, "/health", None) == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ("/v1/chat/completions", bytes(6 * 2**20)),
        ("/v1/chat/completions", b'{"messages": "\xff"}'),
        ("/nothing", bytes(6 * 2**20)),
    ],
)
def test_bodies_of_no_use_are_answered(server: Server, path: str, body: bytes) -> None:
    """Nested too deeply, too large, no text, nowhere: a status, also for clients that send all before they listen."""
    assert asked(server, path, body) == (404 if path == "/nothing" else 400)


SECOND = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: \xb2",
        b"Content-Length: +5",
        b"Content-Length: " + b"1" * 5000,
        b"Content-Length: 0\r\nContent-Length: 40",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked",
    ],
)
@pytest.mark.parametrize("verb", [b"POST /v1/chat/completions", b"GET /health", b"DELETE /v1/prefill/a"])
def test_where_a_request_ends_is_never_guessed(server: Server, verb: bytes, headers: bytes) -> None:
    """One that does not say it clearly is refused, and what follows on its connection is not read as another."""
    answer = said(server.port, verb + b" HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n\r\n" + SECOND)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")) and answer.count(b"HTTP/1.") == 1


def test_a_body_where_none_belongs_is_no_request(server: Server) -> None:
    """The health is answered; its body is not."""
    header = b"Content-Length: %d\r\n\r\n" % len(SECOND)
    answer = said(server.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + header + SECOND)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


def test_a_client_with_too_much_open_is_told_so(server: Server) -> None:
    """Status 429 with the reason; who is counted is the address that has connected, whatever its headers say."""
    asked_for = []

    async def compute(request: Any, client: str, *, name: str) -> Any:
        asked_for.append(client)
        raise GenerationBusyError("2 prompts are open")

    server.api.prefills = SimpleNamespace(compute=compute)
    server.config.peer = object()
    connection = connected(server)
    connection.request("POST", "/v1/prefill", json.dumps(CHAT), {"X-Forwarded-For": "10.0.0.1"})
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["message"]) == (429, "2 prompts are open")
    connection.close()
    assert asked_for == ["127.0.0.1"]


def asked(server: Server, path: str, body: bytes | None) -> int:
    connection = connected(server)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        return connection.getresponse().status
    finally:
        connection.close()
