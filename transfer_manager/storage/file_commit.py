"""Group commit: makes what was written to the file store durable, objects first and the journal that names them after.

The bad interleavings, and what prevents them:
- the journal names an object whose bytes a crash takes: a slab is synced before the frame is written;
- a slot is written anew while the journal on the disk still names its old object: slots of forgotten objects stay
  retired until the frame that says so is synced;
- an object is evicted between the sync of its slab and the frame: `Index.begin_commit` leaves it out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_cache.errors import StorageError, StorageGoneError
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk
from fastdeploy_cache.transfer_manager.storage.file_full import FullDisk
from fastdeploy_cache.transfer_manager.storage.file_index import Index
from fastdeploy_cache.transfer_manager.storage.file_journal import Journal, Put
from fastdeploy_cache.transfer_manager.storage.file_slabs import Slabs

GROUP_SECONDS = 0.5
GROUP_BYTES = 64 * 2**20


class Commits:
    """Commits of one open store. `commit` and `commit_removals` raise OSError and `StorageGoneError`."""

    def __init__(
        self, disk: Disk, *, lock_path: Path, lock_fd: int, journal: Journal, slabs: Slabs, index: Index, full: FullDisk
    ) -> None:
        self._disk = disk
        self._lock_path = lock_path
        self._identity = disk.identity_of(lock_fd)
        self._journal = journal
        self._slabs = slabs
        self._index = index
        self._full = full
        self._turn = threading.Lock()  # one frame at a time
        self._work = threading.Condition()
        self._pending_bytes = -1  # -1: there is nothing to commit
        self._is_closing = False
        self._failure: StorageError | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Commit in the background from here on."""
        self._thread = threading.Thread(target=self._run, name="kv-file-commit", daemon=True)
        self._thread.start()

    def notice(self, num_bytes: int) -> None:
        """There is something to commit. Any thread."""
        with self._work:
            self._pending_bytes = max(self._pending_bytes, 0) + num_bytes
            self._work.notify()

    def stop(self) -> None:
        """End the thread; what it has not committed is left."""
        with self._work:
            self._is_closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def raise_failure(self) -> None:
        """Raise what went wrong in the background: once, or for ever if the folder is gone. Any thread."""
        failure = self._failure
        if failure is None:
            return
        if not isinstance(failure, StorageGoneError):
            self._failure = None
        raise failure

    @property
    def is_gone(self) -> bool:
        """Whether the folder is gone."""
        return isinstance(self._failure, StorageGoneError)

    def check_there(self) -> None:
        """Raise `StorageGoneError`, now and ever after, if the folder is not the one that was opened."""
        try:
            is_there = self._disk.identity(self._lock_path) == self._identity
        except OSError:  # such as EIO or ESTALE of a mount that broke
            is_there = False
        if not is_there:
            self._failure = StorageGoneError(f"{self._lock_path.parent} has vanished; open the store anew")
            raise self._failure

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._pending_bytes >= 0 or self._is_closing)
                self._work.wait_for(lambda: self._pending_bytes >= GROUP_BYTES or self._is_closing, GROUP_SECONDS)
                if self._is_closing:
                    return
                self._pending_bytes = -1
            try:
                self.commit()
            except StorageGoneError:
                return
            except OSError as error:
                self._failure = StorageError(f"could not make {self._lock_path.parent} durable: {error}")

    def commit(self) -> None:
        """Make everything durable. One thread at a time: ours, or after `stop` another."""
        fresh = self._index.fresh()
        with self._full.watching("commit"):
            try:
                self._slabs.sync(put.slot for put in fresh)
            except OSError:
                # Linux reports a lost write once and then takes the page for clean: what of this is on the disk, nobody
                # knows any more.
                self._index.drop(fresh)
                raise
            self._commit(fresh)

    def commit_removals(self) -> None:
        """Free the retired slots. Does not wait for slabs."""
        with self._full.watching("commit"):
            self._commit(())

    def _commit(self, synced: Sequence[Put]) -> None:
        with self._turn:
            self.check_there()
            standing, retired = self._index.begin_commit(synced)
            if not standing and not retired and self._journal.is_sound:
                return
            try:
                if self._journal.wants_rewrite(self._slabs.num_slots):
                    self._journal.rewrite(self._index.journaled())
                else:
                    self._journal.append(standing, retired)
            except OSError:
                self._index.end_commit(retired, is_durable=False)
                raise
            self._index.end_commit(retired, is_durable=True)
