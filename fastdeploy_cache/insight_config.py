"""The table `insight` of the configuration: what an operator sees of a cache while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.settings import names_checked


@names_checked
@dataclass(frozen=True, kw_only=True)
class InsightConfig:
    """What is kept and shown beside the metrics.

    Args:
        what_if: estimate the hit rates that other sizes of the tiers would have, in a process of its own that starts
            with the first metrics endpoint.
        page: show a page for people at `/` of each metrics endpoint.
        control_socket: path of a unix socket at which this cache can be looked at and controlled; None: none.
        max_pinned_share: of the GPU's blocks, what an operator's pins may keep in place.

    Raises:
        ConfigError: an impossible value.
    """

    what_if: bool = True
    page: bool = True
    control_socket: str | None = None
    max_pinned_share: float = 0.25

    def __post_init__(self) -> None:
        for name in ("what_if", "page"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"insight.{name} is {value!r}; use true or false")
        path, share = self.control_socket, self.max_pinned_share
        if path is not None and (not isinstance(path, str) or not path):
            raise ConfigError(f"insight.control_socket is {path!r}; give the path of a socket, or leave it out")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"insight.max_pinned_share is {share!r}; it is a share, use 0 to 1")
