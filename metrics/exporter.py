"""The HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fastdeploy_cache.errors import MetricsError, PortInUseError

__all__ = ["Collector", "MetricsExporter"]


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
    """Serves `/metrics` from a private registry in a thread of the engine process."""

    def __init__(self, *collectors: Collector, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 takes a free one. `collectors`: `CacheMetrics` of one cache, or of several with different
        data-parallel ids.

        Raises:
            PortInUseError: the address cannot be listened on.
            MetricsError: the host is not known, or the port is none.
        """
        if type(port) is not int or not 0 <= port <= 65535:
            raise MetricsError(f"metrics cannot listen on port {port!r}; use 1 to 65535, or 0 for a free one")
        registry = CollectorRegistry()
        registry.register(Together(collectors))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except socket.gaierror as error:
            raise MetricsError(f"metrics cannot listen on {host}:{port}: {error}; use another host") from error
        except OSError as error:
            reason = error.strerror or error
            raise PortInUseError(f"metrics cannot listen on {host}:{port}: {reason}; use another port") from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
