"""The list of tables `tenants` of the configuration: what namespaces have a share of the tiers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.settings import names_checked
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import owner_mark

_MOST_SECONDS = 10 * 365 * 86400.0
MAX_TENANTS = 64  # each has an eviction policy of its own, and making room looks at all of them
_TIERS = ("gpu", "cpu", "store")


@names_checked
@dataclass(frozen=True, kw_only=True)
class TenantConfig:
    """A namespace and its share of each tier. Namespaces that no table names share what the tables leave.

    Args:
        namespace: whose requests these are: `Request.namespace`.
        guaranteed_gpu_share: of the GPU's blocks. As long as the namespace uses no more than these, what it has cached
            is not evicted for another one.
        max_gpu_share: of the GPU's blocks, what it may use at most, with what its running requests hold.
        guaranteed_cpu_share: as `guaranteed_gpu_share`, of the CPU tier.
        max_cpu_share: as `max_gpu_share`, of the CPU tier.
        guaranteed_store_share: as `guaranteed_gpu_share`, of a file store's objects. Not of the default namespace.
        max_store_share: as `max_gpu_share`, of these.
        keep_seconds: what has not been used for so long is dropped from both tiers; None: nothing is for its age.

    Raises:
        ConfigError: an impossible value.
    """

    namespace: str
    guaranteed_gpu_share: float = 0.0
    max_gpu_share: float = 1.0
    guaranteed_cpu_share: float = 0.0
    max_cpu_share: float = 1.0
    guaranteed_store_share: float = 0.0
    max_store_share: float = 1.0
    keep_seconds: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str):
            raise ConfigError(f"tenants.namespace is {self.namespace!r}; give the text that requests have")
        try:
            self.namespace.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"tenants.namespace is {self.namespace!r}, which is no UTF-8 text: {error}") from error
        for name in [f"{which}_{tier}_share" for tier in _TIERS for which in ("guaranteed", "max")]:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"tenants.{name} is {value!r}; it is a share, use 0 to 1")
        for tier in _TIERS:
            least, most = getattr(self, f"guaranteed_{tier}_share"), getattr(self, f"max_{tier}_share")
            if least > most:
                name = f"tenants.guaranteed_{tier}_share is {least} and max_{tier}_share {most}"
                raise ConfigError(f"{name}, of namespace {self.namespace!r}; guarantee no more than it may have")
        if not self.namespace and self.has_store_share:
            raise ConfigError(
                "tenants of the default namespace, '', have no share of a store: the names of its objects do not say "
                "whose they are. Give its requests a namespace, or leave guaranteed_store_share and max_store_share out"
            )
        seconds = self.keep_seconds
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and (not is_number or not 0 < seconds <= _MOST_SECONDS):
            raise ConfigError(f"tenants.keep_seconds is {seconds!r}; use a number above 0, up to {_MOST_SECONDS:.0f}")

    @property
    def has_store_share(self) -> bool:
        """Whether it has a share of a store."""
        return (self.guaranteed_store_share, self.max_store_share) != (0, 1)

    @property
    def has_tier_share(self) -> bool:
        """Whether the tree has to know it. A table that is about a store alone costs the tree nothing."""
        return not self.has_store_share or self != TenantConfig(
            namespace=self.namespace,
            guaranteed_store_share=self.guaranteed_store_share,
            max_store_share=self.max_store_share,
        )


def check_tenants(tenants: Sequence[TenantConfig]) -> None:
    """Raise `ConfigError` where all together cannot be."""
    if not isinstance(tenants, list | tuple) or not all(isinstance(each, TenantConfig) for each in tenants):
        raise ConfigError(f"tenants is {tenants!r}; give a list of TenantConfig")
    if len(tenants) > MAX_TENANTS:
        raise ConfigError(f"tenants has {len(tenants)} tables; use {MAX_TENANTS} or fewer")
    name, count = Counter(tenant.namespace for tenant in tenants).most_common(1)[0] if tenants else ("", 0)
    if count > 1:
        raise ConfigError(f"tenants has {count} tables for the namespace {name!r}; give it one")
    for key in [f"guaranteed_{tier}_share" for tier in _TIERS]:
        if (total := math.fsum(getattr(tenant, key) for tenant in tenants)) >= 1:
            raise ConfigError(f"tenants.{key} is {total:g} of all together; stay below 1: others need some, too")


def check_policies(tenants: Sequence[TenantConfig], *, is_given: bool) -> None:
    """Raise `ConfigError` where a program gives one eviction policy for several tenants."""
    if tenants and is_given:
        raise ConfigError("each of the tenants needs an eviction policy: leave `policy` out, and set eviction_policy")


def tier_tenants(tenants: Sequence[TenantConfig]) -> list[TenantConfig]:
    """Those of whom the tree has to know."""
    return [each for each in tenants if each.has_tier_share]


def store_shares(tenants: Sequence[TenantConfig], storage: StorageConfig) -> list[tuple[bytes, float, float]]:
    """What a file store takes as shares: of each tenant that has one its mark, what is guaranteed to it, and its most.

    Raises `ConfigError`: it is no file store.
    """
    sharing = [each for each in tenants if each.has_store_share]
    if sharing and storage.kind != "file":
        raise ConfigError(
            f"tenants has shares of a store, and storage.kind is {storage.kind!r}: only a file store knows shares. "
            "Leave guaranteed_store_share and max_store_share out"
        )
    return [
        (owner_mark(each.namespace), float(each.guaranteed_store_share), float(each.max_store_share))
        for each in sharing
    ]


def keep_seconds(tenants: Sequence[TenantConfig]) -> dict[str, float]:
    """The times to live that there are, by namespace."""
    return {each.namespace: each.keep_seconds for each in tenants if each.keep_seconds is not None}
