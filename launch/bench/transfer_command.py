"""The data-plane benchmark as a program."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fastdeploy_cache.ipc.codec import encode
from fastdeploy_cache.launch.bench import ping_pong
from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.bench.reach import Reach, add_at_least, add_at_most, show_reach, table_of
from fastdeploy_cache.launch.bench.transfer import (
    CASES,
    Case,
    Ranks,
    bandwidth,
    first_and_last_layer,
    idle_cpu,
    own_bytes,
)
from fastdeploy_cache.launch.findings import check_target, console_beside, write_json
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.process.wire import TaskMessage
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask

_GIB = 2**30
_MAX_PROMISED_RANKS = 2  # more ranks than cores share them with the plain copies' threads
_COUNTS = (1, 16, 256, 2048)
_SMALL = KVLayout(num_layers=4, num_kv_heads=4, head_dim=64)


def bench_transfer(json_file: Path | None, repeats: int, memory_mib: int, idle_seconds: float) -> bool:
    """Run everything, print it, write it; whether every figure was reached.

    Raises:
        LaunchError: a folder that does not exist.
        NotEnoughMemoryError: `memory_mib` for each of four pools are not there.
    """
    check_target(json_file)
    console = console_beside(json_file, 110)
    reach: Reach = []
    found: dict[str, Any] = {"machine": describe_machine(), "reach": reach}
    console.print(found["machine"]["text"])
    cases = [(case, 1) for case in CASES] + [(CASES[1], 2), (CASES[-1], 2), (CASES[-1], 4)]
    found["bandwidth"] = [
        _run_case(console, case, n, memory_bytes=memory_mib * 2**20, repeats=repeats, reach=reach) for case, n in cases
    ]
    found["round_trip_us"] = _run_round_trips(console, max(50, 100 * repeats), reach)
    found["ranks"] = _run_life(console, idle_seconds, reach)
    found["load"] = _run_layers(console, memory_mib // 8, repeats)
    show_reach(console, reach)
    console.print("docs/benchmark.md says what each figure is.")
    write_json(json_file, found)
    return all(entry["ok"] for entry in reach)


def _run_case(
    console: Console, case: Case, num_ranks: int, *, memory_bytes: int, repeats: int, reach: Reach
) -> dict[str, Any]:
    title = f"{case.name}; {num_ranks} rank{'s' * (num_ranks > 1)}. GiB/s of all ranks, from submission to answer"
    table = table_of(title, ("blocks", "plain copy", "swap out", "of plain", "swap in", "of plain"))
    rows = bandwidth(case, num_ranks, _COUNTS, memory_bytes, repeats)
    for row in rows:
        shares = [speed / row.plain for speed in (row.swap_out, row.swap_in)]
        cells = [row.swap_out, shares[0], row.swap_in, shares[1]]
        table.add_row(str(row.num_blocks), f"{row.plain / _GIB:.1f}", *_speeds_and_shares(cells))
    console.print(table)
    if case.promised is not None and num_ranks <= _MAX_PROMISED_RANKS:
        best = rows[-1]  # where the round trip weighs least
        for name, speed in (("swap out", best.swap_out), ("swap in", best.swap_in)):
            add_at_least(reach, f"{name}, {case.name}, {num_ranks}: of plain copy", speed / best.plain, case.promised)
    columns = ("num_blocks", "plain_bytes_per_second", "swap_out_bytes_per_second", "swap_in_bytes_per_second")
    return {"case": case.name, "ranks": num_ranks, "rows": [dict(zip(columns, row, strict=True)) for row in rows]}


def _speeds_and_shares(cells: list[float]) -> list[str]:
    return [f"{cells[0] / _GIB:.1f}", f"{cells[1]:.2f}", f"{cells[2] / _GIB:.1f}", f"{cells[3]:.2f}"]


def _run_round_trips(console: Console, num_trips: int, reach: Reach) -> dict[str, float]:
    """Empty swaps beside bare ping-pongs of a message of the same size, interleaved."""
    ids = np.empty(0, np.int32)
    task = TransferTask(
        task_id=1, kind=TaskKind.SWAP_OUT, source_ids=ids, destination_ids=ids, deadline=time.monotonic()
    )
    message = encode(TaskMessage(1, task))
    started = {n: Ranks(n, _SMALL.for_rank(n, 16), 4, 4) for n in (1, 2, 4)}
    content = {"task_id": 1, "kind": "swap_out", "source_ids": [], "destination_ids": [], "deadline": 1.0}
    times: dict[str, list[float]] = {}
    try:
        with ping_pong.zeromq(message) as zeromq, ping_pong.manager_queue(content) as manager:
            for _ in range(num_trips):
                for num_ranks, ranks in started.items():
                    name = f"empty swap, {num_ranks} rank{'s' * (num_ranks > 1)}"
                    times.setdefault(name, []).append(ranks.run(TaskKind.SWAP_OUT, (), ()))
                times.setdefault("ZeroMQ ping-pong", []).append(zeromq())
                times.setdefault("multiprocessing manager queue", []).append(manager())
    finally:
        for ranks in started.values():
            ranks.client.stop()
    medians = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
    table = table_of(f"Round trips of {len(message)} bytes; microseconds", ("", "median", "90 %", "of ZeroMQ"))
    for name, seconds in times.items():
        high = statistics.quantiles(seconds, n=10)[-1] * 1e6
        table.add_row(name, f"{medians[name]:.0f}", f"{high:.0f}", f"{medians[name] / medians['ZeroMQ ping-pong']:.2f}")
    console.print(table)
    ratio = medians["empty swap, 1 rank"] / medians["ZeroMQ ping-pong"]
    add_at_most(reach, "empty swap with 1 rank / ZeroMQ ping-pong", ratio, 3.0)
    return medians


def _run_life(console: Console, idle_seconds: float, reach: Reach) -> dict[str, float]:
    two = Ranks(2, _SMALL.for_rank(2, 16), 4, 4)
    two.client.stop()
    four = Ranks(4, _SMALL.for_rank(4, 16), 4, 4)
    try:
        share = idle_cpu(four, idle_seconds)
        memory = max(own_bytes(pid) for pid in four.pids())
    finally:
        four.client.stop()
    console.print(
        f"Start of 2 ranks {two.start_seconds:.2f} s; at rest 1 engine and 4 ranks use {share:.2%} of a core; an idle "
        f"rank has {memory / 2**20:.0f} MiB beyond its segments"
    )
    add_at_most(reach, "start of 2 ranks, s", two.start_seconds, 2.0)
    add_at_most(reach, "idle CPU of 1 engine and 4 ranks, % of a core", share * 100, 1.0)
    add_at_most(reach, "memory of an idle rank beyond its segments, MB", memory / 1e6, 60.0)
    return {"start_seconds": two.start_seconds, "idle_share_of_core": share, "idle_rank_bytes": float(memory)}


def _run_layers(console: Console, num_blocks: int, repeats: int) -> dict[str, float]:
    times = first_and_last_layer(num_blocks, repeats)
    console.print(
        f"Load of {num_blocks} blocks of an 8B model, 32 layers: the first layer is in after "
        f"{times['first layer'] * 1e3:.1f} ms, the last after {times['last layer'] * 1e3:.1f} ms"
    )
    return times
