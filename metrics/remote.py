"""Another process's metrics, shown by this one's endpoint."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import urllib.parse
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_cache.errors import MetricsError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK

_MAX_BYTES = 16 * 2**20

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
        place, seconds, began = urllib.parse.urlsplit(self._url).netloc, self._timeout_seconds, SYSTEM_CLOCK.now()
        with contextlib.closing(http.client.HTTPConnection(place, timeout=seconds)) as peer:
            peer.connect()
            peer.sock = BoundedSocket(peer.sock.detach(), seconds - SYSTEM_CLOCK.now() + began, _MAX_BYTES, seconds)
            peer.request("GET", self._url.partition(place)[2] or "/")
            with peer.getresponse() as answer:
                if answer.status != 200:
                    raise OSError(f"its answer has status {answer.status}, and not 200")
                return answer.read()


class BoundedSocket(socket.socket):
    """A connection that is read for so long, and so much, as a whole: who sends a byte now and then is cut, too."""

    def __init__(self, descriptor: int, seconds: float, max_bytes: int, send_seconds: float) -> None:
        super().__init__(fileno=descriptor)
        self._deadline, self._num_left, self._send_seconds = SYSTEM_CLOCK.now() + seconds, max_bytes, send_seconds

    def recv_into(self, *args: Any) -> int:
        """Some bytes."""
        self.settimeout(max(1e-6, self._deadline - SYSTEM_CLOCK.now()))
        num_bytes = super().recv_into(*args)
        self._num_left -= num_bytes
        if self._num_left < 0 or SYSTEM_CLOCK.now() > self._deadline:  # of a fast drip there always is a byte
            raise http.client.HTTPException("what is sent is too long, or too slow")
        return num_bytes

    def sendall(self, *args: Any) -> None:
        """All of it within that time; of this error wsgiref writes no traceback."""
        self.settimeout(self._send_seconds)
        try:
            super().sendall(*args)
        except TimeoutError as error:
            raise BrokenPipeError(str(error)) from error
