"""FastDeploy's start of the ranks, changes of size, signals to workers, and control requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.adapters.fastdeploy.config import cache_config, extra_settings, pool_size
from fastdeploy_cache.adapters.fastdeploy.peer_config import has_peers
from fastdeploy_cache.adapters.fastdeploy.task import HeldTask
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import CacheError, ConfigError, LayoutError, RankStartError
from fastdeploy_cache.life_cycle import LifeCycleStatus
from fastdeploy_cache.manager import PrefixCacheManager as NativeManager
from fastdeploy_cache.transfer_manager.client import RankStatus
from fastdeploy_cache.transfer_manager.rank.worker_signals import BY_RANK, Signal, TreeStatus, WorkerSignals

logger = logging.getLogger(__name__)

_CONTROL: dict[str, tuple[str, tuple[str, ...]]] = {  # the cache's verb, and what it may be given
    "pause": ("pause", ()),
    "resume": ("resume", ()),
    "sleep": ("sleep", ("tiers", "tags")),
    "wakeup": ("wake", ("tags",)),
    "clear": ("clear", ()),
    "update_weights": ("update_weights", ("weights_id",)),
}


_SIGNALS = {  # attributes of a manager, and the names of the words
    "shm_cache_task_flag_broadcast": "cache_task_broadcast_signal",
    "cache_task_is_paused_signal": "cache_task_is_paused",
    "cache_task_inflight_signal": "cache_task_inflight",
    "cache_ready_signal": "cache_ready_signal",
    "swap_space_ready_signal": "swap_space_ready_signal",
    "cache_transfer_inited_signal": "cache_transfer_inited_signal",
    "prefix_tree_status_signal": "prefix_tree_status",
}


class PeersLateError(RankStartError):
    """The ranks' peer processes were not ready in time."""


