"""Clients that take little of their answers: what waits for them is bounded in time, whichever kind of answer it is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from fastdeploy_cache.launch.server.http_server import answering
from fastdeploy_cache.launch.server.limits import Connection, Limits
from tests.rigs.http_rig import SECONDS, served


async def long(_: web.Request) -> web.Response:
    return web.Response(body=bytes(2**25))


async def short(_: web.Request) -> web.Response:
    return web.Response(body=bytes(2**15))


async def ended(request: web.Request) -> web.Response:
    transport = request.transport
    assert transport is not None
    while not transport.get_write_buffer_size():
        transport.write(bytes(1000))
    transport.close()
    return web.Response()


@pytest.mark.parametrize("answer", [long, short, ended])
def test_who_does_not_take_a_whole_answer_is_cut(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> None:
    """A long one, many short ones asked for at once, and the last bytes of a connection that we have closed."""
    lost, connection_lost = threading.Event(), Connection.connection_lost

    def note(connection: Connection, error: BaseException | None) -> None:
        connection_lost(connection, error)
        lost.set()

    monkeypatch.setattr(Connection, "connection_lost", note)
    app = web.Application(middlewares=[answering])
    app.add_routes([web.get("/", answer)])
    with served(app, Limits(write_seconds=0.2)) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(1000 * b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert lost.wait(SECONDS)
