"""What aiohttp leaves open: deadlines of bodies, half-closed clients, connections per client, refusals as JSON."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import http_exceptions, web

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.log_lines import in_request
from fastdeploy_cache.launch.server.answers import failure
from fastdeploy_cache.launch.server.request_log import ID_HEADER, REQUEST_ID

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 65536  # of a request's first line; a header's field has aiohttp's own bound, which is another number


class ClientGoneError(ConnectionError):
    """Nobody waits for the answer any more, or takes it."""


class ClientCounts:
    """How much each client, by its address, has open of something that many share: connections, or prompts computed at
    its wish. None has more than the others leave room for. Any thread."""

    def __init__(self, max_per_client: int) -> None:
        self.max_per_client = max_per_client
        self._lock = threading.Lock()
        self._num_open: Counter[str] = Counter()

    def enter(self, client: str) -> bool:
        """One more; False, and nothing is counted, where the client has as many as it may."""
        with self._lock:
            if self._num_open[client] >= self.max_per_client:
                return False
            self._num_open[client] += 1
            return True

    @property
    def num_open(self) -> int:
        """Open connections of all clients together."""
        with self._lock:
            return self._num_open.total()

    def leave(self, client: str) -> None:
        """One that had entered is over."""
        with self._lock:
            self._num_open[client] -= 1
            if not self._num_open[client]:
                del self._num_open[client]


class Limits(NamedTuple):
    """How much one client may take of a server, and for how long."""

    head_seconds: float = 30.0  # for the head of a request; also the longest pause between two of them
    body_seconds: float = 30.0
    write_seconds: float = 30.0  # for the client to take all that waits for it
    ended_seconds: float = 1.0  # for an answer to begin after the client has ended its side
    max_body_bytes: int = 4 * 2**20
    max_connections_per_client: int = 512
    max_connections: int | None = None  # of all clients; None: half of the open files that the process may have


class Connection(web.RequestHandler):
    """One client's connection, within limits. aiohttp ends it where a head is slow (its `keepalive_timeout`)."""

    def __init__(self, server: web.Server, limits: Limits, counts: ClientCounts) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.head_seconds,
            max_line_size=_MAX_LINE_BYTES,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
        )
        self.limits = limits
        self.is_asked = False  # something has come, or is being answered
        self.has_begun = False  # an answer in pieces: from now on only its end ends the connection
        self.has_ended = False  # the client's side
        self._counts, self._client, self._is_counted = counts, "", False
        self._cutting: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse a client that has too many; nothing of such a connection is read."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(0)  # tell of each byte that waits
        self._client = (transport.get_extra_info("peername") or [""])[0]
        self._is_counted = self._counts.enter(self._client)
        if self._is_counted:
            super().connection_made(transport)
        else:
            logger.warning("event=connection_refused client=%s num_open=%d", self._client, self._counts.max_per_client)
            transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Its handler is cancelled by aiohttp."""
        self.on_lost()
        if self._is_counted:
            self._is_counted = False
            self._counts.leave(self._client)
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Some of an answer waits: the client has so long to take all of that. A close would wait for it, too."""
        super().pause_writing()
        assert self.transport is not None
        self._cutting = self._loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Nothing waits."""
        assert self._cutting is not None
        self._cutting.cancel()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """A piece of what the client says."""
        self.is_asked = self.is_asked or bool(data)
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It may have gone, or only have said all: nobody can tell before something is sent.

        So a short answer is still given, and one in pieces goes on: to a client that has gone it soon cannot be sent.
        """
        self.has_ended = True
        if self.is_asked:
            self._loop.call_later(self.limits.ended_seconds, self._end_unless_begun)
        return self.is_asked  # then asyncio leaves our side open

    def _end_unless_begun(self) -> None:
        if self.transport is not None and not self.has_begun:
            self.transport.close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what cannot be read, and what failed, as everything is answered; the connection ends."""
        if isinstance(exc, ClientGoneError):
            raise exc
        if status >= 500:
            return self._fail(request, status, exc)
        logger.info("event=http_refused client=%s reason=%r", self._client, message)
        reason = (message or "no HTTP").partition("\n")[0].rstrip(":")
        return failure(_status_of(exc), f"the request cannot be read: {reason}", ends=True)

    def _fail(self, request: web.BaseRequest, status: int, exc: BaseException | None) -> web.StreamResponse:
        """A fault of ours; what named the request is left by now."""
        request_id = request.get(REQUEST_ID, "")
        with in_request(request_id):
            logger.error("event=http_failed client=%s", self._client, exc_info=exc)
        if request.writer.output_size > 0:
            raise ClientGoneError("too late for an answer; the connection ends") from exc
        response = failure(status, "the server has failed; its log says why", ends=True)
        response.headers[ID_HEADER] = request_id
        return response


def _status_of(error: BaseException | None) -> int:
    if isinstance(error, http_exceptions.LineTooLong):
        return 414 if error.args[1] == _MAX_LINE_BYTES else 431
    return 431 if isinstance(error, http_exceptions.BadHttpMessage) and "Too many headers" in error.message else 400


def connection_of(request: web.BaseRequest) -> Connection:
    """The connection on which a request has come."""
    assert isinstance(request.protocol, Connection)
    return request.protocol


async def read_body(request: web.BaseRequest) -> bytes:
    """The whole body.

    Raises:
        LaunchError: its length is not said, or is too much.
        ClientGoneError: it did not come in time; the connection has ended.
    """
    limits, length = connection_of(request).limits, request.headers.get("Content-Length", "")
    if not length or int(length) > limits.max_body_bytes:
        raise LaunchError(f"Content-Length is {length!r}; send it, at most {limits.max_body_bytes}")
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await request.read()
    except TimeoutError:
        request.protocol.force_close()
        raise ClientGoneError(f"no whole body within {limits.body_seconds} s") from None
    except ConnectionError as error:
        raise ClientGoneError(str(error)) from error
