"""What the servers add to aiohttp: how many connections, how much time, and what half a connection is worth."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.ipc.log_lines import current_request
from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from fastdeploy_cache.launch.server.limits import Connection, Limits
from fastdeploy_cache.launch.server.prefills import Prefill
from tests.rigs.http_rig import SECONDS, said, served
from tests.rigs.router_rig import Instance, _Handler, answers, routed

pytestmark = pytest.mark.processes

CHAT = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
STREAM = CHAT[:-1] + b', "stream": true}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: bytes, version: str = "1.1") -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


class Api:
    """Stands in for `ChatApi`: answers when it may, and says pieces of this size without end."""

    def __init__(self, piece: str = "") -> None:
        self.is_asked, self.is_cancelled, self._piece = threading.Event(), threading.Event(), piece
        self.may_answer = asyncio.Event()

    async def submit(self, request: Any, *, name: str) -> Any:
        self.is_asked.set()
        return [Generation(Request(request_id=name, prompt_token_ids=[1]), 1)]

    async def complete(self, request: Any, generations: Any, *, name: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(SECONDS):
                await self.may_answer.wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        return {"text": "all"}

    async def stream(self, request: Any, generations: Any, *, name: str) -> AsyncIterator[dict[str, Any]]:
        for _ in range(10_000):
            yield {"text": self._piece}
            await asyncio.sleep(0)

    def cancel(self, *generations: Any) -> None:
        self.is_cancelled.set()


@contextmanager
def chats(api: Api, limits: Limits, peer: object = None) -> Iterator[int]:
    cache: Any = SimpleNamespace(config=SimpleNamespace(role="mixed", peer=peer))
    with served(InstanceApp(api, cache).build(), limits) as port:  # type: ignore[arg-type]
        yield port


def is_served(connection: socket.socket) -> bool:
    """Whether its health is answered on it."""
    connection.settimeout(SECONDS)
    try:
        connection.sendall(HEALTH)
        return connection.recv(12) == b"HTTP/1.1 200"
    except ConnectionError:
        return False


def test_a_client_has_so_many_connections() -> None:
    """The third of two is ended and nothing of it answered, whatever the first say; another address has its own two,
    and who ends one may have another."""
    with chats(Api(), Limits(max_connections_per_client=2)) as port:
        where = ("127.0.0.1", port)
        with socket.create_connection(where) as first, socket.create_connection(where) as second:
            assert is_served(first) and is_served(second)
            with socket.create_connection(where) as third:
                assert not is_served(third)
            with socket.create_connection(where, source_address=("127.0.0.2", 0)) as other:
                assert is_served(other)
            second.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while second.recv(4096):
                pass
            with socket.create_connection(where) as fourth:
                assert is_served(fourth)


def test_who_has_said_all_is_answered() -> None:
    """A client that ends its side after its request: health and streams are answered whole."""
    with chats(Api(), Limits(ended_seconds=SECONDS)) as port:
        assert said(port, HEALTH[:-2] + b"Connection: close\r\n\r\n", is_half_closed=True).endswith(b'{"status": "ok"}')
    with chats(Api(), Limits(ended_seconds=0.0)) as port:
        assert said(port, post(STREAM), is_half_closed=True).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_who_may_have_gone_is_not_computed_for() -> None:
    """A whole answer that takes longer than that: its client counts as gone, and the generation is cancelled."""
    api = Api()
    with chats(api, Limits(ended_seconds=0.1)) as port:
        assert said(port, post(CHAT), is_half_closed=True) == b""
        assert api.is_asked.is_set() and api.is_cancelled.wait(SECONDS)


def test_a_fault_of_ours_in_the_middle_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream ends without its last chunk, and the log has the traceback; before it begins it is status 500. Log and
    answer name the request."""
    api: Any = Api()
    requests = list[str | None]()

    def note(record: logging.LogRecord) -> bool:
        requests.append(current_request())
        return True

    monkeypatch.setattr(logging.getLogger("fastdeploy_cache.launch.server.limits"), "filters", [note])

    async def stream(*_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"text": "first"}
        raise LookupError("a fault of ours")

    async def submit(_: Any, *, name: str) -> Any:
        raise LookupError("a fault of ours")

    with chats(api, Limits()) as port:
        api.stream = stream
        assert said(port, post(STREAM)).endswith(b'data: {"text":"first"}\n\n\r\n')
        assert api.is_cancelled.is_set() and caplog.text.count("LookupError: a fault of ours") == 1
        api.submit = submit
        failed = said(port, post(CHAT))
        named = re.search(rb"X-Request-Id: (\w+)", failed)
        assert failed.startswith(b"HTTP/1.1 500") and named is not None
    assert requests[-1] == named.group(1).decode() and len(set(requests)) == 2
    assert caplog.text.count("event=http_failed client=127.0.0.1") == 2


def test_blocks_are_not_kept_for_who_may_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill whose client has ended its side meanwhile is given up."""
    api: Any = Api()
    ended, eof_received = asyncio.Event(), Connection.eof_received

    def note(connection: Connection) -> bool:
        ended.set()
        return eof_received(connection)

    async def compute(*_: Any, name: str) -> Prefill:
        await ended.wait()
        return Prefill(Generation(Request(request_id=name, prompt_token_ids=[1]), 0), {"offer_id": "a"})

    monkeypatch.setattr(Connection, "eof_received", note)
    api.prefills = SimpleNamespace(compute=compute)
    with chats(api, Limits(ended_seconds=SECONDS), peer=object()) as port:
        data = post(CHAT).replace(b"/v1/chat/completions", b"/v1/prefill")
        assert said(port, data, is_half_closed=True).endswith(b'{"offer_id": "a"}')
    assert api.is_cancelled.is_set()


def test_who_takes_nothing_is_ended() -> None:
    """A stream that its client does not read: it is cut off, and the generation cancelled."""
    api = Api("x" * 65536)
    with chats(api, Limits(write_seconds=0.2)) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(post(STREAM))
        assert api.is_cancelled.wait(SECONDS)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01 hello\r\n\r\n",
        b"PUT /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
    ],
)
def test_every_error_is_json(request_: bytes) -> None:
    """No HTTP at all, a method that nobody has, a request that says no host: an error as all others are."""
    with chats(Api(), Limits()) as port:
        head, _, body = said(port, request_).partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head
    assert json.loads(body)["error"]["type"] in ("invalid_request_error", "server_error")


def test_a_stream_through_the_router_for_an_old_client() -> None:
    """Of HTTP/1.0: no chunks, and the end is the connection's; where the instance dies it is a reset."""

    def streams(handler: _Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"d\r\ndata: first\n\n\r\n")
        if not dies:
            handler.wfile.write(b"0\r\n\r\n")

    for dies in (False, True):
        with routed([], [Instance(streams)]) as router:
            address = ("127.0.0.1", router.server_port)
            with socket.create_connection(address, timeout=SECONDS) as connection, connection.makefile("rb") as file:
                connection.sendall(post(STREAM, "1.0"))
                if dies:
                    with pytest.raises(ConnectionResetError):
                        file.read()
                else:
                    head, _, body = file.read().partition(b"\r\n\r\n")
                    assert body == b"data: first\n\n" and b"chunked" not in head


def test_an_answer_of_known_length_keeps_it() -> None:
    """Passed on by the router with the length that the instance has said."""
    with routed([], [Instance(answers)]) as router:
        head, _, body = said(router.server_port, post(CHAT)).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head and b"chunked" not in head
