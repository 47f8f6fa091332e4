"""The rank's storage process: moves blocks between its CPU tier and a store, apart from the copies of other tiers.

A process of its own, because a call into a store may hang, crash or go on for half a minute whatever time-out it was
given: it is killed then, and loads from the CPU tier never notice.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading

import numpy as np

from fastdeploy_cache.errors import StorageError, StorageGoneError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.codec import Int32Array, encode
from fastdeploy_cache.transfer_manager.kv.memory import open_cpu_blocks
from fastdeploy_cache.transfer_manager.process.lane_task import Moved
from fastdeploy_cache.transfer_manager.process.lanes import LaneServer
from fastdeploy_cache.transfer_manager.process.main import serve_process
from fastdeploy_cache.transfer_manager.storage import open_storage
from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment, Storage, find_each, remove_owned
from fastdeploy_cache.transfer_manager.storage.keys import BARE_STOP, NO_STOP, PROBE_OWNER, is_page, owned, page_names
from fastdeploy_cache.transfer_manager.storage.news import news_of
from fastdeploy_cache.transfer_manager.storage.setup import StorageSetup, StoreReport
from fastdeploy_cache.transfer_manager.task import StoreNews, TaskKind, TransferTask

logger = logging.getLogger(__name__)

_HASH_BYTES = 32
_MAX_BOUNDARIES = 256  # that a look-up asks for, from the deepest on


def _opened(setup: StorageSetup, segment: Segment) -> Storage:
    """The store, with its objects encrypted where there are keys for it."""
    if setup.keys_file is None:
        return open_storage(setup.kind, setup.options, setup.space, segment)
    from fastdeploy_cache.transfer_manager.storage.encrypted import EncryptedStorage
    from fastdeploy_cache.transfer_manager.storage.tenant_keys import read_keys

    return EncryptedStorage(setup.kind, setup.options, setup.space, segment, read_keys(setup.keys_file))


class StorageExecutor:
    """See `process.lane_task.Executor`."""

    def __init__(self, setup: StorageSetup) -> None:
        """Open the store over the rank's CPU blocks.

        Raises:
            IPCError: the CPU blocks are smaller than the set-up says.
            StorageRefusedError, StorageError: it cannot be opened.
        """
        size = setup.space.object_bytes
        cpu = open_cpu_blocks(setup.cpu_fd, setup.num_cpu_blocks, size)
        self._segment = cpu.view(np.uint8, (setup.num_cpu_blocks, size))
        self._base = self._segment.__array_interface__["data"][0]
        self._size, self._weights_id = size, setup.space.weights_id
        sys.path += [path for path in setup.import_paths if path not in sys.path]  # behind: it replaces nothing of ours
        self._store = _opened(setup, self._segment)
        self.report = encode(StoreReport(self._store.needs_token_ids))
        self.is_lost = False
        self._opened_ns = round(SYSTEM_CLOCK.now() * 1e9)  # a later process is one that counts from 0 on
        self._one_writer = threading.Lock()  # probes write, too, and come on the lane of reads

    def bind_thread(self) -> None:
        pass

    def do(self, task: TransferTask) -> Moved:
        try:
            return self._do(task)
        except StorageGoneError:
            self.is_lost = True
            raise

    def _do(self, task: TransferTask) -> Moved:
        store, kind = self._store, task.kind
        if kind is TaskKind.LOOKUP:
            moved = Moved(0, self._count(task))
        elif kind is TaskKind.PREFETCH:
            blocks = self._blocks(task, task.destination_ids)
            num_whole = store.read(blocks)
            if num_whole < len(blocks.hashes) and is_page(blocks.hashes[0]):
                with self._one_writer:
                    store.remove(blocks.hashes)  # or look-ups would find an image again that is not whole
            moved = Moved(num_whole * self._size, num_whole)
        elif kind is TaskKind.WRITE:
            with self._one_writer:
                written = store.write(self._blocks(task, task.source_ids))
            moved = Moved(written.num_bytes, written.num_leading)
        elif kind is TaskKind.CLEAR:
            with self._one_writer:
                moved = Moved(0, store.clear(self._weights_id))
        elif kind is TaskKind.FORGET:
            with self._one_writer:
                moved = Moved(0, remove_owned(store, self._weights_id, task.owner))
        elif kind is TaskKind.PROBE:
            moved = self._probe(task)
        else:
            raise StorageError(f"a storage process does not {kind.value}")
        counts = {name: value for name, value in dataclasses.asdict(store.stats()).items() if value is not None}
        said = news_of(store, task.listener) if task.listener else None
        news = StoreNews(task.listener, self._opened_ns, *said) if said is not None else None
        return moved._replace(counts=counts | {"opened_ns": self._opened_ns}, news=news)

    def _count(self, task: TransferTask) -> int:
        """Leading blocks that are there or, where the task asks for a checkpoint, up to the deepest boundary among them
        of whose image the last page is there, too."""
        blocks = self._blocks(task)
        num_leading = self._store.count_leading(blocks)
        if not task.detail:
            return num_leading
        stops = [end for end in range(num_leading, 0, -1) if task.detail[end - 1] != NO_STOP][:_MAX_BOUNDARIES]
        bare = next((end for end in stops if task.detail[end - 1] == BARE_STOP), 0)
        asked = [end for end in stops if end > bare]
        hashes = [task.hashes[(end - 1) * _HASH_BYTES : end * _HASH_BYTES] for end in asked]
        there = find_each(self._store, [owned(page_names(block_hash, 1)[0], task.owner) for block_hash in hashes])
        return next((end for end, is_there in zip(asked, there, strict=True) if is_there), bare)

    @staticmethod
    def _names(hashes: bytes, owner: bytes) -> list[bytes]:
        starts = range(0, len(hashes), _HASH_BYTES)
        return [owned(hashes[start : start + _HASH_BYTES], owner) for start in starts]

    def _blocks(self, task: TransferTask, ids: Int32Array | None = None) -> Blocks:
        hashes = self._names(task.hashes, task.owner)
        block_ids = ids.tolist() if ids is not None else []
        if block_ids and (len(block_ids) != len(hashes) or not all(0 <= i < len(self._segment) for i in block_ids)):
            raise StorageError(f"{len(hashes)} hashes with {len(block_ids)} blocks, or an id outside the CPU pool")
        return Blocks(
            hashes=hashes,
            buffers=[memoryview(self._segment[i]) for i in block_ids],
            addresses=[self._base + i * self._size for i in block_ids],
            token_ids=np.frombuffer(task.token_ids, "<i4") if task.token_ids else None,
            priority=task.priority,
            owner=task.owner,
            above=self._names(task.detail, task.owner) if task.kind is TaskKind.WRITE else (),
        )

    def _probe(self, task: TransferTask) -> Moved:
        """Look up, write, read and remove the blocks that the task lends; the seconds are those of reading.

        A store that fails to write can still be read: that is `num_blocks` 0, and no error.
        """
        names = self._names(task.hashes, PROBE_OWNER)
        blocks = dataclasses.replace(self._blocks(task, task.destination_ids), owner=PROBE_OWNER, hashes=names)
        self._store.count_leading(blocks)
        noise = [SYSTEM_CLOCK.random_bytes(self._size) for _ in blocks.buffers]
        for buffer, data in zip(blocks.buffers, noise, strict=True):
            buffer[:] = data
        try:
            with self._one_writer:
                num_written = max(self._store.write(blocks).num_leading for _ in range(2))  # a filter may want it twice
        except StorageGoneError:
            raise
        except StorageError as error:
            logger.warning("event=probe_cannot_write error=%s", error)
            return Moved(0, 0)
        started = SYSTEM_CLOCK.now()
        num_whole = self._store.read(blocks) if num_written else 0
        seconds = SYSTEM_CLOCK.now() - started
        if num_whole < num_written or any(
            bytes(buffer) != data for buffer, data in zip(blocks.buffers[:num_whole], noise[:num_whole], strict=True)
        ):
            raise StorageError("blocks that were just written cannot be read back")
        with self._one_writer:
            self._store.remove(blocks.hashes)
        return Moved(num_whole * self._size, 1, seconds)

    def close(self) -> None:
        self._store.close()


def main() -> int:
    """The process's entry."""
    return serve_process(StorageSetup, lambda setup, signal: LaneServer(setup, signal, StorageExecutor(setup)))
