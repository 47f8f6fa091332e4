"""An application on a port of its own, and what a client that reads no HTTP is told there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from fastdeploy_cache.launch.server.http_server import HttpServer
from fastdeploy_cache.launch.server.limits import Limits

SECONDS = 10.0


@contextmanager
def served(app: web.Application, limits: Limits | None = None, host: str = "127.0.0.1") -> Iterator[int]:
    """It is answered at this port."""
    server = HttpServer(host, 0, limits)
    thread = threading.Thread(target=server.run, args=(app,))
    thread.start()
    try:
        yield server.port
    finally:
        server.stop()
        thread.join(2 * SECONDS)
        server.close()


def said(port: int, data: bytes, *, is_half_closed: bool = False) -> bytes:
    """All that comes back until the connection ends."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        connection.sendall(data)
        if is_half_closed:
            connection.shutdown(socket.SHUT_WR)
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:  # it has closed with our bytes unread
            pass
    return answer
