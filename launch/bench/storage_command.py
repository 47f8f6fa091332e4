"""The storage benchmark as a program."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.options import StorageOptions
from fastdeploy_cache.launch.bench.report import Figure, Report, at_least, at_most, size
from fastdeploy_cache.launch.bench.storage import bandwidth, hung_store, reopen_seconds
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig

_GB = 1e9
_SIZES = (64 * 2**10, 2**20, 8 * 2**20)
_PROMISED_FROM_BYTES = 2**20
_PAGE_BYTES, _NUM_PAGES = 3 * 2**19, 26  # of a checkpoint of Qwen3-Next with blocks of 64 tokens
_HUNG_DEADLINE_SECONDS = 0.2
_REOPEN_OBJECT_BYTES = 2**20


def bench_storage(wanted: StorageOptions, json_file: Path | None) -> bool:
    """Run everything, print it, write it; whether every promise was kept.

    Raises:
        LaunchError: the folder cannot be used, or has too little room.
        typer.BadParameter: a size is none.
    """
    needed = int(max(wanted.reopen_bytes * 1.05, 4 * (wanted.repeats + 3) * wanted.memory_bytes)) + 2**30
    with Report(json_file, page="docs/storage.md") as report:
        if wanted.folder is not None and not wanted.folder.is_dir():
            raise LaunchError(f"--folder {wanted.folder} is no folder")
        stores = report.facts["stores"] = {}
        with tempfile.TemporaryDirectory(prefix="fastdeploy-cache-bench-", dir=wanted.folder) as name:
            folder = Path(name)
            _check_room(folder, needed)
            report.note(f"Files in {folder} (device {folder.stat().st_dev})")
            for config in _stores(wanted, folder):
                stores[config.kind] = _run_store(report, config, folder, wanted)
            if wanted.reopen_bytes:
                report.facts["reopen"] = _run_reopen(report, folder / "reopen", wanted.reopen_bytes)
            if wanted.model:
                _run_model(report, folder / "model")
        _run_hung(report, max(3, 2 * wanted.repeats))
        return report.end()


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LaunchError(f"{folder} has {free / _GB:.1f} GB free, {needed / _GB:.1f} are needed; choose --folder")


def _stores(wanted: StorageOptions, folder: Path) -> list[StorageConfig]:
    room = 2 * (wanted.repeats + 2) * wanted.memory_bytes
    common: dict[str, Any] = {"weights_id": "bench", "start_timeout_seconds": 3.0, "task_timeout_seconds": 60.0}
    stores = [StorageConfig(folder=str(folder / "store"), admission="all", capacity_bytes=room + 2**28, **common)]
    if wanted.server_url is not None:
        stores.append(StorageConfig(kind="valkey", server_url=wanted.server_url, **common))
    if wanted.master_address is not None:
        stores.append(
            StorageConfig(kind="mooncake", master_address=wanted.master_address, segment_bytes=room + 2**28, **common)
        )
    return stores


def _run_store(report: Report, config: StorageConfig, folder: Path, wanted: StorageOptions) -> list[dict[str, float]]:
    rows, lines = [], {}
    for num_bytes, num_pages in (*((each, 0) for each in _SIZES), (_PAGE_BYTES, _NUM_PAGES)):
        own = folder / f"store-{num_bytes}"  # a folder's capacity is that of all its key spaces
        chosen = dataclasses.replace(config, folder=str(own)) if config.kind == "file" else config
        measured = bandwidth(
            chosen, folder, num_bytes, wanted.memory_bytes, wanted.repeats, num_pages=num_pages
        )._asdict()
        shutil.rmtree(own, ignore_errors=True)
        row = {name: value for name, value in measured.items() if not math.isnan(value)}
        rows.append(row)
        name = f"{num_pages} pages of {size(num_bytes)}" if num_pages else size(num_bytes)
        is_promised = config.kind == "file" and num_bytes >= _PROMISED_FROM_BYTES
        lines[name] = list[Figure]()
        for what in ("write", "read", "durable"):
            if what not in row:
                continue
            plain = Figure(f"plain {what}", row[f"plain_{what}"] / _GB, "GB/s")
            least = 0.75 if num_pages else 0.8
            promise = at_least(f"file, {name}: {what} / plain {what}", least) if what != "durable" else None
            lines[name] += [plain, Figure(what, row[what] / _GB, "GB/s", plain, promise if is_promised else None)]
        lines[name] += [
            Figure("plain, one read", row["plain_read_one"] * 1e6, "us"),
            Figure("one read", row["read_one"] * 1e6, "us"),
        ]
    report.table(f"{config.kind}, through its process", lines, label="object")
    return rows


def _run_reopen(report: Report, folder: Path, num_bytes: int) -> dict[str, float]:
    gigabytes = num_bytes / _GB
    seconds, num_objects = reopen_seconds(folder, num_bytes, _REOPEN_OBJECT_BYTES)
    wanted = Figure("written", num_bytes // _REOPEN_OBJECT_BYTES)
    there = at_least("objects there after it, of those written", 1.0)
    report.line(
        f"Opening {gigabytes:g} GB of 1 MiB objects again",
        Figure("took", seconds, "s", promise=at_most(f"re-open of {gigabytes:g} GB, s", 2.0)),
        wanted,
        Figure("there after it", num_objects, "", wanted, there),
    )
    return {"gigabytes": gigabytes, "seconds": seconds, "num_objects": num_objects}


def _run_hung(report: Report, num_requests: int) -> None:
    result = hung_store(num_requests, _HUNG_DEADLINE_SECONDS)
    late_ms, cpu_ms = (result.worst_seconds - result.deadline_seconds) * 1e3, result.worst_cpu_seconds * 1e3
    cpu_limit = at_most("hung store: processor time of a request's thread, ms", 50.0)
    report.line(
        f"{num_requests} requests over a store that hangs, each with {result.deadline_seconds * 1e3:.0f} ms for it",
        Figure("most processor time", cpu_ms, "ms", promise=cpu_limit),
        Figure("latest after that", late_ms, "ms", promise=at_most("hung store: later than the deadline, ms", 50.0)),
    )


def _run_model(report: Report, folder: Path) -> None:
    from fastdeploy_cache.launch.bench.storage_model import load_or_compute

    times = load_or_compute(folder)
    report.line(
        f"SmolLM2-135M, prompt of {times['num_tokens']:.0f} tokens, submission to first token",
        Figure("computed", times["computed_seconds"] * 1e3, "ms"),
        Figure("from disk by a new engine", times["loaded_seconds"] * 1e3, "ms"),
        Figure("of the prompt from disk", times["num_loaded_tokens"], "tokens"),
    )
