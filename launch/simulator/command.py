"""The simulator as a program: which capacity and which policy would have hit how much of a trace."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from fastdeploy_cache.config.cache import WRITE_POLICIES, CacheConfig
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.insight.flight.file import is_recording
from fastdeploy_cache.launch.findings import check_target, console_beside, progress_on, write_json
from fastdeploy_cache.launch.simulator.bound import Clairvoyant, infinite_hit_rate
from fastdeploy_cache.launch.simulator.hybrid import HybridModel
from fastdeploy_cache.launch.simulator.options import SimulateOptions
from fastdeploy_cache.launch.simulator.plot import check_plot, draw
from fastdeploy_cache.launch.simulator.recorded_trace import read_recorded_trace
from fastdeploy_cache.launch.simulator.replay import Replay, Replayed, StorePlan
from fastdeploy_cache.launch.simulator.report import show
from fastdeploy_cache.launch.simulator.trace import Trace, TraceRequest, read_trace
from fastdeploy_cache.launch.simulator.trace_hints import with_hints
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.transfer_manager.sizes import parse_size

_ADMISSIONS = ("second_use", "all")  # `priority` needs hints, which traces have not
_Sizes = tuple[int, int, int]  # blocks of GPU, CPU and storage


def simulate(path: Path, options: SimulateOptions) -> None:
    """Replay the trace once for each capacity and policy; print, and write what was asked for.

    Raises:
        LaunchError: a bad trace or option.
    """
    console = console_beside(options.json_file, 80 if _split(options.storage_blocks) == ["0"] else 110)
    policies = _names(options.policy)
    _check_choices(options)
    check_target(options.plot_file)
    if options.plot_file is not None:
        check_plot(options.plot_file)
    trace = with_hints(_read(path, options), _split(options.hints), options.hint_seed)
    block_bytes, model = _model(options.config_file, trace)
    sizes = _tier_sizes(options, trace, block_bytes)
    if model is not None and any(storage for _, _, storage in sizes):
        raise LaunchError("--storage-blocks with a layout of several groups is not simulated; leave it out")
    results, clairvoyant, interrupt = list[Replayed](), dict[int, float](), None
    try:
        _replay_all(console, trace, sizes, policies, options, model=model, results=results, clairvoyant=clairvoyant)
    except KeyboardInterrupt as error:
        if not results:
            raise
        interrupt = error
    found = _findings(path, trace, results, clairvoyant) | {"interrupted": interrupt is not None}
    found["rows"] = [] if model is None else [str(row) for row in model.layout.rows]
    found["hints"] = _split(options.hints)
    found |= {name: getattr(options, name) for name in ("write_policy", "storage_write_policy", "storage_admission")}
    if (speed := options.prefill_tokens_per_second) is not None:
        for row in found["results"]:
            row["saved_seconds"] = row["token_hit_rate"] * trace.num_tokens / speed
    show(console, found)
    if options.plot_file is not None:
        draw(options.plot_file, found)
    write_json(options.json_file, found)
    if interrupt is not None:
        raise interrupt


def _read(path: Path, options: SimulateOptions) -> Trace:
    """A trace, or a flight recording in its place."""
    if is_recording(path):
        return read_recorded_trace(path, options.block_size)
    block_size = options.block_size or options.trace_block_size
    return read_trace(path, options.trace_block_size, block_size, options.skip_bad)


def _check_choices(options: SimulateOptions) -> None:
    if not options.gpu_blocks:
        raise LaunchError("no size of the GPU tier was given; give --gpu-blocks, or --replay for a flight recording")
    choices = (
        ("--write-policy", options.write_policy, WRITE_POLICIES),
        ("--storage-write-policy", options.storage_write_policy, WRITE_POLICIES),
        ("--storage-admission", options.storage_admission, _ADMISSIONS),
    )
    for name, given, known in choices:
        if given not in known:
            raise LaunchError(f"{name} is {given!r}; use one of {', '.join(known)}")


def _replay_all(
    console: Console,
    trace: Trace,
    sizes: list[_Sizes],
    policies: list[str],
    options: SimulateOptions,
    *,
    model: HybridModel | None,
    results: list[Replayed],
    clairvoyant: dict[int, float],
) -> None:
    """Add each capacity under each policy to `results`, and the clairvoyant hit rate of each capacity."""
    replays: list[tuple[_Sizes, str | Clairvoyant]] = [(size, policy) for size in sizes for policy in policies]
    if options.bound and model is None:
        replays += [((size, 0, 0), Clairvoyant(trace, size)) for size in sorted(set(map(sum, sizes)))]
    policy_of_store = {"write_policy": options.storage_write_policy, "admission": options.storage_admission}
    with progress_on(console, is_transient=True) as progress:
        bar = progress.add_task("requests", total=len(replays) * len(trace.requests))
        for (gpu, cpu, storage), policy in replays:
            clairvoyant_policy = policy if isinstance(policy, Clairvoyant) else None

            def on_request(number: int, request: TraceRequest, told: Clairvoyant | None = clairvoyant_policy) -> None:
                if told is not None:
                    told.hear(number, request)
                if number % 256 == 0:
                    progress.advance(bar, min(256, len(trace.requests) - number))

            store = StorePlan(num_blocks=storage, **policy_of_store)
            replay = Replay(trace, gpu, cpu, policy, write_policy=options.write_policy, storage=store, model=model)
            replayed = replay.run(on_request)
            if isinstance(policy, str):
                results.append(replayed)
            else:
                clairvoyant[gpu] = replayed.token_hit_rate


def _findings(path: Path, trace: Trace, results: list[Replayed], clairvoyant: dict[int, float]) -> dict[str, Any]:
    return {
        "trace": path.name,
        "requests": len(trace.requests),
        "tokens": trace.num_tokens,
        "skipped_lines": trace.num_skipped_lines,
        "unnamed_tokens": trace.num_unnamed_tokens,
        "block_size": trace.block_size,
        "distinct_blocks": trace.num_distinct_blocks,
        "infinite_token_hit_rate": infinite_hit_rate(trace),
        "bounds": [{"blocks": size, "clairvoyant_token_hit_rate": rate} for size, rate in clairvoyant.items()],
        "results": [dataclasses.asdict(replayed) for replayed in results],
    }


def _split(given: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(part.strip() for text in given for part in text.split(",") if part.strip()))


def _names(given: list[str]) -> list[str]:
    names = _split(given)
    for name in names:
        if name not in EVICTION_POLICIES:
            raise LaunchError(f"unknown policy {name!r}; the policies are {', '.join(EVICTION_POLICIES)}")
    if not names:
        raise LaunchError(f"no policy was given; the policies are {', '.join(EVICTION_POLICIES)}")
    return names


def _model(config_file: Path | None, trace: Trace) -> tuple[int, HybridModel | None]:
    """One rank's bytes of a block of the trace, by the layout of a configuration, and its hybrid model if it is one;
    without a configuration those of a recording's hybrid model. 0 and None where there is neither."""
    config = trace.hybrid if config_file is None else CacheConfig.load(config_file)
    if config is None:
        return 0, None
    if config.layout is None:
        raise LaunchError(f"{config_file} has no table [layout], which says how many bytes a block has")
    block_bytes = config.layout.for_rank(config.transfer.tp_size, trace.block_size).block_bytes
    return block_bytes, HybridModel.of(config, trace.block_size, grows=config_file is None)


