"""An answer that is sent piece by piece."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

from aiohttp import web

from fastdeploy_cache.launch.server.limits import ClientGoneError, connection_of
from fastdeploy_cache.launch.server.request_log import ID_HEADER, REQUEST_ID

_RESET = struct.pack("ii", 1, 0)  # linger for no time: socket(7)


class StreamedAnswer:
    """Chunks, or for a client of HTTP/1.0 all until the connection's end: aiohttp knows. One task uses it.

    `begin` and `write` raise `ClientGoneError`. The task of a client that takes too long for what waits is cancelled.
    """

    def __init__(
        self, request: web.Request, status: int, headers: Mapping[str, str], reason: str | None = None
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(status=status, reason=reason, headers=headers)
        self._response.headers[ID_HEADER] = request[REQUEST_ID]
        self._response.force_close()

    async def begin(self) -> None:
        """Send the status and the headers."""
        connection_of(self._request).has_begun = True
        try:
            await self._response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGoneError(str(error)) from error

    async def write(self, piece: bytes) -> None:
        """Send a piece."""
        try:
            await self._response.write(piece)
        except ConnectionError as error:
            raise ClientGoneError(str(error)) from error

    def end(self) -> web.StreamResponse:
        """What the route returns: aiohttp then says that this was all."""
        return self._response

    def cut(self) -> web.StreamResponse:
        """End the connection so that the client cannot take that for the end of the answer; the route returns this."""
        if (transport := self._request.transport) is not None:
            if self._request.version < (1, 1) and "Content-Length" not in self._response.headers:
                # without chunks a plain end would be an end: it gets a reset
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.close()
        return self._response
