"""WHAT is cached, WHERE, and WHAT moves next. Handles block ids, never a tensor. The one package that users import."""

from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.match import Match
from fastdeploy_cache.request import Request
from fastdeploy_cache.stats import CacheStats, TierStats
from transfer_manager.config import TransferConfig
from transfer_manager.layout import KVLayout

__all__ = [
    "CacheConfig",
    "CacheStats",
    "KVLayout",
    "Match",
    "PrefixCacheManager",
    "Request",
    "TierStats",
    "TransferConfig",
]
