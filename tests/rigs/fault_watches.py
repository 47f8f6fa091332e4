"""Oracles of the simulation that the product does not have."""

from __future__ import annotations

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.launch.faults.stage import Watch
from tests.rigs.tap_mirror import TapMirror


def mirrored(cache: PrefixCacheManager) -> Watch:
    """What taps tell of each tier, beside what is in it. From the first moment: nothing is cached yet."""
    return TapMirror(cache._books.tree)
