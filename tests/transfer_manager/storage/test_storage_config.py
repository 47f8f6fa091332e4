"""Settings of a store: what cannot be meant is refused, with the name, the value and what to do."""

from __future__ import annotations

import pytest

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig

FILE = {"weights_id": "w1", "folder": "/var/lib/kv"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"folder": "/kv"}, "weights_id"),
        ({**FILE, "weights_id": " "}, "name the weights"),
        ({"weights_id": "w1"}, "folder is missing"),
        ({**FILE, "kind": "s3"}, "file, mooncake, valkey, or module:Class"),
        ({**FILE, "kind": "valkey"}, "uses none; leave it out"),
        ({**FILE, "options": {"a": "b"}}, "a store of your own"),
        ({"weights_id": "w1", "kind": "a:B", "options": {"a": 1}}, "give texts by name"),
        ({**FILE, "admission": "never"}, "second_use, all, priority"),
        ({**FILE, "capacity_bytes": 0}, "at least 1"),
        ({**FILE, "capacity_bytes": 1.5}, "whole number"),
        ({**FILE, "num_io_threads": 10**6}, "at most 256"),
        ({**FILE, "task_timeout_seconds": "5"}, "give a number"),
        ({**FILE, "min_priority": "high"}, "give a number"),
        ({**FILE, "breaker_seconds": 0}, "above 0"),
        ({**FILE, "time_to_live_seconds": -1}, "not be negative"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, object], words: str) -> None:
    """Missing, of the wrong type, out of range, or for another kind of store."""
    with pytest.raises(ConfigError, match=words):
        StorageConfig(**settings)  # type: ignore[arg-type]


def test_a_rank_gets_its_share_and_nothing_of_other_stores() -> None:
    """Capacity is of all ranks; a store of one's own gets `options` alone."""
    options = StorageConfig(**FILE, capacity_bytes=100).store_options(tp_size=4)  # type: ignore[arg-type]
    assert options["capacity_bytes"] == 25 and "server_url" not in options
    own = StorageConfig(kind="a:B", weights_id="w1", options={"x": "y"})
    assert own.is_own_store and own.store_options(tp_size=4) == {"x": "y"}


def test_one_slab_leaves_room_for_other_spaces() -> None:
    """Other weights in a small folder are not pushed out by the first slab of new ones."""
    options = StorageConfig(**FILE, capacity_bytes=2**26).store_options(tp_size=2)  # type: ignore[arg-type]
    assert options["slab_bytes"] == 2**22
