"""WHAT is cached, WHERE, and WHAT moves next. Handles block ids, never a tensor.

The names below are what a user imports. Each is loaded when it is first used (PEP 562): a rank's process imports
modules of this package, too, and must not load the whole engine side with them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdeploy_cache.books.leaves.policy import EvictionPolicy
    from fastdeploy_cache.books.run import Tier
    from fastdeploy_cache.config.cache import CacheConfig
    from fastdeploy_cache.config.events import EventsConfig
    from fastdeploy_cache.config.insight import InsightConfig
    from fastdeploy_cache.config.tenants import TenantConfig
    from fastdeploy_cache.insight.doctor.finding import Finding
    from fastdeploy_cache.manager import PrefixCacheManager
    from fastdeploy_cache.peers.transfers import Receive, Send
    from fastdeploy_cache.request import Request
    from fastdeploy_cache.requests.explanation import Explanation
    from fastdeploy_cache.requests.match import Match, Prefetch
    from fastdeploy_cache.requests.tables import RowBlocks, RowTable
    from fastdeploy_cache.stats import CacheStats, TierStats
    from fastdeploy_cache.transfer_manager.config import TransferConfig
    from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
    from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
    from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory
    from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
    from fastdeploy_cache.transfer_manager.peer.peer_signal import StepProgress
    from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress
    from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
    from fastdeploy_cache.transfer_manager.storage.weights import weights_id_of
    from fastdeploy_cache.transfer_manager.task import TaskKind

__version__ = "0.1.0"  # setup.py reads it here
__all__ = [
    "CacheConfig",
    "CacheStats",
    "EventsConfig",
    "TenantConfig",
    "EvictionPolicy",
    "Explanation",
    "Finding",
    "InsightConfig",
    "KVHandle",
    "KVGroup",
    "KVLayout",
    "KVMemory",
    "LayerProgress",
    "Match",
    "PeerConfig",
    "Prefetch",
    "PrefixCacheManager",
    "Receive",
    "Request",
    "RowBlocks",
    "RowTable",
    "Send",
    "StatePart",
    "StepProgress",
    "StorageConfig",
    "TaskKind",
    "Tier",
    "TierStats",
    "TransferConfig",
    "weights_id_of",
]

_HOMES = {
    "CacheConfig": "config.cache",
    "CacheStats": "stats",
    "EventsConfig": "config.events",
    "TenantConfig": "config.tenants",
    "EvictionPolicy": "books.leaves.policy",
    "Explanation": "requests.explanation",
    "Finding": "insight.doctor.finding",
    "InsightConfig": "config.insight",
    "KVHandle": "transfer_manager.kv.memory",
    "KVGroup": "transfer_manager.kv.groups",
    "KVLayout": "transfer_manager.kv.layout",
    "KVMemory": "transfer_manager.kv.memory",
    "LayerProgress": "transfer_manager.rank.layer_progress",
    "Match": "requests.match",
    "PeerConfig": "transfer_manager.peer.config",
    "Prefetch": "requests.match",
    "PrefixCacheManager": "manager",
    "Receive": "peers.transfers",
    "Request": "request",
    "RowBlocks": "requests.tables",
    "RowTable": "requests.tables",
    "Send": "peers.transfers",
    "StatePart": "transfer_manager.kv.groups",
    "StepProgress": "transfer_manager.peer.peer_signal",
    "StorageConfig": "transfer_manager.storage.config",
    "TaskKind": "transfer_manager.task",
    "Tier": "books.run",
    "TierStats": "stats",
    "TransferConfig": "transfer_manager.config",
    "weights_id_of": "transfer_manager.storage.weights",
}


def __getattr__(name: str) -> object:
    """A public name, loaded from its home."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
