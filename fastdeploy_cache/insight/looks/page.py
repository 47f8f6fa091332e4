"""The page at `/` of the metrics endpoint, and the data that it shows."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.insight.looks.history import History, Moment
from fastdeploy_cache.insight.looks.live_views import RanksView, RequestsView
from fastdeploy_cache.insight.looks.prefix_views import TreeView
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.metrics.request_counts import TIERS
from fastdeploy_cache.requests.accounts import Accounts
from fastdeploy_cache.requests.explanation import Explanation
from fastdeploy_cache.stats import CacheStats

if TYPE_CHECKING:
    from fastdeploy_cache.insight.doctor.finding import Finding
    from fastdeploy_cache.insight.what_if.what_if import WhatIfRate
    from fastdeploy_cache.metrics.exporter import Page

_STYLES = ("colors.css", "page.css", "sections.css")
_SCRIPTS = ("charts.js", "reading.js", "map.js", "sections.js", "lists.js", "page.js")
_NUM_RECENT, _NUM_RUNNING = 25, 20
_MAP_DEPTH, _MAP_NODES = 24, 600


class Looks(Protocol):
    """What the page asks of an operator's looks: see `Insight`."""

    def requests(self, num_requests: int) -> RequestsView: ...
    def ranks(self) -> RanksView: ...
    def tree(self, depth: int, max_nodes: int) -> TreeView: ...


class Told(Protocol):
    """What it asks of all that is told of the cache: see `Seen`."""

    def stats(self) -> CacheStats: ...
    def explain_last(self, num_requests: int) -> Sequence[Explanation]: ...
    def num_explained(self) -> int: ...
    def examine(self) -> Sequence[Finding]: ...
    def known_what_if(self) -> Sequence[WhatIfRate]: ...
    def policy_name(self) -> str: ...


class OperatorPage:
    """Makes what the page asks for. Any thread; nothing here changes the cache."""

    def __init__(
        self,
        config: CacheConfig,
        insight: Looks,
        seen: Told,
        accounts: Accounts,
        life_cycle: Callable[[], str],
        *,
        clock: Clock,
    ) -> None:
        """`life_cycle` says whether the cache runs, is paused, asleep and so on."""
        self._config, self._insight, self._seen, self._accounts = config, insight, seen, accounts
        self._metrics, self._life_cycle = accounts.metrics, life_cycle
        self.history = History(self._moment, clock)
        self._unix = clock.unix
        self._started_at = clock.unix()

    def pages(self) -> dict[str, Page]:
        """What is served, by path."""
        from fastdeploy_cache.metrics.exporter import Page  # late: a web server comes with it

        html = _assembled()
        looks = {"/data.json": self._data, "/map.json": self._map, "/findings.json": self._findings}
        served = {path: Page("application/json", _as_json(look)) for path, look in looks.items()}
        return {"/": Page("text/html; charset=utf-8", lambda: html), **served}

    def _moment(self) -> Moment:
        stats = self._seen.stats()
        num_tokens, hit_tokens = self._metrics.token_counts()
        tiers = (stats.gpu, stats.cpu)
        return Moment(
            at=self._unix(),
            num_requests=self._metrics.num_requests,
            num_tokens=num_tokens,
            hit_tokens=hit_tokens,
            missed_tokens=tuple(stats.missed_tokens.values()),
            saved_seconds=tuple(stats.saved_seconds.values()),
            move_seconds=tuple(self._accounts.moved_by_tier().values()),
            evicted_blocks=tuple(tier.num_evicted for tier in tiers),
            used_blocks=tuple(tier.num_blocks - tier.num_available for tier in tiers),
            cached_blocks=tuple(tier.num_cached for tier in tiers),
            moved_bytes=self._metrics.task_bytes(),
        )

    def _data(self) -> dict[str, Any]:
        insight, seen, config = self._insight, self._seen, self._config
        stats = seen.stats()
        moments, requests = self.history.moments(), insight.requests(_NUM_RUNNING)
        recent = seen.explain_last(_NUM_RECENT)
        storage = stats.storage
        return {
            "now": self._unix(),
            "started_at": self._started_at,
            "life_cycle": self._life_cycle(),
            "dp": config.transfer.data_parallel_id,
            "block_size": config.block_size,
            "block_bytes": config.block_bytes() * config.transfer.tp_size,
            "policy": config.eviction_policy,
            "policy_now": seen.policy_name(),
            "tier_names": TIERS,
            "causes": list(stats.missed_tokens),
            "tiers": {"gpu": stats.gpu.by_state(), "cpu": stats.cpu.by_state()},
            "storage": asdict(storage) if storage is not None else None,
            "ranks": insight.ranks().as_dict(),
            "running": [asdict(each) for each in requests.running],
            "num_running": requests.num_running,
            "num_known": seen.num_explained(),
            "needs": self._needs(),
            "recent": [{**each.as_dict(), "text": str(each)} for each in recent],
            "what_if": [asdict(rate) for rate in seen.known_what_if()],
            "history": {name: [getattr(moment, name) for moment in moments] for name in Moment._fields},
        }

    def _needs(self) -> dict[str, Any]:
        """What must have happened before there is something to show, in numbers of requests, and what is off."""
        from fastdeploy_cache.insight.doctor import finding
        from fastdeploy_cache.insight.what_if import setup, what_if  # late: nobody may look at the page

        return {
            "doctor": finding.MIN_REQUESTS,
            "what_if": what_if.MIN_REQUESTS,
            "what_if_off": setup.reason_for_none(self._config),
            "remembers": self._config.num_explained_requests > 0,
        }

    def _map(self) -> dict[str, Any]:
        return self._insight.tree(_MAP_DEPTH, _MAP_NODES).as_dict()

    def _findings(self) -> list[dict[str, Any]]:
        return [{**asdict(each), "text": str(each)} for each in self._seen.examine()]


def _as_json(look: Callable[[], object]) -> Callable[[], bytes]:
    return lambda: json.dumps(look()).encode()


def _assembled() -> bytes:
    """One file with all that it needs."""
    folder = importlib.resources.files("fastdeploy_cache.insight.looks") / "page_parts"
    html = (folder / "page.html").read_text()
    for part in (*_STYLES, *_SCRIPTS):
        html = html.replace(f"/*{part}*/", (folder / part).read_text())
    return html.encode()
