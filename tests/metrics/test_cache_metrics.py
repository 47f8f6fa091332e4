"""Every series is there at zero from the first scrape on, and counts what happened."""

from __future__ import annotations

from itertools import product

import pytest

from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.metrics.event_metrics import PublishedCounts
from fastdeploy_cache.metrics.histogram import AGE_SECONDS, CALL_SECONDS, TASK_SECONDS, Counted, Histogram
from fastdeploy_cache.metrics.peer_counts import PEER_KINDS, PEER_REASONS
from fastdeploy_cache.metrics.picture import (
    CAUSES,
    EVICTION_KINDS,
    PHASES,
    STATES,
    STEPS,
    STORAGE_FATES,
    STORAGE_LOSSES,
    STORAGE_OPERATIONS,
    Durations,
    Picture,
    StorageCounts,
)
from fastdeploy_cache.metrics.request_counts import TIERS
from fastdeploy_cache.metrics.task_counts import SWAP_KINDS, TASK_KINDS
from fastdeploy_cache.metrics.what_if_metrics import WhatIfCounts
from fastdeploy_cache.stats import CheckpointStats

PREFIX = "fastdeploy_cache_"
INFO = "config_info", frozenset({("block_size", "0"), ("eviction_policy", "")})
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(metrics: CacheMetrics) -> Samples:
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items()) - {("dp", "0")}): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def expected_keys(num_ranks: int) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    ranks = [str(rank) for rank in range(num_ranks)]
    keys = {key("what_if_lost_requests_total"), key("event_sequence"), INFO}
    keys |= {key(f"event_{what}_total") for what in ("records", "tellings", "drops")}
    keys |= {key(name) for name in ("requests_total", "requests_hit_total", "tokens_queried_total")}
    keys |= {key(name) for name in ("skipped_write_blocks_total", "window_request_hit_rate", "window_token_hit_rate")}
    keys |= {key(name, tier=tier) for name in ("tokens_hit_total", "window_tier_token_hit_rate") for tier in TIERS}
    keys |= {key("evicted_blocks_total", tier=t, kind=k) for t in ("gpu", "cpu") for k in EVICTION_KINDS}
    keys |= {key("evicted_checkpoints_total", tier=t, kind=k) for t in ("gpu", "cpu") for k in EVICTION_KINDS}
    keys |= {key("checkpoints", tier=tier) for tier in ("gpu", "cpu")}
    keys |= {key("checkpoints_made_total"), key("checkpoints_refused_total")}
    for name in ("tasks_total", "task_bytes_total", "task_seconds_total", "task_failures_total"):
        keys |= {key(name, kind=d, rank=r) for d, r in product(TASK_KINDS, ranks)}
    keys |= {key("refused_tasks_total", kind=d) for d in SWAP_KINDS}
    keys |= {key("hashed_blocks_total"), key("hash_seconds_total"), key("waiting_for_room")}
    keys |= {key("room_waits_total"), key("room_wait_seconds_total")}
    keys |= {key("failed_steps_total", step=s) for s in STEPS} | {key("quarantined_blocks")}
    keys |= {key("storage_breaker_state", operation=o) for o in STORAGE_OPERATIONS}
    keys |= {key("storage_blocks_total", fate=f) for f in STORAGE_FATES}
    keys |= {key("storage_lost_objects_total", reason=r) for r in STORAGE_LOSSES}
    keys |= {key("storage_up"), key("storage_disk_full")}
    keys |= {key("tokens_missed_total", cause=c) for c in CAUSES}
    keys |= {key(name, tier=tier) for name in ("saved_seconds_total", "load_seconds_total") for tier in TIERS}
    for name in ("peer_transfers_total", "peer_bytes_total", "peer_seconds_total"):
        keys |= {key(name, kind=d, peer="") for d in PEER_KINDS}
    keys |= {key("peer_failures_total", kind=d, peer="", reason=r) for d in PEER_KINDS for r in PEER_REASONS}
    keys |= {key("peer_layers_in_flight", peer="")}
    keys |= {key("tasks_in_flight", kind=k) for k in TASK_KINDS} | {key("matched_requests", phase=p) for p in PHASES}
    keys |= {key("life_cycle_state", state=state) for state in STATES}
    keys |= histogram_keys("match_duration_seconds", CALL_SECONDS)
    keys |= histogram_keys("prefetch_duration_seconds", TASK_SECONDS)
    keys |= histogram_keys("reuse_gap_seconds", AGE_SECONDS)
    for kind in TASK_KINDS:
        keys |= histogram_keys("task_duration_seconds", TASK_SECONDS, kind=kind)
    for tier, name in product(("gpu", "cpu"), ("eviction_residency_seconds", "eviction_idle_seconds")):
        keys |= histogram_keys(name, AGE_SECONDS, tier=tier)
    return keys | {key(name, rank=r) for name in ("rank_up", "rank_restarts_total") for r in ranks}


