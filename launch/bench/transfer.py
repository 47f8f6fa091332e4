"""What ranks reach: bytes per second beside a plain copy, round trips, progress of a load, rest, start."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

_WAIT_SECONDS = 60.0
WAYS = (TaskKind.SWAP_OUT, TaskKind.SWAP_IN)


class Case(NamedTuple):
    """A layout to copy, and the share of a plain copy's speed that is promised for it (None: it is shown only)."""

    name: str
    layout: KVLayout
    block_size: int
    promised: float | None


def _case(name: str, layers: int, piece_kib: float, order: str, promised: float | None) -> Case:
    """`piece_kib`: of one part of one layer, in blocks of 64 tokens of one head in bfloat16."""
    head_dim = int(piece_kib * 1024) // (64 * 2)
    layout = KVLayout(num_layers=layers, num_kv_heads=1, head_dim=head_dim, dtype="bfloat16", device_order=order)  # type: ignore[arg-type]
    return Case(name, layout, 64, promised)


CASES = (
    _case("64 KiB blocks, block first, 16 layers", 16, 2, "block_first", 0.7),
    _case("256 KiB blocks, block first, 32 layers", 32, 4, "block_first", 0.85),
    _case("256 KiB blocks, layer first, 2 layers", 2, 64, "layer_first", 0.85),
    _case("256 KiB blocks, layer first, 32 layers (4 KiB pieces)", 32, 4, "layer_first", 0.85),
    _case("1 MiB blocks, layer first, 32 layers (16 KiB pieces)", 32, 16, "layer_first", 0.85),
    Case(
        "MLA, 61 layers, FP8 with scales",
        KVLayout(
            num_layers=61,
            num_kv_heads=1,
            head_dim=576,
            value_head_dim=0,
            dtype="float8_e4m3",
            scale_dtype="float32",
            scale_elements=64,
        ),
        64,
        0.85,
    ),
    Case(
        "INT8 with scales, 32 layers, heads first",
        KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="int8", scale_dtype="float16", heads_first=True),
        64,
        0.85,
    ),
    Case(
        "INT4, 32 layers and 1 extra",
        KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="int4", num_extra_layers=1),
        64,
        0.85,
    ),
    Case(
        "INT4 with scales, 32 layers, 1 head (4 KiB pieces)",
        KVLayout(num_layers=32, num_kv_heads=1, head_dim=128, dtype="int4", scale_dtype="float16"),
        64,
        0.85,
    ),
    _case("8 MiB blocks, layer first, 32 layers: an 8B model", 32, 128, "layer_first", 0.85),
)


