"""The tables of an engine's lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from fastdeploy_cache.launch.findings import table_of


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: a pass of a run, or of several runs of one kind."""

    run: str
    num_requests: int
    num_equal: int  # answers that are those of the engine alone, token for token
    num_prompt_tokens: int
    num_cached_tokens: int  # as the engine counts
    hit_tokens: tuple[int, ...]  # by tier: gpu, cpu, storage, as the cache counts
    median_seconds: float  # to the first token
    longest_seconds: float  # to the first token of the longest prompt
    cpu_seconds: float  # of a pass
    num_restarts: int = 0  # of the cache's ranks
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


def print_lines(console: Console, lines: Sequence[Line]) -> None:
    """Print the table."""
    columns = ("equal", "prompt", "cached", "gpu", "cpu", "storage", "median s", "longest s", "cpu s", "restarts")
    table = table_of(("run", *columns), words=("run",))
    for line in lines:
        counts: list[int | str] = [line.num_prompt_tokens, line.num_cached_tokens, *line.hit_tokens]
        if line.num_stored_tokens is not None:
            counts[-1] = f"{counts[-1]} of {line.num_stored_tokens}"
        seconds = (f"{line.median_seconds:.3f}", f"{line.longest_seconds:.3f}", f"{line.cpu_seconds:.1f}")
        equal = f"{line.num_equal} of {line.num_requests}"
        table.add_row(line.run, equal, *map(str, counts), *seconds, str(line.num_restarts))
    console.print(table)


def print_cases(console: Console, cases: Sequence[CaseResult]) -> None:
    """Print the table."""
    table = table_of(("case", "equal", "gpu", "cpu", "storage", "note"), words=("case", "note"))
    for case in cases:
        equal = f"{case.num_equal} of {case.num_answers}"
        table.add_row(case.name, equal, *map(str, case.hit_tokens), case.failed or case.note)
    console.print(table)
