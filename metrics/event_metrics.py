"""Counters of the events that tell others what is cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastdeploy_cache.metrics.families import Families

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class PublishedCounts(NamedTuple):
    """Messages of the present publisher; records that it and those before it were told; how often all was told from
    the begin, and how often that was because too much was waiting."""

    num_messages: int = 0
    num_records: int = 0
    num_begun: int = 0
    num_dropped: int = 0


def event_families(counts: PublishedCounts, families: Families) -> list[Metric]:
    """Zeros where nothing is published."""
    return [
        families.gauge("event_sequence", "Sequence of the next message of events", (), {(): counts.num_messages}),
        families.counter("event_records", "Runs and changes that were told", (), {(): counts.num_records}),
        families.counter("event_tellings", "Times that all was told from the begin", (), {(): counts.num_begun}),
        families.counter("event_drops", "Times that too much was waiting", (), {(): counts.num_dropped}),
    ]