class Ranks:
    """Started rank processes and a way to run one task and wait for it."""

    def __init__(
        self,
        num_ranks: int,
        layout: RankLayout,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        config: TransferConfig | None = None,
    ) -> None:
        """`config` has `num_ranks` ranks; without it they are on the CPU device, and have the engine's arrays."""
        config = config or TransferConfig(tp_size=num_ranks)
        self.client = RankClient(config, layout, num_gpu_blocks, num_cpu_blocks)
        self._changed = threading.Condition()
        self._ended: dict[int, str | None] = {}  # tasks that nobody has waited for: their errors
        self._task_ids, self._rng = itertools.count(1), np.random.default_rng(1)
        started = time.perf_counter()
        self.client.start(self._on_result)
        self.start_seconds = time.perf_counter() - started

    def _on_result(self, result: TransferResult) -> None:
        with self._changed:
            self._ended[result.task.task_id] = result.error
            self._changed.notify_all()

    def start_task(
        self, kind: TaskKind, gpu: Sequence[int], cpu: Sequence[int], units: Sequence[Sequence[int]] = ()
    ) -> int:
        """Submit; its id. With `units` it is of a checkpoint."""
        sources, destinations = (cpu, gpu) if kind is TaskKind.SWAP_IN else (gpu, cpu)
        task_id = next(self._task_ids)
        self.client.submit(
            TransferTask(
                task_id=task_id,
                kind=kind,
                source_ids=np.asarray(sources, np.int32),
                destination_ids=np.asarray(destinations, np.int32),
                deadline=time.monotonic() + _WAIT_SECONDS,
                units=tuple(np.asarray(ids, np.int32) for ids in units),
            )
        )
        return task_id

    def wait(self, task_id: int) -> None:
        """Wait until the task has ended. Raises `RuntimeError` if it failed."""
        with self._changed:
            has_ended = self._changed.wait_for(lambda: task_id in self._ended, _WAIT_SECONDS)
            error = self._ended.pop(task_id) if has_ended else "no answer"
        if error is not None:
            raise RuntimeError(f"a benchmark task failed: {error}")

    def run(self, kind: TaskKind, gpu: Sequence[int], cpu: Sequence[int], units: Sequence[Sequence[int]] = ()) -> float:
        """Seconds from submission to the last rank's answer."""
        started = time.perf_counter()
        self.wait(self.start_task(kind, gpu, cpu, units))
        return time.perf_counter() - started

    def rounds(
        self, num_pool: int, num_blocks: int, repeats: int, plainly: Callable[[], Sequence[float]]
    ) -> list[float]:
        """Median seconds of what `plainly` says, and of swaps of so many blocks of two pools: scattered ones out and
        in, then neighbours. All in the same rounds, of which the first does not count."""
        scattered = [self._rng.permutation(num_pool)[:num_blocks].tolist() for _ in range(2)]
        joined = [range(num_pool - num_blocks, num_pool), range(num_blocks)]
        times: list[list[float]] = []
        for _ in range(repeats + 1):
            plain = plainly()
            times.append([*plain, *(self.run(way, *ids) for ids in (scattered, joined) for way in WAYS)])
        return [statistics.median(column) for column in zip(*times[1:], strict=True)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop()

    def pids(self) -> list[int]:
        """The process ids of the ranks."""
        return [status.pid for status in self.client.statuses() if status.pid is not None]


class Bandwidth(NamedTuple):
    """Medians; bytes per second of all ranks together. `joined`: of neighbours, as the pool has most of them."""

    num_blocks: int
    plain: float
    swap_out: float
    swap_in: float
    joined_out: float
    joined_in: float


def bandwidth(case: Case, num_ranks: int, counts: Sequence[int], memory_bytes: int, repeats: int) -> list[Bandwidth]:
    """Swaps of scattered and of neighbouring blocks beside plain copies of as many bytes, one a rank, interleaved."""
    layout = case.layout.for_rank(1, case.block_size)  # each rank has a share of that size
    num_kv_heads = case.layout.num_kv_heads * num_ranks
    whole = case.layout if num_ranks == 1 else dataclasses.replace(case.layout, num_kv_heads=num_kv_heads)
    num_pool = max(2, memory_bytes // layout.block_bytes)
    source, target = (SharedArray.create(name, num_ranks * num_pool * layout.block_bytes) for name in ("a", "b"))
    found = []
    try:
        views = [array.view(np.uint8, (num_ranks, num_pool * layout.block_bytes)) for array in (source, target)]
        threads = concurrent.futures.ThreadPoolExecutor(num_ranks)
        with threads, Ranks(num_ranks, whole.for_rank(num_ranks, case.block_size), num_pool, num_pool) as ranks:
            for num_blocks in [count for count in counts if count <= num_pool // 2] or [num_pool // 2]:
                plain_copy = _plain_copy(threads, views, num_blocks * layout.block_bytes)
                seconds = ranks.rounds(num_pool, num_blocks, repeats, plain_copy)
                num_bytes = num_ranks * num_blocks * layout.block_bytes
                speeds = [num_bytes / each for each in seconds]
                found.append(Bandwidth(num_blocks, *speeds))
    finally:
        source.close()
        target.close()
    return found


def _plain_copy(
    threads: concurrent.futures.ThreadPoolExecutor, views: list[np.ndarray], num_bytes: int
) -> Callable[[], list[float]]:
    """Copies so many bytes in one piece on each thread; seconds until all are through."""
    source, target = views

    def copy(rank: int) -> None:
        target[rank, :num_bytes] = source[rank, :num_bytes]

    def run() -> list[float]:
        started = time.perf_counter()
        if len(source) == 1:
            copy(0)
        else:
            list(threads.map(copy, range(len(source))))
        return [time.perf_counter() - started]

    return run


def first_and_last_layer(num_blocks: int, repeats: int) -> dict[str, float]:
    """Seconds from submission of an 8B model's load until its first layer is in, and until its last one is."""
    case = CASES[-1]
    layout = case.layout.for_rank(1, case.block_size)
    with Ranks(1, layout, num_blocks, num_blocks) as ranks:
        progress, times = ranks.client.layer_progress(0), []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            load = ranks.start_task(TaskKind.SWAP_IN, range(num_blocks), range(num_blocks))
            row = []
            for layer in (0, layout.num_layers - 1):
                assert progress is not None and progress.wait_layer((load,), layer, _WAIT_SECONDS)
                row.append(time.perf_counter() - started)
            ranks.wait(load)
            times.append(row)
    first, last = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {"first layer": first, "last layer": last}


def idle_cpu(ranks: Ranks, seconds: float) -> float:
    """Share of a core that the I/O thread and the ranks use while nothing happens, in all."""
    tasks = [task for pid in ranks.pids() for task in Path(f"/proc/{pid}/task").iterdir()]
    tasks += [
        Path(f"/proc/self/task/{thread.native_id}") for thread in threading.enumerate() if thread.name == "transfer-io"
    ]
    before = [_run_nanoseconds(task) for task in tasks]
    started = time.perf_counter()
    time.sleep(seconds)  # what is measured is the rest of the others
    used = sum(_run_nanoseconds(task) for task in tasks) - sum(before)
    return used / 1e9 / (time.perf_counter() - started)


def _run_nanoseconds(task: Path) -> int:
    """Time on a processor; source: proc(5), schedstat."""
    return int((task / "schedstat").read_text().split()[0])


def own_bytes(pid: int) -> int:
    """Resident memory of a process beyond shared segments."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
