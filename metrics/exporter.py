"""The HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

import errno
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fastdeploy_cache.errors import MetricsError, PortInUseError, reason_of
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.metrics.allowed_hosts import AllowedHosts
from fastdeploy_cache.metrics.remote import BoundedSocket

__all__ = ["Collector", "MetricsExporter", "Page"]

logger = logging.getLogger(__name__)

_HEADERS = [("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer")]
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_HEAD_SECONDS, _ANSWER_SECONDS = 5.0, 10.0  # to send the whole head of a request, and to take the whole answer
_MAX_HEAD_BYTES = 2**17  # beyond, the handler answers 431
_REST_SECONDS = 0.5
_NOTHING = b"nothing is here; see / and /metrics\n"
_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Page(NamedTuple):
    """What is served beside the metrics: its type, and what gives its bytes. Called in a thread of the server."""

    content_type: str
    content: Callable[[], bytes]


class Together:
    """Several collectors as one: series of one name, told apart by their labels, become one family."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = tuple(collectors)

    def collect(self) -> Iterator[Metric]:
        """The protocol of a `prometheus_client` collector."""
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = families.setdefault(family.name, family)
                if known is not family:  # a series that two of them show, such as one data-parallel id twice: the first
                    shown = {(s.name, tuple(sorted(s.labels.items()))) for s in known.samples}
                    new = [s for s in family.samples if (s.name, tuple(sorted(s.labels.items()))) not in shown]
                    known.samples += new
        yield from families.values()


class MetricsExporter:
    """Serves `/metrics` from a private registry in a thread of the engine process, and pages beside it."""

    def __init__(
        self,
        *collectors: Collector,
        host: str = "127.0.0.1",
        port: int = 0,
        pages: Mapping[str, Page] = MappingProxyType({}),
        allow_hosts: Sequence[str] = (),
        max_connections: int = 32,
    ) -> None:
        """Listen; port 0 takes a free one. Beyond `max_connections` who connects waits until one ends.

        `collectors`: `CacheMetrics` of one cache, or of several with different data-parallel ids. `pages`, by path:
        what is answered to GET there, and to nothing but GET and HEAD. `allow_hosts`: see `AllowedHosts`.

        Raises:
            ConfigError: one of `allow_hosts` is no name.
            PortInUseError: the address cannot be listened on.
            MetricsError: the host is not known, or the port is none.
        """
        if type(port) is not int or not 0 <= port <= 65535:
            raise MetricsError(f"metrics cannot listen on port {port!r}; use 1 to 65535, or 0 for a free one")
        registry = CollectorRegistry()
        registry.register(Together(collectors))
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            site = _site(make_wsgi_app(registry), dict(pages), AllowedHosts(host, str(found[4][0]), allow_hosts))
            self._server = _Server(found[0], (str(found[4][0]), port), site, max_connections)
        except OSError as error:
            kind = MetricsError if isinstance(error, socket.gaierror) else PortInUseError
            raise kind(f"metrics {cannot_listen(host, port, error)}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening."""
        self._server.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def cannot_listen(host: str, port: int, error: OSError, *, dashes: str = "", port_name: str = "port") -> str:
    """Why nothing can listen there, and which of the two to change. `dashes` stand before what a command calls them."""
    reason = reason_of(error).partition(" (while ")[0]  # Python adds the address
    if (error.errno or 0) < 0 or error.errno == errno.EADDRNOTAVAIL:  # below 0: it cannot be looked up
        what = f"{host} is no address of this machine ({reason}); choose another {dashes}host, such as 127.0.0.1"
    else:
        what = f"{reason}; choose another {dashes}{port_name}, or 0 for a free one"
    return f"cannot listen on {host}:{port}: {what}"


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, and so many connections at a time.

    It asks again at once for what it could not accept. So whatever cannot be had now is waited for here.
    """

    daemon_threads = True

    def __init__(self, family: int, address: tuple[str, int], site: _Application, max_connections: int) -> None:
        self.address_family, self._places = family, threading.BoundedSemaphore(max_connections)
        self.closed, self._is_short = SYSTEM_CLOCK.event(), False
        self.set_app(site)  # before anybody can connect
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection and its address. Raises `OSError` where there is none now, as is expected."""
        if not self._places.acquire(timeout=_REST_SECONDS):
            raise TimeoutError("every place is taken")
        try:
            accepted, address = super().get_request()
            connection = BoundedSocket(accepted.detach(), _HEAD_SECONDS, _MAX_HEAD_BYTES, _ANSWER_SECONDS)
        except OSError as error:
            self._places.release()
            if not self._is_short:
                self._is_short = True
                logger.warning("event=cannot_accept where=metrics error=%r", str(error))
            self.closed.wait(_REST_SECONDS)
            raise
        if self._is_short:
            self._is_short = False
            logger.warning("event=accepts_again where=metrics")
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """It has been answered, or has failed. In the connection's thread."""
        try:
            super().shutdown_request(request)
        finally:
            self._places.release()

    def handle_error(self, _: object, client_address: object) -> None:
        """A client has gone, or was too slow: no traceback for that."""
        logger.debug("event=metrics_client_gone address=%s reason=%r", client_address, str(sys.exception()))


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing is written for each scrape."""


def _site(metrics: Any, pages: Mapping[str, Page], hosts: AllowedHosts) -> _Application:
    """The metrics at their own path, the pages at theirs, and nothing elsewhere; without pages metrics everywhere.

    What is asked under a name that is none of ours is refused.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        given = [[environ[name]] if name in environ else [] for name in ("HTTP_HOST", "HTTP_ORIGIN")]
        reason = hosts.refusal(method, *given)
        if reason is None and (not pages or path.rstrip("/") == "/metrics"):
            parts: Iterable[bytes] = metrics(environ, start_response)
            return parts
        status, content_type, body = "404 Not Found", "text/plain; charset=utf-8", _NOTHING
        if reason is not None:
            status, body = "403 Forbidden", f"{reason}\n".encode()
        elif method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", b"only GET is answered here\n"
        elif (page := pages.get(path)) is not None:
            status, content_type, body = "200 OK", page.content_type, page.content()
        own = [("Content-Type", content_type), ("Content-Length", str(len(body))), ("Content-Security-Policy", _POLICY)]
        start_response(status, [*own, *_HEADERS, *([("Allow", "GET, HEAD")] if status[0:3] == "405" else [])])
        return [body if method != "HEAD" else b""]

    return answer