def histogram_keys(name: str, bounds: tuple[float, ...], **labels: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    buckets = {key(f"{name}_bucket", **labels, le=le) for le in (*(f"{bound:g}" for bound in bounds), "+Inf")}
    return buckets | {key(f"{name}_{end}", **labels) for end in ("sum", "count")}


def filled(bounds: tuple[float, ...]) -> Counted:
    histogram = Histogram(bounds)
    for bound in bounds:
        histogram.add(bound)
    return histogram.read()


def test_all_series_exist_at_zero_from_the_first_scrape() -> None:
    """Every rank, tier and kind is there before anything happened: no series appears later from nowhere."""
    samples = scrape(CacheMetrics(tp_size=3))
    assert set(samples) == expected_keys(3)
    assert samples.pop(INFO) == 1
    assert set(samples.values()) == {0.0}


def test_no_series_appears_later() -> None:
    """Doing everything once changes values, never the set of series."""
    metrics = CacheMetrics(tp_size=2)
    metrics.record_request(10, (1, 1, 1))
    metrics.record_skipped_writes(1)
    for kind, rank in product(TASK_KINDS, range(2)):
        metrics.record_task(kind, rank, 1, 1.0, failed=True)
    for kind, bound in product(TASK_KINDS, TASK_SECONDS):
        metrics.record_task_duration(kind, bound)
    for bound in TASK_SECONDS:
        metrics.record_prefetch(bound)
    for kind, reason in product(PEER_KINDS, PEER_REASONS):
        metrics.record_peer(kind, "", 1, 1.0, reason)
    metrics.observe_peers(lambda: {"": 1})
    ages = dict.fromkeys(("gpu", "cpu"), filled(AGE_SECONDS))
    counts = (dict.fromkeys(names, 1) for names in (STORAGE_OPERATIONS, STORAGE_FATES, STORAGE_LOSSES))
    picture = Picture(
        evictions=[(tier, kind, 1) for tier, kind in product(("gpu", "cpu"), EVICTION_KINDS)],
        checkpoints=CheckpointStats(num_in=(1, 1), num_evicted=((1, 1), (1, 1)), num_made=1, num_refused=1),
        ranks=[(0, True, 1), (1, True, 1)],
        refused_tasks=dict.fromkeys(SWAP_KINDS, 1),
        tasks_in_flight=dict.fromkeys(TASK_KINDS, 1),
        requests=dict.fromkeys(PHASES, 1),
        num_waiting_for_room=1,
        room_waits=(1, 1.0),
        storage=StorageCounts(True, *counts, num_full_disks=1),
        failed_steps=dict.fromkeys(STEPS, 1),
        num_quarantined_blocks=1,
        num_hashed_blocks=1,
        hash_seconds=1.0,
        missed_tokens=dict.fromkeys(CAUSES, 1),
        saved_seconds=dict.fromkeys(TIERS, 1.0),
        load_seconds=dict.fromkeys(TIERS, 1.0),
        life_cycle="running",
        times=Durations(ages, ages, filled(AGE_SECONDS), filled(CALL_SECONDS)),
        what_if=WhatIfCounts(num_lost_requests=1),
        events=PublishedCounts(1, 1, 1, 1),
    )
    metrics.observe(lambda: picture)
    samples = scrape(metrics)
    assert set(samples) == expected_keys(2)
    others = {key("life_cycle_state", state=state) for state in STATES if state != "running"}
    assert {name for name, value in samples.items() if not value} == others, "and each was counted"


def test_values_fall_into_buckets_with_their_weights() -> None:
    """A bucket holds what is at most its bound and has all buckets before it in it; the last one has everything."""
    metrics, gaps = CacheMetrics(), Histogram(AGE_SECONDS)
    gaps.add(1.0, 10)
    gaps.add(1.1, 5)
    gaps.add(1e6)
    metrics.observe(lambda: Picture(times=Durations(reuse_gaps=gaps.read())))
    samples = scrape(metrics)
    shown = {le: samples[key("reuse_gap_seconds_bucket", le=le)] for le in ("0.1", "1", "5", "86400", "+Inf")}
    assert shown == {"0.1": 0, "1": 10, "5": 15, "86400": 15, "+Inf": 16}
    assert samples[key("reuse_gap_seconds_count")] == 16
    assert samples[key("reuse_gap_seconds_sum")] == pytest.approx(10 + 5.5 + 1e6)


def test_peers_are_counted_by_name() -> None:
    """What goes to and comes from another instance, with its failures by reason, has series of that instance's name."""
    metrics = CacheMetrics()
    metrics.record_peer("receive", "prefill-1", 100, 0.5, None)
    metrics.record_peer("receive", "prefill-1", 0, 1.5, "gone")
    metrics.observe_peers(lambda: {"prefill-1": 7})
    samples = scrape(metrics)
    labels = {"kind": "receive", "peer": "prefill-1"}
    counted = [samples[key(f"peer_{name}_total", **labels)] for name in ("transfers", "bytes", "seconds")]
    assert counted == [2, 100, 2.0]
    assert samples[key("peer_failures_total", **labels, reason="gone")] == 1
    assert samples[key("peer_layers_in_flight", peer="prefill-1")] == 7


def test_requests_and_tokens_are_counted() -> None:
    """Counters only grow, by what was recorded; tokens by the tier that served them."""
    metrics = CacheMetrics(clock=lambda: 5.0)
    metrics.record_request(100, (60, 20, 0))
    metrics.record_request(50, (0, 0, 0))
    samples = scrape(metrics)
    assert (samples[key("requests_total")], samples[key("requests_hit_total")]) == (2, 1)
    assert samples[key("tokens_queried_total")] == 150
    assert [samples[key("tokens_hit_total", tier=tier)] for tier in TIERS] == [60, 20, 0]
    assert samples[key("window_request_hit_rate")] == 0.5
    assert samples[key("window_token_hit_rate")] == pytest.approx(80 / 150)
    assert samples[key("window_tier_token_hit_rate", tier="cpu")] == pytest.approx(20 / 150)


def test_the_window_forgets_what_the_counters_keep() -> None:
    """Gauges follow the clock; counters do not. That there is no rate is known, too."""
    now = [0.0]
    metrics = CacheMetrics(window_seconds=60.0, clock=lambda: now[0])
    metrics.record_request(10, (5, 0, 0))
    rates = {"request": 1.0, "token": 0.5, "gpu": 0.5, "cpu": 0.0, "storage": 0.0}
    assert metrics.hit_rates() == metrics.known_hit_rates() == rates
    now[0] = 100.0
    assert set(metrics.hit_rates().values()) == {0.0} and set(metrics.known_hit_rates().values()) == {None}
    assert scrape(metrics)[key("tokens_hit_total", tier="gpu")] == 5


def test_tasks_are_counted_for_each_rank_and_kind() -> None:
    """Bytes, seconds, tasks and failures go to the rank and kind that they belong to."""
    metrics = CacheMetrics(tp_size=2)
    metrics.record_task("swap_in", 1, 4096, 0.5, failed=False)
    metrics.record_task("swap_in", 1, 1024, 0.25, failed=False)
    metrics.record_task("swap_out", 0, 0, 0.0, failed=True)
    samples = scrape(metrics)
    loads = {"kind": "swap_in", "rank": "1"}
    stores = {"kind": "swap_out", "rank": "0"}
    assert (samples[key("tasks_total", **loads)], samples[key("task_bytes_total", **loads)]) == (2, 5120)
    assert (samples[key("task_seconds_total", **loads)], samples[key("task_failures_total", **loads)]) == (0.75, 0)
    assert (samples[key("tasks_total", **stores)], samples[key("task_failures_total", **stores)]) == (1, 1)
    assert samples[key("tasks_total", kind="swap_in", rank="0")] == 0


def test_evictions_and_skipped_writes_are_counted() -> None:
    """By tier and by whether a copy remains."""
    metrics = CacheMetrics()
    metrics.observe(lambda: Picture(evictions=[("gpu", "copy_kept", 3), ("gpu", "dropped", 2)]))
    metrics.record_skipped_writes(4)
    samples = scrape(metrics)
    assert samples[key("evicted_blocks_total", tier="gpu", kind="copy_kept")] == 3
    assert samples[key("evicted_blocks_total", tier="gpu", kind="dropped")] == 2
    assert samples[key("evicted_blocks_total", tier="cpu", kind="dropped")] == 0
    assert samples[key("skipped_write_blocks_total")] == 4


def test_gauges_are_read_at_every_scrape() -> None:
    """Blocks and ranks show what `observe` was given to ask, as it is now."""
    ranks = [(0, True, 0), (1, False, 0)]
    metrics = CacheMetrics(tp_size=2)
    metrics.observe(lambda: Picture(blocks=[("gpu", "free", 7), ("cpu", "pinned", 1)], ranks=ranks))
    samples = scrape(metrics)
    assert samples[key("blocks", tier="gpu", state="free")] == 7
    assert [samples[key("rank_up", rank=rank)] for rank in "01"] == [1, 0]
    ranks[:] = [(0, False, 4), (1, True, 0)]
    samples = scrape(metrics)
    assert [samples[key("rank_up", rank=rank)] for rank in "01"] == [0, 1]
    assert samples[key("rank_restarts_total", rank="0")] == 4


def test_the_data_parallel_id_is_on_every_series() -> None:
    """Engines of one group can share a dashboard: each sample carries its engine's number."""
    families = list(CacheMetrics(data_parallel_id=3).collect())
    assert families and all(sample.labels["dp"] == "3" for family in families for sample in family.samples)


def test_a_scrape_that_stops_half_way_does_not_stop_the_cache() -> None:
    """Whoever reads slowly or gives up holds no lock: the engine's verbs record under the manager's own."""
    metrics = CacheMetrics()
    scraping = metrics.collect()
    next(scraping)
    assert not metrics._lock.locked()
