"""Tasks that ranks are working on: who still has to answer, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fastdeploy_cache.transfer_manager.task import Lane, RankResult, TransferResult, TransferTask

# A rank skips tasks whose deadline has passed, so one that runs answers soon after; one that does not is stuck. With
# no grace at all, a rank that finishes in the very moment of the deadline would be killed with its answer on the way.
_ANSWER_GRACE_SECONDS = 0.5


@dataclass
class Flight:
    """One task and the ranks that have not answered."""

    task: TransferTask
    waiting: set[int]
    results: list[RankResult] = field(default_factory=list)


class Flights:
    """All of them, by task id. Used by the I/O thread alone.

    A lane does its tasks in order, so only the oldest of each can be stuck: those behind it wait for it, and what it
    leaves too late is skipped.
    """

    def __init__(self, *, in_order: bool = True) -> None:
        """Not `in_order`: a lane does its tasks side by side, and each is held to its own deadline."""
        self._in_order = in_order
        self._flights: dict[int, Flight] = {}
        self._answered_at: dict[tuple[int, Lane], float] = {}

    def add(self, task: TransferTask, ranks: Iterable[int]) -> Flight:
        """A task is being sent to these ranks."""
        flight = Flight(task, set(ranks))
        self._flights[task.task_id] = flight
        return flight

    def get(self, task_id: int) -> Flight | None:
        """The task's flight, if it has not ended."""
        return self._flights.get(task_id)

    def of_rank(self, rank: int) -> list[Flight]:
        """What a rank has not answered, the oldest first."""
        return [flight for flight in self._flights.values() if rank in flight.waiting]

    def working_on(self, rank: int, is_at: Callable[[Lane, int], bool]) -> set[int]:
        """The tasks that a rank may have begun: of each lane the one that it says that it `is_at`, or the oldest."""
        # Not all that it owes: what stood behind the oldest when the process died was never begun. To call that tried
        # would count failures of a store, say, that nobody has asked. And not the oldest alone: another one may have
        # been taken between two steps of it. It may have died before it said so.
        oldest: dict[Lane, int] = {}
        for flight in self.of_rank(rank):
            oldest.setdefault(flight.task.kind.lane, flight.task.task_id)
        return {self.at_work(rank, lane, is_at) or task_id for lane, task_id in oldest.items()}

    def at_work(self, rank: int, lane: Lane, is_at: Callable[[Lane, int], bool]) -> int | None:
        """What a rank owes and says that it `is_at` in a lane."""
        owed = (flight.task for flight in self.of_rank(rank) if flight.task.kind.lane is lane)
        return next((task.task_id for task in owed if is_at(lane, task.task_id)), None)

    def all(self) -> list[Flight]:
        """Everything in flight."""
        return list(self._flights.values())

    def stuck_at(self) -> dict[tuple[int, Lane], tuple[float, int]]:
        """When each rank is stuck unless it answers, and which task it owes, by rank and lane."""
        found: dict[tuple[int, Lane], tuple[float, int]] = {}
        flights = list(self._flights.values())
        if not self._in_order:
            flights.sort(key=lambda flight: flight.task.deadline)
        elif any(flight.task.units for flight in flights):
            # Others are taken between the steps of a checkpoint, and it ends late at the next one: so a lane is stuck
            # with the first of these only where no other task is owed.
            flights.sort(key=lambda flight: bool(flight.task.units))
        for flight in flights:
            lane = flight.task.kind.lane
            for rank in flight.waiting:
                if (rank, lane) not in found:
                    # From the last answer on, if that is later than the deadline: a task that stood behind a long one
                    # is late through no fault of the rank, which has only now had the chance to skip it.
                    answered_at = self._answered_at.get((rank, lane), 0.0) if self._in_order else 0.0
                    since = max(flight.task.deadline, answered_at)
                    found[rank, lane] = (since + _ANSWER_GRACE_SECONDS, flight.task.task_id)
        return found

    def answer(self, flight: Flight, result: RankResult, now: float) -> TransferResult | None:
        """Note one rank's answer; with the last one the task ends: its result."""
        # A rank may be answered for twice: by itself just before it dies, and then by whoever reaps it. Counted twice,
        # a task would end while another rank still writes into its blocks.
        if result.rank not in flight.waiting:
            return None
        self._answered_at[result.rank, flight.task.kind.lane] = now
        flight.waiting.discard(result.rank)
        flight.results.append(result)
        if flight.waiting:
            return None
        self._flights.pop(flight.task.task_id, None)
        return TransferResult(task=flight.task, ranks=tuple(flight.results))


def failed(task: TransferTask, num_ranks: int, error: str) -> TransferResult:
    """The end of a task that no rank has begun."""
    ranks = tuple(RankResult(rank=rank, error=error, was_tried=False) for rank in range(num_ranks))
    return TransferResult(task=task, ranks=ranks)
