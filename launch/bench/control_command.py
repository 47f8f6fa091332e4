"""The control-plane benchmark as a program."""

from __future__ import annotations

from pathlib import Path

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.control import PHASES, floors, match_over_edges, medians, serve_workload
from fastdeploy_cache.launch.bench.pauses import LOCK, VERBS, pauses, pools_of
from fastdeploy_cache.launch.bench.report import Figure, Report, at_most
from fastdeploy_cache.launch.bench.scale import bytes_per_block, eviction_cost, scale_ratio
from fastdeploy_cache.launch.bench.workloads import Scale, Workload, chat, long, recorded

# (name, policy, CPU blocks for each GPU block)
_VARIANTS = (("lru", "lru", 0.0), ("lru + CPU tier", "lru", 2.0), ("reuse", "reuse", 0.0))
_CHAIN_LIMITS = {"long": 0.35, "chat": 0.8, "trace": 1.0}


def bench_control(
    trace: Path | None, trace_block_size: int, json_file: Path | None, repeats: int, scale_sizes: str
) -> bool:
    """Run everything, print it, write it; whether every promise was kept.

    Raises:
        LaunchError: a bad trace or size, or a folder that does not exist.
    """
    scale_blocks = _scale_blocks(scale_sizes)
    report = Report(json_file)
    workloads = [chat(64), chat(16), long(64)]
    if trace is not None:
        workloads.append(recorded(trace, trace_block_size))
    for workload in workloads:
        _run_workload(report, workload, repeats)
    if trace is None:
        report.note("No trace workload: give a file with --trace")
    _run_edges(report)
    _run_eviction(report, scale_blocks[-1])
    _run_scale(report, scale_blocks)
    _run_pauses(report, scale_blocks[-1])
    _run_bytes(report, scale_blocks[-1])
    report.note("Smaller is better throughout, but for hits.")
    return report.end()


def _scale_blocks(sizes: str) -> list[int]:
    try:
        blocks = [int(size) for size in sizes.split(",")]
    except ValueError:
        blocks = []
    if len(blocks) < 2 or min(blocks) < Scale.MIN_BLOCKS:
        raise LaunchError(f"--scale-blocks is {sizes!r}; give two or more sizes of at least {Scale.MIN_BLOCKS} blocks")
    return blocks


def _run_workload(report: Report, workload: Workload, repeats: int) -> None:
    """Each variant and the floors, interleaved; medians of the repeats."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in _VARIANTS}
    bare = []
    for _ in range(repeats):
        for name, policy, cpu_ratio in _VARIANTS:
            runs[name].append(serve_workload(workload, policy, cpu_ratio))
            bare.append(floors(workload))
    results, floor = {name: medians(times) for name, times in runs.items()}, medians(bare)
    kind = workload.name.split()[0].rstrip(",")
    of_chain = of_lru = None
    if kind in _CHAIN_LIMITS and workload.block_size == 64:
        of_chain = at_most(f"{workload.name}: request / SHA-256 chain", _CHAIN_LIMITS[kind])
        of_lru = at_most(f"{workload.name}: with CPU tier / without", 1.5)
    bare_figures = {name: Figure(name, value, "us") for name, value in floor.items()}
    num_prompts = len(workload.works)
    num_blocks = workload.num_blocks / num_prompts
    lines = {
        name: [
            *(Figure(phase, times[phase], "us") for phase in PHASES),
            Figure("all", times["all"], "us", bare_figures["chain"], of_chain if name == "lru" else None),
            Figure("of lru", times["all"] / results["lru"]["all"], promise=of_lru if "CPU" in name else None),
            Figure("a block", times["all"] / num_blocks * 1000, "ns"),
            Figure("hit", times["hit"] * 100, "%"),
        ]
        for name, times in results.items()
    }
    mean_tokens = sum(len(work.prompt) for work in workload.works) / num_prompts
    about = f"{num_prompts} prompts of {mean_tokens:.0f} tokens; {num_blocks:.1f} blocks with their outputs"
    report.table(workload.name, lines, about=about)
    report.line(f"{workload.name}, floors", *bare_figures.values())


def _run_edges(report: Report) -> None:
    lines = {}
    for num_edges, limit in ((1, 5), (20, 5), (100, 10)):
        times = match_over_edges(num_edges)
        compare = Figure("NumPy compare", times["compare"], "us")
        promise = at_most(f"match over {num_edges} edges / NumPy compare", limit)
        lines[str(num_edges)] = [compare, Figure("match", times["match"], "us", compare, promise)]
    report.table("Match of a cached prompt", lines, about="128k tokens, block 64", label="edges")


def _run_eviction(report: Report, num_blocks: int) -> None:
    lines = {}
    for policy in ("lru", "reuse"):
        for per_call, limit in ((1, 3), (16, 1), (64, 1)):
            times = eviction_cost(num_blocks, per_call, policy)
            promise = at_most(f"eviction, {per_call} a call, us over the push", limit) if policy == "lru" else None
            lines[f"{policy}, {per_call} a call"] = [
                Figure("evict", times["evict"], "us"),
                Figure("of it heap push", times["push"], "us"),
                Figure("over the push", times["over the push"], "us", promise=promise),
            ]
    report.table("Eviction of a block", lines, about=f"{num_blocks} cached blocks in runs of 64")


def _run_scale(report: Report, scale_blocks: list[int]) -> None:
    lines, small = {}, scale_blocks[0]
    for large in scale_blocks[1:]:
        times = scale_ratio(small, large)
        name = f"scale: request at {large} blocks / at {small}"
        promise = at_most(name, 1.3) if large == scale_blocks[-1] else None
        lines[f"{small} / {large}"] = [
            Figure("request, small", times["small"], "us"),
            Figure("request, large", times["large"], "us"),
            Figure("best ratio of 5", times["ratio"], promise=promise),
        ]
    report.table("Requests that all evict", lines, about="blocks of 16 tokens", label="blocks")


def _run_pauses(report: Report, num_blocks: int) -> None:
    """The worst call beside the mean."""
    lines = {}
    for pool in pools_of(num_blocks):
        times = pauses(pool)
        promises = {
            "first eviction": at_most(f"first eviction of a full pool, {pool.name}, ms", 2),
            LOCK: at_most(f"longest hold of the lock, {pool.name}, ms", 20),
        }
        for which in ("mean", "worst"):
            lines[f"{pool.name}, {pool.num_blocks}: {which}"] = [
                Figure(verb, times[verb][which] / 1000, "ms", promise=promises.get(verb) if which == "worst" else None)
                for verb in (*VERBS, LOCK)
            ]
    report.table("Mean and worst call of each verb, in thread time", lines, label="prompts, blocks")


def _run_bytes(report: Report, num_blocks: int) -> None:
    promises = {"lru": at_most("bytes per cached block", 200)}
    grown = [
        Figure(f"with {policy}", bytes_per_block(num_blocks, policy), "bytes", promise=promises.get(policy))
        for policy in ("lru", "reuse")
    ]
    report.line("A cached block of 16 tokens, by the growth of a process", *grown)
