"""Chats answered by two instances each: one computes the prompt, the other receives its blocks and answers."""

from __future__ import annotations

import http.client
import json
import logging
import queue
import signal
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from launch.errors import LaunchError
from launch.upstream import ClientGoneError, Instances, Question, Upstream

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 4 * 2**20
_READ_TIMEOUT_SECONDS = 30.0
_ANSWER_SECONDS = 600.0  # a whole answer comes in one piece
_HEALTH_SECONDS = 2.0
_CHAT, _PREFILL = "/v1/chat/completions", "/v1/prefill"
_UNREACHABLE = (OSError, http.client.HTTPException)


def route(prefill: Sequence[str], decode: Sequence[str], *, host: str, port: int, prefill_seconds: float) -> None:
    """Run until SIGTERM or SIGINT.

    Without an offer of a prefill instance within `prefill_seconds` the decode instance computes the prompt itself. A
    decode instance that cannot be reached is passed over, as long as it has not begun to answer.

    Raises:
        LaunchError: the port is taken, or a URL is none.
    """
    endings: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: endings.put(number))
    server = Router((host, port), Instances(prefill), Instances(decode), prefill_seconds)
    thread = threading.Thread(target=server.serve_forever, name="http")
    thread.start()
    try:
        url = f"http://{host}:{server.server_port}"
        logger.info("event=serving url=%s prefill=%s decode=%s", url, ",".join(prefill), ",".join(decode))
        endings.get()
    finally:
        logger.info("event=stopping")
        server.shutdown()
        thread.join()
        server.server_close()


class Router(ThreadingHTTPServer):
    """A thread for each connection; they share the turns alone."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], prefill: Instances, decode: Instances, prefill_seconds: float) -> None:
        """Raises `LaunchError` where the address cannot be listened on."""
        self.prefill, self.decode, self.prefill_seconds = prefill, decode, prefill_seconds
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise LaunchError(f"cannot listen on {where}: {error.strerror}; choose another --port") from error


class _Handler(BaseHTTPRequestHandler):
    server: Router
    protocol_version = "HTTP/1.1"
    timeout = _READ_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """Health, models."""
        try:
            if self.path == "/health":
                self._health()
            elif self.path == "/v1/models":
                self._forward(Question("GET", self.path, None, _HEALTH_SECONDS))
            else:
                self._fail(404, f"no page {self.path}; there are {_CHAT}, /v1/models and /health")
        except ClientGoneError:
            self._note_client_gone()

    def do_POST(self) -> None:
        """A chat."""
        length = self.headers.get("Content-Length", "")
        if self.path != _CHAT or not length.isdigit() or int(length) > _MAX_BODY_BYTES:
            self.close_connection = True  # its body is not read
            if self.path != _CHAT:
                self._fail(404, f"nothing is posted to {self.path}; use {_CHAT}")
            else:
                self._fail(400, f"Content-Length is {length!r}; send it, at most {_MAX_BODY_BYTES}")
            return
        try:
            chat = json.loads(self.rfile.read(int(length)))
            if not isinstance(chat, dict):
                raise ValueError(f"{type(chat).__name__} instead of an object")
        except (ValueError, RecursionError) as error:
            self._fail(400, f"the body is no JSON object: {error}")
            return
        chat.pop("kv_offer", None)  # only our own: an offer says where to read memory
        try:
            offer = self._prefill(json.dumps(chat).encode())
            chat |= {"kv_offer": offer} if offer is not None else {}
            self._forward(Question("POST", _CHAT, json.dumps(chat).encode(), _ANSWER_SECONDS))
        except ClientGoneError:
            self._note_client_gone()

    def _prefill(self, body: bytes) -> str | None:
        """What a prefill instance offers of this prompt, if it does in time."""
        question = Question("POST", _PREFILL, body, self.server.prefill_seconds)
        for place in self.server.prefill.in_turn():
            try:
                with Upstream(place, question, self.connection) as upstream:
                    status, answer = upstream.answer()
                    offer = json.loads(answer)["offer"] if status == 200 else None
            except ConnectionError as error:  # at once: there is time for another
                logger.warning("event=prefill_unreachable at=%s:%d error=%r", *place, error)
                continue
            except (*_UNREACHABLE, ValueError, LookupError, TypeError) as error:
                logger.warning("event=prefill_failed at=%s:%d error=%r", *place, error)
                return None
            if status != 200:
                logger.warning("event=prefill_refused at=%s:%d status=%d answer=%r", *place, status, answer[:200])
            return offer if isinstance(offer, str) else None
        return None

    def _forward(self, question: Question) -> None:
        """Pass the request on, and the answer back as it comes."""
        for place in self.server.decode.in_turn():
            has_begun = False
            try:
                with Upstream(place, question, self.connection) as upstream:
                    for piece in upstream.pieces():
                        has_begun = self.close_connection = True  # the answer ends with the connection
                        self._write(piece)
            except _UNREACHABLE as error:
                logger.warning("event=decode_unreachable at=%s:%d begun=%s error=%r", *place, has_begun, error)
            if has_begun:
                self.log_request("forwarded")
                return
        self._fail(503, "no decode instance can be reached")

    def _write(self, piece: bytes) -> None:
        try:
            self.wfile.write(piece)
        except OSError as error:
            raise ClientGoneError from error

    def _health(self) -> None:
        question = Question("GET", "/health", None, _HEALTH_SECONDS)
        for place in self.server.decode.in_turn():
            try:
                with Upstream(place, question, self.connection) as upstream:
                    if upstream.answer()[0] == 200:
                        self._send(200, {"status": "ok"})
                        return
            except _UNREACHABLE as error:
                logger.warning("event=decode_unreachable at=%s:%d error=%r", *place, error)
        self._fail(503, "no decode instance is healthy")

    def _note_client_gone(self) -> None:
        self.close_connection = True
        logger.info("event=client_closed")  # before the end, or having read all of it

    def _fail(self, status: int, message: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._send(status, {"error": {"message": message, "type": kind}})

    def _send(self, status: int, content: dict[str, Any]) -> None:
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
            self._note_client_gone()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """To the log instead of standard error."""
        logger.info("event=http %s", format % args)
