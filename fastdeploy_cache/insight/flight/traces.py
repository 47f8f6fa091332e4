"""A span of OpenTelemetry for each hop: matches, prefetches, loads, copies down, reads and writes."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.movement.block_mover import TaskEnded
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.listener import RequestListener
from fastdeploy_cache.storage.prefetch import PrefetchEnded, StorageTaskEnded
from fastdeploy_cache.transfer_manager.task import TransferResult

if TYPE_CHECKING:
    from opentelemetry.context import Context

_MAX_PARENTS = 4096  # of what has not ended: a request or a task beyond that has a span without a parent
_NAME = "fastdeploy_cache"
_NANOSECONDS = 1_000_000_000


class Traces:
    """Hears of every verb of a request, passes it on to who heard of it before, and makes spans.

    The parent of a span is what was current in the thread that called `match` or `prefetch`: the engine's own span of
    the request. What no request waits for has none. Spans are begun and ended after the turn, without the lock, with
    the times at which things happened: a processor of spans that is slow holds up the verb's caller, and nobody else.

    See `RequestListener`.
    """

    def __init__(self, books: Books, heard_before: RequestListener | None) -> None:
        """Raise `ConfigError` where OpenTelemetry is not installed."""
        try:
            from opentelemetry import context, trace
        except ImportError as error:
            raise ConfigError(
                f"insight.traces needs OpenTelemetry ({error}); run: pip install 'fastdeploy-cache[otel]'"
            ) from error
        self._books, self._before = books, heard_before
        self._current: Callable[[], Context] = context.get_current
        self._tracer = trace.get_tracer(_NAME)
        self._status = trace.StatusCode.ERROR
        self._of_tasks: OrderedDict[int, Context] = OrderedDict()
        self._of_prefetches: OrderedDict[str, Context] = OrderedDict()
        books.listen(TaskEnded, lambda ended: self._on_task(ended.result, ended.seconds, None))
        books.listen(StorageTaskEnded, lambda ended: self._on_task(ended.result, ended.seconds, ended.request_id))
        books.listen(PrefetchEnded, self._on_prefetch_ended)

    @property
    def note(self) -> Callable[[tuple[object, ...]], None]:
        """See `RequestListener`."""
        return self._before.note if self._before is not None else _nothing

    def begin_step(self) -> None:
        """See `RequestListener`."""
        if self._before is not None:
            self._before.begin_step()

    def end_step(self) -> None:
        """See `RequestListener`."""
        if self._before is not None:
            self._before.end_step()

    def matched(self, active: ActiveRequest) -> None:
        """See `RequestListener`."""
        if self._before is not None:
            self._before.matched(active)
        parent, seconds = self._current(), self._books.clock.now() - active.trail.matched_at
        for transfer in active.loads:
            _remember(self._of_tasks, transfer.task_id, parent)
        attributes = {
            "request_id": active.request.request_id,
            "num_tokens": active.request.num_tokens,
            "num_found_blocks": active.asked.num_found,
            "num_gpu_blocks": active.num_gpu_blocks,
        }
        self._make("match", parent, seconds, attributes)

    def looked(self, request: Request, keys: BlockKeys, path: list[Run], num_found: int) -> None:
        """See `RequestListener`."""
        if self._before is not None:
            self._before.looked(request, keys, path, num_found)
        _remember(self._of_prefetches, request.request_id, self._current())

    def released(self, active: ActiveRequest) -> None:
        """See `RequestListener`."""
        if self._before is not None:
            self._before.released(active)
        self._of_prefetches.pop(active.request.request_id, None)

    def _on_task(self, result: TransferResult, seconds: float, request_id: str | None) -> None:
        task = result.task
        parent = self._of_tasks.pop(task.task_id, None) if request_id is None else self._of_prefetches.get(request_id)
        attributes = {
            "num_blocks": len(task.destination_ids) or len(task.source_ids),
            "num_bytes": sum([rank.num_bytes for rank in result.ranks]),
            "moving_seconds": max([rank.seconds for rank in result.ranks], default=0.0),
        }
        self._make(task.kind.value, parent, seconds, attributes, result.error)

    def _on_prefetch_ended(self, ended: PrefetchEnded) -> None:
        parent = self._of_prefetches.get(ended.request_id)
        attributes = {"request_id": ended.request_id, "num_blocks": ended.num_blocks}
        self._make("request_prefetch", parent, ended.seconds, attributes)

    def _make(
        self, name: str, parent: Context | None, seconds: float, attributes: Mapping[str, Any], error: object = None
    ) -> None:
        """A span of so many seconds that ends now, when the lock has been given back."""
        now = round(self._books.clock.unix() * _NANOSECONDS)
        times = (now - round(seconds * _NANOSECONDS), now)
        self._books.call_later(functools.partial(self._end, name, parent, times, attributes, error))

    def _end(
        self, name: str, parent: Context | None, times: tuple[int, int], attributes: Mapping[str, Any], error: object
    ) -> None:
        own = {f"{_NAME}.{key}": value for key, value in attributes.items()}
        span = self._tracer.start_span(f"{_NAME}.{name}", context=parent, start_time=times[0], attributes=own)
        if error is not None:
            span.set_status(self._status, str(error))
        span.end(times[1])


def _remember(contexts: OrderedDict[Any, Context], key: int | str, parent: Context) -> None:
    contexts[key] = parent
    if len(contexts) > _MAX_PARENTS:
        contexts.popitem(last=False)


def _nothing(_: tuple[object, ...]) -> None:
    """Nobody keeps it."""
