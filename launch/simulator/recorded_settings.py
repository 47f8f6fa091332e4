"""The settings of a recorded cache, as a replay of it needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.errors import ConfigError, LayoutError, RecordingError
from fastdeploy_cache.insight.flight.header import RECORDED_SETTINGS

_MOST_BLOCKS: Final = 2**25  # of a tier: the books of so many take seconds to make
_MOST_RANKS: Final = 4096


def recorded_config(header: Mapping[str, Any], changes: Mapping[str, Any]) -> CacheConfig:
    """What a replay of a recording with this header runs with, but for `changes`.

    No other settings than those that a recorder writes are taken: none of these names a program or a file.

    Raises:
        RecordingError: they cannot be, or are too much for a replay.
    """
    settings, num_ranks = header.get("settings"), header.get("num_ranks", 1)
    if not isinstance(settings, dict) or type(num_ranks) is not int:
        raise RecordingError("the recording has no settings in its header; it cannot be replayed")
    if not 1 <= num_ranks <= _MOST_RANKS:
        raise RecordingError(f"the recording is of {num_ranks} ranks; 1 to {_MOST_RANKS} can be replayed")
    if other := sorted(set(settings) - RECORDED_SETTINGS):
        raise RecordingError(f"the recording's header has the setting {other[0]!r}, which is none of a recording")
    settings = settings | {"load_policy": "always"} if settings.get("load_policy") == "auto" else settings
    own = {"transfer_client": "inline", "transfer": {"tp_size": num_ranks}}
    own |= {"insight": {"flight_recorder_bytes": 0, "what_if": False}}
    try:
        config = CacheConfig.load(environment={}, **(settings | own | dict(changes)))
        sizes = config.pool_sizes()
    except (ConfigError, LayoutError, RecursionError) as error:
        raise RecordingError(f"the recording's settings are refused here: {error}") from None
    if max(sizes) > _MOST_BLOCKS:
        raise RecordingError(f"the recording is of a tier of {max(sizes)} blocks; at most {_MOST_BLOCKS} are replayed")
    return config
