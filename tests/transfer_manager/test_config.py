"""Impossible transfer settings are refused at once, by name and number."""

from __future__ import annotations

import pytest

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.config import TransferConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp_size", 0),
        ("max_tasks_in_flight", 0),
        ("data_parallel_id", -1),
        ("max_restarts", -1),
        ("restart_backoff_seconds", -0.1),
        ("start_timeout_seconds", 0.0),
        ("task_timeout_seconds", -1.0),
        ("stop_timeout_seconds", 0.0),
        ("restart_window_seconds", 86400.0),
        ("task_timeout_seconds", float("inf")),
        ("task_timeout_seconds", float("nan")),
        ("heartbeat_seconds", 0.2),
        ("device", "gpu"),
    ],
)
def test_impossible_values_are_refused(name: str, value: object) -> None:
    """The message names the field and the value seen."""
    with pytest.raises(ConfigError, match=rf"transfer\.{name} is '?{value}"):
        TransferConfig(**{name: value})  # type: ignore[arg-type]


def test_a_heartbeat_time_out_leaves_room_for_four_beats() -> None:
    """One late beat is no death; the smallest allowed pair is accepted."""
    with pytest.raises(ConfigError, match=r"0\.99"):
        TransferConfig(heartbeat_seconds=0.25, heartbeat_timeout_seconds=0.99)
    TransferConfig(heartbeat_seconds=0.25, heartbeat_timeout_seconds=1.0)


def test_no_backoff_and_no_restarts_are_allowed() -> None:
    """Zero means at once, and never."""
    config = TransferConfig(restart_backoff_seconds=0.0, max_restarts=0)
    assert (config.restart_backoff_seconds, config.max_restarts) == (0.0, 0)


def test_device_ids_count_up_or_are_given() -> None:
    """One device for each rank: its own number unless told otherwise; a list of another length is refused."""
    assert [TransferConfig(tp_size=3).device_id(rank) for rank in range(3)] == [0, 1, 2]
    assert [TransferConfig(tp_size=2, device_ids=(5, 3)).device_id(rank) for rank in range(2)] == [5, 3]
    with pytest.raises(ConfigError, match="1 entries for tp_size 2"):
        TransferConfig(tp_size=2, device_ids=(1,))


def test_a_config_cannot_be_changed() -> None:
    """It is read by threads and processes at any time."""
    with pytest.raises(AttributeError):
        TransferConfig().tp_size = 2  # type: ignore[misc]
