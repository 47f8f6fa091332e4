"""What a cache shows of itself at a scrape: one picture, taken at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fastdeploy_cache.metrics.event_metrics import PublishedCounts, event_families
from fastdeploy_cache.metrics.families import Families, Values, by_one
from fastdeploy_cache.metrics.histogram import AGE_SECONDS, CALL_SECONDS, Counted, Histogram
from fastdeploy_cache.metrics.request_counts import TIERS
from fastdeploy_cache.metrics.task_counts import SWAP_KINDS, TASK_KINDS
from fastdeploy_cache.metrics.what_if_metrics import WhatIfCounts, what_if_families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BLOCK_TIERS = ("gpu", "cpu")
EVICTION_KINDS = ("copy_kept", "dropped")
STORAGE_OPERATIONS = ("read", "write")
STORAGE_FATES = ("fetched", "unasked", "written", "skipped")
STORAGE_LOSSES = ("evicted", "declined", "damaged")
STEPS = (
    *("policy", "copy_down", "write_out", "prefetch", "landing", "client", "metrics", "callback", "settling"),
    "checkpoint",
)
CAUSES = (  # why a token was missed: see `fastdeploy_cache.books.causes`
    *("new", "new_or_forgotten", "evicted", "namespace", "image", "uncommitted", "late", "slower", "rank", "room"),
    *("limit", "reset", "partial", "last", "unanchored", "expired"),
)
PHASES = ("waiting", "ahead", "settled", "void")  # of a request: see `fastdeploy_cache.requests.active_request`
STATES = ("running", "pausing", "paused", "falling_asleep", "asleep", "waking", "clearing", "updating")
NONE: Mapping[str, int] = MappingProxyType({})
_NO_AGE, _NO_CALL = Histogram(AGE_SECONDS).read(), Histogram(CALL_SECONDS).read()


class StorageCounts(NamedTuple):
    """What is known of the attached store.

    The breaker's state by operation, blocks by what became of them here, objects by how it lost them, and how many
    ranks' disks are full.
    """

    is_up: bool = False
    breakers: Mapping[str, int] = NONE
    blocks: Mapping[str, int] = NONE
    objects: Mapping[str, int] = NONE
    num_full_disks: int = 0


class CheckpointSums(Protocol):
    """Those of a hybrid model: see `fastdeploy_cache.stats.CheckpointStats`."""

    @property
    def num_in(self) -> tuple[int, int]: ...
    @property
    def num_evicted(self) -> tuple[tuple[int, int], tuple[int, int]]: ...
    @property
    def num_made(self) -> int: ...
    @property
    def num_refused(self) -> int: ...


class Durations(NamedTuple):
    """Histograms of seconds. `residency` and `idle` are by tier and count blocks; the others count requests."""

    residency: Mapping[str, Counted] = MappingProxyType({})
    idle: Mapping[str, Counted] = MappingProxyType({})
    reuse_gaps: Counted = _NO_AGE
    matches: Counted = _NO_CALL


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Everything that is not counted here but asked for at each scrape. What is not in a mapping is zero.

    Attributes:
        blocks: tier, state, blocks now.
        units: row, state, units now, of a hybrid model.
        tenants: namespace, tier, kind, blocks now, of namespaces that have a share.
        evictions: tier, kind, blocks so far.
        ranks: rank, whether it is up, restarts. None: nobody knows yet. Empty where there are no processes.
        processes: kind, rank, number of its state.
        refused_tasks: by kind, tasks that a full queue kept from starting.
        tasks_in_flight: by kind, tasks that not every rank has answered.
        requests: by phase, those that are matched now.
        num_waiting_for_room: matches and allocations that wait for GPU blocks now.
        room_waits: how many such waits have ended, and their seconds.
        missed_tokens: so far, by cause.
        saved_seconds, load_seconds: so far, by tier.
    """

    blocks: Sequence[tuple[str, str, int]] = ()
    units: Sequence[tuple[str, str, int]] = ()
    tenants: Sequence[tuple[str, str, str, int]] = ()
    checkpoints: CheckpointSums | None = None
    evictions: Sequence[tuple[str, str, int]] = ()
    ranks: Sequence[tuple[int, bool, int]] | None = None
    processes: Sequence[tuple[str, int, int]] = ()
    refused_tasks: Mapping[str, int] = field(default_factory=dict)
    tasks_in_flight: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    num_waiting_for_room: int = 0
    room_waits: tuple[int, float] = (0, 0.0)
    storage: StorageCounts = field(default_factory=StorageCounts)
    failed_steps: Mapping[str, int] = field(default_factory=dict)
    num_quarantined_blocks: int = 0
    num_hashed_blocks: int = 0
    hash_seconds: float = 0.0
    missed_tokens: Mapping[str, int] = field(default_factory=dict)
    saved_seconds: Mapping[str, float] = field(default_factory=dict)
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    life_cycle: str = ""
    times: Durations = field(default_factory=Durations)
    what_if: WhatIfCounts = field(default_factory=WhatIfCounts)
    events: PublishedCounts = field(default_factory=PublishedCounts)
    block_size: int = 0
    eviction_policy: str = ""