def _tier_sizes(options: SimulateOptions, trace: Trace, block_bytes: int) -> list[_Sizes]:
    """Every size of a tier with every size of the others."""
    gpu = _sizes(options.gpu_blocks, trace, 1, block_bytes)
    cpu = _sizes(options.cpu_blocks, trace, 0, block_bytes)
    storage = _sizes(options.storage_blocks, trace, 0, block_bytes)
    if max(storage) and not min(cpu):
        raise LaunchError(
            "what storage has goes through the CPU tier; beside --storage-blocks give --cpu-blocks above 0"
        )
    return list(itertools.product(gpu, cpu, storage))


def _sizes(given: list[str], trace: Trace, least: int, block_bytes: int) -> list[int]:
    """Numbers of blocks; `5%` is a share of the trace's distinct blocks, `80GiB` what fits into so many bytes."""
    sizes = []
    for text in _split(given):
        try:
            share = float(text.removesuffix("%"))
            size = int(trace.num_distinct_blocks * share / 100) if text.endswith("%") else int(text)
        except (ValueError, OverflowError):
            if not block_bytes:
                raise LaunchError(
                    f"{text!r} is no number of blocks; give one such as 4096, a share such as 5%, or with --config and "
                    "its layout a size such as 80GiB"
                ) from None
            size = parse_size(text, "a tier's size") // block_bytes
        if size < least:
            raise LaunchError(f"{text} makes {size} blocks; use at least {least}")
        sizes.append(size)
    if not sizes:
        raise LaunchError("no number of blocks was given")
    return sizes
