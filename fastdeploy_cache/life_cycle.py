"""Pause, resume, sleep, wake, clear, update-weights: one state machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, GPU, Tier, wait_done
from fastdeploy_cache.books.tier_loss import drop_cpu, drop_gpu
from fastdeploy_cache.callers.pinned_prefix import Pinned
from fastdeploy_cache.errors import ConfigError, LifeCycleError, NotEnoughMemoryError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.peers.link_road import PeerTier
from fastdeploy_cache.peers.store_road import StoredPeers
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.task import TaskKind

logger = event_log(__name__)

TierName = Literal["gpu", "cpu"]
_MAX_SECONDS = 86400.0
_TIERS: dict[str, Tier] = {"gpu": GPU, "cpu": CPU}


class LifeCycleStatus(Enum):
    """Where a cache is. In all but `running` no bytes move between tiers."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    CLEARING = "clearing"
    UPDATING = "updating"


_RESTING = (LifeCycleStatus.RUNNING, LifeCycleStatus.PAUSED, LifeCycleStatus.ASLEEP)


@dataclass(eq=False)
class LifeCycleState:
    """What a manager keeps of it."""

    changing: threading.Lock = field(default_factory=threading.Lock)  # one change at a time
    # one attach, detach or change of weights at a time; a change of weights detaches and attaches
    renaming: threading.RLock = field(default_factory=threading.RLock)
    status: LifeCycleStatus = LifeCycleStatus.RUNNING
    resting: LifeCycleStatus = LifeCycleStatus.RUNNING  # before the change that is under way
    asleep: set[Tier] = field(default_factory=set)