def picture_families(picture: Picture, families: Families, num_ranks: int) -> list[Metric]:
    """What Prometheus is shown of it. `num_ranks`: that are shown as down where nobody knows of any."""
    settings, text = (str(picture.block_size), picture.eviction_policy), "1, with settings of the cache as labels"
    return [
        *_block_families(picture, families),
        *_row_families(picture, families),
        *_task_families(picture, families),
        *_worth_families(picture, families),
        *_storage_families(picture.storage, families),
        *_process_families(picture, families, num_ranks),
        *_time_families(picture.times, families),
        *what_if_families(picture.what_if, families),
        *event_families(picture.events, families),
        families.gauge("config_info", text, ("block_size", "eviction_policy"), {settings: 1}),
    ]


def _block_families(picture: Picture, families: Families) -> list[Metric]:
    blocks: dict[tuple[str, ...], float] = {(t, s): n for t, s, n in picture.blocks}
    evictions: dict[tuple[str, ...], float] = {(t, k): 0 for t in BLOCK_TIERS for k in EVICTION_KINDS}
    evictions |= {(t, k): n for t, k, n in picture.evictions}
    text = "Blocks that left a tier; copy_kept: another tier still has them"
    quarantined = "Blocks of ended tasks whose landing failed: nobody gets them any more"
    by_state = "Blocks by tier and state; pinned: held by requests, copies or pins"
    hashed = "Cached blocks whose hash storage, a peer or an adapter has asked for"
    of_tenants, own = "Blocks of namespaces with a share, and of their shares", ("namespace", "tier", "kind")
    tenants: dict[tuple[str, ...], float] = {tuple(key): n for *key, n in picture.tenants}
    return [
        families.gauge("blocks", by_state, ("tier", "state"), blocks),
        families.counter("evicted_blocks", text, ("tier", "kind"), evictions),
        families.gauge("tenant_blocks", of_tenants, own, tenants),
        families.gauge("quarantined_blocks", quarantined, (), {(): picture.num_quarantined_blocks}),
        families.counter("hashed_blocks", hashed, (), {(): picture.num_hashed_blocks}),
        families.counter("hash_seconds", "Time spent on computing these hashes", (), {(): picture.hash_seconds}),
    ]


def _row_families(picture: Picture, families: Families) -> list[Metric]:
    counts = picture.checkpoints
    num_in = counts.num_in if counts is not None else (0, 0)
    num_evicted = counts.num_evicted if counts is not None else ((0, 0), (0, 0))
    num_made, num_refused = (counts.num_made, counts.num_refused) if counts is not None else (0, 0)
    evicted: Values = {
        (tier, kind): n
        for tier, kinds in zip(BLOCK_TIERS, num_evicted, strict=True)
        for kind, n in zip(EVICTION_KINDS, kinds, strict=True)
    }
    there: Values = {(tier,): n for tier, n in zip(BLOCK_TIERS, num_in, strict=True)}
    units = "Units of the rows behind the full one by row and state; evictable and pinned: of checkpoints"
    refused = "Checkpoints for which there was no slot, no unit or no memory"
    left = "Checkpoints that left a tier for room; copy_kept: another tier still has them"
    return [
        families.gauge("units", units, ("row", "state"), {(row, state): n for row, state, n in picture.units}),
        families.gauge("checkpoints", "Checkpoints that are in a tier now", ("tier",), there),
        families.counter("checkpoints_made", "Checkpoints that requests have made", (), {(): num_made}),
        families.counter("checkpoints_refused", refused, (), {(): num_refused}),
        families.counter("evicted_checkpoints", left, ("tier", "kind"), evicted),
    ]


