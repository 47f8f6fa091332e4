"""A copy in flight between tiers, and the places in the tree that it fills."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastdeploy_cache.books.run import Pin, Run, Tier
from fastdeploy_cache.ipc.clock import Clock, Event


class Cargo(Protocol):
    """What a transfer moves, and what becomes of it. Under the lock."""

    @property
    def ids(self) -> Sequence[int]:
        """Destination blocks that are the task's now."""
        ...

    @property
    def pins(self) -> Sequence[Pin]:
        """What keeps its sources in place."""
        ...

    def num_freed(self, held: dict[Run, int]) -> int:
        """GPU blocks, of its destinations, that become free or evictable when it ends well. `held`: blocks from the
        front of each run that requests hold."""
        ...

    def end(self, succeeded: bool) -> None:
        """Every rank has answered, well or not: give ids and pins to whom they belong now.

        Where it raises it has given away what it could, and nothing twice; the rest stays the task's for good.
        """
        ...


@dataclass(eq=False)
class Transfer:
    """A copy in flight; `done` is set when it has ended, well or not."""

    task_id: int
    tier: Tier  # the destination
    done: Event
    segments: list[Segment] = field(default_factory=list)  # of runs, that it fills
    cargo: Cargo | None = None  # until it has ended well
    succeeded: bool = False
    seconds: float = 0.0  # that the slowest rank took, once it has ended
    is_quarantined: bool = False  # it has ended, and landing it failed: see `BlockMover.finish`
    cancelled: bool = False  # nobody starts to wait for it any more; it may still succeed
    num_lost: int = 0  # blocks that have come and joined nothing
    num_waiting: int = 0  # matches that are not settled and contain blocks of it
    on_done: list[Callable[[], None]] = field(default_factory=list)  # called without the lock
    num_ahead: int = 0  # requests that use the destinations before the load has ended
    kept: list[array[int]] = field(default_factory=list)  # of those, what did not join the tree
    kept_units: Sequence[array[int]] = ()  # the same of a checkpoint, by row


def wait_done(transfers: Iterable[Transfer], timeout_seconds: float, clock: Clock) -> bool:
    """Wait until all have ended; False when the time is over first. Not under the lock."""
    deadline = clock.now() + timeout_seconds
    return all(transfer.done.wait(clock.seconds_to(deadline)) for transfer in transfers)


class Segment(Pin):
    """Blocks [start, end) of a run on their way to `ids` in the transfer's tier; as a pin it keeps their source."""

    __slots__ = ("ids", "start", "transfer")

    def __init__(self, transfer: Transfer, run: Run, start: int, ids: array[int]) -> None:
        super().__init__(run, start + len(ids))
        self.transfer = transfer
        self.start = start
        self.ids = ids


def segments_of(run: Run, tier: Tier) -> list[Segment]:
    """What is on its way to a tier for this run, and wanted."""
    return [
        pin for pin in run.pins if isinstance(pin, Segment) and pin.transfer.tier is tier and not pin.transfer.cancelled
    ]


Halves = dict[Pin, tuple["array[int]", "array[int]"]]  # the ids of segments above and below a cut


def halves(run: Run, cut: int) -> Halves:
    """What `split_pins` is going to need of a run that is cut after so many blocks; this may lack memory."""
    ids: Halves = {}
    for pin in run.pins:  # a comprehension would be one call more at each cut
        if pin.end > cut and isinstance(pin, Segment) and pin.start < cut:
            ids[pin] = pin.ids[: cut - pin.start], pin.ids[cut - pin.start :]
    return ids


def split_pins(lower: Run, upper: Run, ids: Halves) -> None:
    """Each pin follows its blocks; a segment on both sides becomes two. What is held stays the same blocks."""
    cut, above = upper.num_blocks, list(upper.pins)
    below: list[Pin] = []
    for pin in lower.pins:
        if pin.end <= cut:
            pin.run = upper
            above.append(pin)
            continue
        if pin in ids and isinstance(pin, Segment):
            part = Segment(pin.transfer, upper, pin.start, ids[pin][0])
            pin.start, pin.ids = cut, ids[pin][1]
            above.append(part)
            segments = pin.transfer.segments
            segments.insert(segments.index(pin), part)  # loads land from the top down
        if isinstance(pin, Segment):
            pin.start -= cut
        pin.end -= cut
        below.append(pin)
    upper.pins, lower.pins = tuple(above), tuple(below)
    upper.num_held, lower.num_held = min(lower.num_held, cut), max(0, lower.num_held - cut)
    upper.num_held_children = int(lower.num_held > 0)
