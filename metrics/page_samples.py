"""The samples of a page of metrics, as Prometheus would read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fastdeploy_cache.errors import MetricsError


class Sample(NamedTuple):
    """A series and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples_of(text: str) -> list[Sample]:
    """All of them, in the order of the page.

    Raises:
        MetricsError: this is no page of metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families  # late: few read a page

    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(f"this is no page of metrics: {error}; give what /metrics answers") from error
    return [Sample(each.name, each.labels, each.value) for family in families for each in family.samples]
