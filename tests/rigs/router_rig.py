"""A router between stand-ins for instances, which answer as a test says."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from fastdeploy_cache.launch.server.choice import Chooser
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.limits import ClientCounts, Limits
from fastdeploy_cache.launch.server.router import MAX_BODY_BYTES, Router
from tests.rigs.http_rig import served

SECONDS = 10.0
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


class Instance(ThreadingHTTPServer):
    """Answers as it is told to, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Callable[[_Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.is_held = threading.Event()  # somebody waits for an answer that does not come
        self.has_lost_client = threading.Event()
        self.is_given_up = threading.Event()
        self.deleted: list[str] = []
        self.num_probes = 0
        self.may_go_on = threading.Event()
        self.is_hung = False  # its health does not answer either

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Instance

    def do_GET(self) -> None:
        self.server.num_probes += 1
        if self.server.is_hung:
            never_answers(self)
        else:
            self.reply(200, {"path": self.path})

    def do_DELETE(self) -> None:
        self.server.deleted.append(self.path)
        self.reply(200, {})
        self.server.is_given_up.set()

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.answer(self)

    def reply(self, status: int, content: Any) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        pass


def offers(handler: _Handler) -> None:
    handler.reply(200, {"offer": "b2ZmZXI=", "offer_id": "a-secret", "num_blocks": 1})


def answers(handler: _Handler) -> None:
    handler.reply(200, {"by": handler.server.url})


def answers_later(handler: _Handler) -> None:
    """Once it may."""
    handler.server.is_held.set()
    assert handler.server.may_go_on.wait(SECONDS)
    answers(handler)


def refuses(handler: _Handler) -> None:
    handler.reply(503, {"error": {"message": "not now"}})


def hangs_up(handler: _Handler) -> None:
    handler.close_connection = True


def never_answers(handler: _Handler) -> None:
    """Until the router hangs up."""
    handler.server.is_held.set()
    handler.connection.settimeout(SECONDS)
    assert handler.connection.recv(1) == b""
    handler.server.has_lost_client.set()
    handler.close_connection = True


@contextmanager
def running(*servers: ThreadingHTTPServer) -> Iterator[None]:
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join(SECONDS)
            server.server_close()


class Routed(NamedTuple):
    """A router that runs."""

    server_port: int
    open_prefills: ClientCounts


@contextmanager
def routed(
    prefill: list[Instance],
    decode: list[Instance | str],
    prefill_seconds: float = SECONDS,
    probe_seconds: float = 5.0,
    max_open_prefills: int = 32,
    chooser: Chooser | None = None,
) -> Iterator[Routed]:
    """A router before these; a text is a URL that nobody listens at."""
    urls = [each if isinstance(each, str) else each.url for each in decode]
    instances = Instances([each.url for each in prefill]), Instances(urls)
    bounds: dict[str, Any] = {"probe_seconds": probe_seconds, "max_open_prefills": max_open_prefills}
    router = Router(*instances, prefill_seconds, chooser=chooser, **bounds)
    servers = [*prefill, *(each for each in decode if not isinstance(each, str))]
    with ExitStack() as stack:
        stack.enter_context(running(*servers))
        port = stack.enter_context(served(router.build(), Limits(max_body_bytes=MAX_BODY_BYTES)))
        yield Routed(port, router.open_prefills)


def ask(router: Routed, body: Any = CHAT, method: str = "POST", path: str = "/v1/chat/completions") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", router.server_port, timeout=SECONDS)
    try:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()
