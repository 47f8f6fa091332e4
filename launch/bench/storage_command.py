"""The storage benchmark as a program."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.bench.reach import Reach, add_at_least, add_at_most, show_reach, table_of
from fastdeploy_cache.launch.bench.storage import Row, bandwidth, hung_store, reopen_seconds
from fastdeploy_cache.launch.findings import check_target, console_beside, write_json
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig

_GB = 1e9
_SIZES = (64 * 2**10, 2**20, 8 * 2**20)
_PROMISED_FROM_BYTES = 2**20
_HUNG_DEADLINE_SECONDS = 0.2
_REOPEN_OBJECT_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class StorageBench:
    """What to measure. `folder` is where the file store and the plain files lie; None: a temporary one."""

    folder: Path | None
    server_url: str | None
    master_address: str | None
    memory_mib: int
    repeats: int
    reopen_gb: float
    with_model: bool


def bench_storage(wanted: StorageBench, json_file: Path | None) -> bool:
    """Run everything, print it, write it; whether every figure was reached.

    Raises:
        LaunchError: the folder cannot be used, or has too little room.
    """
    check_target(json_file)
    console = console_beside(json_file, 110)
    reach: Reach = []
    found: dict[str, Any] = {"machine": describe_machine(), "stores": {}, "reach": reach}
    console.print(found["machine"]["text"])
    if wanted.folder is not None and not wanted.folder.is_dir():
        raise LaunchError(f"--folder {wanted.folder} is no folder")
    with tempfile.TemporaryDirectory(prefix="fastdeploy-cache-bench-", dir=wanted.folder) as name:
        folder = Path(name)
        _check_room(folder, wanted)
        console.print(f"Files in {folder} (device {folder.stat().st_dev})")
        for config in _stores(wanted, folder):
            found["stores"][config.kind] = _run_store(console, config, folder, wanted, reach)
        if wanted.reopen_gb:
            found["reopen"] = _run_reopen(console, folder / "reopen", wanted.reopen_gb, reach)
        if wanted.with_model:
            found["model"] = _run_model(console, folder / "model")
    found["hung"] = _run_hung(console, max(3, 2 * wanted.repeats), reach)
    show_reach(console, reach)
    console.print("docs/storage.md says what each figure is.")
    write_json(json_file, found)
    return all(entry["ok"] for entry in reach)


def _check_room(folder: Path, wanted: StorageBench) -> None:
    needed = int(max(wanted.reopen_gb * 1.05 * _GB, 4 * (wanted.repeats + 3) * wanted.memory_mib * 2**20)) + 2**30
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LaunchError(f"{folder} has {free / _GB:.1f} GB free, {needed / _GB:.1f} are needed; choose --folder")


def _stores(wanted: StorageBench, folder: Path) -> list[StorageConfig]:
    room = 2 * (wanted.repeats + 2) * wanted.memory_mib * 2**20
    common: dict[str, Any] = {"weights_id": "bench", "start_timeout_seconds": 3.0, "task_timeout_seconds": 60.0}
    stores = [
        StorageConfig(folder=str(folder / "store"), admission="all", capacity_bytes=room + 2**28, **common),
    ]
    if wanted.server_url is not None:
        stores.append(StorageConfig(kind="valkey", server_url=wanted.server_url, **common))
    if wanted.master_address is not None:
        stores.append(
            StorageConfig(kind="mooncake", master_address=wanted.master_address, segment_bytes=room + 2**28, **common)
        )
    return stores


def _run_store(
    console: Console, config: StorageConfig, folder: Path, wanted: StorageBench, reach: Reach
) -> list[dict[str, float]]:
    kinds = ("write", "read", *(("durable",) if config.kind == "file" else ()))
    speeds = [word for what in kinds for word in (f"plain {what}", what, "of it")]
    table = table_of(
        f"{config.kind}, through its process: GB/s, and microseconds to read one object",
        ("object", *speeds, "plain, one", "one"),
    )
    rows = []
    for size in _SIZES:
        own = folder / f"store-{size}"  # a folder's capacity is that of all its key spaces
        chosen = dataclasses.replace(config, folder=str(own)) if config.kind == "file" else config
        row = bandwidth(chosen, folder, size, wanted.memory_mib * 2**20, wanted.repeats)
        shutil.rmtree(own, ignore_errors=True)
        table.add_row(*_cells(row))
        rows.append({name: value for name, value in row._asdict().items() if not math.isnan(value)})
        if config.kind == "file" and size >= _PROMISED_FROM_BYTES:
            for what, ratio in (("write", row.write / row.plain_write), ("read", row.read / row.plain_read)):
                add_at_least(reach, f"file, {size // 2**20} MiB: {what} / plain {what}", ratio, 0.8)
    console.print(table)
    return rows


def _cells(row: Row) -> list[str]:
    pairs = ((row.plain_write, row.write), (row.plain_read, row.read), (row.plain_durable, row.durable))
    size = f"{row.object_bytes // 2**10} KiB" if row.object_bytes < 2**20 else f"{row.object_bytes // 2**20} MiB"
    known = [(plain, own) for plain, own in pairs if not math.isnan(own)]
    speeds = [cell for plain, own in known for cell in (f"{plain / _GB:.2f}", f"{own / _GB:.2f}", f"{own / plain:.2f}")]
    return [size, *speeds, f"{row.plain_read_one * 1e6:.0f}", f"{row.read_one * 1e6:.0f}"]


def _run_reopen(console: Console, folder: Path, gigabytes: float, reach: Reach) -> dict[str, float]:
    seconds, num_objects = reopen_seconds(folder, int(gigabytes * _GB), _REOPEN_OBJECT_BYTES)
    wanted = int(gigabytes * _GB) // _REOPEN_OBJECT_BYTES
    console.print(f"Opening {gigabytes:g} GB of 1 MiB objects again: {seconds:.2f} s, {num_objects} of {wanted} there")
    add_at_most(reach, f"re-open of {gigabytes:g} GB, s", seconds, 2.0)
    add_at_least(reach, "objects there after it, of those written", num_objects / wanted, 1.0)
    return {"gigabytes": gigabytes, "seconds": seconds, "num_objects": num_objects}


def _run_hung(console: Console, num_requests: int, reach: Reach) -> dict[str, float]:
    result = hung_store(num_requests, _HUNG_DEADLINE_SECONDS)
    late = result.worst_seconds - result.deadline_seconds
    console.print(
        f"{num_requests} requests over a store that hangs, each with {result.deadline_seconds * 1e3:.0f} ms for it: "
        f"the last had its match {late * 1e3:+.1f} ms after that; {result.worst_cpu_seconds * 1e3:.1f} ms of "
        "processor time"
    )
    add_at_most(reach, "hung store: processor time of a request's thread, ms", result.worst_cpu_seconds * 1e3, 50.0)
    add_at_most(reach, "hung store: later than the deadline, ms", late * 1e3, 50.0)
    return result._asdict()


def _run_model(console: Console, folder: Path) -> dict[str, float]:
    from fastdeploy_cache.launch.bench.storage_model import load_or_compute

    times = load_or_compute(folder)
    console.print(
        f"SmolLM2-135M, prompt of {times['num_tokens']:.0f} tokens, submission to first token: computed "
        f"{times['computed_seconds'] * 1e3:.0f} ms, from disk by a new engine {times['loaded_seconds'] * 1e3:.0f} ms "
        f"({times['num_loaded_tokens']:.0f} tokens of it)"
    )
    return times
