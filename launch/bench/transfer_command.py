"""The data-plane benchmark as a program."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_cache.ipc.codec import encode
from fastdeploy_cache.launch.bench import ping_pong
from fastdeploy_cache.launch.bench.image_transfer import (
    IMAGE_CASES,
    PROMISED,
    ImageCase,
    delay_behind_an_image,
    fits,
    image_speeds,
)
from fastdeploy_cache.launch.bench.report import Figure, Report, at_least, at_most
from fastdeploy_cache.launch.bench.transfer import (
    CASES,
    Case,
    Ranks,
    bandwidth,
    first_and_last_layer,
    idle_cpu,
    own_bytes,
)
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.process.wire import TaskMessage
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask

_GIB = 2**30
_MAX_PROMISED_RANKS = 2  # more ranks than cores share them with the plain copies' threads
_COUNTS = (1, 16, 256, 2048)
_MOST_DELAY = 1.5  # the engine, which sends it, has to share two cores with the threads that copy
_SMALL = KVLayout(num_layers=4, num_kv_heads=4, head_dim=64)


def bench_transfer(json_file: Path | None, repeats: int, memory_bytes: int, idle_seconds: float) -> bool:
    """Run everything, print it, write it; whether every promise was kept.

    Raises:
        LaunchError: a folder that does not exist.
        NotEnoughMemoryError: `memory_bytes` for each of four pools are not there.
    """
    with Report(json_file) as report:
        cases = [(case, 1) for case in CASES] + [(CASES[1], 2), (CASES[-1], 2), (CASES[-1], 4)]
        report.facts["bandwidth"] = [_run_case(report, case, n, memory_bytes, repeats) for case, n in cases]
        report.facts["round_trip_us"] = _run_round_trips(report, max(50, 100 * repeats))
        report.facts["ranks"] = _run_life(report, idle_seconds)
        report.facts["load"] = _run_layers(report, memory_bytes // (8 * 2**20), repeats)
        images = [case for case in IMAGE_CASES if fits(case, 4 * memory_bytes)] or [IMAGE_CASES[0]]
        report.facts["checkpoints"] = _run_images(report, images, repeats)
        report.facts["delay"] = _run_delay(report, images[-1], repeats)
        return report.end()


def _run_case(report: Report, case: Case, num_ranks: int, memory_bytes: int, repeats: int) -> dict[str, Any]:
    rows, lines = bandwidth(case, num_ranks, _COUNTS, memory_bytes, repeats), {}
    for row in rows:
        plain = Figure("plain copy", row.plain / _GIB, "GiB/s")
        lines[str(row.num_blocks)] = [plain]
        ways = {"swap out": row.swap_out, "swap in": row.swap_in}
        ways |= {"out, neighbours": row.joined_out, "in, neighbours": row.joined_in}
        for way, speed in ways.items():
            promise = None
            if (
                case.promised and num_ranks <= _MAX_PROMISED_RANKS and row is rows[-1]
            ):  # where a round trip weighs least
                promise = at_least(f"{way}, {case.name}, {num_ranks}: of plain copy", case.promised)
            lines[str(row.num_blocks)].append(Figure(way, speed / _GIB, "GiB/s", plain, promise))
    name = f"{case.name}; {num_ranks} rank{'s' * (num_ranks > 1)}"
    report.table(
        name,
        lines,
        about="of all ranks, from submission to answer; the plain copy is one thread's for each",
        label="blocks",
    )
    columns = ("num_blocks", *(f"{what}_bytes_per_second" for what in row._fields[1:]))
    return {"case": case.name, "ranks": num_ranks, "rows": [dict(zip(columns, row, strict=True)) for row in rows]}


def _run_round_trips(report: Report, num_trips: int) -> dict[str, float]:
    """Empty swaps beside bare ping-pongs of a message of the same size, interleaved."""
    ids = np.empty(0, np.int32)
    task = TransferTask(
        task_id=1, kind=TaskKind.SWAP_OUT, source_ids=ids, destination_ids=ids, deadline=time.monotonic()
    )
    message = encode(TaskMessage(1, task))
    content = {"task_id": 1, "kind": "swap_out", "source_ids": [], "destination_ids": [], "deadline": 1.0}
    with contextlib.ExitStack() as opened:
        ranks = {n: opened.enter_context(Ranks(n, _SMALL.for_rank(n, 16), 4, 4)) for n in (1, 2, 4)}
        trips: dict[str, Callable[[], float]] = {
            f"empty swap, {n} rank{'s' * (n > 1)}": partial(each.run, TaskKind.SWAP_OUT, (), ())
            for n, each in ranks.items()
        }
        trips["ZeroMQ ping-pong"] = opened.enter_context(ping_pong.zeromq(message))
        trips["multiprocessing manager queue"] = opened.enter_context(ping_pong.manager_queue(content))
        rounds = [[trip() for trip in trips.values()] for _ in range(num_trips)]
    times = dict(zip(trips, zip(*rounds, strict=True), strict=True))
    medians = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
    bare = Figure("ZeroMQ", medians["ZeroMQ ping-pong"], "us")
    promises = {"empty swap, 1 rank": at_most("empty swap with 1 rank / ZeroMQ ping-pong", 3.0)}
    lines = {
        name: [
            Figure("median", medians[name], "us", bare, promises.get(name)),
            Figure("90 %", statistics.quantiles(seconds, n=10)[-1] * 1e6, "us"),
        ]
        for name, seconds in times.items()
    }
    report.table("Round trips", lines, about=f"messages of {len(message)} bytes")
    return medians


def _run_life(report: Report, idle_seconds: float) -> dict[str, float]:
    with Ranks(2, _SMALL.for_rank(2, 16), 4, 4) as two:
        start_seconds = two.start_seconds
    with Ranks(4, _SMALL.for_rank(4, 16), 4, 4) as four:
        share, memory = idle_cpu(four, idle_seconds), max(own_bytes(pid) for pid in four.pids())
    cpu, kept = "idle CPU of 1 engine and 4 ranks", "memory of an idle rank beyond its segments"
    report.line(
        "Ranks",
        Figure("start of 2 ranks", start_seconds, "s", promise=at_most("start of 2 ranks, s", 2.0)),
        Figure(cpu, share * 100, "% of a core", promise=at_most(f"{cpu}, % of a core", 1.0)),
        Figure(kept, memory / 1e6, "MB", promise=at_most(f"{kept}, MB", 60.0)),
    )
    return {"start_seconds": start_seconds, "idle_share_of_core": share, "idle_rank_bytes": float(memory)}


def _run_layers(report: Report, num_blocks: int, repeats: int) -> dict[str, float]:
    times = first_and_last_layer(num_blocks, repeats)
    figures = (Figure(f"{layer} is in after", seconds * 1e3, "ms") for layer, seconds in times.items())
    report.line(f"Load of {num_blocks} blocks of an 8B model, 32 layers", *figures)
    return times


def _run_images(report: Report, cases: list[ImageCase], repeats: int) -> list[dict[str, Any]]:
    rows, lines = list[dict[str, Any]](), dict[str, list[Figure]]()
    for case in cases:
        speeds = image_speeds(case, repeats)
        name = f"{case.name}, {speeds.num_bytes / 2**20:.1f} MiB"
        ways = {"out": (speeds.image_out, speeds.blocks_out), "in": (speeds.image_in, speeds.blocks_in)}
        lines[name] = []
        for way, (image, blocks) in ways.items():
            beside = Figure(f"blocks {way}", blocks / _GIB, "GiB/s")
            promise = at_least(f"checkpoint {way}, {case.name}: of full blocks", PROMISED)
            lines[name] += [beside, Figure(way, image / _GIB, "GiB/s", beside, promise)]
        rows.append({"case": case.name, **speeds._asdict()})
    about = "one rank, from submission to answer; beside it full blocks of as many bytes, scattered like it"
    report.table("Checkpoints", lines, about=about, label="model")
    return rows


def _run_delay(report: Report, case: ImageCase, repeats: int) -> dict[str, float]:
    delay = delay_behind_an_image(case, repeats)
    bound = Figure("alone, and a step of the checkpoint", (delay.alone + delay.step) * 1e3, "ms")
    promise = at_most("a small load behind a checkpoint: of itself and a step", _MOST_DELAY)
    figures = (Figure("alone", delay.alone * 1e3, "ms"), bound)
    report.line(
        f"A small load just behind the load of a checkpoint of {case.name}",
        *figures,
        Figure("behind", delay.behind * 1e3, "ms", bound, promise),
    )
    return delay._asdict()
