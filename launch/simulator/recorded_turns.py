"""The records of a flight recording, those of one step together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from fastdeploy_cache.insight.flight.records import Record, RecordKind

_OF_STEPS: Final = frozenset({RecordKind.ALLOCATED, RecordKind.REFUSED, RecordKind.COMMITTED, RecordKind.DRAFTED})
_MOST_HELD: Final = 65_536  # requests of a step


def turns(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Each record by itself, but those of one step of several requests, which the record behind them tells of."""
    held = list[Record]()
    for record in records:
        kind = record["kind"]
        if kind in _OF_STEPS and len(held) < _MOST_HELD:
            held.append(record)
            continue
        num_together = min(len(held), record["num_records"]) if kind is RecordKind.STEPPED else 0
        yield from ([each] for each in held[: len(held) - num_together])
        known_before = RecordKind.DRAFTED
        together = [each for each in held[len(held) - num_together :] if each["kind"] is not known_before]
        if together:
            yield together
        if kind is not RecordKind.STEPPED:
            yield [record]
        held = []
    yield from ([each] for each in held)
