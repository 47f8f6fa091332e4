"""The doctor where no running cache is asked: over a page of metrics (a file or an address), and over a recording."""

from __future__ import annotations

import dataclasses
from http.client import HTTPException
from pathlib import Path
from typing import Any

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import MetricsError, RecordingError
from fastdeploy_cache.insight.doctor.doctor import examine
from fastdeploy_cache.insight.doctor.evidence import evidence_of_requests
from fastdeploy_cache.insight.doctor.finding import Finding
from fastdeploy_cache.insight.doctor.metrics_evidence import evidence_in_metrics
from fastdeploy_cache.insight.flight.file import read_recording
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay

_ASK_SECONDS = 5.0
_NUM_EXPLAINED = 100_000  # requests: more than a recording has


def findings_of_page(source: str) -> list[dict[str, Any]]:
    """What is wrong with the caches on a page, each with its data-parallel id and a `text` to print.

    Raises:
        MetricsError: the file or the address cannot be read, or it is no page of a cache's metrics.
    """
    return [
        {"dp": dp, **dataclasses.asdict(each), "text": str(each)}
        for dp, case in evidence_in_metrics(_read(source)).items()
        for each in examine(case)
    ]


def _read(source: str) -> str:
    try:
        if "://" not in source:
            return Path(source).read_text()
        from fastdeploy_cache.metrics.remote import RemoteMetrics  # late: a web server comes with it

        return RemoteMetrics(source, _ASK_SECONDS).page().decode()
    except (OSError, HTTPException, ValueError) as error:
        raise MetricsError(f"{source} cannot be read ({error}); give a file or an address of metrics") from error


def findings_of_recording(path: Path) -> list[dict[str, Any]]:
    """What is wrong with the cache that made the recording, each with a `text` to print: it is served again.

    The replay takes no time, so nothing is said of ages; what is wrong with ranks and storage is not in a recording.

    Raises:
        RecordingError: the file cannot be read, or not replayed, or has no request.
    """
    found: list[Finding] = []

    def judge(cache: PrefixCacheManager) -> None:
        case = evidence_of_requests(cache.config, cache.explain_last(_NUM_EXPLAINED))
        misses = [dataclasses.replace(miss, seconds_ago=None) for miss in case.misses]
        found.extend(examine(dataclasses.replace(case, misses=misses)))

    recording = read_recording(path)
    outcome = FlightReplay(recording, {"num_explained_requests": _NUM_EXPLAINED}).run(judge)
    if not outcome.num_requests:
        raise RecordingError(recording.note or f"{path} has no request to judge by")
    return [{**dataclasses.asdict(each), "text": str(each)} for each in found]
