"""Another process's metrics, shown by this one's endpoint."""

from __future__ import annotations

import http.client
import logging
import time
import urllib.request
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_cache.errors import MetricsError

_MAX_BYTES = 16 * 2**20
_PIECE_BYTES = 65536

logger = logging.getLogger(__name__)


class RemoteMetrics:
    """A collector of what an endpoint of this machine shows, such as that of another data-parallel engine.

    It is asked at each scrape; one that does not answer in time, or not with metrics, shows in `remote_up` alone.
    """

    def __init__(self, url: str, timeout_seconds: float = 1.0) -> None:
        """`url`: as `serve_metrics` of the other cache returned it.

        Raises:
            MetricsError: no address of HTTP.
        """
        if not url.startswith("http://"):
            raise MetricsError(f"metrics at {url!r}; give an address that begins with http://")
        self._url, self._timeout_seconds = url, timeout_seconds

    def collect(self) -> Iterator[Metric]:
        """The protocol of a `prometheus_client` collector."""
        families: list[Metric] = []
        try:
            families = list(text_string_to_metric_families(self.page().decode()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            logger.warning("event=remote_metrics_missing url=%s error=%r", self._url, str(error))
        yield from families
        up = GaugeMetricFamily("fastdeploy_cache_remote_up", "1 while that endpoint answers", labels=["url"])
        up.add_metric([self._url], float(bool(families)))
        yield up

    def page(self) -> bytes:
        """What is there, within the time in all and the size: a slow or endless page must not hold up this one."""
        deadline, parts, num_bytes = time.monotonic() + self._timeout_seconds, list[bytes](), 0
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._url, timeout=self._timeout_seconds) as answer:
            while part := answer.read1(_PIECE_BYTES):
                parts.append(part)
                num_bytes += len(part)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not there within {self._timeout_seconds} s")
                if num_bytes > _MAX_BYTES:
                    raise ValueError(f"more than {_MAX_BYTES} bytes")
        return b"".join(parts)
