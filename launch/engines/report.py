"""The tables of a real engine's runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from fastdeploy_cache.launch.engines.results import Passed
from fastdeploy_cache.launch.findings import table_of


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: a pass of a run, or of several runs of one kind. `seconds`: see `Served`."""

    run: str
    num_requests: int
    num_equal: int  # answers that are those of the engine alone, token for token
    num_prompt_tokens: int
    num_cached_tokens: int  # as the engine counts
    hit_tokens: tuple[int, ...]  # by tier: gpu, cpu, storage; (): this cache was not there to count
    median_seconds: float
    longest_seconds: float  # of the longest prompt
    cpu_seconds: float  # of a pass
    num_kills: int = 0  # of the cache's processes, in the whole run
    num_stored_tokens: int | None = None  # that were on disk before it; None: not counted


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What became of one case. `failed` says why it did not hold."""

    name: str
    num_answers: int
    num_equal: int
    hit_tokens: tuple[int, ...]  # by tier: gpu, cpu, storage
    failed: str = ""
    note: str = ""


def line_of(
    run: str, passes: Sequence[Passed], expected: Sequence[tuple[int, ...]], lengths: Sequence[int], **more: int
) -> Line:
    """The line of passes of one kind: `expected` are the answers of the engine alone, `more` goes into the line."""
    longest = lengths.index(max(lengths))
    served = [answer for passed in passes for answer in passed.served]
    return Line(
        run=run,
        num_requests=len(served),
        num_equal=sum(answer.tokens == expected[i % len(expected)] for i, answer in enumerate(served)),
        num_prompt_tokens=sum(lengths) * len(passes),
        num_cached_tokens=sum(answer.num_cached_tokens for answer in served),
        hit_tokens=tuple(sum(tier) for tier in zip(*(passed.hit_tokens for passed in passes), strict=True)),
        median_seconds=statistics.median(answer.seconds for answer in served),
        longest_seconds=statistics.median(passed.served[longest].seconds for passed in passes),
        cpu_seconds=statistics.median(passed.cpu_seconds for passed in passes),
        **more,
    )


def print_lines(console: Console, lines: Sequence[Line]) -> None:
    """Print the table."""
    columns = ("equal", "prompt", "cached", "gpu", "cpu", "storage", "median s", "longest s", "cpu s", "kills")
    rows = []
    for line in lines:
        counts: list[int | str] = [line.num_prompt_tokens, line.num_cached_tokens, *(line.hit_tokens or ("-",) * 3)]
        if line.num_stored_tokens is not None:
            counts[-1] = f"{counts[-1]} of {line.num_stored_tokens}"
        seconds = (
            f"{line.median_seconds:.3f}",
            f"{line.longest_seconds:.3f}",
            f"{line.cpu_seconds:.1f}" if line.cpu_seconds else "-",
        )
        equal = f"{line.num_equal} of {line.num_requests}"
        rows.append((line.run, equal, *counts, *seconds, line.num_kills))
    console.print(table_of(("run", *columns), rows, words=("run",)))


def print_cases(console: Console, cases: Sequence[CaseResult]) -> None:
    """Print the table."""
    rows = [(c.name, f"{c.num_equal} of {c.num_answers}", *c.hit_tokens, c.failed or c.note) for c in cases]
    console.print(table_of(("case", "equal", "gpu", "cpu", "storage", "note"), rows, words=("case", "note")))
