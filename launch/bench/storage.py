"""What a store reaches: bytes per second and latency beside plain positioned I/O, a hung one, and a large folder."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout
from fastdeploy_cache.transfer_manager.storage import open_storage
from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment, StorageStats
from fastdeploy_cache.transfer_manager.storage.client import StorageProcesses
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace, page_names
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

_TASK_BYTES = 128 * 2**20  # as the cache cuts them for a fast store
_BURST_BYTES = 32 * 2**20  # less than what the file store syncs at a time
_WAIT_SECONDS = 120.0
_BLOCK_SIZE = 64
_A_DAY_SECONDS = 86400.0


def layout_of_bytes(object_bytes: int) -> RankLayout:
    """A layout whose blocks have so many bytes: a multiple of 256."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=object_bytes // (2 * _BLOCK_SIZE * 2), dtype="bfloat16")
    return layout.for_rank(1, _BLOCK_SIZE)


class Store:
    """A store behind its process, as an engine has it, and blocks to write and to read into."""

    def __init__(self, config: StorageConfig, object_bytes: int, num_objects: int, per_task: int = 0) -> None:
        """`per_task`: objects of a task; 0: as many as the cache would take of a prompt.

        Raises `StorageRefusedError`, or `LaunchError` where it cannot be reached.
        """
        self.object_bytes = object_bytes
        self._per_task = per_task or max(1, _TASK_BYTES // object_bytes)
        self.segment = SharedArray.create("bench-cpu", num_objects * object_bytes)
        self.blocks = self.segment.view(np.uint8, (num_objects, object_bytes))
        self.blocks[...] = np.frombuffer(np.random.default_rng(1).bytes(object_bytes), np.uint8)
        self._client = StorageProcesses(
            config,
            TransferConfig(),
            spaces=[KeySpace.of(config.weights_id, layout_of_bytes(object_bytes), _BLOCK_SIZE, 0, 1)],
            segments=[self.segment],
        )
        self._ended = threading.Condition()
        self._num_open, self._num_done, self._errors = 0, 0, list[str]()
        self._next_id = 1
        try:
            self._client.start(self._on_result, lambda: None)
            if not self._client.wait_ready(config.start_timeout_seconds):
                raise LaunchError(f"the {config.kind} store cannot be opened")
        except BaseException:  # an interrupt, too: its process would go on in a folder that is being removed
            self.close()
            raise

    def run(self, kind: TaskKind, hashes: Sequence[bytes], first: int = 0) -> float:
        """Move the blocks from `first` on; seconds from the first submission to the last answer."""
        per_task, self._num_done = self._per_task, 0
        started = time.perf_counter()
        for start in range(0, len(hashes), per_task):
            part = hashes[start : start + per_task]
            self._submit(kind, part, np.arange(first + start, first + start + len(part), dtype=np.int32))
        with self._ended:
            in_time = self._ended.wait_for(lambda: not self._num_open, _WAIT_SECONDS)
        seconds = time.perf_counter() - started
        if not in_time or self._errors or self._num_done != len(hashes):
            raise LaunchError(f"{self._num_done} of {len(hashes)} blocks came through: {self._errors or 'no error'}")
        return seconds

    def _submit(self, kind: TaskKind, hashes: Sequence[bytes], ids: np.ndarray) -> None:
        none = np.empty(0, np.int32)
        with self._ended:
            self._num_open += 1
        self._next_id += 1
        self._client.submit(
            TransferTask(
                task_id=self._next_id,
                kind=kind,
                source_ids=ids if kind is TaskKind.WRITE else none,
                destination_ids=none if kind is TaskKind.WRITE else ids,
                deadline=time.monotonic() + _WAIT_SECONDS,
                hashes=b"".join(hashes),
            )
        )

    def _on_result(self, result: TransferResult) -> None:
        with self._ended:
            self._num_open -= 1
            self._num_done += result.num_blocks
            if result.error is not None:
                self._errors.append(result.error)
            self._ended.notify()

    def close(self) -> None:
        """End the process and give the memory back."""
        self._client.stop()
        del self.blocks
        self.segment.close()


class PlainFile:
    """The floor: as many bytes, by positioned calls on as many threads, without names or checksums."""

    def __init__(self, folder: Path, object_bytes: int, num_objects: int, num_threads: int) -> None:
        self.path = folder / "plain"
        self._size, self._num, self._start = object_bytes, num_objects, 0
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._threads = ThreadPoolExecutor(num_threads)

    def renew(self) -> None:
        """Go on behind what was written, as a store does with new objects: room that was taken and never written to.

        Memory that the kernel has just got back would be faster than what it takes for the first time.
        """
        self._start += self._size * self._num
        os.posix_fallocate(self._fd, self._start, self._size * self._num)

    def write(self, blocks: np.ndarray, which: range) -> float:
        """Seconds for these blocks, one behind the other."""
        return self._each(which, lambda i: os.pwrite(self._fd, blocks[i].data, self._start + i * self._size))

    def read(self, blocks: np.ndarray, which: range) -> float:
        """The same for reading."""
        return self._each(which, lambda i: os.preadv(self._fd, [blocks[i].data], self._start + i * self._size))

    def read_one(self, block: np.ndarray, index: int) -> float:
        """Seconds for one block."""
        started = time.perf_counter()
        os.preadv(self._fd, [block.data], self._start + index * self._size)
        return time.perf_counter() - started

    def _each(self, which: range, move: Callable[[int], int]) -> float:
        started = time.perf_counter()
        if any(num != self._size for num in self._threads.map(move, which)):
            raise LaunchError("a plain read or write was cut short")
        return time.perf_counter() - started

    def close(self) -> None:
        """Remove it."""
        self._threads.shutdown()
        os.close(self._fd)
        self.path.unlink()


def synced(files: Sequence[Path]) -> float:
    """Seconds until all that was written to these is on the disk."""
    started = time.perf_counter()
    for file in files:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        os.fdatasync(fd)
        os.close(fd)
    return time.perf_counter() - started


class Row(NamedTuple):
    """Medians: bytes per second, and seconds of one read. `durable`: until it is on the disk (else NaN)."""

    object_bytes: int
    plain_write: float
    write: float
    plain_read: float
    read: float
    plain_durable: float
    durable: float
    plain_read_one: float
    read_one: float


def names(seed: int, num: int) -> list[bytes]:
    """So many block hashes."""
    return [hashlib.sha256(b"%d/%d" % (seed, i)).digest() for i in range(num)]


def bandwidth(
    config: StorageConfig, folder: Path, object_bytes: int, total_bytes: int, repeats: int, *, num_pages: int = 0
) -> Row:
    """Write and read `total_bytes` in objects, and plainly in `folder`, in the same rounds; the first one warms up.

    `num_pages`: the objects are pages of images with so many, of which each is a task.
    """
    num = max(2, total_bytes // object_bytes)
    times, ones = list[tuple[float, ...]](), list[tuple[float, ...]]()
    durable: list[tuple[float, ...]] = [(math.nan, math.nan)] * 2
    with (
        contextlib.closing(Store(config, object_bytes, num, num_pages)) as store,
        contextlib.closing(PlainFile(folder, object_bytes, num, config.num_io_threads)) as plain,
    ):
        for _ in range(repeats + 1):
            hashes = _named(num, num_pages)
            plain.renew()
            plain_write, write = _write_in_bursts(store, plain, hashes)
            plain_read = plain.read(store.blocks, range(num))
            times.append((plain_write, write, plain_read, store.run(TaskKind.PREFETCH, hashes)))
            for i in range(min(num, 16)):
                one = store.run(TaskKind.PREFETCH, hashes[i : i + 1], first=i)
                ones.append((plain.read_one(store.blocks[i], i), one))
        if config.folder is not None:  # last: a disk may be slow for a while after much that was synced
            where = Path(config.folder)
            durable = [_write_durably(where, store, plain, names(time.monotonic_ns(), num)) for _ in range(repeats + 1)]
    total = num * object_bytes
    speeds = [
        total / statistics.median(column) for rows in (times[1:], durable[1:]) for column in zip(*rows, strict=True)
    ]
    return Row(object_bytes, *speeds, *(statistics.median(column) for column in zip(*ones, strict=True)))


def _named(num: int, num_pages: int) -> list[bytes]:
    drawn = names(time.monotonic_ns(), num)
    return [page for each in drawn for page in page_names(each, num_pages)][:num] if num_pages else drawn


def _write_in_bursts(store: Store, plain: PlainFile, hashes: list[bytes]) -> tuple[float, float]:
    """Seconds of the calls alone: bursts that the kernel takes into memory, and a pause for the disk behind each."""
    plain_seconds = seconds = 0.0
    per_burst = max(1, _BURST_BYTES // store.object_bytes)
    for start in range(0, len(hashes), per_burst):
        which = range(start, min(start + per_burst, len(hashes)))
        os.sync()
        plain_seconds += plain.write(store.blocks, which)
        os.sync()
        seconds += store.run(TaskKind.WRITE, hashes[which.start : which.stop], first=start)
    os.sync()
    return plain_seconds, seconds


def _write_durably(folder: Path, store: Store, plain: PlainFile, hashes: list[bytes]) -> tuple[float, float]:
    """Seconds until all is on the disk."""
    plain.renew()
    os.sync()
    plain_seconds = plain.write(store.blocks, range(len(hashes))) + synced([plain.path])
    os.sync()
    seconds = store.run(TaskKind.WRITE, hashes)
    seconds += synced([path for path in folder.rglob("*") if path.is_file()])
    os.sync()
    return plain_seconds, seconds


class HungResult(NamedTuple):
    """The longest that a request took until it had its match, and the most processor time that its thread used."""

    deadline_seconds: float
    worst_seconds: float
    worst_cpu_seconds: float


class HungStore:
    """Every call hangs, as on a network that swallows packets, until its process is killed."""

    needs_token_ids = False

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        """Opens at once."""

    def _hang(self, _: object) -> NoReturn:
        threading.Event().wait(_A_DAY_SECONDS)
        raise TimeoutError

    count_leading = read = write = remove = clear = _hang

    def stats(self) -> StorageStats:
        """Nothing is known."""
        return StorageStats()

    def close(self) -> None:
        """Nothing to give back."""


def hung_store(num_requests: int, deadline_seconds: float) -> HungResult:
    """Requests of a whole manager over a store whose every call hangs."""
    config = CacheConfig(
        block_size=_BLOCK_SIZE,
        num_gpu_blocks=64,
        num_cpu_blocks=64,
        layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="bfloat16"),
        prefetch_policy="timeout",
        prefetch_timeout_seconds=deadline_seconds,
        prefetch_seconds_per_1024_tokens=0.0,
        min_prefetch_tokens=1,
        load_policy="always",
        storage=StorageConfig(
            kind="fastdeploy_cache.launch.bench.storage:HungStore",
            weights_id="bench",
            task_timeout_seconds=10 * deadline_seconds,
            breaker_failures=10**6,
        ),
    )
    seconds, cpu = [], []
    with PrefixCacheManager(config) as cache:
        for number in range(num_requests):
            request = Request(request_id=str(number), prompt_token_ids=[number] * (8 * _BLOCK_SIZE + 1))
            started, cpu_started = time.perf_counter(), time.thread_time()
            cache.prefetch(request)
            cache.match(request).wait()
            seconds.append(time.perf_counter() - started)
            cpu.append(time.thread_time() - cpu_started)
            cache.release(request)
    return HungResult(deadline_seconds, max(seconds), max(cpu))


def reopen_seconds(folder: Path, num_bytes: int, object_bytes: int) -> tuple[float, int]:
    """Fill a folder, close it, and open it again: seconds for that, and how many objects it then has."""
    space = KeySpace.of("reopen", layout_of_bytes(object_bytes), _BLOCK_SIZE, 0, 1)
    num, batch = num_bytes // object_bytes, max(1, _TASK_BYTES // object_bytes)
    segment = np.zeros((batch, object_bytes), np.uint8)
    buffers = [block.data for block in segment]
    config = StorageConfig(folder=str(folder), weights_id="reopen", admission="all", capacity_bytes=num_bytes + 2**30)
    options = config.store_options(1)
    store = open_storage("file", options, space, segment)
    for start in range(0, num, batch):
        hashes = names(start, min(batch, num - start))
        store.write(Blocks(hashes=hashes, buffers=buffers[: len(hashes)]))
    store.close()
    started = time.perf_counter()
    store = open_storage("file", options, space, segment)
    seconds = time.perf_counter() - started
    found = store.stats().num_objects or 0
    store.close()
    return seconds, found
