"""The HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from metrics.cache_metrics import CacheMetrics
from metrics.errors import PortInUseError


class MetricsExporter:
    """Serves `/metrics` from a private registry in a thread of the engine process."""

    def __init__(self, metrics: CacheMetrics, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            PortInUseError: the address cannot be listened on.
        """
        registry = CollectorRegistry()
        registry.register(metrics)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise PortInUseError(f"metrics cannot listen on {host}:{port}: {error}; use another port") from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
