"""The control-plane benchmark as a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.control import PHASES, floors, match_over_edges, medians, row, serve_workload
from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.bench.pauses import LOCK, VERBS, pauses, pools_of
from fastdeploy_cache.launch.bench.pauses import row as row_of_pauses
from fastdeploy_cache.launch.bench.reach import Reach, add_at_most, show_reach, table_of
from fastdeploy_cache.launch.bench.scale import bytes_per_block, eviction_cost, scale_ratio
from fastdeploy_cache.launch.bench.workloads import Scale, Workload, chat, long, recorded
from fastdeploy_cache.launch.findings import check_target, console_beside, write_json

# (name, policy, CPU blocks for each GPU block)
_VARIANTS = (("lru", "lru", 0.0), ("lru + CPU tier", "lru", 2.0), ("reuse", "reuse", 0.0))
_CHAIN_LIMITS = {"long": 0.35, "chat": 0.8, "trace": 1.0}


def bench_control(
    trace: Path | None, trace_block_size: int, json_file: Path | None, repeats: int, scale_sizes: str
) -> bool:
    """Run everything, print it, write it; whether every figure was reached.

    Raises:
        LaunchError: a bad trace or size, or a folder that does not exist.
    """
    check_target(json_file)
    scale_blocks = _scale_blocks(scale_sizes)
    console = console_beside(json_file, 110)
    workloads = [chat(64), chat(16), long(64)]
    if trace is not None:
        workloads.append(recorded(trace, trace_block_size))
    reach: Reach = []
    found: dict[str, Any] = {"machine": describe_machine(), "workloads": {}, "reach": reach}
    console.print(found["machine"]["text"])
    for workload in workloads:
        found["workloads"][workload.name] = _run_workload(console, workload, repeats, reach)
    if trace is None:
        console.print("No trace workload: give a file with --trace")
    found["match"] = _run_edges(console, reach)
    found["eviction"] = _run_eviction(console, scale_blocks[-1], reach)
    found["scale"] = _run_scale(console, scale_blocks, reach)
    found["pauses"] = _run_pauses(console, scale_blocks[-1], reach)
    found["bytes_per_block"] = _run_bytes(console, scale_blocks[-1], reach)
    show_reach(console, reach)
    console.print("docs/benchmark.md says what each figure is; smaller is better throughout.")
    write_json(json_file, found)
    return all(entry["ok"] for entry in reach)


def _scale_blocks(sizes: str) -> list[int]:
    try:
        blocks = [int(size) for size in sizes.split(",")]
    except ValueError:
        blocks = []
    if len(blocks) < 2 or min(blocks) < Scale.MIN_BLOCKS:
        raise LaunchError(f"--scale-blocks is {sizes!r}; give two or more sizes of at least {Scale.MIN_BLOCKS} blocks")
    return blocks


def _run_workload(console: Console, workload: Workload, repeats: int, reach: Reach) -> dict[str, Any]:
    """Each variant and the floors, interleaved; medians of the repeats."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in _VARIANTS}
    bare = []
    for _ in range(repeats):
        for name, policy, cpu_ratio in _VARIANTS:
            runs[name].append(serve_workload(workload, policy, cpu_ratio))
            bare.append(floors(workload))
    results, floor = {name: medians(times) for name, times in runs.items()}, medians(bare)
    mean_tokens = sum(len(work.prompt) for work in workload.works) / len(workload.works)
    table = Table(
        title=f"{workload.name}: {len(workload.works)} prompts of {mean_tokens:.0f} tokens; microseconds per request",
        title_justify="left",
    )
    for column in ("", *PHASES, "all", "of chain", "ns/block", "hit"):
        table.add_column(column, justify="left" if not column else "right")
    blocks = workload.num_blocks / len(workload.works)
    for name, times in results.items():
        cells = [f"{times[phase]:.1f}" for phase in (*PHASES, "all")]
        ratio = times["all"] / floor["chain"]
        table.add_row(name, *cells, f"{ratio:.2f}", f"{times['all'] / blocks * 1000:.0f}", f"{times['hit']:.1%}")
    console.print(table)
    console.print("Floors: " + ", ".join(f"{name} {value:.1f}" for name, value in floor.items()))
    kind = workload.name.split()[0].rstrip(",")
    base = results["lru"]["all"]
    if kind in _CHAIN_LIMITS and workload.block_size == 64:
        add_at_most(reach, f"{workload.name}: request / SHA-256 chain", base / floor["chain"], _CHAIN_LIMITS[kind])
        add_at_most(reach, f"{workload.name}: with CPU tier / without", results["lru + CPU tier"]["all"] / base, 1.5)
    return {
        "results": {name: row(times) for name, times in results.items()},
        "floors": row(floor),
        "mean_prompt_tokens": mean_tokens,
        "blocks_per_request": blocks,
        "microseconds_per_block": {name: round(times["all"] / blocks, 4) for name, times in results.items()},
    }


