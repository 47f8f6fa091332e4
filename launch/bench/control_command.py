"""The control-plane benchmark as a program."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from fastdeploy_cache.books.tokens import IS_NATIVE
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.control import by_token, floors, match_over_edges, medians
from fastdeploy_cache.launch.bench.options import ControlOptions
from fastdeploy_cache.launch.bench.pause_tables import run_pauses
from fastdeploy_cache.launch.bench.report import Figure, Promise, Report, at_most
from fastdeploy_cache.launch.bench.row_serving import WINDOW_TOKENS, long_match, row_times
from fastdeploy_cache.launch.bench.scale import eviction_cost, full_pool_costs, scale_ratio
from fastdeploy_cache.launch.bench.serving import PHASES, new_server, serve_workload
from fastdeploy_cache.launch.bench.steps import NUM_RUNNING, our_step, step_cost
from fastdeploy_cache.launch.bench.vllm_process import VllmProcess, vllm_process
from fastdeploy_cache.launch.bench.workloads import Recipe, Scale


class _Variant(NamedTuple):
    name: str
    policy: str = "lru"
    cpu_ratio: float = 0.0  # CPU blocks for each GPU block
    from_list: bool = False
    explains: bool = True


class _Limits(NamedTuple):
    """Promises of a workload: "all" by the chain's time, and "whole" by vLLM's, from an array and from a list."""

    chain: float | None
    vllm: float
    vllm_from_list: float


_VLLM = "vLLM"
_VARIANTS = (
    _Variant("lru"),
    _Variant("lru, from a list", from_list=True),
    _Variant("lru + CPU tier", cpu_ratio=2.0),
    _Variant("reuse", "reuse"),
    _Variant("lru, no causes", explains=False),
    _Variant("CPU tier, no causes", cpu_ratio=2.0, explains=False),
)
_LIMITS = {
    ("chat", 64): _Limits(0.8, 0.18, 0.22),
    ("chat", 16): _Limits(None, 0.065, 0.09),
    ("long", 64): _Limits(0.35, 0.03, 0.09),
    ("trace", 64): _Limits(1.0, 0.19, 0.21),
}
_WITHOUT_CAUSES = {"lru": "lru, no causes", "lru + CPU tier": "CPU tier, no causes"}
_FULL_POOL_OF_VLLM, _FULL_POOL_OF_VLLM_FROM_LIST = 0.24, 0.25
_STEP_MICROSECONDS = 3
_ROW_MATCH_MICROSECONDS, _ROW_REQUEST_MICROSECONDS, _LONG_MATCH_OF_ROWS = 5, 45, 1.3
_MADE_UP = (Recipe("chat", 64), Recipe("chat", 16), Recipe("long", 64, 60))


def bench_control(options: ControlOptions, json_file: Path | None, made_up: Sequence[Recipe] = _MADE_UP) -> bool:
    """Run everything, print it, write it; whether every promise was kept.

    Raises:
        LaunchError: a bad trace, size or peer, or a folder that does not exist.
    """
    scale_blocks = _scale_blocks(options.scale_blocks)
    folder = _vllm_folder(options.peer)
    with Report(json_file) as report:
        recipes = list(made_up)
        if options.trace is not None:
            # first: a file that cannot be read is told at once, and not behind a minute of figures
            recipes.insert(0, Recipe("trace", 64, 400, str(options.trace), options.trace_block_size))
        with vllm_process(folder) if folder is not None else nullcontext() as vllm:
            report.note(f"Beside {vllm.name}" if vllm else "Without vLLM: give its folder with --peer vllm=FOLDER")
            report.note("Lists of tokens are packed natively" if IS_NATIVE else "Lists of tokens are packed in Python")
            for recipe in recipes:
                _run_workload(report, recipe, options.repeats, vllm)
                if recipe.kind == "chat":
                    _run_by_token(report, recipe, options.repeats)
                    _run_rows(report, recipe, options.repeats)
            if options.trace is None:
                report.note("No trace workload: give a file with --trace")
            _run_steps(report, options.repeats, vllm)
            _run_full_pools(report, scale_blocks, vllm)
        _run_edges(report)
        _run_long_match_of_rows(report)
        _run_eviction(report, scale_blocks[-1])
        if len(scale_blocks) > 1:  # the ratio is of two
            _run_scale(report, scale_blocks)
        run_pauses(report, scale_blocks, options.max_runs)
        report.note("Smaller is better throughout, but for hits.")
        return report.end()


def _scale_blocks(sizes: str) -> list[int]:
    try:
        blocks = [int(size) for size in sizes.split(",")]
    except ValueError:
        blocks = []
    if min(blocks, default=0) < Scale.MIN_BLOCKS:
        raise LaunchError(f"--scale-blocks is {sizes!r}; give sizes of at least {Scale.MIN_BLOCKS} blocks")
    return blocks


def _vllm_folder(peer: str | None) -> Path | None:
    if peer is None:
        return None
    name, _, folder = peer.partition("=")
    if name != "vllm" or not folder:
        raise LaunchError(f"--peer is {peer!r}; give vllm=FOLDER, the folder that holds the package vllm")
    return Path(folder)


def _run_workload(report: Report, recipe: Recipe, repeats: int, vllm: VllmProcess | None) -> None:
    """Each variant, the floors and vLLM, interleaved; medians of the repeats."""
    workload = recipe.make()
    runs: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in _VARIANTS}
    bare = []
    for _ in range(repeats):
        for name, policy, cpu_ratio, from_list, explains in _VARIANTS:
            server = new_server(workload, policy, cpu_ratio, from_list=from_list, explains=explains)
            runs[name].append(serve_workload(server, workload))
        bare.append(floors(workload))
        if vllm is not None:
            runs.setdefault(_VLLM, []).append(vllm.serve(recipe))
    results, floor = {name: medians(times) for name, times in runs.items()}, medians(bare)
    bare_figures = {name: Figure(name, value, "us") for name, value in floor.items()}
    theirs = Figure("vLLM", results[_VLLM]["whole"], "us") if vllm is not None else None
    promises = _promises(workload.name, _LIMITS[recipe.kind, recipe.block_size])
    num_prompts = len(workload.works)
    num_blocks = workload.num_blocks / num_prompts
    lines = {
        name: [
            *(Figure(phase, times[phase], "us") for phase in PHASES if times[phase]),
            Figure("all", times["all"], "us", bare_figures["chain"], promises.get((name, "chain"))),
            Figure("whole", times["whole"], "us", theirs, promises.get((name, "vLLM")) if vllm is not None else None),
            Figure("of lru", times["whole"] / results["lru"]["whole"], promise=promises.get((name, "lru"))),
            *(
                Figure("of no causes", times["whole"] / results[other]["whole"], promise=promises[name, other])
                for other in (_WITHOUT_CAUSES.get(name),)
                if other is not None
            ),
            Figure("a block", times["all"] / num_blocks * 1000, "ns"),
            Figure("hit", times["hit"] * 100, "%"),
        ]
        for name, times in results.items()
    }
    mean_tokens = sum(len(work.prompt) for work in workload.works) / num_prompts
    about = f"{num_prompts} prompts of {mean_tokens:.0f} tokens; {num_blocks:.1f} blocks with their outputs"
    report.table(workload.name, lines, about=about)
    report.line(f"{workload.name}, floors", *bare_figures.values())


def _promises(workload: str, limits: _Limits) -> dict[tuple[str, str], Promise]:
    """Promises by line, and by what the figure is compared with."""
    found = {
        ("lru", "vLLM"): at_most(f"{workload}: whole / vLLM", limits.vllm),
        ("lru, from a list", "vLLM"): at_most(f"{workload}: from a list / vLLM", limits.vllm_from_list),
        ("lru + CPU tier", "lru"): at_most(f"{workload}: with CPU tier / without", 1.35),
    }
    for name, other in _WITHOUT_CAUSES.items():
        found[name, other] = at_most(f"{workload}: {name} / {other}", 1.05)
    if limits.chain is not None:
        found["lru", "chain"] = at_most(f"{workload}: request / SHA-256 chain", limits.chain)
    if workload.startswith("chat"):
        found["reuse", "lru"] = at_most(f"{workload}: reuse / lru", 1.25)
    return found


def _run_by_token(report: Report, recipe: Recipe, repeats: int) -> None:
    workload = recipe.make()
    times = by_token(workload, repeats)
    ratio = times["lru"]["whole"] / times["lru, no causes"]["whole"]
    name = f"{workload.name}, one token a step"
    lines = {line: [Figure("whole", found["whole"], "us")] for line, found in times.items()}
    lines["lru"].append(Figure("of no causes", ratio, promise=at_most(f"{name}: lru / lru, no causes", 1.05)))
    report.table(name, lines, about=f"{workload.num_in_flight} requests take a step together")


def _run_rows(report: Report, recipe: Recipe, repeats: int) -> None:
    """A model with a window and states beside one whose layers all keep everything."""
    workload = recipe.make()
    times = row_times(workload, repeats)
    more = {phase: times["rows"][phase] - times["uniform"][phase] for phase in ("match", "whole")}
    name = f"{workload.name}, window of {WINDOW_TOKENS} and states"
    promises = {
        "match": at_most(f"{name}: match less uniform, us", _ROW_MATCH_MICROSECONDS),
        "whole": at_most(f"{name}: request less uniform, us", _ROW_REQUEST_MICROSECONDS),
    }
    lines = {line: [Figure(phase, found[phase], "us") for phase in (*PHASES, "whole")] for line, found in times.items()}
    for line, found in times.items():
        lines[line].append(Figure("hit", found["hit"] * 100, "%"))
    lines["rows"] += [Figure(f"{phase}, more", more[phase], "us", promise=each) for phase, each in promises.items()]
    report.table(name, lines, about="without the flight recorder; a snapshot at each block of output")


def _run_long_match_of_rows(report: Report) -> None:
    times = long_match()
    uniform = Figure("uniform", times["uniform"], "us")
    promise = at_most("match of 128k tokens with a window and states / uniform", _LONG_MATCH_OF_ROWS)
    lines = {"match": [uniform, Figure("rows", times["rows"], "us", uniform, promise)]}
    report.table(
        "Match of a cached prompt of 128k tokens", lines, about=f"block 64, window of {WINDOW_TOKENS} and states"
    )


def _run_steps(report: Report, repeats: int, vllm: VllmProcess | None) -> None:
    lines = {}
    for block_size in (16, 64):
        times = []
        for _ in range(repeats):
            found = {"ours": step_cost(our_step(block_size), 200)}
            if vllm is not None:
                found["vLLM"] = vllm.step(block_size, 200)
            times.append(found)
        cost = medians(times)
        theirs = [Figure("vLLM", cost["vLLM"], "us")] if vllm is not None else []
        name = f"decode step, us a request, block {block_size}"
        lines[f"block {block_size}"] = [
            Figure("a request", cost["ours"], "us", promise=at_most(name, _STEP_MICROSECONDS)),
            *theirs,
            *(Figure("ratio", cost["ours"] / each.value) for each in theirs),
        ]
    report.table(f"A decode step of {NUM_RUNNING} running requests", lines, about="one token for each")


def _run_full_pools(report: Report, scale_blocks: list[int], vllm: VllmProcess | None) -> None:
    lines = {}
    for num_blocks in scale_blocks:
        costs = full_pool_costs(num_blocks, vllm.serve_full if vllm is not None else None)
        theirs = Figure("vLLM", costs["vLLM"], "us") if vllm is not None else None
        promises = [
            at_most(f"full pool of {num_blocks} blocks: {name} / vLLM", limit) if vllm is not None else None
            for name, limit in (("whole", _FULL_POOL_OF_VLLM), ("from a list", _FULL_POOL_OF_VLLM_FROM_LIST))
        ]
        lines[str(num_blocks)] = [
            Figure("request", costs["ours"], "us", theirs, promises[0]),
            Figure("from a list", costs["from a list"], "us", theirs, promises[1]),
            *([theirs] if theirs is not None else []),
        ]
    report.table("Requests under a full pool", lines, about="blocks of 16 tokens; all evict", label="blocks")


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
            promise = at_most(f"eviction, {per_call} a call, us a block", limit) if policy == "lru" else None
            figure = Figure("evict", eviction_cost(num_blocks, per_call, policy), "us", promise=promise)
            lines[f"{policy}, {per_call} a call"] = [figure]
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
