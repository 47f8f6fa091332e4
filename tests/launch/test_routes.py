"""Every route of server and router with more than it can take: it is refused, and others are answered after it."""

from __future__ import annotations

import ast
import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server import instance_app, router
from fastdeploy_cache.launch.server.answer_forms import MODEL_NAME
from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.limits import Limits
from fastdeploy_cache.launch.server.router import MAX_BODY_BYTES, Router
from fastdeploy_cache.life_cycle import LifeCycleStatus
from fastdeploy_cache.transfer_manager.client import ProcessHealth, RankStatus
from tests.rigs.http_rig import said, served
from tests.rigs.integer_instance import SECONDS, Instance, instances

pytestmark = pytest.mark.processes

CHAT, COMPLETION, PREFILL = "/v1/chat/completions", "/v1/completions", "/v1/prefill"
ROUTES: dict[str, list[tuple[str, str]]] = {
    "server": [("GET", "/status"), ("POST", PREFILL)],
    "router": [],
}
for routes in ROUTES.values():
    routes += [("GET", "/health"), ("GET", "/ready"), ("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL_NAME}")]
    routes += [("POST", CHAT), ("POST", COMPLETION)]
ROUTES["server"].append(("DELETE", f"{PREFILL}/"))
BIG = 5 * 2**20
FITS = 2**20  # a body that is taken, with a text that can never fit


class Untouched(ChatTokenizer):
    """Knows lengths alone: what comes here is to be refused by these."""

    def __init__(self) -> None:
        self.max_token_bytes = 81

    def encode_chat(self, messages: Any) -> np.ndarray[Any, Any]:
        raise AssertionError("it was tokenised")


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """A server with an engine that computes integers, and a router before it."""
    with contextlib.ExitStack() as stack:
        (there,) = stack.enter_context(instances(lambda: Instance("mixed", 1)))
        server = InstanceApp(ChatApi(there.engine, Untouched()), there.cache)
        port = stack.enter_context(served(server.build()))
        url = f"http://127.0.0.1:{port}"
        routed = Router(Instances([url]), Instances([url]), SECONDS).build()
        yield {"server": port, "router": stack.enter_context(served(routed, Limits(max_body_bytes=MAX_BODY_BYTES)))}


def chat(content: Any) -> bytes:
    return json.dumps({"messages": content}).encode()


def message(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


BODIES = {
    "a body larger than is taken": chat([message("x" * BIG)]),
    "a text that can never fit": chat([message("x" * FITS)]),
    "characters without tokens": chat([message("\x16" * (FITS // 8))]),
    "characters of many bytes": chat([message("\U0001f98a" * (FITS // 12))]),
    "very many messages": chat([message("")] * 40_000),
    "very many parts": chat([message([{"type": "text", "text": "x" * 40}] * 20_000)]),
    "a salt without end": json.dumps({"messages": [message("a")], "cache_salt": "x" * FITS}).encode(),
    "an offer without end": json.dumps({"messages": [message("x" * FITS)], "kv_offer": "QUJD" * (FITS // 4)}).encode(),
    "numbers without end": b'{"messages": [], "max_tokens": ' + b"9" * FITS + b"}",
    "brackets without end": b'{"messages": ' + b"[" * FITS,
    "half a character": b'{"messages": [{"role": "user", "content": "\\ud83e"}]}',
}


def status_of(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def all_routes() -> list[tuple[str, str, str]]:
    return [(name, method, path) for name, routes in ROUTES.items() for method, path in routes]


@pytest.mark.parametrize(("name", "module"), [("server", instance_app), ("router", router)])
def test_no_route_is_left_out(name: str, module: Any) -> None:
    """Every path in the source of the two is walked here, with each method that a route is made for."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    paths = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = {call.attr for call in calls if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "web"}
    walked = {path.rstrip("/") for _, path in ROUTES[name]} | {PREFILL}  # which the router asks for
    assert {path for path in paths if re.fullmatch(r"/[a-z0-9/]+", path)} <= walked
    methods = {"get", "post", "put", "delete", "patch", "head", "view", "static"}
    assert made & methods == {method.lower() for method, _ in ROUTES[name]}


@pytest.mark.parametrize(("name", "method", "path"), all_routes())
@pytest.mark.parametrize("what", BODIES)
def test_bodies_that_are_too_much(ports: dict[str, int], name: str, method: str, path: str, what: str) -> None:
    """Where a chat is taken: status 400 without a token of it being made. Elsewhere a body is not read: its sender may
    find the connection closed before it has sent all."""
    if method == "POST":
        assert status_of(ports[name], method, path, BODIES[what]) == 400
    else:
        with contextlib.suppress(ConnectionError):
            assert status_of(ports[name], method, path, BODIES[what]) == (404 if method == "DELETE" else 200)
    assert status_of(ports[name], "GET", "/health") == 200


@pytest.mark.parametrize(("name", "method", "path"), all_routes())
def test_heads_that_are_too_much(ports: dict[str, int], name: str, method: str, path: str) -> None:
    """Paths and headers without end, and lengths that nobody sends: refused, or the connection ends."""
    port = ports[name]
    assert status_of(port, method, path + "x" * 60_000) == 404
    assert status_of(port, method, path + "x" * 70_000) == 414
    assert status_of(port, method, path, None, X="x" * 70_000) == 431
    assert status_of(port, method, path, None, **{f"X{number}": "" for number in range(200)}) == 431
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nContent-Length: {10**17}\r\n\r\n".encode() + bytes(100))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(12) in (b"HTTP/1.0 400", b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 200", b"")
    assert status_of(port, "GET", "/health") == 200


@pytest.mark.parametrize(("name", "method", "path"), all_routes())
def test_a_path_with_another_method_says_which(ports: dict[str, int], name: str, method: str, path: str) -> None:
    """Status 405, with the methods of the path in the answer and its head; a page that is none stays 404."""
    for other in ("GET", "POST", "DELETE", "PUT"):
        if (other, path) not in all_methods(name):
            connection = http.client.HTTPConnection("127.0.0.1", ports[name], timeout=SECONDS)
            with contextlib.closing(connection):
                connection.request(other, path)
                answer = connection.getresponse()
                assert answer.status == 405 and method in (answer.headers["Allow"] or "").split(", ")
                assert f"{other} is not for {path}; use " in answer.read().decode()
    assert status_of(ports[name], "GET", "/no/such/page") == 404


def all_methods(name: str) -> set[tuple[str, str]]:
    return {(method, path) for method, path in ROUTES[name]}


def test_a_server_without_a_rank_is_ready_and_says_so() -> None:
    """Requests are answered all the same; who looks sees which process is off, and why one cannot be started."""
    off = RankStatus(rank=0, up=False, num_restarts=6, state=ProcessHealth.OFF)
    short = RankStatus(rank=0, up=False, num_restarts=0, state=ProcessHealth.SHORT, shortage="no more open files")
    insight = SimpleNamespace(processes=lambda: {"transfer": (off,), "storage": (short,)})
    cache: Any = SimpleNamespace(life=SimpleNamespace(status=LifeCycleStatus.RUNNING), insight=insight)
    api: Any = None
    with served(InstanceApp(api, cache).build()) as port:
        head, _, body = said(port, b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").partition(
            b"\r\n\r\n"
        )
    assert head.startswith(b"HTTP/1.1 200 ") and json.loads(body) == {
        "status": "ready",
        "troubles": [
            "the transfer process of rank 0 is off, since it has died too often",
            "the storage process of rank 0 waits for descriptors, threads or memory: no more open files",
        ],
    }