class RankProcess:
    """A rank's process, with as much of `subprocess.Popen` as a launcher looks at. The cache restarts and ends it."""

    def __init__(self, statuses: Callable[[], Sequence[RankStatus]], rank: int) -> None:
        self._statuses, self.rank = statuses, rank

    def _status(self) -> RankStatus | None:
        return next((status for status in self._statuses() if status.rank == self.rank), None)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now; another one after a restart."""
        status = self._status()
        return status.pid if status is not None else None

    def poll(self) -> int | None:
        """None while it is up; 1 while it is down."""
        status = self._status()
        return None if status is not None and status.up else 1


class Launching:
    """The part of the adapter about processes and states. Not while requests are served, but for `control`.

    The signals are the words themselves, shared with the engine and its workers. Before the launch nobody looks at
    them.
    """

    cache: NativeManager
    shm_cache_task_flag_broadcast: Signal
    cache_task_is_paused_signal: Signal
    cache_task_inflight_signal: Signal
    cache_ready_signal: Signal
    swap_space_ready_signal: Signal
    cache_transfer_inited_signal: Signal
    prefix_tree_status_signal: Signal
    splitwise_role: str
    _device_ids: Sequence[int] | None = None
    _dp_id: int
    _num_blocks: int
    _pod_ip: str = "127.0.0.1"
    _signals: WorkerSignals | None
    _suffix: str = ""
    _tasks: dict[str, HeldTask]
    _their_config: Any
    _tp_size: int

    def launch_cache_manager(  # noqa: PLR0917 (theirs)
        self,
        cache_config: Any,
        tensor_parallel_size: int,
        device_ids: Sequence[int],
        pod_ip: str,
        engine_worker_queue_port: int | str,
        ipc_suffix: int | str,
        create_cache_tensor: bool = True,
    ) -> list[RankProcess]:
        """Start the ranks and wait until all are ready, with `splitwise_role` prefill or decode their peer processes,
        too; attach or make the signals, with `engine_worker_queue_port` behind their names. Returns the peer processes,
        then the ranks.

        What was cached before is forgotten. `pod_ip` is where others reach this host, for `local_rdma_comm_ports`;
        `ipc_suffix` is not used. Who makes the KV arrays is said by
        `cache_config.fastdeploy_cache["transfer"]["kv_owner"]`, not by `create_cache_tensor`.

        Raises:
            ConfigError: blocks are held by tasks or the caller, or an impossible setting.
            RankStartError: a rank did not start in time. PeerRefusedError: the link cannot be opened as configured.
            IPCError: another engine has these signals. Nothing is left.
        """
        del cache_config, ipc_suffix, create_cache_tensor
        self._check_nothing_is_held()
        self._close_signals()
        self._pod_ip, suffix = pod_ip, str(engine_worker_queue_port)
        signals = WorkerSignals(suffix, tensor_parallel_size, on_asked=self._do_asked, state=self._transfer_state)
        try:
            self._replace_cache(self._num_blocks, device_ids, tensor_parallel_size)
        except BaseException:
            signals.close()
            raise
        self._signals, self._device_ids, self._suffix = signals, device_ids, suffix
        self._show_signals()
        signals.set_ready(with_swap_space=self.cache.blocks.view.tier_stats(CPU).num_blocks > 0)
        ranks = [RankProcess(lambda: self.cache.stats().ranks, status.rank) for status in self.cache.stats().ranks]
        return self._peer_processes() + ranks

    def launch_cache_messager(  # noqa: PLR0917 (theirs)
        self,
        cache_config: Any,
        tensor_parallel_size: int,
        device_ids: Sequence[int],
        key_cache_shape: Any,
        value_cache_shape: Any,
        pod_ip: str,
        engine_worker_queue_port: int | str,
        ipc_suffix: int | str,
    ) -> list[RankProcess] | None:
        """The ranks' peer processes, ready, with `cache_ready_signal` set; None where they are not ready in time.

        `launch_cache_manager` starts them: where that was not called yet it is now, and all of it is started.

        Raises:
            ConfigError: no blocks go between instances, or it was launched with another port. As
            `launch_cache_manager`.
        """
        del key_cache_shape, value_cache_shape
        if not has_peers(self.splitwise_role, extra_settings(self._their_config.cache_config).get("peer")):
            what = f"launch_cache_messager with splitwise_role {self.splitwise_role!r}"
            raise ConfigError(f"{what}: no blocks go between instances; use 'prefill' and 'decode'")
        if self._signals is None:
            where = (pod_ip, engine_worker_queue_port, ipc_suffix)
            try:
                self.launch_cache_manager(cache_config, tensor_parallel_size, device_ids, *where)
            except PeersLateError as error:
                logger.error("event=messager_late error=%r", str(error))
                return None
        elif self._suffix != str(engine_worker_queue_port):
            what = f"launch_cache_messager with engine_worker_queue_port {engine_worker_queue_port!r}"
            raise ConfigError(f"{what}, but launched with {self._suffix!r}")
        are_ready = self._wait_for_peers(self.cache.config.transfer.start_timeout_seconds)
        return self._peer_processes() if are_ready else None

    def _peer_processes(self) -> list[RankProcess]:
        return [RankProcess(self._peer_statuses, status.rank) for status in self._peer_statuses()]

    def _peer_statuses(self) -> Sequence[RankStatus]:
        return self.cache.peers.statuses()  # of the cache that there is then

    def _wait_for_peers(self, timeout_seconds: float) -> bool:
        """Those without KV arrays are not waited for: workers bring them, once they have seen the signals."""
        cache = self.cache
        return cache.config.transfer.owner_of_kv == "worker" or cache.peers.wait_ready(timeout_seconds)

    def update_cache_config(self, cache_config: Any) -> None:
        """Take over a new pool size, after profiling. What was cached is forgotten; the ranks are started anew, and a
        metrics endpoint of before is gone.

        Raises:
            ConfigError: blocks are held by tasks or the caller.
        """
        self._check_nothing_is_held()
        num_blocks, before = pool_size(cache_config), self._their_config.cache_config
        self._their_config.cache_config = cache_config
        try:
            self._replace_cache(num_blocks, self._device_ids, self._tp_size, launched=self._signals is not None)
        except BaseException:
            self._their_config.cache_config = before
            raise
        self._num_blocks = num_blocks

    def _check_nothing_is_held(self) -> None:
        gpu = self.cache.blocks.view.tier_stats()
        num_held = gpu.num_private + gpu.num_callers
        if self._tasks or num_held:
            raise ConfigError(
                f"{len(self._tasks)} tasks hold something, {num_held} blocks are held; release them first"
            )

    def _replace_cache(
        self, num_blocks: int, device_ids: Sequence[int] | None, tp_size: int, *, launched: bool = True
    ) -> None:
        """The old one first: both would need the memory, and a store's folder. Where the new one cannot be, one without
        ranks takes its place."""
        ours = self._ours(num_blocks, tp_size, device_ids=device_ids, launched=launched)
        self.cache.close()
        try:
            self.cache = NativeManager(ours)
            if not self._wait_for_peers(0.0):  # the constructor has waited
                down = [status.rank for status in self._peer_statuses() if not status.up]
                late = f"peer processes of ranks {down} are not ready after {ours.transfer.start_timeout_seconds} s"
                raise PeersLateError(f"{late}; event=peers_late in this process's log says why")
        except BaseException:
            self.cache.close()
            self.cache = NativeManager(self._ours(self._num_blocks, self._tp_size))
            raise
        self._tp_size = tp_size

    def _ours(
        self, num_blocks: int, tp_size: int, *, device_ids: Sequence[int] | None = None, launched: bool = False
    ) -> CacheConfig:
        return cache_config(
            self._their_config,
            tp_size=tp_size,
            num_blocks=num_blocks,
            data_parallel_id=self._dp_id,
            device_ids=device_ids,
            splitwise_role=self.splitwise_role,
            pod_ip=self._pod_ip,
            launched=launched,
        )

    # -- states

    def _transfer_state(self) -> tuple[bool, int]:
        cache = self.cache
        return cache.life.status is not LifeCycleStatus.RUNNING, cache.stats().num_transfers_in_flight

    def _do_asked(self, asked: TreeStatus) -> bool:
        """A worker has written to `prefix_tree_status`; False where it has to be tried again."""
        try:
            self.cache.life.clear() if asked is TreeStatus.CLEARING else self.cache.reset()
        except CacheError as error:
            logger.warning("event=prefix_tree_status asked=%s error=%r", asked.name, str(error))
            return False
        return True

    def control(self, verb: str, args: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """One of pause, resume, sleep, wakeup, clear, update_weights: (200, status), (400, what is wrong with the
        call), or (500, why it could not be done; the cache is as it was before).

        `args`: `timeout_seconds` for each; of sleep and wakeup `tags`, as theirs: `kv_cache` is ours, what else is
        named is not, and `tiers` for sleep; of update_weights `weights_id`.
        """
        if verb not in _CONTROL:
            return 400, f"unknown verb {verb!r}; use one of {', '.join(_CONTROL)}"
        native, known = _CONTROL[verb]
        if not isinstance(args or {}, Mapping) or set(args or {}) - {*known, "timeout_seconds"}:
            return 400, f"{verb} with {args!r}; give a mapping with {', '.join((*known, 'timeout_seconds'))} at most"
        settings = dict(args or {})
        tags = settings.pop("tags", None)
        try:
            if tags is None or "kv_cache" in (tags.split(",") if isinstance(tags, str) else tags):
                getattr(self.cache.life, native)(**settings)
        except (ConfigError, LayoutError) as error:
            return 400, f"{verb}: {error}"
        except CacheError as error:
            return 500, f"{verb}: {error}"
        if self._signals is not None:
            self._signals.refresh()
        return 200, self.cache.life.status.value

    def _show_signals(self) -> None:
        for attribute, name in _SIGNALS.items():
            num_words = self._tp_size if name in BY_RANK else 1
            nameless = Signal(np.zeros(num_words, np.int32))
            setattr(self, attribute, self._signals.signal(name) if self._signals is not None else nameless)

    def _close_signals(self) -> None:
        if self._signals is not None:
            self._signals.close()
            self._signals = None
