"""What is kept of a request only to explain it: no verb decides by it, but for what it has to tell."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.books.taps import Loss

# Blocks in a row that were missed for one cause: how many, where they were lost how and when, and further evidence.
MissedBlocks = tuple[Cause, int, Loss | None, float, str]


class Trail(msgspec.Struct, gc=False):
    """One of each request, from its match on. Under the lock."""

    matched_at: float = 0.0  # when `match` was called, by the monotonic clock
    match_seconds: float = 0.0  # that it took
    idle_since: float = 0.0  # when the last run that it found had been used last; 0: never, or nothing was found
    num_searched_blocks: int = 0  # that the match itself found: behind these are its `misses`
    num_whole_blocks: int = 0  # of the found ones, those behind which it can go on
    misses: Sequence[MissedBlocks] = ()  # what no tier had
    room_seconds: float = 0.0  # that it has waited for room
    refused_for: tuple[Cause, str] | None = None  # why what the CPU tier has was not loaded
    has_failed_load: bool = False
    load_seconds: float = 0.0  # of the loads that it waited for and that came
    row_load_bytes: int = 0  # of a hybrid model, on each rank: what its match lacked on the GPU of its goal
    owes_load_seconds: bool = False  # it was counted while it ran ahead of them
    computing_key: int | None = None  # see `Computing`
    stepped_at: float = 0.0  # when it was last given blocks or committed: how fast is prefill?
    number: int = 0  # among all that were recorded
