"""What a router shows of itself: `/metrics` for Prometheus, and `/status` for people."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fastdeploy_cache.launch.server.answers import success
from fastdeploy_cache.launch.server.choice import Chooser
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.upstream import Place, Upstream

_PREFIX = "fastdeploy_cache_router_"
_OTHER = "other"  # the path of all that there is not: clients could make up any number


class RouterPages:
    """Counts what is answered. For one event loop; a collector for `prometheus_client`."""

    def __init__(self, instances: Mapping[str, Instances], upstream: web.AppKey[Upstream], chooser: Chooser) -> None:
        """`instances` by their role; `upstream`: where the application has what asks them; `chooser`: what orders
        them."""
        self._instances, self._upstream, self._chooser = instances, upstream, chooser
        self._num_open = 0
        self._num_answers: defaultdict[tuple[str, str], int] = defaultdict(int)  # path, status
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def routes(self) -> list[web.RouteDef]:
        """The two pages."""
        pages = {"/metrics": self._metrics, "/status": self._status}
        return [web.get(path, page, allow_head=False) for path, page in pages.items()]

    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        """What counts; it goes around what answers."""

        @web.middleware
        async def counting(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            began, status = time.monotonic(), "client_gone"
            self._num_open += 1
            try:
                response = await handler(request)
                status = str(response.status)
                return response
            finally:
                self._num_open -= 1
                path = _path_of(request)
                self._num_answers[path, status] += 1
                self._seconds[path] += time.monotonic() - began

        return counting

    def collect(self) -> Iterator[Metric]:
        """The protocol of a `prometheus_client` collector."""
        answers = CounterMetricFamily(f"{_PREFIX}answers", "Requests answered", labels=("path", "status"))
        for key, count in self._num_answers.items():
            answers.add_metric(key, count)
        seconds = CounterMetricFamily(f"{_PREFIX}answer_seconds", "Time that answers took", labels=("path",))
        for path, sum_ in self._seconds.items():
            seconds.add_metric((path,), sum_)
        labels = ("role", "instance_url")
        hung = GaugeMetricFamily(f"{_PREFIX}instance_hung", "1 while it is passed over, as it hung", labels=labels)
        for role, place, is_hung in self._places():
            hung.add_metric((role, _url(place)), float(is_hung))
        yield from (answers, seconds, hung)
        yield from self._routes()
        yield GaugeMetricFamily(f"{_PREFIX}open_requests", "Requests being answered", value=self._num_open)

    def _routes(self) -> Iterator[Metric]:
        """Where prompts went, and why."""
        lookup, own = self._chooser.lookup, "instance_url"
        routed = CounterMetricFamily(f"{_PREFIX}routed", "Prompts that were answered", labels=(own, "reason"))
        for (place, reason), count in self._chooser.num_routed.items():
            routed.add_metric((_url(place), reason), count)
        load = GaugeMetricFamily(f"{_PREFIX}load_tokens", "How busy it is with them", labels=("role", own))
        for role, place, _ in self._places():
            load.add_metric((role, _url(place)), self._instances[role].load(place))
        yield from (routed, load)
        if lookup is None:
            return
        tokens = CounterMetricFamily(f"{_PREFIX}tokens", "Of prompts: all, and those cached", labels=(own, "kind"))
        for (place, kind), count in self._chooser.num_tokens.items():
            tokens.add_metric((_url(place), kind), count)
        current = GaugeMetricFamily(f"{_PREFIX}events_current", "1 while it is known what is cached", labels=(own,))
        for place in lookup.places():
            state = lookup.state_of(place)
            current.add_metric((_url(place),), float(state is not None and state.is_current))
        yield from (tokens, current)

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        text = generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _status(self, request: web.Request) -> web.StreamResponse:
        upstream, places = request.app[self._upstream], list(self._places())
        healthy = await asyncio.gather(*(upstream.is_healthy(place) for _, place, _ in places))
        instances: dict[str, list[dict[str, Any]]] = {role: [] for role in self._instances}
        for (role, place, is_hung), is_healthy in zip(places, healthy, strict=True):
            instances[role].append({"url": _url(place), "healthy": is_healthy, "hung": is_hung, **self._known(place)})
        return success({"role": "router", "open_requests": self._num_open - 1, **instances})

    def _known(self, place: Place) -> dict[str, Any]:
        state = self._chooser.lookup.state_of(place) if self._chooser.lookup is not None else None
        return {"events": dataclasses.asdict(state)} if state is not None else {}

    def _places(self) -> Iterator[tuple[str, Place, bool]]:
        for role, instances in self._instances.items():
            for place in instances.in_order():
                yield role, place, instances.is_hung(place)


def _path_of(request: web.Request) -> str:
    resource = request.match_info.route.resource
    canonical = resource.canonical if resource is not None else _OTHER
    return _OTHER if "{" in canonical else canonical


def _url(place: Place) -> str:
    host, port = place
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
