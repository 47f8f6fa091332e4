"""The manager that an engine embeds."""

from __future__ import annotations

import functools
import operator
import threading
import time
from array import array
from collections.abc import Callable
from typing import Self

from fastdeploy_cache.books.block_pool import REQUEST, BlockPool
from fastdeploy_cache.books.prefix_tree import BlockKeys, PrefixTree
from fastdeploy_cache.books.run import GPU, CallerCopy, Transfer, wait_done
from fastdeploy_cache.callers.copies import CallerCopies
from fastdeploy_cache.callers.pinned_prefix import Pinned
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import (
    ClosedError,
    OutOfBlocksError,
    PromptTooLongError,
    RequestError,
    UnknownRequestError,
)
from fastdeploy_cache.inspection import Inspection
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.life_cycle import LifeCycle, LifeCycleState
from fastdeploy_cache.match import Match
from fastdeploy_cache.metrics.exporter import MetricsExporter
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.parts import new_client, new_matcher, new_metrics, new_policy_of, new_speeds
from fastdeploy_cache.peers.access import PeerAccess
from fastdeploy_cache.peers.store_road import StoredPeers
from fastdeploy_cache.policies.eviction import EvictionPolicy
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.loads import MatchLoads
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.peer.client import PeerClient
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult

logger = event_log(__name__)


