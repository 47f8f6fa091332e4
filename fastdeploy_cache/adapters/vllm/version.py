"""Which vLLM the connector can serve."""

from __future__ import annotations

import logging
import re

from fastdeploy_cache.errors import ConfigError

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 29), (0, 33)  # what it was written for; 0.31 to 0.33 were tried in a real engine


def check_version(version: str) -> None:
    """Refuse an older vLLM, and warn of one that nobody has tried.

    Raises:
        ConfigError: it is older than 0.29.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else None
    if number is not None and number < OLDEST:
        raise ConfigError(f"this is vLLM {version}; the connector needs {_name(OLDEST)} or newer: pip install -U vllm")
    if number is None or number > NEWEST:
        logger.warning(
            "event=unknown_vllm version=%s; the connector was written for %s to %s and is tried all the same",
            version,
            _name(OLDEST),
            _name(NEWEST),
        )


def _name(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
