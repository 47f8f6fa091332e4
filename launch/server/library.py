"""The servers' HTTP library, which an engine that embeds the cache does not need."""

from __future__ import annotations

import re
from importlib import metadata

from fastdeploy_cache.errors import LaunchError

_OLDEST = (3, 14, 4)  # before it a client that says nothing at all was never ended


def check_library() -> None:
    """Raises `LaunchError` where it is missing, or too old; to be called before a module of a server is imported."""
    try:
        found = metadata.version("aiohttp")
    except metadata.PackageNotFoundError:
        found = "not installed"
    else:
        if tuple(map(int, re.findall(r"\d+", found)[:3])) >= _OLDEST:
            return
    oldest = ".".join(map(str, _OLDEST))
    raise LaunchError(f"aiohttp is {found}; needed is {oldest} or newer: pip install 'fastdeploy-cache[serve]'")
