"""Section: ranks are killed while they copy; the bytes of every copy that is said to have succeeded are right."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.cuda_transfer import cuda_config
from fastdeploy_cache.launch.gpu.arrays import PlainArrays
from fastdeploy_cache.launch.gpu.gpu_memory import Bytes, expect_equal, noise
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.launch.shm_files import is_held, other_processes, shm_names
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

_NUM_RANKS = 2
_BLOCKS_PER_TASK, _NUM_TASKS = 8, 32
_NUM_BLOCKS = _BLOCKS_PER_TASK * _NUM_TASKS  # in either tier; each task has blocks of its own
_WAIT_SECONDS, _SECOND_LOOK_SECONDS = 40.0, 2.0
_CUDA_NAMES = ("cuda.shm", "nvidia")  # files of the driver's own, which it keeps as long as any process uses it


def run(notes: Notes, options: GpuOptions) -> None:
    """Kill the ranks in turn, in both directions; then see what is left behind."""
    num_rounds, block_kib = (1, 16) if options.is_quick else (4, 512)
    before, cuda = shm_names(), Cuda(0)
    free_before = int(cuda.call("cuMemGetInfo")[0])
    notes.check("kills", partial(_kill_all, num_rounds, block_kib))
    notes.check("files of shared memory", partial(_expect_no_files, before))
    cuda.bind_thread()
    free_after = int(cuda.call("cuMemGetInfo")[0])
    text = f"{free_before / 2**20:.0f} MiB before, {free_after / 2**20:.0f} MiB after; other programs count, too"
    notes.note("free memory of GPU 0", text)


def _kill_all(num_rounds: int, block_kib: int) -> str:
    heads = _NUM_RANKS
    layout = KVLayout(num_layers=8, num_kv_heads=heads, head_dim=block_kib * 1024 // (8 * 2 * 16 * 2), dtype="float16")
    rank_layout = layout.for_rank(_NUM_RANKS, 16)
    config = cuda_config(_NUM_RANKS, "worker")
    arrays = [PlainArrays(rank_layout, _NUM_BLOCKS, device_id) for device_id in config.device_ids]
    load = _Load(RankClient(config, rank_layout, _NUM_BLOCKS, _NUM_BLOCKS), arrays, rank_layout.block_bytes)
    try:
        return load.run(num_rounds)
    finally:
        load.client.stop()
        for each in arrays:
            each.close()


class _Load:
    """Copies of all blocks in one direction, some of them cut off by the death of a rank, and done again."""

    def __init__(self, client: RankClient, arrays: Sequence[PlainArrays], block_bytes: int) -> None:
        self.client, self._arrays, self._block_bytes = client, arrays, block_bytes
        self._ids, self._results = itertools.count(1), dict[int, TransferResult]()
        self._changed = threading.Condition()
        self.num_cut = 0

    def _on_result(self, result: TransferResult) -> None:
        with self._changed:
            self._results[result.task.task_id] = result
            self._changed.notify_all()

    def run(self, num_rounds: int) -> str:
        self.client.start(self._on_result)
        for rank, each in enumerate(self._arrays):
            self.client.attach_kv(rank, each.handle())
        num_kills = 0
        for number in range(num_rounds):
            wanted = [noise(10 * number + r, _NUM_BLOCKS * self._block_bytes) for r in range(_NUM_RANKS)]
            images = [each.reshape(_NUM_BLOCKS, self._block_bytes) for each in wanted]
            for each, image in zip(self._arrays, images, strict=True):
                each.write(image)
            self._copy_all(TaskKind.SWAP_OUT, number % _NUM_RANKS, images)
            for each, image in zip(self._arrays, images, strict=True):
                each.write(np.zeros_like(image))
            self._copy_all(TaskKind.SWAP_IN, (number + 1) % _NUM_RANKS, images)
            num_kills += 2
        restarts = [status.num_restarts for status in self.client.statuses()]
        if sum(restarts) < num_kills:
            raise LaunchError(f"{num_kills} kills, but restarts {restarts}")
        num_tasks = 2 * num_rounds * _NUM_TASKS
        return (
            f"{num_kills} kills; of {num_tasks} tasks of {_BLOCKS_PER_TASK} blocks {self.num_cut} were cut off and "
            f"done again; every byte is right; restarts {restarts}"
        )

    def _copy_all(self, kind: TaskKind, victim: int, images: Sequence[Bytes]) -> None:
        """Copy every block to the same number, with a kill; check what succeeded, do the rest again, check all."""
        if not self.client.wait_ready(_WAIT_SECONDS):
            raise LaunchError(f"the ranks are not ready after {_WAIT_SECONDS:.0f} s: {self.client.statuses()}")
        groups = [range(first, first + _BLOCKS_PER_TASK) for first in range(0, _NUM_BLOCKS, _BLOCKS_PER_TASK)]
        submitted = [self._submit(kind, group) for group in groups]
        self._wait(submitted[:1])
        pid = self.client.statuses()[victim].pid
        if pid is None:
            raise LaunchError(f"rank {victim} has no process to kill")
        os.kill(pid, signal.SIGKILL)
        self._wait(submitted)
        done = [group for task, group in zip(submitted, groups, strict=True) if self._results[task].error is None]
        self._compare(kind.value, kind, done, images)
        cut = [group for group in groups if group not in done]
        self.num_cut += len(cut)
        marked = self._mark(kind, cut, images)
        if not self.client.wait_ready(_WAIT_SECONDS):
            raise LaunchError(f"rank {victim} is not back after {_WAIT_SECONDS:.0f} s: {self.client.statuses()}")
        self._compare(f"{kind.value} that was cut off and answered, and wrote on", kind, cut, marked)
        again = [self._submit(kind, group) for group in cut]
        self._wait(again)
        failed = [self._results[task].error for task in again if self._results[task].error is not None]
        if failed:
            raise LaunchError(f"{len(failed)} tasks failed after the restart, the first: {failed[0]}")
        self._compare(f"{kind.value} after the restart", kind, groups, images)

    def _submit(self, kind: TaskKind, blocks: Sequence[int]) -> int:
        ids, task_id = np.array(blocks, np.int32), next(self._ids)
        deadline = time.monotonic() + _WAIT_SECONDS
        self.client.submit(
            TransferTask(task_id=task_id, kind=kind, source_ids=ids, destination_ids=ids, deadline=deadline)
        )
        return task_id

    def _wait(self, task_ids: Sequence[int]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(each in self._results for each in task_ids), _WAIT_SECONDS):
                missing = [each for each in task_ids if each not in self._results]
                raise LaunchError(f"{len(missing)} tasks have no answer after {_WAIT_SECONDS:.0f} s")

    def _mark(self, kind: TaskKind, cut: Sequence[range], images: Sequence[Bytes]) -> list[Bytes]:
        """Overwrite the destinations of tasks that are said to have ended: nobody may write there any more."""
        blocks, marked = list(itertools.chain.from_iterable(cut)), [image.copy() for image in images]
        for rank, (arrays, image) in enumerate(zip(self._arrays, marked, strict=True)):
            image[blocks] = 0xA5
            if kind is TaskKind.SWAP_IN:
                arrays.write(image)
            else:
                self._on_cpu(rank)[blocks] = 0xA5
        return marked

    def _compare(self, what: str, kind: TaskKind, groups: Sequence[range], images: Sequence[Bytes]) -> None:
        blocks = list(itertools.chain.from_iterable(groups))
        for rank, (arrays, wanted) in enumerate(zip(self._arrays, images, strict=True)):
            found = arrays.read() if kind is TaskKind.SWAP_IN else self._on_cpu(rank)
            expect_equal(f"{what}, rank {rank}", found[blocks], wanted[blocks])

    def _on_cpu(self, rank: int) -> Bytes:
        return self.client.cpu_segments()[rank].view(np.uint8, (_NUM_BLOCKS, self._block_bytes))


def _expect_no_files(before: set[str]) -> str:
    left = shm_names() - before
    ours = _ours_among(left)
    if ours:  # other programs make files and remove them at once, semaphores above all: look again, a little later
        threading.Event().wait(_SECOND_LOOK_SECONDS)
        ours = _ours_among(ours & shm_names()) & shm_names()
    if ours:
        raise LaunchError(f"left in /dev/shm: {', '.join(sorted(ours))}")
    return f"nothing is left; of the driver and of other programs: {', '.join(sorted(left)) or 'none'}"


def _ours_among(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith(_CUDA_NAMES) and not _is_of_others(name)}


def _is_of_others(name: str) -> bool:
    """Whether another living process holds the file, or its name ends with the number of one.

    The ranks have ended by then, so that every other process is another program's.
    """
    number = re.search(r"\d+$", name)
    by_name = number is not None and any(process.name == number[0] for process in other_processes())
    return by_name or is_held(name)
