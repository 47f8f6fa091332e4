"""What pages of other sites have a browser ask of a port on loopback."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.launch.background.group_plan import GroupPlan
from fastdeploy_cache.launch.background.run_folder import RunFolder
from fastdeploy_cache.launch.server.http_server import HttpServer, answering
from tests.rigs.http_rig import said, served


def new_app() -> web.Application:
    async def done(_: web.Request) -> web.Response:
        return web.Response(text="done")

    application = web.Application(middlewares=[answering])
    application.add_routes([web.route("*", "/{path:.*}", done)])
    return application


def asked(port: int, method: str, headers: str) -> bytes:
    head = f"{method} /v1/chat HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: 0\r\n\r\n"
    return said(port, head.encode())


def test_other_names_and_other_sites_are_refused() -> None:
    """By `Host`, whatever is asked; by `Origin`, where something is changed. Without `Origin` a request passes."""
    with served(new_app()) as port:
        ask = partial(asked, port)
        for method in ("GET", "POST"):
            refused = ask(method, "Host: evil.example\r\n")
            assert refused.startswith(b"HTTP/1.1 403 ") and b"done" not in refused
            assert "--allow-host" in json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert ask(method, f"Host: localhost:{port}\r\n").endswith(b"done")
        for origin in ("https://evil.example", "null"):
            assert ask("POST", f"Host: localhost\r\nOrigin: {origin}\r\n").startswith(b"HTTP/1.1 403 ")
            assert ask("GET", f"Host: localhost\r\nOrigin: {origin}\r\n").endswith(b"done")
        assert ask("POST", f"Host: localhost\r\nOrigin: http://127.0.0.1:{port}\r\n").endswith(b"done")


def test_other_sites_are_refused_off_loopback_too() -> None:
    """By an `Origin` that is not the `Host`, whatever that is, where something is changed."""
    with served(new_app(), host="0.0.0.0") as port:
        ask = partial(asked, port)
        for origin in ("https://evil.example", "http://box", "null"):
            assert ask("POST", f"Host: box:8000\r\nOrigin: {origin}\r\n").startswith(b"HTTP/1.1 403 ")
            assert ask("GET", f"Host: box:8000\r\nOrigin: {origin}\r\n").endswith(b"done")
        assert ask("POST", "Host: box:8000\r\nOrigin: http://box:8000\r\n").endswith(b"done")
        assert ask("POST", "Host: box:8000\r\n").endswith(b"done")


def test_a_name_that_is_none_is_refused_before_anything_starts() -> None:
    """With the option and the value seen."""
    with pytest.raises(ConfigError, match="--allow-host is 'a b'"):
        HttpServer("127.0.0.1", 0, allow_hosts=["a b"])


def test_a_group_hands_on_its_names(tmp_path: Path) -> None:
    """To the router, to its instances, and to the supervisor in the background."""
    plan = GroupPlan(allow_hosts=("a", "b:1"))
    expected = ["--allow-host", "a", "--allow-host", "b:1"]
    for words in (plan.words(), plan.router({}, RunFolder(tmp_path))):
        at = words.index("--allow-host")
        assert words[at : at + 4] == expected
