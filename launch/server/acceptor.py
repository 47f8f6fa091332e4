"""Takes connections for a server: so many at a time, and quietly where there are no descriptors for more."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from fastdeploy_cache.ipc.shortage import AcceptRests
from fastdeploy_cache.launch.server.limits import Connection

logger = logging.getLogger(__name__)

_FULL_NO_MORE = 0.75  # of the places: so full is full said once, and not with each that comes and goes


class Acceptor:
    """Who comes when every place is taken waits in the kernel's line until another one leaves.

    asyncio's own loop has no bound, and where there is no descriptor it writes a traceback for each place in that line,
    every second.
    """

    def __init__(self, listener: socket.socket, new_connection: Callable[[], Connection], max_connections: int) -> None:
        self._listener, self._new, self._most = listener, new_connection, max_connections
        self._num_open, self._is_full, self._left = 0, False, asyncio.Event()
        self._rests = AcceptRests("{}:{}".format(*listener.getsockname()[:2]))

    async def run(self) -> None:
        """Take connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            while self._num_open >= self._most:
                self._note_full()
                self._left.clear()
                await self._left.wait()
            try:
                taken, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                await asyncio.sleep(self._rests.met(error))
                continue
            self._rests.over()
            await self._begin(loop, taken)

    async def _begin(self, loop: asyncio.AbstractEventLoop, taken: socket.socket) -> None:
        connection = self._new()
        connection.on_lost = self._leave
        self._num_open += 1
        try:
            await loop.connect_accepted_socket(lambda: connection, taken)
        except OSError as error:  # it has gone already
            taken.close()
            self._leave()
            logger.debug("event=connection_lost_early error=%r", str(error))

    def _note_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("event=connections_full num_open=%d action=others_wait", self._num_open)

    def _leave(self) -> None:
        self._num_open -= 1
        self._left.set()
        if self._is_full and self._num_open < _FULL_NO_MORE * self._most:
            self._is_full = False
            logger.warning("event=connections_full_no_more num_open=%d", self._num_open)
