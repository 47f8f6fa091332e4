"""Where the connector serves the manager's metrics: two keys of `kv_connector_extra_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from fastdeploy_cache.errors import ConfigError

_MOST = 65_535


@dataclass(frozen=True)
class MetricsAddress:
    """The address of one engine's page."""

    host: str
    port: int  # 0 takes a free one, which the log names

    @classmethod
    def take(cls, extra: dict[str, Any], data_parallel_index: int) -> Self | None:
        """Take `metrics_port` and `metrics_host` out of the settings; None without a port.

        Data-parallel engines of one host get the ports from `metrics_port` on.

        Raises:
            ConfigError: no port, or a host without a port.
        """
        port, host = extra.pop("metrics_port", None), extra.pop("metrics_host", None)
        if port is None:
            if host is not None:
                raise ConfigError(f"metrics_host is {host!r} without metrics_port; give metrics_port, too, 0 for any")
            return None
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= _MOST - data_parallel_index:
            raise ConfigError(f"metrics_port is {port!r}; give a whole number from 0 to {_MOST - data_parallel_index}")
        if host is not None and not isinstance(host, str):
            raise ConfigError(f"metrics_host is {host!r}; give a name or an address, such as '0.0.0.0'")
        return cls(host or "127.0.0.1", port + data_parallel_index if port else 0)
