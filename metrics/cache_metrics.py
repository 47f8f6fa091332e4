"""Every series of the cache: its name, labels, help text, and the numbers behind it.

The cache adds to plain integers, once for each request or task; Prometheus objects are made at scrape time only.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from fastdeploy_cache.metrics.hit_rate import HitRateWindow
from fastdeploy_cache.metrics.what_if_metrics import WhatIfCounts, what_if_families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

TIERS = ("gpu", "cpu", "storage")
SWAP_KINDS = ("swap_in", "swap_out", "copy")
TASK_KINDS = (*SWAP_KINDS, "lookup", "prefetch", "write", "probe")  # the last four are of storage
EVICTION_KINDS = ("copy_kept", "dropped")
STORAGE_OPERATIONS = ("read", "write")
STORAGE_FATES = ("fetched", "unasked", "written", "skipped")
STORAGE_LOSSES = ("evicted", "declined", "damaged")
STEPS = ("policy", "copy_down", "write_out", "prefetch", "landing", "client", "metrics", "callback", "settling")
CAUSES = (  # why a token was missed: see `fastdeploy_cache.causes`
    *("new", "new_or_forgotten", "evicted", "namespace", "image", "uncommitted", "late", "slower", "rank", "room"),
    *("limit", "reset", "partial", "last"),
)
PEER_KINDS = ("send", "receive")
PEER_REASONS = ("gone", "late", "refused", "failed", "cancelled", "full")

BlockCounts = Iterable[tuple[str, str, int]]  # tier, state, blocks
EvictionCounts = Iterable[tuple[str, str, int]]  # tier, kind, blocks
RefusedCounts = Iterable[tuple[str, int]]  # kind, tasks
RankCounts = Iterable[tuple[int, bool, int]]  # rank, up, restarts
WorthCounts = tuple[Mapping[str, int], Mapping[str, float], Mapping[str, float]]  # by cause; by tier; by tier
HashCounts = tuple[int, float]  # blocks, seconds
FailureCounts = tuple[Mapping[str, int], int]  # by step, failures; quarantined blocks


class StorageCounts(NamedTuple):
    """What is known of the attached store.

    The breaker's state by operation, blocks by what became of them here, objects by how it lost them, and how many
    ranks' disks are full.
    """

    is_up: bool = False
    breakers: Mapping[str, int] = MappingProxyType({})
    blocks: Mapping[str, int] = MappingProxyType({})
    objects: Mapping[str, int] = MappingProxyType({})
    num_full_disks: int = 0


@dataclass(slots=True)
class _PeerSums:
    num_tasks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class TaskSums:
    """What became of tasks of one kind."""

    num_tasks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_failures: int = 0


class CacheMetrics:
    """Counts what the cache did; a collector for `prometheus_client`. Any thread may call any method.

    All series exist, at zero, from the first scrape on, but for those of single peers.
    """

    def __init__(
        self,
        *,
        tp_size: int = 1,
        data_parallel_id: int = 0,
        window_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = range(tp_size)
        self._dp = str(data_parallel_id)
        self._clock = clock
        self._lock = Lock()
        self._window = HitRateWindow(window_seconds)
        self._num_requests = 0
        self._num_requests_hit = 0
        self._num_tokens = 0
        self._hit_tokens = (0,) * len(TIERS)
        self._tasks: defaultdict[tuple[str, int], TaskSums] = defaultdict(TaskSums)
        self._peers: defaultdict[tuple[str, str], _PeerSums] = defaultdict(_PeerSums)  # kind, peer
        self._peer_failures: defaultdict[tuple[str, str, str], int] = defaultdict(int)  # kind, peer, reason
        self._layers_in_flight: Callable[[], Mapping[str, int]] = dict
        self._num_skipped_writes = 0
        self._blocks: Callable[[], BlockCounts] = tuple
        self._evictions: Callable[[], EvictionCounts] = tuple
        self._rank_counts: Callable[[], RankCounts] | None = None
        self._refused: Callable[[], RefusedCounts] = tuple
        self._storage: Callable[[], StorageCounts] = StorageCounts
        self._failures: Callable[[], FailureCounts] = lambda: ({}, 0)
        self._hashes: Callable[[], HashCounts] = lambda: (0, 0.0)
        self._worths: Callable[[], WorthCounts] = lambda: ({}, {}, {})
        self._what_if: Callable[[], WhatIfCounts] = WhatIfCounts

    @property
    def data_parallel_id(self) -> int:
        """What its series are labelled with."""
        return int(self._dp)

    def observe(
        self,
        blocks: Callable[[], BlockCounts],
        evictions: Callable[[], EvictionCounts],
        ranks: Callable[[], RankCounts],
        refused: Callable[[], RefusedCounts] = tuple,
        storage: Callable[[], StorageCounts] = StorageCounts,
        *,
        failures: Callable[[], FailureCounts] = lambda: ({}, 0),
        hashes: Callable[[], HashCounts] = lambda: (0, 0.0),
        worths: Callable[[], WorthCounts] = lambda: ({}, {}, {}),
        what_if: Callable[[], WhatIfCounts] = WhatIfCounts,
    ) -> None:
        """Read these at every scrape: blocks by tier and state, blocks evicted so far, ranks up and restarted, tasks
        that a full queue kept from starting; storage; steps that failed, and blocks in quarantine; blocks hashed, and
        the seconds that this took; missed tokens by cause, seconds saved and seconds spent on moving by tier; what
        other sizes would hit."""
        self._what_if = what_if
        self._worths, self._storage, self._failures, self._hashes = worths, storage, failures, hashes
        self._blocks, self._evictions, self._rank_counts, self._refused = blocks, evictions, ranks, refused

    def record_request(self, num_tokens: int, hit_tokens: tuple[int, ...]) -> None:
        """A request of `num_tokens` prompt tokens was admitted; `hit_tokens` in the order of `TIERS`."""
        now = self._clock()  # first: it may be somebody's who raises
        with self._lock:
            self._num_requests += 1
            self._num_tokens += num_tokens
            if any(hit_tokens):
                self._num_requests_hit += 1
                self._hit_tokens = tuple(map(operator.add, self._hit_tokens, hit_tokens))
            self._window.record(now, num_tokens, hit_tokens)

    def record_task(self, kind: str, rank: int, num_bytes: int, seconds: float, failed: bool) -> None:
        """One rank's part of a task has ended."""
        with self._lock:
            sums = self._tasks[kind, rank]
            sums.num_tasks += 1
            sums.num_bytes += num_bytes
            sums.seconds += seconds
            sums.num_failures += failed

    def observe_peers(self, layers_in_flight: Callable[[], Mapping[str, int]]) -> None:
        """Read this at every scrape: by peer, layers that it has computed and that have not come yet."""
        self._layers_in_flight = layers_in_flight

    def record_peer(self, kind: str, peer: str, num_bytes: int, seconds: float, reason: str | None) -> None:
        """A send to another instance, or a receive from it, has ended; with a reason it came to nothing."""
        with self._lock:
            sums = self._peers[kind, peer]
            sums.num_tasks += 1
            sums.num_bytes += num_bytes
            sums.seconds += seconds
            if reason is not None:
                self._peer_failures[kind, peer, reason] += 1

    def record_skipped_writes(self, num_blocks: int) -> None:
        """Blocks that were to be copied down and were not: no room, or a rank was down."""
        with self._lock:
            self._num_skipped_writes += num_blocks

    def hit_rates(self) -> dict[str, float]:
        """The hit rates over the window: `request`, `token`, and the token hit rate of each tier."""
        with self._lock:
            now = self._clock()
            rates = {"request": self._window.request_hit_rate(now), "token": self._window.token_hit_rate(now)}
            return rates | {tier: self._window.token_hit_rate(now, i) for i, tier in enumerate(TIERS)}

    def token_counts(self) -> tuple[int, tuple[int, ...]]:
        """Prompt tokens of admitted requests so far, and how many of them each tier has served."""
        with self._lock:
            return self._num_tokens, self._hit_tokens

    def task_bytes(self) -> dict[str, int]:
        """Bytes copied so far by all ranks together, by kind."""
        return {kind: self.task_totals(kind).num_bytes for kind in TASK_KINDS}

    def task_totals(self, kind: str) -> TaskSums:
        """Tasks of one of `TASK_KINDS` so far, of all ranks together."""
        with self._lock:
            parts = [self._tasks[kind, rank] for rank in self._ranks]
            return TaskSums(
                num_tasks=sum(part.num_tasks for part in parts),
                num_bytes=sum(part.num_bytes for part in parts),
                seconds=sum(part.seconds for part in parts),
                num_failures=sum(part.num_failures for part in parts),
            )

    def collect(self) -> Iterator[Metric]:
        """The protocol of a `prometheus_client` collector."""
        rates = self.hit_rates()
        with self._lock:
            # not yielded from here: the consumer would hold the lock for as long as it likes
            families = [*self._request_families(), *self._transfer_families(), *self._peer_families()]
        yield from families
        yield from self._gauge_families(rates)

    def _request_families(self) -> list[Metric]:
        return [
            self._counter("requests", "Requests admitted", (), {(): self._num_requests}),
            self._counter("requests_hit", "Requests that hit at least one token", (), {(): self._num_requests_hit}),
            self._counter("tokens_queried", "Prompt tokens of admitted requests", (), {(): self._num_tokens}),
            self._counter(
                "tokens_hit",
                "Prompt tokens served by a tier",
                ("tier",),
                {(t,): n for t, n in zip(TIERS, self._hit_tokens, strict=True)},
            ),
            self._counter(
                "skipped_write_blocks",
                "Blocks not copied to the CPU tier for want of room or ranks",
                (),
                {(): self._num_skipped_writes},
            ),
        ]

    def _transfer_families(self) -> list[Metric]:
        def by_rank(name: str) -> dict[tuple[str, ...], float]:
            return {(d, str(r)): getattr(self._tasks[d, r], name) for d in TASK_KINDS for r in self._ranks}

        labels = ("kind", "rank")
        return [
            self._counter("tasks", "Tasks ended on a rank", labels, by_rank("num_tasks")),
            self._counter("task_bytes", "Bytes copied by a rank", labels, by_rank("num_bytes")),
            self._counter("task_seconds", "Time a rank spent copying", labels, by_rank("seconds")),
            self._counter("task_failures", "Tasks failed on a rank", labels, by_rank("num_failures")),
        ]

    def _peer_families(self) -> list[Metric]:
        nobody = dict.fromkeys(((kind, "") for kind in PEER_KINDS), _PeerSums())

        def by_peer(name: str) -> dict[tuple[str, ...], float]:
            return {key: getattr(sums, name) for key, sums in (nobody | self._peers).items()}

        labels = ("kind", "peer")
        text = "Sends and receives that came to nothing, by reason"
        failures: dict[tuple[str, ...], float] = {(d, "", r): 0 for d in PEER_KINDS for r in PEER_REASONS}
        failures |= {(*key,): n for key, n in self._peer_failures.items()}
        return [
            self._counter("peer_transfers", "Sends to and receives from other instances", labels, by_peer("num_tasks")),
            self._counter("peer_bytes", "Bytes that went from one instance to another", labels, by_peer("num_bytes")),
            self._counter("peer_seconds", "Time receives took, computing included", labels, by_peer("seconds")),
            self._counter("peer_failures", text, (*labels, "reason"), failures),
        ]

    def _gauge_families(self, rates: Mapping[str, float]) -> Iterator[Metric]:
        yield self._gauge(
            "blocks", "Blocks by tier and state", ("tier", "state"), {(t, s): n for t, s, n in self._blocks()}
        )
        evictions: dict[tuple[str, ...], float] = {(t, k): 0 for t in ("gpu", "cpu") for k in EVICTION_KINDS}
        evictions |= {(t, k): n for t, k, n in self._evictions()}
        yield self._counter(
            "evicted_blocks",
            "Blocks that left a tier; copy_kept: another tier still has them",
            ("tier", "kind"),
            evictions,
        )
        refused: dict[tuple[str, ...], float] = {(kind,): 0 for kind in SWAP_KINDS}
        refused |= {(kind,): n for kind, n in self._refused()}
        text = "Tasks that were not started because the ranks' queue was full"
        yield self._counter("refused_tasks", text, ("kind",), refused)
        yield from self._worth_families()
        yield from self._storage_families()
        yield from what_if_families(self._dp, self._what_if())
        steps, num_quarantined_blocks = self._failures()
        text = "Steps that a verb took along, that failed, and that it did without"
        yield self._counter("failed_steps", text, ("step",), {(s,): steps.get(s, 0) for s in STEPS})
        num_hashed_blocks, hash_seconds = self._hashes()
        text = "Cached blocks whose hash storage, a peer or an adapter has asked for"
        yield self._counter("hashed_blocks", text, (), {(): num_hashed_blocks})
        yield self._counter("hash_seconds", "Time spent on computing these hashes", (), {(): hash_seconds})
        text = "Blocks of ended tasks whose landing failed: nobody gets them any more"
        yield self._gauge("quarantined_blocks", text, (), {(): num_quarantined_blocks})
        text = "Layers that another instance has computed and that have not come yet"
        in_flight: dict[tuple[str, ...], float] = {("",): 0}
        in_flight |= {(peer,): n for peer, n in self._layers_in_flight().items()}
        yield self._gauge("peer_layers_in_flight", text, ("peer",), in_flight)
        if self._rank_counts is None:
            ranks = dict.fromkeys(self._ranks, (False, 0))
        else:  # none where the cache runs without rank processes: nothing is down then
            ranks = {rank: (up, num_restarts) for rank, up, num_restarts in self._rank_counts()}
        ups: dict[tuple[str, ...], float] = {(str(rank),): up for rank, (up, _) in ranks.items()}
        restarts: dict[tuple[str, ...], float] = {
            (str(rank),): num_restarts for rank, (_, num_restarts) in ranks.items()
        }
        yield self._gauge("rank_up", "1 while the rank is ready", ("rank",), ups)
        yield self._counter("rank_restarts", "Restarts of a rank", ("rank",), restarts)
        yield self._gauge("window_request_hit_rate", "Share of requests that hit, recently", (), {(): rates["request"]})
        yield self._gauge("window_token_hit_rate", "Share of tokens hit, recently", (), {(): rates["token"]})
        yield self._gauge(
            "window_tier_token_hit_rate",
            "Share of tokens served by a tier, recently",
            ("tier",),
            {(t,): rates[t] for t in TIERS},
        )

    def _worth_families(self) -> Iterator[Metric]:
        missed, saved, spent = self._worths()
        text = "Prompt tokens that were computed, by the reason why no tier served them"
        yield self._counter("tokens_missed", text, ("cause",), {(name,): missed.get(name, 0) for name in CAUSES})
        text = "Time that computing what a tier served would have taken, by the prefill speed seen"
        yield self._counter("saved_seconds", text, ("tier",), {(tier,): saved.get(tier, 0.0) for tier in TIERS})
        text = "Time that requests waited for what a tier served, as far as it was moved"
        yield self._counter("load_seconds", text, ("tier",), {(tier,): spent.get(tier, 0.0) for tier in TIERS})

    def _storage_families(self) -> Iterator[Metric]:
        is_up, breakers, blocks, objects, num_full_disks = self._storage()
        yield self._gauge("storage_up", "1 while every rank has the store open", (), {(): int(is_up)})
        text = "Ranks whose store writes less than it should, as its disk has no room"
        yield self._gauge("storage_disk_full", text, (), {(): num_full_disks})
        text = "0: storage is used, 1: it is being probed, 2: it has failed too often and is left alone"
        states: dict[tuple[str, ...], float] = {(name,): breakers.get(name, 0) for name in STORAGE_OPERATIONS}
        yield self._gauge("storage_breaker_state", text, ("operation",), states)
        text = "Blocks that came from storage, are in it after a write, and were to be written and were not"
        yield self._counter("storage_blocks", text, ("fate",), {(name,): blocks.get(name, 0) for name in STORAGE_FATES})
        text = "Objects that the store has evicted, did not admit, or has found damaged and removed"
        lost: dict[tuple[str, ...], float] = {(name,): objects.get(name, 0) for name in STORAGE_LOSSES}
        yield self._counter("storage_lost_objects", text, ("reason",), lost)

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        from prometheus_client.core import CounterMetricFamily  # late: a web server comes with it

        family = CounterMetricFamily(f"fastdeploy_cache_{name}", text, labels=("dp", *labels))
        for key, value in values.items():
            family.add_metric((self._dp, *key), value)
        return family

    def _gauge(self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(f"fastdeploy_cache_{name}", text, labels=("dp", *labels))
        for key, value in values.items():
            family.add_metric((self._dp, *key), float(value))
        return family