class LifeCycle:
    """The part of `PrefixCacheManager` that is about stopping and going on; any thread, one change at a time.

    A change ends when every rank has acknowledged that it moves nothing any more (its lanes have done all that came
    before), or has been reaped. At its deadline it raises `LifeCycleError`, and the cache is as it was before. Requests
    that wait for blocks are answered meanwhile: with what has arrived, and a miss for the rest.

    =============  ==================================================================================================
    status         what verbs do
    =============  ==================================================================================================
    paused         all but moving: what is on the GPU is found, what is below is not loaded, nothing is copied down
    asleep (gpu)   nothing is found, `allocate` and `take` raise `LifeCycleError`; requests from before are void
    asleep (cpu)   as paused, over the GPU alone
    =============  ==================================================================================================
    """

    _client: TransferClient
    _copy_down: CopyDown
    _life: LifeCycleState
    _lock: threading.Lock
    _matcher: Matcher
    _mover: BlockMover
    _pinned: Pinned
    _requests: dict[str, ActiveRequest]
    _reopen: StorageConfig | None
    _peers: PeerTier | StoredPeers | None
    _storage: StorageTier | None
    _tree: PrefixTree

    @property
    def life_cycle_status(self) -> LifeCycleStatus:
        """Where the cache is now."""
        return self._life.status

    @property
    def is_gpu_asleep(self) -> bool:
        """Whether there is no GPU memory to use now."""
        return GPU in self._life.asleep

    def pause(self, timeout_seconds: float = 30.0) -> None:
        """Let no more bytes move, and wait until none does. Safe to call when paused.

        Raises:
            LifeCycleError: it is asleep, or a copy or a rank has not come to an end in time.
        """
        with self._change("pause", LifeCycleStatus.PAUSING, timeout_seconds, _RESTING[:2]) as deadline:
            self._wait_until_quiet(deadline)
            self._set_status(LifeCycleStatus.PAUSED)

    def resume(self, timeout_seconds: float = 30.0) -> None:
        """The reverse of `pause`. Safe to call when running. Raises as `pause`."""
        with self._change("resume", LifeCycleStatus.RUNNING, timeout_seconds, _RESTING[:2]):
            pass

    def sleep(self, timeout_seconds: float = 30.0, *, tiers: Collection[TierName] = ("gpu", "cpu")) -> int:
        """Forget what is in these tiers and give their memory back; returns how many bytes.

        What the other tier has stays cached. KV arrays that a worker owns are the worker's to free; on a GPU the
        ranks' host memory is pinned and is kept. `flush_storage` first, to find it all again.

        Raises:
            ConfigError: an unknown tier.
            LifeCycleError: see `pause`.
        """
        if isinstance(tiers, str) or not tiers or set(tiers) - _TIERS.keys():
            raise ConfigError(f"sleep of tiers {tiers!r}; give a list of one or both of {', '.join(_TIERS)}")
        with self._change("sleep", LifeCycleStatus.FALLING_ASLEEP, timeout_seconds, _RESTING) as deadline:
            self._wait_until_quiet(deadline)
            with self._lock:
                asleep = self._life.asleep | {_TIERS[name] for name in tiers}
                self._forget(asleep)
                self._life.asleep = asleep
            num_bytes = self._client.release_memory(gpu=GPU in asleep, cpu=CPU in asleep)
            self._set_status(LifeCycleStatus.ASLEEP)
        return num_bytes

    def wake(self, timeout_seconds: float = 30.0) -> None:
        """Take the memory again and run. Attach a worker's KV arrays before, where it has freed them. Safe to call when
        running.

        Raises:
            NotEnoughMemoryError: it is not to be had any more; the cache sleeps on.
            LifeCycleError: it is paused, or a rank has not answered in time.
        """
        if self._life.status is LifeCycleStatus.RUNNING:
            return
        with self._change("wake", LifeCycleStatus.WAKING, timeout_seconds, _RESTING[2:]) as deadline:
            try:
                self._client.retake_memory()
            except NotEnoughMemoryError:
                self._client.release_memory(gpu=GPU in self._life.asleep, cpu=CPU in self._life.asleep)
                raise
            self._acknowledge(deadline)
            with self._lock:
                self._life.asleep = set()
            self._set_status(LifeCycleStatus.RUNNING)

    def clear(self, timeout_seconds: float = 30.0) -> None:
        """`reset` while nothing moves; then it is as before. What is in storage stays. Raises `LifeCycleError`."""
        with self._change("clear", LifeCycleStatus.CLEARING, timeout_seconds, _RESTING) as deadline:
            before = self._life.resting
            self._wait_until_quiet(deadline)
            self.reset()
            self._set_status(before)

    def update_weights(self, weights_id: str | None = None, timeout_seconds: float = 30.0) -> None:
        """The model's weights have changed: forget all that was computed with others.

        Where a store is attached, or there are peers, the new `weights_id` is needed: under it alone blocks are read
        and written from now on. Requests that run go on with what they have, and publish nothing.

        Raises:
            ConfigError: no `weights_id` with a store, or with peers.
            StorageRefusedError: the store cannot be opened again; the cache goes on without.
            LifeCycleError: see `pause`.
        """
        is_named = self._reopen is not None or self._peers is not None
        if is_named and not weights_id:
            raise ConfigError("update_weights without a weights_id, but a store or a peer goes by it; give the new one")
        with self._change("update_weights", LifeCycleStatus.UPDATING, timeout_seconds, _RESTING) as deadline:
            before = self._life.resting
            self._wait_until_quiet(deadline)
            try:
                self.reset(weights_id=weights_id if is_named else None)
            finally:
                self._set_status(before)

    # -- steps

    @contextmanager
    def _change(
        self, verb: str, via: LifeCycleStatus, timeout_seconds: float, allowed: Collection[LifeCycleStatus]
    ) -> Iterator[float]:
        """One change from one of the `allowed` states; gives its deadline. What fails leaves the state as it was."""
        if not isinstance(timeout_seconds, int | float) or not 0 <= timeout_seconds <= _MAX_SECONDS:
            raise ConfigError(f"{verb}: timeout_seconds is {timeout_seconds!r}; use 0 to {_MAX_SECONDS:.0f}")
        deadline = time.monotonic() + timeout_seconds
        if not self._life.changing.acquire(timeout=max(0.0, timeout_seconds)):
            raise LifeCycleError(f"{verb}: the cache is still {self._life.status.value} after {timeout_seconds} s")
        try:
            before = self._life.status
            if before not in allowed:
                names = " or ".join(status.value for status in allowed)
                raise LifeCycleError(f"{verb}: the cache is {before.value}; it has to be {names}")
            with self._lock:
                self._check_open()
            self._life.resting = before
            if via is not before:  # or who waits for storage would lose it for nothing
                self._set_status(via)
            try:
                yield deadline
            except BaseException:
                if self._life.status is not before:
                    self._set_status(before)
                raise
        finally:
            self._life.changing.release()

    def _set_status(self, status: LifeCycleStatus) -> None:
        with self._lock:
            self._life.status = status
            self._mover.is_quiet = status is not LifeCycleStatus.RUNNING
            if self._storage is not None:
                self._storage.be_quiet(self._mover.is_quiet)
            if self._peers is not None:
                self._peers.be_quiet(self._mover.is_quiet)
            if not self._mover.is_quiet:
                self._copy_down.look_ahead()
        self._submit()
        logger.info("event=life_cycle status=%s", status.value)

    def _wait_until_quiet(self, deadline: float) -> None:
        """Nothing starts any more: wait for what has."""
        with self._lock:
            transfers, storage = list(self._mover.in_flight.values()), self._storage
        num_left = sum(not wait_done((transfer,), max(0.0, deadline - time.monotonic())) for transfer in transfers)
        if num_left:
            raise LifeCycleError(f"{num_left} copies have not ended in time; try again, or look at the ranks")
        if storage is not None and not storage.settled.wait(max(0.0, deadline - time.monotonic())):
            raise LifeCycleError("a task of storage has not ended in time; try again, or detach_storage first")
        peers = self._peers
        if peers is not None and not peers.settled.wait(max(0.0, deadline - time.monotonic())):
            raise LifeCycleError("a send to another instance, or a receive, has not ended in time; try again")
        self._acknowledge(deadline)

    def _acknowledge(self, deadline: float) -> None:
        """Every lane of every rank has come to an empty task, and so done all before it; or its process was reaped."""
        if not self._client.available:  # what is down moves nothing, and gets nothing to do
            return
        with self._lock:
            barriers = [self._mover.barrier(kind) for kind in (TaskKind.SWAP_IN, TaskKind.SWAP_OUT)]
        self._submit()
        if not wait_done(barriers, max(0.0, deadline - time.monotonic())):
            ranks = ", ".join(f"rank {s.rank} {'is ready' if s.up else 'is down'}" for s in self._client.statuses())
            raise LifeCycleError(f"not every rank has acknowledged in time ({ranks}); try again with more time")

    def _forget(self, tiers: set[Tier]) -> None:
        """Under the lock, with nothing in flight."""
        for active in self._requests.values():
            self._matcher.settle(active)
            if active.is_ahead and not all(transfer.succeeded for transfer in active.ahead):
                self._matcher.end_ahead(active, arrived=False)
        if tiers == {GPU, CPU}:
            self._tree.reset()
            self._tree.num_kv_losses += 1
            self._tree.num_cpu_losses += 1
        elif GPU in tiers:
            drop_gpu(self._tree)
        else:
            drop_cpu(self._tree, self._pinned)

    def _check_running(self) -> None:
        self._check_open()
        if self.is_gpu_asleep:
            raise LifeCycleError("the cache is asleep; wake it before its GPU blocks are used")

    def _check_open(self) -> None:
        raise NotImplementedError

    def _submit(self) -> None:
        raise NotImplementedError

    def reset(self, *, weights_id: str | None = None) -> None:
        """See `StorageAccess`."""
        raise NotImplementedError
