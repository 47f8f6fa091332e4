"""The doctor over a file of the flight recorder: the recording is served again, and what that cache shows is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import RecordingError
from fastdeploy_cache.insight.doctor.doctor import examine
from fastdeploy_cache.insight.doctor.evidence import evidence_of_requests
from fastdeploy_cache.insight.doctor.finding import Finding
from fastdeploy_cache.insight.flight.file import read_recording
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay

_NUM_EXPLAINED = 100_000  # requests: more than a recording has


def findings_of_recording(path: Path) -> list[dict[str, Any]]:
    """What is wrong with the cache that made the recording, each with a `text` to print.

    The replay takes no time, so nothing is said of ages; what is wrong with ranks and storage is not in a recording.

    Raises:
        RecordingError: the file cannot be read, or not replayed, or has no request.
    """
    found: list[Finding] = []

    def judge(cache: PrefixCacheManager) -> None:
        found.extend(_judge(cache))

    recording = read_recording(path)
    outcome = FlightReplay(recording, {"num_explained_requests": _NUM_EXPLAINED}).run(judge)
    if not outcome.num_requests:
        raise RecordingError(recording.note or f"{path} has no request to judge by")
    return [{**dataclasses.asdict(each), "text": str(each)} for each in found]


def _judge(cache: PrefixCacheManager) -> Sequence[Finding]:
    case = evidence_of_requests(cache.config, cache.explain_last(_NUM_EXPLAINED))
    return examine(dataclasses.replace(case, misses=[dataclasses.replace(m, seconds_ago=None) for m in case.misses]))