def _task_families(picture: Picture, families: Families) -> list[Metric]:
    refused, in_flight = by_one(SWAP_KINDS, picture.refused_tasks), by_one(TASK_KINDS, picture.tasks_in_flight)
    text = "Tasks that were not started because the ranks' queue was full"
    requests = "Requests that are matched now, by their phase; waiting ones have loads on their way"
    steps = "Steps that a verb took along, that failed, and that it did without"
    waiting = "Matches and allocations that wait for GPU blocks which copies in flight will give back"
    (num_waits, seconds), waits = picture.room_waits, "Waits for GPU blocks that have ended, with and without success"
    return [
        families.counter("refused_tasks", text, ("kind",), refused),
        families.gauge("tasks_in_flight", "Tasks that not every rank has answered yet", ("kind",), in_flight),
        families.gauge("matched_requests", requests, ("phase",), by_one(PHASES, picture.requests)),
        families.gauge("waiting_for_room", waiting, (), {(): picture.num_waiting_for_room}),
        families.counter("room_waits", waits, (), {(): num_waits}),
        families.counter("room_wait_seconds", "Time that these waits took together", (), {(): seconds}),
        families.counter("failed_steps", steps, ("step",), by_one(STEPS, picture.failed_steps)),
    ]


def _worth_families(picture: Picture, families: Families) -> list[Metric]:
    missed = "Prompt tokens that were computed, by the reason why no tier served them"
    saved = "Time that computing what a tier served would have taken, by the prefill speed seen"
    spent = "Time that requests waited for what a tier served, as far as it was moved"
    return [
        families.counter("tokens_missed", missed, ("cause",), by_one(CAUSES, picture.missed_tokens)),
        families.counter("saved_seconds", saved, ("tier",), by_one(TIERS, picture.saved_seconds)),
        families.counter("load_seconds", spent, ("tier",), by_one(TIERS, picture.load_seconds)),
    ]


def _storage_families(storage: StorageCounts, families: Families) -> list[Metric]:
    is_up, breakers, blocks, objects, num_full_disks = storage
    full = "Ranks whose store writes less than it should, as its disk has no room"
    states = "0: storage is used, 1: it is being probed, 2: it has failed too often and is left alone"
    fates = "Blocks that came from storage, are in it after a write, and were to be written and were not"
    lost = "Objects that the store has evicted, did not admit, or has found damaged and removed"
    operations = by_one(STORAGE_OPERATIONS, breakers)
    return [
        families.gauge("storage_up", "1 while every rank has the store open", (), {(): int(is_up)}),
        families.gauge("storage_disk_full", full, (), {(): num_full_disks}),
        families.gauge("storage_breaker_state", states, ("operation",), operations),
        families.counter("storage_blocks", fates, ("fate",), by_one(STORAGE_FATES, blocks)),
        families.counter("storage_lost_objects", lost, ("reason",), by_one(STORAGE_LOSSES, objects)),
    ]


def _process_families(picture: Picture, families: Families, num_ranks: int) -> list[Metric]:
    # none where the cache runs without rank processes: nothing is down then
    ranks = picture.ranks if picture.ranks is not None else [(rank, False, 0) for rank in range(num_ranks)]
    ups: dict[tuple[str, ...], float] = {(str(rank),): up for rank, up, _ in ranks}
    restarts: dict[tuple[str, ...], float] = {(str(rank),): num for rank, _, num in ranks}
    processes: dict[tuple[str, ...], float] = {(kind, str(rank)): n for kind, rank, n in picture.processes}
    waits = "0 ready, 1 starting, 2 waits for descriptors, threads or memory, 3 off, 4 has no KV arrays"
    states = by_one(STATES, {picture.life_cycle: 1})
    text = "1 for the state of the life cycle that the cache is in; bytes move in running alone"
    return [
        families.gauge("rank_up", "1 while the rank is ready", ("rank",), ups),
        families.counter("rank_restarts", "Restarts of a rank", ("rank",), restarts),
        families.gauge("process_state", waits, ("process", "rank"), processes),
        families.gauge("life_cycle_state", text, ("state",), states),
    ]


def _time_families(times: Durations, families: Families) -> list[Metric]:
    residency = "Time that evicted blocks had been in the tier; counts blocks"
    idle = "Time from the last use of evicted blocks to their eviction; counts blocks"
    gaps = "Time from the last use of the last blocks that a request hit to its match; counts requests"
    matches = "Time inside match(), of requests that were admitted"
    by_tier = ("tier",)
    residencies: dict[tuple[str, ...], Counted] = {(tier,): times.residency.get(tier, _NO_AGE) for tier in BLOCK_TIERS}
    idles: dict[tuple[str, ...], Counted] = {(tier,): times.idle.get(tier, _NO_AGE) for tier in BLOCK_TIERS}
    return [
        families.histogram("eviction_residency_seconds", residency, by_tier, residencies),
        families.histogram("eviction_idle_seconds", idle, by_tier, idles),
        families.histogram("reuse_gap_seconds", gaps, (), {(): times.reuse_gaps}),
        families.histogram("match_duration_seconds", matches, (), {(): times.matches}),
    ]
