"""What a manager offers of storage: prefetch, write, attach and detach."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time

from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher, root_hash
from fastdeploy_cache.books.prefix_tree import BlockKeys, PrefixTree
from fastdeploy_cache.books.run import CPU, Run, wait_done
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import ClosedError, ConfigError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.life_cycle import LifeCycleState
from fastdeploy_cache.match import Prefetch
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.parts import new_storage
from fastdeploy_cache.peers.link_road import PeerTier
from fastdeploy_cache.peers.store_road import StoredPeers
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.storage.prefetch import StoragePrefetch
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.storage.write_out import WriteOut
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from fastdeploy_cache.transfer_manager.storage.client import StorageClient, StorageProcesses
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult

logger = event_log(__name__)

_FOREVER_SECONDS = 1e9


class StorageAccess:
    """The part of `PrefixCacheManager` that is about storage; any thread."""

    config: CacheConfig
    metrics: CacheMetrics
    _client: TransferClient
    _copy_down: CopyDown
    _detached: list[StorageTier]  # whose last answers are still to come
    _lock: threading.Lock
    _matcher: Matcher
    _mover: BlockMover
    _peers: PeerTier | StoredPeers | None
    _requests: dict[str, ActiveRequest]
    _speeds: LoadOrCompute
    _is_attaching = False
    _life: LifeCycleState
    _reopen: StorageConfig | None = None  # the attached store's settings
    _storage: StorageTier | None = None
    _tree: PrefixTree
    _weights_id: str | None = None  # of what is cached, as far as a store has told

    def prefetch(self, request: Request) -> Prefetch:
        """A request has been queued: fetch from storage, to the CPU tier, what no tier here has of it.

        It takes no GPU blocks and pins nothing, so requests that wait never block each other; what is cached of it is
        not the next to be evicted. A `match` meanwhile grows with what comes; `release` or `end_prefetch` ends it.
        """
        size = self.config.block_size
        keys = BlockKeys(request.tokens, request.extra_keys(size))
        with self._lock:
            self._check_open()
            found = self._matcher.look(request, keys)
            first = (found.num_gpu_tokens + found.num_cpu_tokens) // size
            num_missing = (request.num_tokens - 1) // size - first
            storage, now, epoch = self._storage, time.monotonic(), self._tree.epoch
            wanted = storage is not None and self.config.enable_prefix_caching and storage.reads.wants(num_missing)
            above = self._hash_before(request.namespace, keys, first) if wanted else b""
        self._submit()  # it may be a probe
        if storage is None or not wanted:
            return found
        hashes = BlockHasher(size).extend(above, keys.tokens, first, num_missing, keys.extras)  # not under the lock
        deadline = now + self._patience(num_missing)
        prefetch = StoragePrefetch(request.namespace, keys, first, hashes, epoch, deadline, request.priority)
        with self._lock:
            if request.request_id in self._requests or self._storage is not storage:  # a match, a detach was faster
                return found
            storage.reads.start(request.request_id, prefetch)
        self._submit()
        return found.with_fetch(prefetch)

    def _hash_before(self, namespace: str, keys: BlockKeys, first: int) -> bytes:
        """What block `first` has as its parent; the blocks before it are cached."""
        path, _ = self._tree.find(namespace, keys, first)
        run, end = self._tree.place(path, first)
        if run is None:
            return root_hash(namespace, self.config.block_size)
        return bytes(run.hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES])

    def _patience(self, num_blocks: int) -> float:
        """Seconds that a request may wait for so many blocks from storage."""
        config = self.config
        if config.prefetch_policy == "best_effort":
            return 0.0
        if config.prefetch_policy == "wait_complete":
            return _FOREVER_SECONDS  # every task has a deadline, and after it an answer
        num_tokens = num_blocks * config.block_size
        seconds = config.prefetch_timeout_seconds + config.prefetch_seconds_per_1024_tokens * num_tokens / 1024
        worth = self._speeds.patience_seconds(num_blocks)
        return seconds if worth is None else min(seconds, worth)

    def end_prefetch(self, request: Request) -> None:
        """A queued request has gone without ever being matched: what has not come yet is not wanted."""
        with self._lock:
            if self._storage is not None:
                self._storage.reads.forget(request.request_id)
        self._submit()

    # -- write

    def write_to_storage(self, request: Request) -> None:
        """Write what of a matched request is committed to storage now, whatever the policies say; returns at once.

        For an engine without a prefix cache (`enable_prefix_caching=False`), such as a decode instance: the blocks are
        cached then, under the keys that any other instance computes, until the room is needed; nothing here matches
        them. Best effort: `storage_blocks_total` counts what was written and what was skipped.

        Raises:
            UnknownRequestError: not matched, or released already.
        """
        with self._lock:
            active = self._active(request)
            write_out = self._matcher.write_out
            self._matcher.settle(active)
            if write_out is None or active.epoch != self._tree.epoch or not active.settled:
                return
            num_blocks = min(self._num_cacheable(active), len(active.block_ids))
            if num_blocks > active.num_committed_blocks:
                self._matcher.publish(active, num_blocks)
            if active.pin is not None:
                path = active.pin.run.path()
                write_out.write(path)
                self._copy_down.store(path, unstored=True)
        self._submit()

    def flush_storage(self, timeout_seconds: float) -> bool:
        """Write all that is cached to storage and wait for it: before a planned end. True when storage has it all.

        What is on the GPU only goes through the CPU tier, in as many rounds as that takes. An admission filter decides
        as ever. Then storage is asked for every block: it may have dropped what it took, for later blocks or on a full
        disk; what is missing so is written by the next flush. False: no store, one that fails, declines or drops, or
        the time is over.
        """
        deadline = time.monotonic() + timeout_seconds
        num_before: int | None = None
        while True:
            with self._lock:
                tier, write_out = self._storage, self._matcher.write_out
                if tier is None or write_out is None or not tier.link.client.available:
                    return False
                write_out.write(self._unstored_runs())
            self._submit()
            if not tier.writes.wait_drained(deadline - time.monotonic()):
                return False
            with self._lock:
                # only now: copies make room for themselves among what is written
                runs = self._unstored_runs()
                num_left = sum(run.num_blocks - run.num_stored for run in runs)
                if not runs:
                    break
                if num_before is not None and num_left >= num_before:
                    return False
                num_before = num_left
                num_room = self._tree.residency.num_available(CPU)
                for run in runs:
                    if num_room > 0:
                        num_room -= max(0, run.num_gpu - run.num_stored)
                        self._copy_down.store((run,), unstored=True)
                copies = list(self._mover.in_flight.values())
            self._submit()
            if not wait_done(copies, deadline - time.monotonic()):
                return False
        return self._is_all_there(tier, deadline)

    def _is_all_there(self, tier: StorageTier, deadline: float) -> bool:
        """Ask the store for all that is cached."""
        with self._lock:
            if self._storage is not tier:  # detached meanwhile
                return False
            audit = tier.audits.start()
        tier.link.submit()
        audit.done.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if not audit.done.is_set():
                tier.audits.give_up(audit)
            is_whole = tier.audits.is_whole(audit) and not self._unstored_runs()
        if audit.num_missing:
            logger.warning("event=storage_dropped blocks=%d of=%d", audit.num_missing, sum(audit.num_asked.values()))
        return is_whole

    def _unstored_runs(self) -> list[Run]:
        epoch = self._tree.epoch
        return [run for run in self._tree.runs() if run.epoch == epoch and run.num_stored < run.num_blocks]

    # -- what loading and computing take

    def _num_cacheable(self, active: ActiveRequest) -> int:
        """Full blocks of what is computed that may be published."""
        num_tokens = active.num_computed_tokens
        if not self.config.cache_outputs:
            num_tokens = min(num_tokens, active.request.num_prompt_tokens)
        return num_tokens // self.config.block_size

    def _note_prefill(self, active: ActiveRequest, num_computed_tokens: int) -> None:
        """Under the lock: a commit."""
        now, num_matched = time.monotonic(), active.num_matched_tokens(self.config.block_size)
        before = max(active.num_computed_tokens, num_matched)
        if active.stepped_at:
            self._speeds.note_prefill(num_computed_tokens - before, now - active.stepped_at)
        active.num_computed_tokens, active.stepped_at = num_computed_tokens, now

    def _note_load(self, result: TransferResult) -> None:
        """Under the lock: a task has ended."""
        if result.task.kind is TaskKind.SWAP_IN and result.error is None:
            slowest = max(r.seconds for r in result.ranks)
            self._speeds.cpu.note(max(r.num_bytes for r in result.ranks), slowest)

    # -- attaching

    def _open_storage(self) -> None:
        """At the end of the constructor: the configured store, if there is one; nothing stays where it is refused."""
        try:
            if self.config.storage is not None:
                self.attach_storage(self.config.storage)
        except BaseException:
            self.close()
            raise

    def attach_storage(self, storage: StorageConfig, *, client: StorageClient | None = None) -> None:
        """Open a store below the CPU tier; one that cannot be reached yet is tried again and again.

        With other weights than those of the store before, everything that is cached is forgotten, as by `reset`.
        `client` replaces the storage processes (tests, simulation).

        Raises:
            ConfigError: there is one already, no layout, or no CPU block to go through.
            StorageRefusedError: its settings are wrong.
        """
        with self._life.renaming:  # a detach beside it would find nothing yet, and return before the store is there
            with self._lock:
                self._check_open()
                if self._storage is not None or self._is_attaching:  # by a callback of the store that is opening
                    raise ConfigError("a store is attached; detach_storage first")
                self._is_attaching = True
            try:
                self._attach(storage, client)
            finally:
                self._is_attaching = False

    def _attach(self, storage: StorageConfig, client: StorageClient | None) -> None:
        config, layout = self.config, self.config.rank_layout()
        if not config.pool_sizes()[1] or (layout is None and client is None):
            raise ConfigError("storage goes through the CPU tier and needs a layout; give the cache num_cpu_blocks")
        self._reopen = storage if client is None else None
        if client is None:
            assert layout is not None
            segments = self._client.cpu_segments()
            client = StorageProcesses(
                storage, config.transfer, layout=layout, block_size=config.block_size, segments=segments
            )

        def on_result(result: TransferResult) -> None:
            self._on_storage_result(tier, result)

        tier = new_storage(config, storage, self._tree, client, speeds=self._speeds, on_result=on_result)
        client.start(on_result, lambda: self._on_storage_ready(tier))
        try:
            with self._lock:
                self._check_open()
                self._follow(tier, storage.weights_id)
            self._submit()
        except ClosedError:
            client.stop()
            raise
        tier.link.submit()

    def _follow(self, tier: StorageTier, weights_id: str) -> None:
        config = self.config
        others = {self._weights_id, self._peers.offers.info.weights_id if self._peers is not None else None}
        if others - {None, weights_id}:
            self._forget_all(weights_id)
        self._weights_id = weights_id
        tier.writes.forget_stored()
        self._storage = self._matcher.storage = tier
        tier.be_quiet(self._mover.is_quiet)
        write_out = WriteOut(
            self._tree, tier.writes, self._copy_down, config.storage_write_policy, config.storage_write_min_uses
        )
        self._matcher.write_out = write_out
        self._matcher.on_copied(write_out.copied)
        self._copy_down.follow_storage(config.storage_write_policy, config.storage_write_min_uses)

    def detach_storage(self) -> None:
        """End the storage processes; what is on its way is answered as failed. Safe without a store."""
        with self._life.renaming:
            self._reopen = None
            self._detach()

    def _detach(self) -> None:
        with self._lock:
            tier, self._storage, self._matcher.storage, self._matcher.write_out = self._storage, None, None, None
            if tier is None:
                return
            self._matcher.on_copied(None)
            self._copy_down.follow_storage(None, 1)
            tier.stop()
            self._detached.append(tier)
        tier.link.client.stop()
        tier.link.submit()
        with self._lock:
            self._detached.remove(tier)

    def reset(self, *, weights_id: str | None = None) -> None:
        """Forget every cached prefix. Running requests keep their blocks; what they commit later is not published.

        What is in storage stays, and is found again: after the weights have changed give the new `weights_id`, under
        which alone this cache reads and writes from then on.

        Raises:
            ConfigError: `weights_id` without a store or peers.
            LayoutError: an impossible `weights_id`; nothing was changed.
            StorageRefusedError: it cannot be opened again; the cache goes on without, and the next call tries again.
        """
        if weights_id is None:
            self._reset(None)
            return
        # Two at once could detach, forget and attach in turns: the peers would name the one's weights and the store the
        # other's, and blocks of one model would be read as the other's.
        with self._life.renaming:
            self._reset(weights_id)

    def _reset(self, weights_id: str | None) -> None:
        storage = self._reopen
        if weights_id is not None:
            if storage is None and self._peers is None:
                raise ConfigError(
                    f"reset with weights_id {weights_id!r}, but no store is attached and there are no peers"
                )
            if self.config.peer is not None:
                dataclasses.replace(self.config.peer, weights_id=weights_id)  # a wrong name is refused before all else
            if storage is not None:
                storage = dataclasses.replace(storage, weights_id=weights_id)
                self._detach()
        with self._lock:
            self._check_open()
            self._forget_all(weights_id)
        self._submit()
        if weights_id is not None and storage is not None:
            self.attach_storage(storage)

    def _forget_all(self, weights_id: str | None) -> None:
        """Under the lock: nothing that is cached, or on its way to and from other instances, counts any more."""
        self._tree.reset()
        if self._peers is not None:
            self._peers.cancel_all("the cache was reset")
            self._peers.offers.rename_weights(weights_id or self._peers.offers.info.weights_id)
        logger.info("event=reset epoch=%d", self._tree.epoch)

    def _on_storage_ready(self, tier: StorageTier) -> None:
        with self._lock:
            tier.opened()
        tier.link.submit()

    def _on_storage_result(self, tier: StorageTier, result: TransferResult) -> None:
        with self._lock:
            self._tree.mishaps.contain("landing", lambda: tier.finish(result))
            if isinstance(self._peers, StoredPeers):
                self._peers.sends.check(tier)
        self._record_task(result)
        if result.error is not None:
            logger.info("event=storage_task_failed kind=%s error=%r", result.task.kind.value, result.error)
        self._submit()
        tier.link.submit()

    def _record_task(self, result: TransferResult) -> None:
        """What each rank has moved."""
        for r in result.ranks:
            sums = result.task.kind.value, r.rank, r.num_bytes, r.seconds, r.error is not None
            self._tree.mishaps.contain("metrics", functools.partial(self.metrics.record_task, *sums))

    def _active(self, request: Request) -> ActiveRequest:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _submit(self) -> None:
        raise NotImplementedError
