"""Spans of OpenTelemetry: one for each hop, below the engine's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import ConfigError
from tests.rigs.storage_rig import A, Rig, stored

ON = InsightConfig(traces=True)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What an engine's provider has been given."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name.removeprefix("fastdeploy_cache."), []).append(span)
    return found


def test_each_hop_stands_below_the_engine_s_span(spans: InMemorySpanExporter) -> None:
    """A prompt in storage alone: its look-up and its reads below the prefetch's caller, match and load below the
    match's; what nobody waits for has no parent."""
    objects = stored(A)
    spans.clear()
    rig = Rig(objects, insight=ON)
    rig.know(A)
    engine = trace.get_tracer("engine")
    with engine.start_as_current_span("queued") as queued:
        rig.prefetch(A)
    rig.store.land_all()
    with engine.start_as_current_span("step") as step:
        live = rig.match(A)
    rig.land_all()
    rig.model.settle(live)
    rig.model.release(live)
    rig.finish()
    found, of_queue, of_step = by_name(spans), queued.get_span_context(), step.get_span_context()
    for name, parent in (("lookup", of_queue), ("prefetch", of_queue), ("request_prefetch", of_queue)):
        assert [span.parent for span in found[name] if span.parent] == [parent] * len(found[name]), name
    (match,) = [span for span in found["match"] if span.attributes and span.parent == of_step]
    assert match.attributes is not None and match.attributes["fastdeploy_cache.num_tokens"] == len(A)
    (load,) = found["swap_in"]
    assert load.parent == of_step and load.attributes is not None
    assert load.attributes["fastdeploy_cache.num_blocks"] == 10
    assert all(span.parent is None for name in ("swap_out", "probe") for span in found.get(name, ()))
    assert all(span.start_time is not None and span.end_time >= span.start_time for span in spans.get_finished_spans())


def test_a_hop_that_failed_says_why(spans: InMemorySpanExporter) -> None:
    """Its span has the status ERROR."""
    rig = Rig(stored(A), insight=ON)
    rig.know(A)
    spans.clear()
    rig.prefetch(A)
    rig.store.land()
    rig.store.land("the disk is gone")
    rig.finish()
    failed = [span for span in by_name(spans)["prefetch"] if span.status.status_code is trace.StatusCode.ERROR]
    assert "rank 0: the disk is gone" in {span.status.description for span in failed}


def test_the_flight_recorder_hears_all_the_same(spans: InMemorySpanExporter) -> None:
    """With spans and without, it keeps as many notes; and spans are made without it, too."""
    counts = []
    for insight in (InsightConfig(), ON, InsightConfig(traces=True, flight_recorder_bytes=0)):
        rig = Rig(insight=insight)
        for _ in range(2):
            rig.model.serve(A, stays=False, patient=True)
        flight = rig.model.cache._seen.flight
        counts.append(sum(len(list(part.notes)) for part in flight.recorder.parts()) if flight is not None else -1)
        rig.finish()
    assert counts[0] == counts[1] > 4 and counts[2] == -1
    assert len(by_name(spans)["match"]) == 4


def test_without_opentelemetry_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install; without the setting nothing of it is loaded."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"fastdeploy-cache\[otel\]"):
        PrefixCacheManager(CacheConfig(num_gpu_blocks=4, transfer_client="inline", insight=ON))
    PrefixCacheManager(CacheConfig(num_gpu_blocks=4, transfer_client="inline")).close()
