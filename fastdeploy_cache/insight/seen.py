"""All that is told of a cache, to its manager, its metrics, its page and its socket."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import CPU, GPU, Tier
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.metrics.event_metrics import PublishedCounts
from fastdeploy_cache.metrics.picture import Durations, Picture
from fastdeploy_cache.metrics.what_if_metrics import WhatIfCounts
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.peers.peers import Peers
from fastdeploy_cache.requests.explanation import Explanation
from fastdeploy_cache.requests.listener import RequestListener
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.storage.access import StorageAccess

if TYPE_CHECKING:
    from fastdeploy_cache.events.feed.feed import EventFeed
    from fastdeploy_cache.insight.doctor.finding import Finding
    from fastdeploy_cache.insight.flight.keeper import FlightKeeper
    from fastdeploy_cache.insight.looks.page import Looks, OperatorPage
    from fastdeploy_cache.insight.what_if.what_if import WhatIf, WhatIfRate
    from fastdeploy_cache.metrics.exporter import Page
    from fastdeploy_cache.requests.listener import RequestListener
    from fastdeploy_cache.stats import CacheStats
    from fastdeploy_cache.transfer_manager.client import RankStatus

TIER_NAMES = (("gpu", GPU), ("cpu", CPU))


class Seen:
    """Looks at every room and changes nothing; has the recorder, the page and the process of `what_if`. Any thread."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        movement: Movement,
        *,
        requests: Requests,
        storage: StorageAccess,
        peers: Peers,
    ) -> None:
        self._config, self._books, self._movement = config, books, movement
        self._requests, self._storage, self._peers = requests, storage, peers
        self._metrics = requests.accounts.metrics
        self._what_if: WhatIf | None = None
        self._page: OperatorPage | None = None
        self.flight: FlightKeeper | None = None
        self.events: EventFeed | None = None

    def start(self) -> None:
        """Record from now on: the manager is whole.

        Raises:
            ConfigError: `insight.traces` without OpenTelemetry, or a publisher of events that refuses its settings.
        """
        listener: RequestListener | None = None
        if self._config.insight.flight_recorder_bytes:
            from fastdeploy_cache.insight.flight.keeper import FlightKeeper  # late: an import of the manager is quick

            self.flight = flight = FlightKeeper(
                self._config, self._books, self._movement, self._storage, live=self._requests
            )
            listener = flight.recorder
            flight.start()
        if self._config.insight.traces:
            from fastdeploy_cache.insight.flight.traces import Traces

            listener = Traces(self._books, listener)
        if listener is not None:
            self._requests.tell(listener)
        if self._config.events is not None:
            from fastdeploy_cache.events.feed.feed import EventFeed

            self.events = EventFeed(self._config, self._books)
            self.events.start()

    def explain(self, request_id: str) -> Explanation:
        """See `PrefixCacheManager.explain`."""
        with self._books:
            return self._requests.explain(request_id)

    def explain_last(self, num_requests: int) -> list[Explanation]:
        """See `PrefixCacheManager.explain_last`."""
        with self._books:
            accounts = self._requests.accounts.last(num_requests)
        return self._requests.accounts.explained(accounts)

    def num_explained(self) -> int:
        """How many requests `explain_last` can tell of now."""
        with self._books:
            return len(self._requests.accounts)

    def examine(self) -> list[Finding]:
        """See `PrefixCacheManager.examine`."""
        from fastdeploy_cache.insight.doctor.doctor import examine  # late: it is seldom asked
        from fastdeploy_cache.insight.doctor.evidence import evidence_of

        requests = self.explain_last(self._config.num_explained_requests)
        loads = self._metrics.task_totals("swap_in")
        speed = loads.num_bytes / loads.seconds if loads.seconds else None
        rates = self.known_what_if()
        case = evidence_of(
            self._config,
            self.stats(),
            requests,
            self._books,
            rates=rates,
            load_bytes_per_second=speed,
            num_unpublished_requests=self._requests.publisher.num_unpublished,
        )
        return examine(case)

    def start_what_if(self) -> WhatIf:
        """Estimate from now on what other sizes of the tiers would hit, unless `insight.what_if` is off."""
        from fastdeploy_cache.insight.what_if.what_if import WhatIf  # late: it starts a process

        if self._what_if is None:
            prefill = self._movement.speeds.prefill
            self._what_if = WhatIf(self._config, self._books, lambda: prefill.per_second)
        self._what_if.start()
        return self._what_if

    def known_what_if(self) -> list[WhatIfRate]:
        """The same, and nothing where it was never started."""
        return self._what_if.rates() if self._what_if is not None else []

    def policy_name(self) -> str:
        """The eviction policy that is in force now."""
        return self._books.tree.policy.name

    def follow_policy(self, policy: str) -> None:
        """Another eviction policy is in force: what other sizes would hit is estimated for that one."""
        if self._what_if is not None:
            self._what_if.follow(policy)

    def what_if_counts(self) -> WhatIfCounts:
        """What the metrics show of it."""
        rates = [(r.tier, r.factor, r.policy, r.token_hit_rate, r.saved_seconds) for r in self.known_what_if()]
        return WhatIfCounts(rates, self._what_if.num_lost_requests if self._what_if is not None else 0)

    def start_page(self, insight: Looks, life_cycle: Callable[[], str]) -> dict[str, Page]:
        """What is served beside the metrics, by path; begins to keep what that shows. `life_cycle`: its present state.

        Nothing where `insight.page` is off. The process of `what_if` starts all the same.
        """
        self.start_what_if()
        if not self._config.insight.page:
            return {}
        from fastdeploy_cache.insight.looks.page import OperatorPage  # late: not every cache has one

        if self._page is None:
            self._page = OperatorPage(
                self._config, insight, self, self._requests.accounts, life_cycle, clock=self._books.clock
            )
        self._page.history.start()
        return self._page.pages()

    def close(self) -> None:
        """End what was started here."""
        if self._what_if is not None:
            self._what_if.close()
        if self._page is not None:
            self._page.history.stop()
        if self.flight is not None:
            self.flight.close()
        if self.events is not None:
            self.events.close()

    def stats(self) -> CacheStats:
        """See `PrefixCacheManager.stats`."""
        hit_rates = self._metrics.hit_rates()  # with a lock of its own
        with self._books:
            return self._stats(hit_rates)

    def picture(self, life_cycle: str) -> Picture:
        """What the metrics ask for at each scrape, in one turn. `life_cycle`: the state that the cache is in."""
        accounts, ages, mover = self._requests.accounts, self._books.residency.ages, self._movement.mover
        with self._books:
            stats = self._stats({})
            ages.count_evicted()
            phases = Counter([active.phase.value for active in self._requests])
            tasks_in_flight = {**mover.tasks.by_kind(), **self._storage.tasks_in_flight}
            times = Durations(
                residency={name: ages.residency[tier].read() for name, tier in TIER_NAMES},
                idle={name: ages.idle[tier].read() for name, tier in TIER_NAMES},
                reuse_gaps=ages.reuse_gaps.read(),
                matches=accounts.match_times.read(),
            )
            load_seconds, room = accounts.moved_by_tier(), self._requests.room
            num_waiting, room_waits = len(room), (room.num_waited, room.seconds_waited)
        return Picture(
            blocks=stats.block_counts(),
            units=stats.unit_counts(),
            tenants=stats.tenant_counts(self._config.block_size),
            checkpoints=stats.checkpoints,
            evictions=stats.eviction_counts(),
            ranks=stats.rank_counts(),
            processes=stats.process_states(),
            refused_tasks=stats.num_refused_transfers,
            tasks_in_flight=tasks_in_flight,
            requests=phases,
            num_waiting_for_room=num_waiting,
            room_waits=room_waits,
            storage=stats.storage_counts(),
            failed_steps=stats.num_failed_steps,
            num_quarantined_blocks=stats.num_quarantined_blocks,
            num_hashed_blocks=stats.num_hashed_blocks,
            hash_seconds=stats.hash_seconds,
            missed_tokens=stats.missed_tokens,
            saved_seconds=stats.saved_seconds,
            load_seconds=load_seconds,
            life_cycle=life_cycle,
            what_if=self.what_if_counts(),
            events=self.events.counts() if self.events is not None else PublishedCounts(),
            times=times,
            block_size=self._config.block_size,
            eviction_policy=self._config.eviction_policy,
        )

    def _stats(self, hit_rates: Mapping[str, float]) -> CacheStats:
        from fastdeploy_cache.stats import (  # late: an import of the manager is quick
            CacheStats,
            CheckpointStats,
            RowStats,
            TenantStats,
            TierStats,
        )

        books, mover, road = self._books, self._movement.mover, self._peers.road
        gpu, cpu = (TierStats.of(books.pools[tier], books.residency, tier) for tier in Tier)
        storage, storage_sums = self._storage.stats()
        return CacheStats(
            gpu=gpu,
            cpu=cpu,
            storage=storage,
            storage_sums=storage_sums,
            num_requests=len(self._requests),
            num_transfers_in_flight=sum(not t.done.is_set() for t in mover.in_flight.values()),
            num_open_sends=len(road.sends),
            num_open_receives=len(road.receives),
            num_swapped_in_blocks=mover.num_landed[GPU],
            num_swapped_out_blocks=mover.num_landed[CPU],
            num_refused_transfers={d.value: n for d, n in mover.num_refused.items()},
            num_failed_steps=dict(books.mishaps.counts),
            num_hashed_blocks=books.tree.names.num_hashed,
            hash_seconds=books.tree.names.seconds,
            num_quarantined_blocks=mover.num_quarantined_blocks,
            epoch=books.tree.epoch,
            hit_rates=hit_rates,
            missed_tokens=self._requests.accounts.missed_by_cause(),
            saved_seconds=self._requests.accounts.saved_by_tier(),
            ranks=tuple(self._movement.client.statuses()),
            processes=self.processes(),
            rows=RowStats.all_of(books.rows),
            checkpoints=CheckpointStats.of(books.rows),
            tenants=TenantStats.all_of(books.residency.shares),
        )

    def processes(self) -> dict[str, tuple[RankStatus, ...]]:
        """Every process beside the engine's: those that copy (transfer), with a store, and with peers. Not in them: a
        kind that this cache has none of."""
        found = {
            "transfer": self._movement.client.statuses(),
            "storage": self._storage.statuses(),
            "peer": self._peers.road.processes.statuses(),
            "events": self.events.statuses() if self.events is not None else [],
        }
        return {kind: tuple(statuses) for kind, statuses in found.items() if statuses}

    def facts(self) -> dict[str, Any]:
        """The statistics as one document, for JSON."""
        from fastdeploy_cache.insight.looks.status_document import status_document

        return status_document(self.stats(), self._metrics, self._config)

    @contextlib.contextmanager
    def alerting(self, reason: Literal["invariants"]) -> Iterator[None]:
        """What raises `AssertionError` in here is an alert, for which a flight recording is written."""
        with self.flight.alerting(reason) if self.flight is not None else contextlib.nullcontext():
            yield
