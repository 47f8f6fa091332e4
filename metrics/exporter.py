"""The HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fastdeploy_cache.errors import MetricsError, PortInUseError, reason_of
from fastdeploy_cache.metrics.allowed_hosts import AllowedHosts

__all__ = ["Collector", "MetricsExporter", "Page"]

logger = logging.getLogger(__name__)

_HEADERS = [("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer")]
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_METRICS_PATH = "/metrics"
_IDLE_SECONDS = 10.0
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
        AllowedHosts(host, host, allow_hosts)  # what is wrong with the names is told before anybody listens
        registry = CollectorRegistry()
        registry.register(Together(collectors))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            kind = MetricsError if isinstance(error, socket.gaierror) else PortInUseError
            raise kind(f"metrics {cannot_listen(host, port, error)}") from error
        handler: Any = self._server.RequestHandlerClass
        bounded: Any = type("BoundedHandler", (handler,), {"timeout": _IDLE_SECONDS})
        self._door = _Door(self._server, max_connections)
        vars(self._server).update(
            RequestHandlerClass=bounded,
            handle_error=_note_gone,  # else each prints a traceback
            get_request=self._door.enter,
            shutdown_request=self._door.leave,
        )
        answer = make_wsgi_app(registry)
        hosts = AllowedHosts(host, str(self._server.server_address[0]), allow_hosts)
        self._server.set_app(_guarded(_beside(answer, dict(pages)) if pages else answer, hosts))
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening."""
        self._door.close()
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


class _Door:
    """Lets so many connections in at a time. `enter` is the server's thread's, `leave` that of each connection.

    The server asks again at once for what it could not accept. So whatever cannot be had now is waited for here.
    """

    def __init__(self, server: Any, max_connections: int) -> None:
        self._accept, self._end = server.get_request, server.shutdown_request
        self._places = threading.Semaphore(max_connections)
        self._closed, self._is_short = threading.Event(), False

    def enter(self) -> Any:
        """A connection and its address. Raises `OSError` where there is none now, as the server expects."""
        if not self._places.acquire(timeout=_REST_SECONDS):
            raise TimeoutError("every place is taken")
        try:
            found = self._accept()
        except OSError as error:
            self._places.release()
            if not self._is_short:
                self._is_short = True
                logger.warning("event=cannot_accept where=metrics error=%r", str(error))
            self._closed.wait(_REST_SECONDS)
            raise
        if self._is_short:
            self._is_short = False
            logger.warning("event=accepts_again where=metrics")
        return found

    def leave(self, connection: Any) -> None:
        """It has been answered, or has failed."""
        try:
            self._end(connection)
        finally:
            self._places.release()

    def close(self) -> None:
        """Rest no more."""
        self._closed.set()


def _note_gone(_: object, address: object) -> None:
    """A client has gone, or has said nothing for too long: its thread and its descriptor are given back."""
    logger.debug("event=metrics_client_gone address=%s reason=%r", address, str(sys.exception()))


def _guarded(application: Any, hosts: AllowedHosts) -> _Application:
    """What is asked under a name that is none of ours is refused."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = [[environ[name]] if name in environ else [] for name in ("HTTP_HOST", "HTTP_ORIGIN")]
        reason = hosts.refusal(environ["REQUEST_METHOD"], *given)
        if reason is None:
            parts: Iterable[bytes] = application(environ, start_response)
            return parts
        body = f"{reason}\n".encode()
        sizes = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        start_response("403 Forbidden", [*sizes, *_HEADERS])
        return [body if environ["REQUEST_METHOD"] != "HEAD" else b""]

    return answer


def _beside(metrics: Any, pages: Mapping[str, Page]) -> _Application:
    """The metrics at their own path, the pages at theirs, and nothing elsewhere."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.rstrip("/") == _METRICS_PATH:
            parts: Iterable[bytes] = metrics(environ, start_response)
            return parts
        status, content_type, body = (
            "404 Not Found",
            "text/plain; charset=utf-8",
            b"nothing is here; see / and /metrics\n",
        )
        if method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", b"only GET is answered here\n"
        elif (page := pages.get(path)) is not None:
            status, content_type, body = "200 OK", page.content_type, page.content()
        own = [("Content-Type", content_type), ("Content-Length", str(len(body))), ("Content-Security-Policy", _POLICY)]
        start_response(status, [*own, *_HEADERS, *([("Allow", "GET, HEAD")] if status[0:3] == "405" else [])])
        return [body if method != "HEAD" else b""]

    return answer
