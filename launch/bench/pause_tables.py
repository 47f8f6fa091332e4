"""The tables of worst calls and of bytes, a line for each pool."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.launch.bench.pauses import (
    COLLECTION,
    LOCK,
    RESET,
    VERBS,
    Pool,
    PoolFigures,
    pauses_apart,
    pools_of,
)
from fastdeploy_cache.launch.bench.report import Figure, Report, at_most
from fastdeploy_cache.launch.bench.verb_times import STATISTICS, WORST_LESS_BLOCKS

_LARGE_BLOCKS, _VERB_MILLISECONDS, _LARGE_VERB_MILLISECONDS = 1_000_000, 2, 5
_OTHER_MILLISECONDS = {RESET: 10, COLLECTION: 20}
_BLOCK_BYTES = {64: 95, 4: 250, 1: 600}  # by blocks of a prompt
_LEAST_BLOCKS = 100_000  # of a pool whose bytes are judged: in smaller ones what every process has counts


def run_pauses(report: Report, sizes: Sequence[int], max_runs: int) -> None:
    """Fill each pool of `pools_of`; a table for each statistic of its calls, and one of bytes."""
    pools, left_out = pools_of(sizes, max_runs)
    found = {pool: _calm_figures(pool) for pool in pools}
    for statistic in STATISTICS:
        lines = {
            f"{pool.name}, {pool.num_blocks}": _figures(
                pool, {verb: t[statistic] for verb, t in times.items()}, statistic
            )
            for pool, (times, _) in found.items()
        }
        report.table(f"Calls of each verb, {statistic}", lines, about="thread time", label="prompts of, pool")
    _report_bytes(report, found)
    for pool in left_out:
        report.note(f"Left out: {pool.num_blocks} blocks in prompts of {pool.name}; --max-runs {pool.num_runs} has it")


def _calm_figures(pool: Pool) -> PoolFigures:
    """What is found of a pool; where a limit is missed, the smaller of two: noise of the machine is in one of both."""
    found = pauses_apart(pool)
    worst = {verb: times[WORST_LESS_BLOCKS] for verb, times in found.times.items()}
    if all(value <= limit for _, value, limit in _limited(pool, worst)):
        return found
    again = pauses_apart(pool)
    smaller = {
        verb: {name: min(value, again.times.get(verb, times)[name]) for name, value in times.items()}
        for verb, times in found.times.items()
    }
    return PoolFigures(smaller, min(found.bytes_per_block, again.bytes_per_block))


def _limited(pool: Pool, worst: dict[str, float]) -> list[tuple[str, float, float]]:
    """Name, value and limit of what is promised: of the lock, where with a CPU tier a verb pays for whole copies."""
    limit = _VERB_MILLISECONDS if pool.num_blocks <= _LARGE_BLOCKS else _LARGE_VERB_MILLISECONDS
    any_verb = max(worst[verb] for verb in VERBS if verb in worst)
    limited: list[tuple[str, float, float]] = [
        (LOCK, worst[LOCK], limit) if pool.cpu_ratio else ("any verb", any_verb, limit)
    ]
    return limited + [(verb, worst[verb], limit) for verb, limit in _OTHER_MILLISECONDS.items() if verb in worst]


def _figures(pool: Pool, times: dict[str, float], statistic: str) -> list[Figure]:
    figures = {verb: Figure(verb, times[verb], "ms") for verb in (*VERBS, LOCK, RESET, COLLECTION) if verb in times}
    if statistic == WORST_LESS_BLOCKS:
        for name, value, limit in _limited(pool, times):
            promise = at_most(f"{pool.name}, {pool.num_blocks}: {name}, ms", limit)
            figures[name] = Figure(name, value, "ms", promise=promise)
    return list(figures.values())


def _report_bytes(report: Report, found: dict[Pool, PoolFigures]) -> None:
    """A promise for the largest pool of each kind of prompts, where that is large."""
    largest = {pool.blocks_per_prompt: pool for pool in found if not pool.cpu_ratio and pool.policy == "lru"}
    lines = {}
    for pool, (_, grown) in found.items():
        length = pool.blocks_per_prompt
        name = f"bytes per block, runs of {length}, pool of {pool.num_blocks}"
        is_judged = largest[length] == pool and pool.num_blocks >= _LEAST_BLOCKS
        promise = at_most(name, _BLOCK_BYTES[length]) if is_judged else None
        lines[f"{pool.name}, {pool.num_blocks}"] = [Figure("a block", grown, "bytes", promise=promise)]
    report.table("A cached block of 16 tokens, by the growth of a process", lines, label="prompts of, pool")
