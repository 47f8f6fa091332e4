"""What a replayed cache decides of a match, as it is told to a listener."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_cache import Request
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.insight.flight.records import CAUSES, NO_CAUSE
from fastdeploy_cache.requests.active_request import ActiveRequest


class HeardDecisions:
    """A `RequestListener` that keeps what it is told last."""

    def __init__(self) -> None:
        self.note: Callable[[tuple[object, ...]], None] = lambda _: None
        self.active: ActiveRequest | None = None
        self.found = (0, 0, 0, NO_CAUSE)
        self.num_looked = self.boundary = 0

    def matched(self, active: ActiveRequest) -> None:
        self.active, num_unloaded = active, active.num_unloaded_blocks
        refused = active.trail.refused_for if num_unloaded else None
        cause = refused[0].place if refused is not None else NO_CAUSE
        self.found = active.asked.num_found, active.num_gpu_blocks, num_unloaded, cause
        self.boundary = active.trail.num_whole_blocks

    def looked(self, request: Request, keys: BlockKeys, path: list[Run], num_found: int) -> None:  # noqa: ARG002
        self.num_looked = num_found

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def released(self, active: ActiveRequest) -> None: ...


def found_text(found: tuple[int, int, int, int]) -> str:
    """What a match has found, in words."""
    num_found, num_gpu, num_unloaded, cause = found
    text = f"{num_found} blocks found, {num_gpu} of them on the GPU"
    return f"{text}, {num_unloaded} not loaded ({CAUSES[cause]})" if cause != NO_CAUSE else text
