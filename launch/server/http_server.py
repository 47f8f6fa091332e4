"""An application of aiohttp on a port: answered by an event loop in one thread, however many clients there are."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import HttpVersion10, HttpVersion11, web

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.log_lines import in_request
from fastdeploy_cache.ipc.shortage import share_of_files
from fastdeploy_cache.launch.server.acceptor import Acceptor
from fastdeploy_cache.launch.server.answers import failure
from fastdeploy_cache.launch.server.limits import ClientCounts, ClientGoneError, Connection, Limits, connection_of
from fastdeploy_cache.launch.server.request_log import FACTS, ID_HEADER, REQUEST_ID, log_request, request_id_of
from fastdeploy_cache.metrics.allowed_hosts import AllowedHosts
from fastdeploy_cache.metrics.exporter import cannot_listen

_HOSTS = web.AppKey("_HOSTS", AllowedHosts)
_SHARE_OF_FILES, _MOST_CONNECTIONS = 0.5, 20_000  # for all clients together
_BACKLOG = 128  # who comes with many others is not made to try again a second later
_GRACE_SECONDS = 3.0  # for answers that are being given when the server ends


class HttpServer:
    """Listens from its making on; answers while `run` does. One thread runs it, another one stops it."""

    def __init__(self, host: str, port: int, limits: Limits | None = None, *, allow_hosts: Sequence[str] = ()) -> None:
        """`allow_hosts`: see `AllowedHosts`.

        Raises:
            LaunchError: the address cannot be listened on.
            ConfigError: one of `allow_hosts` is no name.
        """
        self._limits = limits or Limits()
        AllowedHosts(host, host, allow_hosts)  # what is wrong with the names is told before anybody listens
        try:
            self._socket = socket.create_server((host, port), backlog=_BACKLOG)
        except OSError as error:
            raise LaunchError(cannot_listen(host, port, error, dashes="--")) from error
        self._hosts = AllowedHosts(host, str(self._socket.getsockname()[0]), allow_hosts)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop, self._stopped = self._runner.get_loop(), asyncio.Event()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._socket.getsockname()[1])

    def run(self, app: web.Application) -> None:
        """Answer with `app` until `stop`; then what is being answered has a few seconds to end."""
        app[_HOSTS] = self._hosts
        self._runner.run(self._serve(app))

    def stop(self) -> None:
        """Let `run` return; before it, it returns at once."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        """Listen no more; after `run`."""
        self._runner.close()
        self._socket.close()

    async def _serve(self, app: web.Application) -> None:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_GRACE_SECONDS)
        await runner.setup()
        server, counts = runner.server, ClientCounts(self._limits.max_connections_per_client)
        assert server is not None
        most = self._limits.max_connections or share_of_files(_SHARE_OF_FILES, _MOST_CONNECTIONS)
        acceptor = Acceptor(self._socket, lambda: Connection(server, self._limits, counts), most)
        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(acceptor.run())
            await self._stopped.wait()
            accepting.cancel()
        self._socket.close()  # who comes now is refused
        await runner.cleanup()


@web.middleware
async def answering(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Around every route: what it logs names the request, and so does the answer; a line says how it went."""
    request_id, begun = request_id_of(request), time.monotonic()
    request[REQUEST_ID], request[FACTS] = request_id, {}
    with in_request(request_id):
        try:
            response = await _answer(request, handler)
        except (asyncio.CancelledError, ClientGoneError):
            log_request(request, "client_gone", begun)
            raise
        except BaseException:
            log_request(request, 500, begun)
            raise
        if not response.prepared:  # a stream has said it
            response.headers[ID_HEADER] = request_id
        log_request(request, response.status, begun)
        return response


async def _answer(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A request that could be read in two ways is refused."""
    connection = connection_of(request)
    connection.is_asked = True  # the answer before it may have cleared that
    try:
        response = _refusal(request) or await handler(request)
    except web.HTTPException as error:  # aiohttp's own, such as for a path that is none
        response = failure(error.status, error.reason)
    finally:
        connection.is_asked = False
    if connection.has_ended or (request.method != "POST" and request.body_exists):
        response.force_close()  # nobody sends more, or nobody reads that body
    return response


def _refusal(request: web.Request) -> web.StreamResponse | None:
    """Why to refuse what aiohttp takes, and nobody needs here. What else is unclear it refuses itself."""
    if request.version not in {HttpVersion10, HttpVersion11}:
        return failure(505, f"Invalid HTTP version ({request.version.major}.{request.version.minor})", ends=True)
    if "Transfer-Encoding" in request.headers:
        return failure(400, "Content-Length is ''; send one number, and no Transfer-Encoding", ends=True)
    given = [request.headers.getall(name, []) for name in ("Host", "Origin")]
    reason = request.app[_HOSTS].refusal(request.method, *given)
    return failure(403, reason, ends=True) if reason is not None else None


def route_of_the_rest(known: Mapping[str, str]) -> web.RouteDef:
    """The answer where there is nothing: `known` says by method what is wrong with {path}, and where to turn to."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        if methods := await _methods_of(request):
            text = f"{request.method} is not for {request.path}; use {' or '.join(methods)}"
            response = failure(405, text, ends=request.method != "GET")
            response.headers["Allow"] = ", ".join(methods)
            return response
        if request.method not in known:
            return failure(501, f"Unsupported method ({request.method!r})", ends=True)
        return failure(404, known[request.method].format(path=request.path_qs), ends=request.method == "POST")

    return web.route("*", "/{path:.*}", refuse)


async def _methods_of(request: web.Request) -> list[str]:
    """What the path of a request can be asked with."""
    found = set[str]()
    for resource in request.app.router.resources():
        if not any(route.method == "*" for route in resource):  # that of the rest has every path
            found |= (await resource.resolve(request))[1]
    return sorted(found)
