"""WHAT is cached, WHERE, and WHAT moves next. Handles block ids, never a tensor. The one package that users import."""

from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.match import Match, Prefetch
from fastdeploy_cache.peer_transfer import Receive, Send
from fastdeploy_cache.request import Request
from fastdeploy_cache.run import Tier
from fastdeploy_cache.stats import CacheStats, TierStats
from transfer_manager.config import TransferConfig
from transfer_manager.kv_memory import KVHandle, KVMemory
from transfer_manager.layout import KVLayout
from transfer_manager.peer.config import PeerConfig
from transfer_manager.peer.peer_signal import StepProgress
from transfer_manager.rank_signal import LayerProgress
from transfer_manager.storage.config import StorageConfig
from transfer_manager.storage.weights import weights_id_of
from transfer_manager.task import Direction

__all__ = [
    "CacheConfig",
    "CacheStats",
    "Direction",
    "KVHandle",
    "KVLayout",
    "KVMemory",
    "LayerProgress",
    "Match",
    "PeerConfig",
    "Prefetch",
    "PrefixCacheManager",
    "Receive",
    "Request",
    "Send",
    "StepProgress",
    "StorageConfig",
    "Tier",
    "TierStats",
    "TransferConfig",
    "weights_id_of",
]