class PrefixCacheManager(Inspection, StorageAccess, LifeCycle, PeerAccess, CallerCopies):
    """Keeps computed KV blocks findable by prefix, on the GPU and in the CPU tier below it.

    Every verb either happens or leaves no trace, and may be called from any thread; calls for one request come one at a
    time. Nothing but `__init__`, `close` and what is called wait waits for more than the lock, which is held for
    bookkeeping only.
    """

    _closed = False

    def __init__(
        self,
        config: CacheConfig,
        *,
        client: TransferClient | None = None,
        peer_client: PeerClient | None = None,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_kv_lost: Callable[[int], None] | None = None,
    ) -> None:
        """Make the pools and start the ranks.

        `client`, `peer_client` and `policy` replace the configured ones (tests, simulation); `clock` gives the seconds
        that eviction policies and hit-rate windows go by. `on_kv_lost` is called with a rank that has died with the KV
        arrays that it owned (`kv_owner = "transfer"`), and again when it has made new ones; each time everything on the
        GPU has been forgotten.

        Raises:
            RankStartError: a rank did not start within its deadline; none is left.
            StorageRefusedError, PeerRefusedError: the storage's, or the link's, settings are wrong.
            NotEnoughMemoryError: the pools do not fit; nothing was taken.
        """
        self.config = config
        self._client = client if client is not None else new_client(config)  # first: it refuses what does not fit
        num_gpu_blocks, num_cpu_blocks = config.pool_sizes()
        self.metrics = new_metrics(config, clock)
        self._lock = threading.Lock()
        self._pools = pools = (BlockPool("GPU", num_gpu_blocks), BlockPool("CPU", num_cpu_blocks))
        self._tree = PrefixTree(config.block_size, pools, policy or new_policy_of(config, clock))
        self._requests: dict[str, ActiveRequest] = {}
        self._pinned: Pinned = {}
        self._ahead: dict[Transfer, int] = {}
        self._taken: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._filling: tuple[dict[int, CallerCopy], dict[int, CallerCopy]] = ({}, {})
        self._life = LifeCycleState()
        self._mover = BlockMover(self._tree, self._client, config.transfer.task_timeout_seconds, self._on_result)
        if config.transfer.owner_of_kv == "worker":
            self._mover.ranks_without_kv.update(range(config.transfer.tp_size))
        self._speeds = new_speeds(config)
        self._copy_down, self._matcher = new_matcher(config, self._tree, self._mover, self._speeds)
        self._detached: list[StorageTier] = []
        self._exporters: list[MetricsExporter] = []
        self._call_on_kv_lost = on_kv_lost
        self._client.start(self._on_result, self._on_kv_lost)
        self._open_storage()
        self._open_peers(peer_client)
        self._show_metrics()

    # -- the verbs

    def match(self, request: Request) -> Match:
        """Find and pin the longest cached prefix of the request's tokens and start loading its CPU part.

        At least one token is left to compute. The CPU part is loaded whole or not at all (`num_unloaded_tokens`): not
        where it does not fit beside the rest of the prompt, or is outside the configured limits.

        Raises:
            RequestError: the request is matched already (release it first).
            PromptTooLongError: it can never fit.
        """
        with self._lock:
            self._check_open()
            num_blocks = self._check_new(request)
            keys = BlockKeys(request.tokens, request.extra_keys(self.config.block_size))
            active = ActiveRequest(request, keys, self._tree.epoch, num_kv_losses=self._tree.num_kv_losses)
            loads = self._loads_of(active)
            self._requests[request.request_id] = active
            try:
                self._find_prefix(active, num_blocks)
                if active.settled and (self._peers is None or not self._peers.outbox):
                    return loads.describe()
            except BaseException:
                self._abandon(active)
                raise
        self._submit()
        with self._lock:
            try:
                return loads.describe()
            except BaseException:
                self._abandon(active)
                raise

    def allocate(self, request: Request, num_blocks: int, *, ahead_of_loads: bool = False) -> list[int]:
        """Give the request `num_blocks` more GPU blocks behind those that it has; evicts what the policy names.

        A match that still waits for loads is cut to what the caller saw of it last (by `match`, `poll` or `wait`), so
        the request's blocks are the `block_ids` of that `Match` and what this returns, one after the other. What has
        landed since is not used.

        With `ahead_of_loads` the match is not cut: poll it again after this call, and the request's blocks are its
        `block_ids`, its `coming_block_ids` and what this returns. The worker waits for each layer of the coming ones
        (`LayerProgress.wait_layer`) before it computes that layer; after the step ask `confirm`.

        Raises:
            OutOfBlocksError: not that many can be had now; nothing was changed.
        """
        num_blocks = operator.index(num_blocks)
        with self._lock:
            active = self._active(request)
            self._check_running()
            if num_blocks < 0:
                raise RequestError(f"allocate of {num_blocks} blocks for {request.request_id!r}; give 0 or more")
            pool, residency = self._pools[GPU], self._tree.residency
            missing = num_blocks - residency.num_available(GPU)
            if missing > 0:
                raise OutOfBlocksError(missing, self._num_coming())
            if not active.settled and not active.is_ahead:
                if ahead_of_loads:
                    self._matcher.run_ahead(active)
                else:
                    self._matcher.settle(active)
            if num_blocks > pool.num_free:
                residency.evict(GPU, num_blocks - pool.num_free)
            ids = pool.allocate(num_blocks, REQUEST)
            try:
                active.block_ids += ids
            except BaseException:  # no memory for a longer table: the blocks are nobody's else
                pool.free(ids, REQUEST)
                raise
            if not active.admitted:
                self._admit(active)
            active.stepped_at = time.monotonic()
            self._copy_down.moved(num_blocks)
        self._submit()
        return ids.tolist()

    def confirm(self, request: Request, timeout_seconds: float | None = None, *, arrived: bool) -> bool:
        """After a step that ran ahead of loads, before sampling: whether it counts, waiting for the loads if need be.

        `arrived`: whether every `wait_layer` of every worker returned True; one that did not has computed on what was
        not there, even if the load came later. Only a confirmed request publishes.

        False, also after `kv_lost`: what was computed for this request is worth nothing; release it and match it again.
        True for a request that runs ahead of nothing.
        """
        with self._lock:
            active = self._active(request)
        if active.is_ahead and arrived:
            seconds = self.config.transfer.task_timeout_seconds if timeout_seconds is None else timeout_seconds
            wait_done(active.ahead, seconds)
        with self._lock:
            self._active(request)
            if active.is_ahead:
                self._matcher.end_ahead(active, arrived)
            return not active.is_void and not self._matcher.is_lost(active)

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens are computed and accepted: their full blocks become findable.

        Call it when the step that computed them is complete: nothing is copied or found before. A request that runs
        ahead of loads publishes nothing before `confirm`. When blocks are copied down is the write policy's.

        Raises:
            CommitError: more tokens than the request has or its blocks hold; nothing was changed.
        """
        num_computed_tokens = operator.index(num_computed_tokens)
        with self._lock:
            active = self._active(request)
            self._matcher.settle(active)
            num_held = len(active.block_ids) * self.config.block_size
            if not 0 <= num_computed_tokens <= min(request.num_tokens, num_held):
                active.refuse_commit(num_computed_tokens, num_held)
            if not active.admitted:
                self._admit(active)
            self._note_prefill(active, num_computed_tokens)
            num_blocks = self._num_cacheable(active)
            publishes = self.config.enable_prefix_caching and active.epoch == self._tree.epoch and active.settled
            if num_blocks > active.num_committed_blocks and publishes:
                self._matcher.publish(active, num_blocks)
            if self._peers is not None:
                self._peers.sends.committed(active)
        self._submit()

    def release(self, request: Request) -> None:
        """The engine has finished the last step that reads or writes the request's blocks: unpin, free what is its own.

        Raises:
            UnknownRequestError: never matched, or released already.
        """
        with self._lock:
            active = self._active(request)
            loads = list(active.loads)
            if active.is_ahead:
                self._matcher.end_ahead(active, arrived=False)
            self._matcher.settle(active)
            private_ids = active.private_ids()
            del self._requests[request.request_id]  # after what may lack memory: a release that fails can be repeated
            if self._peers is not None:
                kept = self._peers.sends.released(active)
                private_ids = array("i", [block_id for block_id in private_ids if block_id not in kept])
            if private_ids:
                self._pools[GPU].free(private_ids, REQUEST)
            num_skipped = self._matcher.release(active)
            if loads:
                self._mover.cancel_unwanted(loads)
        self._submit()
        self._record_skipped(num_skipped)

    def wait_for_transfers(self, timeout_seconds: float) -> bool:
        """Wait until the copies that are in flight now have ended; False when the time is over first.

        For an engine that has nothing to run while blocks are `coming`, and for tests.
        """
        with self._lock:
            transfers = list(self._mover.in_flight.values())
        return wait_done(transfers, timeout_seconds)

    def wait_for_ranks(self, timeout_seconds: float) -> bool:
        """Wait until every rank is ready, after one has died; False when the time is over first."""
        return self._client.wait_ready(timeout_seconds)

    def close(self) -> None:
        """End the ranks and give the memory up; views that the engine holds stay valid. Safe to call twice."""
        with self._lock:
            self._closed = True
        self.detach_storage()
        self._close_peers()
        self._client.stop()
        while self._exporters:
            self._exporters.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- steps of the verbs, under the lock

    def _loads_of(self, active: ActiveRequest) -> MatchLoads:
        return MatchLoads(
            active,
            self._matcher,
            lock=self._lock,
            check=lambda waiting: self._active(waiting.request),
            submit=self._submit,
            size=self.config.block_size,
            timeout_seconds=self.config.transfer.task_timeout_seconds,
        )

    def _find_prefix(self, active: ActiveRequest, num_blocks: int) -> None:
        if self.config.enable_prefix_caching and not self.is_gpu_asleep:
            reads = self._storage.reads if self._storage is not None else None
            if reads is not None and (prefetch := reads.take(active.request.request_id)) is not None:
                self._matcher.follow(active, prefetch)
            self._matcher.find(active, num_blocks)
            if reads is not None:
                reads.advance()
        if self._peers is not None:  # what has come is pinned by the request now
            self._peers.receives.forget(active.request.request_id)

    def _abandon(self, active: ActiveRequest) -> None:
        """Its match has failed half way: it holds nothing, and may be matched again."""
        del self._requests[active.request.request_id]
        private_ids = active.private_ids()
        self._matcher.abandon(active)
        if private_ids:
            self._pools[GPU].free(private_ids, REQUEST)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the cache manager is closed; make a new one")

    def _active(self, request: Request) -> ActiveRequest:
        active = self._requests.get(request.request_id)
        if self._closed or active is None or active.request is not request:
            self._check_open()
            raise UnknownRequestError(f"request {request.request_id!r} is not matched or was released; match it first")
        return active

    def _check_new(self, request: Request) -> int:
        """Returns the blocks that its tokens fill."""
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is matched already; release it first")
        num_blocks = -(-request.num_tokens // self.config.block_size)
        if num_blocks > self._pools[GPU].num_blocks:
            raise PromptTooLongError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, {num_blocks} blocks; the GPU pool "
                f"has {self._pools[GPU].num_blocks}: shorten it or raise num_gpu_blocks"
            )
        return num_blocks

    def _admit(self, active: ActiveRequest) -> None:
        """Count a request once, when it is first admitted: not while it waits, nor when it returns from preemption."""
        request, size, active.admitted = active.request, self.config.block_size, True
        if request.counted:
            return
        request.counted = True
        num_gpu = min(active.num_gpu_blocks, active.num_matched_blocks)
        num_gpu_tokens = num_gpu * size + active.num_copied_tokens
        num_storage = active.num_storage_blocks(num_gpu, active.num_matched_blocks)
        num_cpu = active.num_matched_blocks - num_gpu - num_storage
        hit_tokens = (num_gpu_tokens, num_cpu * size, num_storage * size)
        record = functools.partial(self.metrics.record_request, request.num_tokens, hit_tokens)
        self._tree.mishaps.ask("metrics", record, None)

    def _record_skipped(self, num_blocks: int) -> None:
        if num_blocks:
            self._tree.mishaps.contain("metrics", lambda: self.metrics.record_skipped_writes(num_blocks))

    # -- called back

    def _submit(self) -> None:
        """Hand over what was decided on. Without the lock."""
        storage = self._storage
        if self._mover.outbox:
            self._mover.outbox.submit()
        if storage is not None and (storage.link.outbox or storage.link.calls):
            storage.link.submit()
        if (peers := self._peers) is not None and (peers.outbox or peers.calls):
            peers.submit()

    def _on_result(self, result: TransferResult) -> None:
        """Of a rank's answer, or of a task that the client has raised for: it costs no other task, and no verb."""
        self._tree.mishaps.contain("callback", lambda: self._take_result(result))

    def _take_result(self, result: TransferResult) -> None:
        calls: list[Callable[[], None]] = []
        try:
            with self._lock:
                num_lost, calls = self._mover.finish(result)
                self._note_load(result)
                if result.task.kind is TaskKind.SWAP_OUT:
                    self._copy_down.stored(result.error is None)
                if self._storage is not None:
                    self._storage.reads.advance()
                    if isinstance(self._peers, StoredPeers):
                        self._peers.sends.check(self._storage)
            self._submit()
            self._record_skipped(num_lost)
            self._record_task(result)
            if result.error is not None:
                logger.warning("event=transfer_failed task_id=%d error=%r", result.task.task_id, result.error)
        finally:  # whoever waits for the task hears of it, whatever has failed
            for call in calls:
                self._tree.mishaps.contain("callback", call)