def _run_edges(console: Console, reach: Reach) -> dict[str, Any]:
    table = table_of("Match of a cached prompt of 128k tokens, block 64", ("edges", "match", "NumPy compare", "ratio"))
    found = {}
    for num_edges, limit in ((1, 5), (20, 5), (100, 10)):
        times = match_over_edges(num_edges)
        ratio = times["match"] / times["compare"]
        table.add_row(str(num_edges), f"{times['match']:.1f} us", f"{times['compare']:.1f} us", f"{ratio:.1f}")
        add_at_most(reach, f"match over {num_edges} edges / NumPy compare", ratio, limit)
        found[str(num_edges)] = row(times)
    console.print(table)
    return found


def _run_eviction(console: Console, num_blocks: int, reach: Reach) -> dict[str, Any]:
    columns = ("policy", "blocks a call", "evict", "of it heap push", "over the push")
    table = table_of(f"Eviction from {num_blocks} cached blocks in runs of 64; microseconds per block", columns)
    found: dict[str, Any] = {}
    for policy in ("lru", "reuse"):
        for per_call, limit in ((1, 3), (16, 1), (64, 1)):
            times = eviction_cost(num_blocks, per_call, policy)
            table.add_row(policy, str(per_call), *(f"{value:.2f}" for value in times.values()))
            found[f"{policy}, {per_call} a call"] = row(times)
            if policy == "lru":
                add_at_most(reach, f"eviction, {per_call} a call, us over the push", times["over the push"], limit)
    console.print(table)
    return found


def _run_scale(console: Console, scale_blocks: list[int], reach: Reach) -> dict[str, Any]:
    table = table_of("Requests that all evict, blocks of 16 tokens", ("blocks", "us per request", "best ratio of 5"))
    found = {}
    small = scale_blocks[0]
    for large in scale_blocks[1:]:
        times = scale_ratio(small, large)
        table.add_row(f"{small} / {large}", f"{times['small']:.1f} / {times['large']:.1f}", f"{times['ratio']:.2f}")
        found[f"{large} / {small}"] = row(times)
    add_at_most(reach, f"scale: request at {scale_blocks[-1]} blocks / at {small}", times["ratio"], 1.3)
    console.print(table)
    return found


def _run_pauses(console: Console, num_blocks: int, reach: Reach) -> dict[str, Any]:
    """The worst call beside the mean."""
    columns = ("prompts, blocks", *(f"{verb}, us" for verb in VERBS), f"{LOCK}, us")
    table = table_of("Mean / worst call of each verb, in thread time", columns)
    found: dict[str, Any] = {}
    for pool in pools_of(num_blocks):
        times = pauses(pool)
        cells = [f"{times[name]['mean']:.0f} / {times[name]['worst']:.0f}" for name in (*VERBS, LOCK)]
        table.add_row(f"{pool.name}, {pool.num_blocks}", *cells)
        found[pool.name] = row_of_pauses(times)
        first, held = times["first eviction"]["worst"] / 1000, times[LOCK]["worst"] / 1000
        add_at_most(reach, f"first eviction of a full pool, {pool.name}, ms", first, 2)
        add_at_most(reach, f"longest hold of the lock, {pool.name}, ms", held, 20)
    console.print(table)
    return found


def _run_bytes(console: Console, num_blocks: int, reach: Reach) -> dict[str, Any]:
    grown = {policy: bytes_per_block(num_blocks, policy) for policy in ("lru", "reuse")}
    figures = ", ".join(f"{value:.0f} with {policy}" for policy, value in grown.items())
    console.print(f"Bytes per cached block of 16 tokens (growth of a process): {figures}")
    add_at_most(reach, "bytes per cached block", grown["lru"], 200)
    return row(grown)
