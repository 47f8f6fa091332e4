"""The table `insight` of the configuration: what an operator sees of a cache while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.settings import check_integers, names_checked

_MOST_NAMESPACES = 1000  # each has a series of metrics for each tier, and two more
_LEAST_RING_BYTES, _LEAST_RECORD_BYTES = 64 * 2**10, 2**20


@names_checked
@dataclass(frozen=True, kw_only=True)
class InsightConfig:
    """What is kept and shown beside the metrics.

    Args:
        what_if: estimate the hit rates that other sizes of the tiers would have, in a process of its own that starts
            with the first metrics endpoint.
        page: show a page for people at `/` of each metrics endpoint.
        traces: make a span of OpenTelemetry for each hop; needs the extra `otel`.
        control_socket: path of a unix socket at which this cache can be looked at and controlled; None: none.
        max_pinned_share: of the GPU's blocks, what an operator's pins may keep in place.
        flight_recorder_bytes: of the ring that keeps what the cache was asked and has decided last; 0: there is none.
        flight_folder: where the ring is written by itself when something goes wrong; None: nowhere.
        num_flight_files: how many such files are kept there; the oldest go.
        record_folder: where everything that enters the ring is also written, all the time; None: nowhere.
        record_bytes: of a file there, about; then the next one begins.
        num_record_files: how many files are kept there; the oldest go.
        num_namespaces: how many namespaces are counted by themselves in the metrics, the first that come; the rest
            count as one. 0: none is.

    Raises:
        ConfigError: an impossible value.
    """

    what_if: bool = True
    page: bool = True
    traces: bool = False
    control_socket: str | None = None
    max_pinned_share: float = 0.25
    flight_recorder_bytes: int = 4 * 2**20
    flight_folder: str | None = None
    num_flight_files: int = 8
    record_folder: str | None = None
    record_bytes: int = 64 * 2**20
    num_record_files: int = 16
    num_namespaces: int = 0

    def __post_init__(self) -> None:
        for name in ("what_if", "page", "traces"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"insight.{name} is {value!r}; use true or false")
        path, share = self.control_socket, self.max_pinned_share
        if path is not None and (not isinstance(path, str) or not path):
            raise ConfigError(f"insight.control_socket is {path!r}; give the path of a socket, or leave it out")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"insight.max_pinned_share is {share!r}; it is a share, use 0 to 1")
        check_integers(self, ConfigError, "insight.")
        if not 0 <= self.num_namespaces <= _MOST_NAMESPACES:
            raise ConfigError(f"insight.num_namespaces is {self.num_namespaces}; use 0 to {_MOST_NAMESPACES}")
        self._check_recording()

    def _check_recording(self) -> None:
        ring = self.flight_recorder_bytes
        if ring != 0 and not _LEAST_RING_BYTES <= ring < 2**40:
            raise ConfigError(
                f"insight.flight_recorder_bytes is {ring}; use {_LEAST_RING_BYTES} (64KiB) or more, or 0 for none"
            )
        if not _LEAST_RECORD_BYTES <= self.record_bytes < 2**40:
            raise ConfigError(f"insight.record_bytes is {self.record_bytes}; use {_LEAST_RECORD_BYTES} (1MiB) or more")
        for name in ("num_flight_files", "num_record_files"):
            if not 1 <= (value := getattr(self, name)) <= 10_000:
                raise ConfigError(f"insight.{name} is {value}; use 1 to 10000")
        for name in ("flight_folder", "record_folder"):
            folder = getattr(self, name)
            if folder is None:
                continue
            if not isinstance(folder, str) or not folder:
                raise ConfigError(f"insight.{name} is {folder!r}; give the name of a folder")
            if not ring:
                raise ConfigError(
                    f"insight.{name} is {folder!r} with insight.flight_recorder_bytes 0; what is written there comes "
                    "from the ring, so give that some room"
                )
