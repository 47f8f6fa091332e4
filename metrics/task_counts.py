"""Tasks that have ended: how many, how much they moved, and how long they took."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from fastdeploy_cache.metrics.families import Families
from fastdeploy_cache.metrics.histogram import TASK_SECONDS, Counted, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SWAP_KINDS = ("swap_in", "swap_out", "copy")
TASK_KINDS = (*SWAP_KINDS, "lookup", "prefetch", "write", "probe")  # the last four are of storage


@dataclass(slots=True)
class TaskSums:
    """What became of tasks of one kind."""

    num_tasks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_failures: int = 0


class TaskCounts:
    """Sums for each kind and rank, and durations for each kind. One thread at a time."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._tasks: defaultdict[tuple[str, int], TaskSums] = defaultdict(TaskSums)
        self._durations = {kind: Histogram(TASK_SECONDS) for kind in TASK_KINDS}
        self._prefetches = Histogram(TASK_SECONDS)
        self._num_skipped_writes = 0

    def record(self, kind: str, rank: int, num_bytes: int, seconds: float, failed: bool) -> None:
        """One rank's part of a task has ended."""
        sums = self._tasks[kind, rank]
        sums.num_tasks += 1
        sums.num_bytes += num_bytes
        sums.seconds += seconds
        sums.num_failures += failed

    def record_duration(self, kind: str, seconds: float) -> None:
        """Every rank has answered a task, so long after it was decided on."""
        if kind in self._durations:
            self._durations[kind].add(seconds)

    def record_prefetch(self, seconds: float) -> None:
        """A request's prefetch has ended, so long after it began."""
        self._prefetches.add(seconds)

    def record_skipped(self, num_blocks: int) -> None:
        """Blocks that were to be copied down and were not."""
        self._num_skipped_writes += num_blocks

    def totals(self, kind: str) -> TaskSums:
        """Tasks of a kind so far, of all ranks together."""
        parts = [self._tasks[kind, rank] for rank in self._ranks]
        return TaskSums(*map(sum, zip(*map(astuple, parts), strict=True)))  # field by field

    def families(self, families: Families) -> list[Metric]:
        """What Prometheus is shown."""

        def by_rank(name: str) -> dict[tuple[str, ...], float]:
            return {(d, str(r)): getattr(self._tasks[d, r], name) for d in TASK_KINDS for r in self._ranks}

        labels = ("kind", "rank")
        text = "Time from deciding on a task to the last rank's answer, waiting in queues included"
        durations: dict[tuple[str, ...], Counted] = {(k,): each.read() for k, each in self._durations.items()}
        skipped = "Blocks not copied to the CPU tier for want of room or ranks"
        prefetches = "Time from asking storage for a request's blocks to the end of reading them"
        return [
            families.counter("tasks", "Tasks ended on a rank", labels, by_rank("num_tasks")),
            families.counter("task_bytes", "Bytes copied by a rank", labels, by_rank("num_bytes")),
            families.counter("task_seconds", "Time a rank spent copying", labels, by_rank("seconds")),
            families.counter("task_failures", "Tasks failed on a rank", labels, by_rank("num_failures")),
            families.histogram("task_duration_seconds", text, ("kind",), durations),
            families.histogram("prefetch_duration_seconds", prefetches, (), {(): self._prefetches.read()}),
            families.counter("skipped_write_blocks", skipped, (), {(): self._num_skipped_writes}),
        ]
