"""Pause, resume, sleep, wake, clear, update-weights: one state machine."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Literal

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import StatusChanged, TierLost
from fastdeploy_cache.books.forgetting import forget_namespace
from fastdeploy_cache.books.generations import Reason
from fastdeploy_cache.books.residency import FORGOTTEN
from fastdeploy_cache.books.run import CPU, GPU, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.tier_loss import drop_cpu, drop_gpu
from fastdeploy_cache.books.transfer import wait_done
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError, ControlError, LifeCycleError, NotEnoughMemoryError, counted
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.peers.peers import Peers
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.storage.forget_report import ForgetReport, check_namespace, left_of
from fastdeploy_cache.transfer_manager.task import TaskKind

logger = event_log(__name__)

TierName = Literal["gpu", "cpu"]
_MAX_SECONDS = 86400.0
_WIPE_SECONDS = 0.05  # between two looks at what is wiped; each takes a turn, which removes some more
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


class LifeCycle:
    """Stopping and going on: `cache.life`. Any thread, one change at a time.

    A change ends when every rank has acknowledged that it moves nothing any more (its lanes have done all that came
    before), or has been reaped. At its deadline it raises `LifeCycleError`, and the cache is as it was before. Requests
    that wait for blocks are answered meanwhile: with what has arrived, and a miss for the rest.

    =============  ==================================================================================================
    status         what verbs do
    =============  ==================================================================================================
    paused         all but moving: what is on the GPU is found, what is below is not loaded, nothing is copied down
    asleep (gpu)   nothing is found, `allocate` raises `LifeCycleError`; requests from before are void
    asleep (cpu)   as paused, over the GPU alone
    =============  ==================================================================================================
    """

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        movement: Movement,
        *,
        requests: Requests,
        storage: StorageAccess,
        peers: Peers,
    ) -> None:
        self._config, self._books, self._movement = config, books, movement
        self._requests, self._storage, self._peers = requests, storage, peers
        self._changing = threading.Lock()  # one change at a time
        self._status = self._resting = LifeCycleStatus.RUNNING  # `_resting`: before the change that is under way

    @property
    def status(self) -> LifeCycleStatus:
        """Where the cache is now."""
        return self._status

    @property
    def is_gpu_asleep(self) -> bool:
        """Whether there is no GPU memory to use now."""
        return GPU in self._books.asleep

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
        ranks' host memory is pinned and is kept. Flush the storage first, to find it all again.

        Raises:
            ConfigError: an unknown tier.
            LifeCycleError: see `pause`.
        """
        if isinstance(tiers, str) or not tiers or set(tiers) - _TIERS.keys():
            raise ConfigError(f"sleep of tiers {tiers!r}; give a list of one or both of {', '.join(_TIERS)}")
        with self._change("sleep", LifeCycleStatus.FALLING_ASLEEP, timeout_seconds, _RESTING) as deadline:
            self._wait_until_quiet(deadline)
            with self._books:
                asleep = self._books.asleep | {_TIERS[name] for name in tiers}
                self._forget(asleep)
                self._books.fall_asleep(asleep)
            num_bytes = self._movement.client.release_memory(gpu=GPU in asleep, cpu=CPU in asleep)
            self._set_status(LifeCycleStatus.ASLEEP)
        return num_bytes

    def wake(self, timeout_seconds: float = 30.0) -> None:
        """Take the memory again and run. Attach a worker's KV arrays before, where it has freed them. Safe to call when
        running.

        Raises:
            NotEnoughMemoryError: it is not to be had any more; the cache sleeps on.
            LifeCycleError: it is paused, or a rank has not answered in time.
        """
        if self._status is LifeCycleStatus.RUNNING:
            return
        with self._change("wake", LifeCycleStatus.WAKING, timeout_seconds, _RESTING[2:]) as deadline:
            try:
                self._movement.client.retake_memory()
            except NotEnoughMemoryError:
                self._movement.client.release_memory(gpu=GPU in self._books.asleep, cpu=CPU in self._books.asleep)
                raise
            self._acknowledge(deadline)
            with self._books:
                self._books.fall_asleep(frozenset())
            self._set_status(LifeCycleStatus.RUNNING)

    def clear(self, timeout_seconds: float = 30.0) -> None:
        """`reset` while nothing moves; then it is as before. What is in storage stays. Raises `LifeCycleError`."""
        with self._change("clear", LifeCycleStatus.CLEARING, timeout_seconds, _RESTING) as deadline:
            before = self._resting
            self._wait_until_quiet(deadline)
            self.reset()
            self._set_status(before)

    def update_weights(self, weights_id: str | None = None, timeout_seconds: float = 30.0) -> None:
        """The model's weights have changed: forget all that was computed with others.

        Where a store is attached, or there are peers, the new `weights_id` is needed: under it alone blocks are read
        and written from now on. Requests that run go on with what they have, and publish nothing.

        Raises:
            ConfigError: no `weights_id` with a store, or with peers.
            StorageRefusedError, StorageError: the weights are the new ones, and the store cannot be opened again: its
                settings are wrong, or descriptors are missing. The cache goes on without.
            LifeCycleError: see `pause`.
        """
        is_named = self._storage.settings is not None or self._config.peer is not None
        if is_named and not weights_id:
            raise ConfigError("update_weights without a weights_id, but a store or a peer goes by it; give the new one")
        with self._change("update_weights", LifeCycleStatus.UPDATING, timeout_seconds, _RESTING) as deadline:
            before = self._resting
            self._wait_until_quiet(deadline)
            try:
                self.reset(weights_id=weights_id if is_named else None, why=Loss.WEIGHTS)
            finally:
                self._set_status(before)

    # -- steps

    @contextmanager
    def _change(
        self, verb: str, via: LifeCycleStatus, timeout_seconds: float, allowed: Collection[LifeCycleStatus]
    ) -> Iterator[float]:
        """One change from one of the `allowed` states; gives its deadline. What fails leaves the state as it was."""
        deadline = self._books.clock.now() + _checked(verb, timeout_seconds)
        if not self._changing.acquire(timeout=max(0.0, timeout_seconds)):
            raise LifeCycleError(f"{verb}: the cache is still {self._status.value} after {timeout_seconds} s")
        try:
            before = self._status
            if before not in allowed:
                names = " or ".join(status.value for status in allowed)
                raise LifeCycleError(f"{verb}: the cache is {before.value}; it has to be {names}")
            with self._books:
                self._books.check_open()
            self._resting = before
            if via is not before:  # or who waits for storage would lose it for nothing
                self._set_status(via)
            try:
                yield deadline
            except BaseException:
                if self._status is not before:
                    self._set_status(before)
                raise
        finally:
            self._changing.release()

    def _set_status(self, status: LifeCycleStatus) -> None:
        with self._books:
            self._status = status
            is_quiet = status is not LifeCycleStatus.RUNNING
            self._storage.be_quiet(is_quiet)
            self._peers.road.be_quiet(is_quiet)
            self._movement.be_quiet(is_quiet)
            self._books.note(StatusChanged(status=status.value))
        logger.info("event=life_cycle status=%s", status.value)

    def _wait_until_quiet(self, deadline: float) -> None:
        """Nothing starts any more: wait for what has."""
        with self._books:
            transfers = list(self._movement.mover.in_flight.values())
        clock = self._books.clock
        num_left = sum(not wait_done((transfer,), clock.seconds_to(deadline), clock) for transfer in transfers)
        if num_left:
            raise LifeCycleError(f"not ended in time: {counted(num_left, 'copy')}; try again, or look at the ranks")
        if not self._storage.wait_settled(clock.seconds_to(deadline)):
            raise LifeCycleError("a task of storage has not ended in time; try again, or detach the store first")
        if not self._peers.road.wait_settled(clock.seconds_to(deadline)):
            raise LifeCycleError("a send to another instance, or a receive, has not ended in time; try again")
        self._acknowledge(deadline)

    def _acknowledge(self, deadline: float) -> None:
        """Every lane of every rank has come to an empty task, and so done all before it; or its process was reaped."""
        if not self._movement.client.available:  # what is down moves nothing, and gets nothing to do
            return
        with self._books:
            barriers = [self._movement.mover.barrier(kind) for kind in (TaskKind.SWAP_IN, TaskKind.SWAP_OUT)]
        clock = self._books.clock
        if not wait_done(barriers, clock.seconds_to(deadline), clock):
            ranks = ", ".join(
                f"rank {s.rank} {'is ready' if s.up else 'is down'}" for s in self._movement.client.statuses()
            )
            raise LifeCycleError(f"not every rank has acknowledged in time ({ranks}); try again with more time")

    def _forget(self, tiers: Collection[Tier]) -> None:
        """Under the lock, with nothing in flight."""
        self._requests.settle_all()
        self._books.note(TierLost())
        tree = self._books.tree
        if set(tiers) == {GPU, CPU}:
            tree.reset()
            tree.generations.begin(Reason.GPU_LOST)
            tree.generations.begin(Reason.CPU_LOST)
        elif GPU in tiers:
            drop_gpu(tree)
        else:
            drop_cpu(self._books)

    # -- forgetting

    def reset(self, *, weights_id: str | None = None, why: Loss = Loss.RESET) -> None:
        """See `PrefixCacheManager.reset`."""
        if weights_id is None:
            with self._books:
                self._books.check_open()
                self._books.forget(None, why)
            return
        # Two at once could detach, forget and attach in turns: the peers would name the one's weights and the store the
        # other's, and blocks of one model would be read as the other's.
        with self._storage.renaming:
            self._rename(weights_id)

    def _rename(self, weights_id: str) -> None:
        storage, peer = self._storage.settings, self._config.peer
        if storage is None and peer is None:
            raise ConfigError(
                f"reset with weights_id {weights_id!r}, but no store is attached and there are no peers; "
                "call reset() without it"
            )
        if peer is not None:
            dataclasses.replace(peer, weights_id=weights_id)  # a wrong name is refused before all else
        renamed = dataclasses.replace(storage, weights_id=weights_id) if storage is not None else None
        if renamed is not None:
            self._storage.detach_for(renamed)
        with self._books:
            self._books.check_open()
            self._books.forget(weights_id)
        if renamed is not None:
            self._storage.attach(renamed)

    def forget_namespace(self, namespace: str, timeout_seconds: float = 30.0) -> ForgetReport:
        """Forget all that is cached of a namespace: nothing of it is found from now on, its blocks are overwritten by
        the ranks before anybody gets them, and the store removes what it has. Requests of it that run go on with what
        they have, and publish nothing.

        Waits until that has happened, or the time is over; what is left then goes on by itself, but for the store.
        Raises `ConfigError` for such a time, `RequestError` where `namespace` is no text, and `ControlError` where
        there is no thread for it now; then nothing is forgotten. `ClosedError`: the cache is closed, or was meanwhile.
        """
        check_namespace(namespace)
        clock, wiper = self._books.clock, self._movement.wiper
        deadline = clock.now() + _checked("forget_namespace", timeout_seconds)
        with self._books:
            self._books.check_open()
            try:
                wiper.start()
            except RuntimeError as error:
                raise ControlError(f"nothing was forgotten: what waits is wiped by a thread, and {error}") from error
            num_requests = self._requests.forget_namespace(namespace)
            num_gpu, num_cpu = forget_namespace(self._books, namespace)
            stored = self._storage.forget_namespace(namespace, deadline)
        while True:  # a turn removes some of it, and asks for what waits
            with self._books:
                self._books.check_open()
                is_answered = stored.go_on()
                wiper.go_on()
                num_doomed = sum(self._books.residency.num_doomed)  # marked, and held by nobody
                num_waiting, num_held = wiper.num_waiting + num_doomed, wiper.num_held - num_doomed
                is_at_rest = is_answered and not num_waiting and not self._is_moving_forgotten()
                if is_at_rest or clock.now() >= deadline:
                    break
            clock.sleep(_WIPE_SECONDS)
        return ForgetReport(
            num_gpu_blocks=num_gpu,
            num_cpu_blocks=num_cpu,
            num_held_blocks=num_held,
            num_requests=num_requests,
            num_waiting_blocks=num_waiting,
            num_stored_objects=stored.num_objects,
            left=tuple(left_of(self._config, self._storage.settings, stored, (num_requests, num_waiting, num_held))),
        )

    def _is_moving_forgotten(self) -> bool:
        """Whether tasks in flight hold blocks of a forgotten namespace: they let them go when they have ended."""
        pins = list(self._storage.held.pins)
        for transfer in self._movement.mover.in_flight.values():
            pins += transfer.cargo.pins if transfer.cargo is not None and not transfer.done.is_set() else []
        return any(pin.run.epoch == FORGOTTEN for pin in pins)


class CacheLife:
    """What a server asks of a cache alone: its engine has come to rest by itself, or bears what the verbs do."""

    def __init__(self, life: LifeCycle) -> None:
        self._life = life
        self.pause, self.resume, self.wake, self.clear = life.pause, life.resume, life.wake, life.clear
        self.forget_namespace = life.forget_namespace

    @property
    def status(self) -> str:
        """See `LifeCycle.status`."""
        return self._life.status.value

    def sleep(self, timeout_seconds: float, tiers: Collection[TierName]) -> None:
        """Give back the memory of these tiers."""
        self._life.sleep(timeout_seconds, tiers=tiers)

    def update_weights(self, timeout_seconds: float, weights_id: str | None) -> None:
        """Forget what other weights have computed."""
        self._life.update_weights(weights_id, timeout_seconds)


def _checked(verb: str, timeout_seconds: float) -> float:
    """The time that somebody gives. Raises `ConfigError` where it is none."""
    if not isinstance(timeout_seconds, int | float) or not 0 <= timeout_seconds <= _MAX_SECONDS:
        raise ConfigError(f"{verb}: timeout_seconds is {timeout_seconds!r}; use 0 to {_MAX_SECONDS:.0f}")
    return timeout_seconds
