"""HTTP that the servers here share: JSON answers, a limit for bodies, a port that may be taken."""

from __future__ import annotations

import json
import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from launch.errors import LaunchError

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 4 * 2**20
_READ_TIMEOUT_SECONDS = 30.0


class JsonServer(ThreadingHTTPServer):
    """A thread for each connection; none of them keeps the process alive."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[JsonHandler]) -> None:
        """Raises `LaunchError` where the address cannot be listened on."""
        try:
            super().__init__(address, handler)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise LaunchError(f"cannot listen on {where}: {error.strerror}; choose another --port") from error


class JsonHandler(BaseHTTPRequestHandler):
    """Reads one body, sends one object."""

    protocol_version = "HTTP/1.1"
    timeout = _READ_TIMEOUT_SECONDS

    def read_body(self) -> bytes:
        """Raises `LaunchError` where its length is not said, or is too much; the connection ends then."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MAX_BODY_BYTES:
            self.close_connection = True
            raise LaunchError(f"Content-Length is {length!r}; send it, at most {_MAX_BODY_BYTES}")
        return self.rfile.read(int(length))

    def refuse_body(self, path_served: str) -> None:
        """What is posted where nothing is: it is not read, and must not be taken for the next request."""
        self.close_connection = True
        self.fail(404, f"nothing is posted to {self.path}; use {path_served}")

    def fail(self, status: int, message: str) -> None:
        """An error as OpenAI's clients know it."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.send(status, {"error": {"message": message, "type": kind}})

    def send(self, status: int, content: dict[str, Any]) -> None:
        """The whole answer."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        try:
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.note_client_gone()

    def note_client_gone(self) -> None:
        """Nobody reads the answer, or wants the rest of it."""
        self.close_connection = True
        logger.info("event=client_gone")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """To the log instead of standard error."""
        logger.info("event=http %s", format % args)
