"""What an operator looks at: `cache.insight`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.errors import ConfigError, RecordingError
from fastdeploy_cache.insight.seen import Seen
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.requests.listener import RequestListener
from fastdeploy_cache.requests.requests import Requests

if TYPE_CHECKING:
    from fastdeploy_cache.insight.looks.live_views import RanksView, RequestsView
    from fastdeploy_cache.insight.looks.prefix_views import PrefixView, TreeView
    from fastdeploy_cache.insight.what_if.what_if import WhatIfRate

MAX_SHOWN, MAX_DEPTH = 2000, 64


class Insight:
    """Looks at prefixes, requests and ranks, and changes nothing. Any thread.

    What looks at many prefixes or requests does so in short turns, between which others change them: each prefix or
    request is shown as it was at one moment, and all of them together as they were within a few milliseconds or, in a
    cache of very many blocks, seconds.

    Attributes:
        processes: called, gives every process beside the engine's by kind (transfer, storage, peer), as `CacheStats`
            does, without waiting for the cache's lock.
    """

    def __init__(self, books: Books, movement: Movement, requests: Requests, seen: Seen) -> None:
        self._books, self._movement, self._requests, self._seen = books, movement, requests, seen
        self.processes = seen.processes

    def top(self, num_prefixes: int = 20) -> list[PrefixView]:
        """The prefixes that the most requests have used, the most used first; among equals the last used.

        Raises:
            ConfigError: fewer than 1, or more than 2,000.
        """
        from fastdeploy_cache.insight.looks.prefix_search import PrefixSearch  # late, as all of these: seldom asked

        _check_number("top: num_prefixes", num_prefixes, MAX_SHOWN)
        return PrefixSearch(self._books, num_prefixes, sys.maxsize).prefixes()

    def tree(self, depth: int = 8, max_nodes: int = 200) -> TreeView:
        """The prefix tree, as far as it is used most: up to `max_nodes` prefixes, and `depth` of them in a row.

        Raises:
            ConfigError: no depth from 1 to 64, or not from 1 to 2,000 nodes.
        """
        from fastdeploy_cache.insight.looks.prefix_search import PrefixSearch

        _check_number("tree: depth", depth, MAX_DEPTH)
        _check_number("tree: max_nodes", max_nodes, MAX_SHOWN)
        return PrefixSearch(self._books, max_nodes, depth).tree()

    def requests(self, num_requests: int = 50) -> RequestsView:
        """So many of the requests that are matched now, the oldest, and as many of the last that were admitted.

        Raises:
            ConfigError: fewer than 1, or more than 2,000.
        """
        from fastdeploy_cache.insight.looks.live_views import RequestsView, running_requests

        _check_number("requests: num_requests", num_requests, MAX_SHOWN)
        num_running, running = running_requests(self._books, self._requests, num_requests)
        recent = tuple(self._seen.explain_last(num_requests))
        return RequestsView(num_running=num_running, running=running, recent=recent)

    def ranks(self) -> RanksView:
        """The processes that copy, and how much they have to do."""
        from fastdeploy_cache.insight.looks.live_views import ranks_now

        return ranks_now(self._books, self._movement)

    def what_if(self) -> list[WhatIfRate]:
        """What other sizes of the tiers would have hit in the last hour; nothing before there were enough requests, and
        never anything for a model with rows.

        The first call starts the process that estimates it, where no metrics endpoint has.
        """
        return self._seen.start_what_if().rates()

    def write_flight(self, path: str | Path | None = None) -> Path:
        """Write what the flight recorder has kept to a file of mode 0600; a recording of that name is replaced.

        In a folder, which is `insight.flight_folder` without a path, it gets a new name. Returns the file's path.

        Raises:
            RecordingError: the file cannot be written, or is there and no recording, or
                `insight.flight_recorder_bytes` is 0.
            LifeCycleError: a turn of another thread does not end.
        """
        if (flight := self._seen.flight) is None:
            raise RecordingError(
                "there is no flight recording, as insight.flight_recorder_bytes is 0; give it some room, such as 4MiB"
            )
        if path is None or os.path.isdir(path):  # noqa: PTH112 (no error where it may not be looked at)
            return flight.write_to_folder("asked", None if path is None else Path(path))
        flight.write(Path(path))
        return Path(path)

    def tell(self, listener: RequestListener) -> None:
        """Let this one hear of every verb of a request instead of the flight recorder: for a replay."""
        with self._books:
            self._requests.tell(listener)


def _check_number(name: str, value: int, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} is {value!r}; use 1 to {most}")
