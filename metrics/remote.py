"""Another process's metrics, shown by this one's endpoint."""

from __future__ import annotations

import http.client
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from metrics.errors import MetricsError

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
            with urllib.request.urlopen(self._url, timeout=self._timeout_seconds) as answer:  # noqa: S310 (http)
                families = list(text_string_to_metric_families(answer.read().decode()))
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ValueError) as error:
            logger.warning("event=remote_metrics_missing url=%s error=%r", self._url, str(error))
        yield from families
        up = GaugeMetricFamily("fastdeploy_cache_remote_up", "1 while that endpoint answers", labels=["url"])
        up.add_metric([self._url], float(bool(families)))
        yield up
