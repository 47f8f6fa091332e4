"""The doctor over a page of metrics: a file that was saved, or an address."""

from __future__ import annotations

import dataclasses
from http.client import HTTPException
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import MetricsError
from fastdeploy_cache.insight.doctor.doctor import examine
from fastdeploy_cache.insight.doctor.metrics_evidence import evidence_in_metrics

_ASK_SECONDS = 5.0


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
