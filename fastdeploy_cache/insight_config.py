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

    Raises:
        ConfigError: an impossible value.
    """

    what_if: bool = True
    page: bool = True

    def __post_init__(self) -> None:
        for name in ("what_if", "page"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"insight.{name} is {value!r}; use true or false")
