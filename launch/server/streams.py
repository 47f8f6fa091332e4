"""An answer that is sent piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

from fastdeploy_cache.launch.server.limits import Connection


class ClientGoneError(ConnectionError):
    """Nobody takes the answer any more."""


class StreamedAnswer:
    """Chunks, or for a client of HTTP/1.0 all until the connection's end: aiohttp knows. One task uses it.

    `begin` and `write` raise `ClientGoneError`, also where a client does not take a piece in time.
    """

    def __init__(
        self, request: web.Request, status: int, headers: Mapping[str, str], reason: str | None = None
    ) -> None:
        assert isinstance(request.protocol, Connection)
        self._request, self._connection = request, request.protocol
        self._response = web.StreamResponse(status=status, reason=reason, headers=headers)
        self._response.force_close()

    async def begin(self) -> None:
        """Send the status and the headers."""
        self._connection.has_begun = True
        with _client_errors():
            await self._response.prepare(self._request)

    async def write(self, piece: bytes) -> None:
        """Send a piece."""
        seconds = self._connection.limits.write_seconds
        try:
            async with asyncio.timeout(seconds):
                with _client_errors():
                    await self._response.write(piece)
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()  # to close it would wait until all has been taken
            raise ClientGoneError(f"the client took nothing for {seconds} s") from None

    def end(self) -> web.StreamResponse:
        """What the route returns: aiohttp then says that this was all."""
        return self._response

    def cut(self) -> web.StreamResponse:
        """End the connection so that the client cannot take that for the end of the answer; the route returns this."""
        if (transport := self._request.transport) is not None:
            is_bare = self._request.version < (1, 1) and "Content-Length" not in self._response.headers
            (transport.abort if is_bare else transport.close)()  # without chunks a plain end would be an end
        return self._response


@contextmanager
def _client_errors() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise ClientGoneError(str(error)) from error
