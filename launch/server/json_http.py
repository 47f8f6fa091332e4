"""HTTP that the servers here share: JSON answers, and requests that can be read in one way only."""

from __future__ import annotations

import json
import logging
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fastdeploy_cache.errors import LaunchError

logger = logging.getLogger(__name__)

_READ_TIMEOUT_SECONDS = 30.0
_MAX_DROPPED_BYTES, _PIECE_BYTES = 64 * 2**20, 65536
LAST_CHUNK = b"0\r\n\r\n"  # ends an answer of HTTP's chunks (RFC 9112, 7.1)


class JsonServer(ThreadingHTTPServer):
    """A thread for each connection; none of them keeps the process alive."""

    daemon_threads = True
    request_queue_size = 128  # the base class's 5 costs who comes with many others a second

    def __init__(self, address: tuple[str, int], handler: type[JsonHandler]) -> None:
        """Raises `LaunchError` where the address cannot be listened on."""
        try:
            super().__init__(address, handler)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            text = f"cannot listen on {where}: {error.strerror}; choose another --port, or an address of this host"
            raise LaunchError(text) from error

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """A connection ended by its client is no error of ours."""
        error = sys.exception()
        if isinstance(error, (ConnectionError, TimeoutError)):
            logger.info("event=client_gone")
        else:
            logger.error("event=http_failed client=%s", client_address, exc_info=error)


class JsonHandler(BaseHTTPRequestHandler):
    """Reads one body, sends one object."""

    protocol_version = "HTTP/1.1"
    timeout = _READ_TIMEOUT_SECONDS
    max_body_bytes = 4 * 2**20

    def parse_request(self) -> bool:
        """Refuse what does not say clearly where the next request begins; its connection ends."""
        if not super().parse_request():
            return False
        lengths = self.headers.get_all("Content-Length", [])
        is_plain = all(re.fullmatch(r"[0-9]{1,18}", length) for length in lengths)
        if "Transfer-Encoding" in self.headers or len(lengths) > 1 or not is_plain:
            self.close_connection = True
            self.fail(400, f"Content-Length is {', '.join(lengths)!r}; send one number, and no Transfer-Encoding")
            return False
        if self.command != "POST" and lengths:
            self.close_connection = True  # nobody reads that body
        return True

    def read_body(self) -> bytes:
        """Raises `LaunchError` where its length is not said, or is too much; the connection ends then."""
        length = self.headers.get("Content-Length", "")
        if not length or int(length) > self.max_body_bytes:
            self._drop_body()
            raise LaunchError(f"Content-Length is {length!r}; send it, at most {self.max_body_bytes}")
        return self.rfile.read(int(length))

    def refuse_body(self, path_served: str) -> None:
        """What is posted where nothing is."""
        self._drop_body()
        self.fail(404, f"nothing is posted to {self.path}; use {path_served}")

    def _drop_body(self) -> None:
        """Read what is not too much: many clients look for an answer only after they have sent all."""
        self.close_connection = True
        num_bytes = min(int(self.headers.get("Content-Length", "0")), _MAX_DROPPED_BYTES)
        while num_bytes > 0 and (piece := self.rfile.read(min(num_bytes, _PIECE_BYTES))):
            num_bytes -= len(piece)

    def fail(self, status: int, message: str) -> None:
        """An error as OpenAI's clients know it."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.send(status, {"error": {"message": message, "type": kind}})

    def send(self, status: int, content: dict[str, Any]) -> None:
        """The whole answer."""
        body = json.dumps(content, ensure_ascii=False).encode(errors="replace")
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
        """To the log instead of standard error; what a client sends cannot break the line."""
        logger.info("event=http %s", (format % args).encode("unicode_escape").decode())
