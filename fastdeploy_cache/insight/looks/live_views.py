"""What runs now, as values to show: requests and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.insight.looks.pieces import run_in_turns
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.requests.explanation import Explanation
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.transfer_manager.client import RankStatus


@dataclass(frozen=True, kw_only=True)
class RequestView:
    """A request that is matched now.

    Attributes:
        request_id: of the request.
        phase: `waiting` for loads, running `ahead` of them, `settled`, or `void`; see `RequestPhase`.
        num_tokens: of its prompt and output. num_computed_tokens: of these, committed.
        num_blocks: on the GPU that it has, shared ones and its own.
        running_seconds: since its match.
        matched_tokens: by tier, what it did not have to compute.
    """

    request_id: str
    phase: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    running_seconds: float
    matched_tokens: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class RequestsView:
    """Requests now and lately. `num_running`: all that are matched, of which `running` shows the oldest. `recent`: of
    the last that were admitted, the newest first, where their tokens came from."""

    num_running: int
    running: tuple[RequestView, ...]
    recent: tuple[Explanation, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RanksView:
    """The processes that copy, and what they have to do: loads to the GPU and copies down that have not ended."""

    ranks: tuple[RankStatus, ...]
    num_loads_in_flight: int
    num_copies_down_in_flight: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def running_requests(books: Books, requests: Requests, num_requests: int) -> tuple[int, tuple[RequestView, ...]]:
    """How many requests are matched now, and views of the oldest. Not in a turn."""
    views: list[RequestView] = []
    with books:
        num_running, names = len(requests), [each.request.request_id for each in islice(requests, num_requests)]
    run_in_turns(books, _look(requests, names, views))
    return num_running, tuple(views)


def _look(requests: Requests, names: list[str], views: list[RequestView]) -> Iterator[None]:
    for name in names:
        found = requests.explain_active(name)
        if found is not None:
            active, explanation = found
            views.append(
                RequestView(
                    request_id=name,
                    phase=active.phase.value,
                    num_tokens=active.request.num_tokens,
                    num_computed_tokens=active.num_computed_tokens,
                    num_blocks=len(active.block_ids) or active.num_gpu_blocks,
                    running_seconds=requests.books.clock.now() - active.trail.matched_at,
                    matched_tokens={hit.tier: hit.num_tokens for hit in explanation.hits},
                )
            )
        yield


def ranks_now(books: Books, movement: Movement) -> RanksView:
    """See `RanksView`. Not in a turn."""
    with books:
        tiers = [each.tier for each in movement.mover.in_flight.values() if not each.done.is_set()]
    num_loads = sum(tier == 0 for tier in tiers)
    return RanksView(
        ranks=tuple(movement.client.statuses()),
        num_loads_in_flight=num_loads,
        num_copies_down_in_flight=len(tiers) - num_loads,
    )
