"""FastDeploy's start of the ranks, changes of size, signals to workers, and control requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.adapters.fastdeploy.config import extra_settings, worker_port
from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache, PeersLateError
from fastdeploy_cache.adapters.fastdeploy.held_tasks import HeldTasks
from fastdeploy_cache.adapters.fastdeploy.kv_arrivals import KVArrivals
from fastdeploy_cache.adapters.fastdeploy.peer_config import has_peers
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.errors import CacheError, ConfigError, LayoutError
from fastdeploy_cache.life_cycle import LifeCycleStatus
from fastdeploy_cache.transfer_manager.client import RankStatus
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.rank.worker_signals import BY_RANK, IN_ALL, Signal, TreeStatus, WorkerSignals

logger = logging.getLogger(__name__)

_CONTROL: dict[str, tuple[str, tuple[str, ...]]] = {  # the cache's verb, and what it may be given
    "pause": ("pause", ()),
    "resume": ("resume", ()),
    "sleep": ("sleep", ("tiers", "tags")),
    "wakeup": ("wake", ("tags",)),
    "clear": ("clear", ()),
    "update_weights": ("update_weights", ("weights_id",)),
}
_SIGNALS = (*BY_RANK, *IN_ALL)


class RankProcess:
    """A rank's process, with as much of `subprocess.Popen` as a launcher looks at. The cache restarts and ends it."""

    def __init__(self, statuses: Callable[[], Sequence[RankStatus]], rank: int) -> None:
        self._statuses, self.rank = statuses, rank

    def _status(self) -> RankStatus | None:
        return next((status for status in self._statuses() if status.rank == self.rank), None)

    @property
    def pid(self) -> int | None:
        """The process that runs now; another one after a restart."""
        status = self._status()
        return status.pid if status is not None else None

    def poll(self) -> int | None:
        """None while it is up; 1 while it is down."""
        status = self._status()
        return None if status is not None and status.up else 1


class Launcher:
    """The part of the adapter about processes and states. Not while requests are served, but for `control`."""

    def __init__(self, current: CurrentCache, tasks: HeldTasks, *, tp_size: int) -> None:
        self._current, self._tasks = current, tasks
        self._words: WorkerSignals | None = None
        self._suffix = ""
        port = worker_port(current.their_config)
        self._arrivals = KVArrivals(port) if port is not None else None
        # the words themselves, shared with the engine and its workers; before the launch nobody looks at them
        self.signals = {name: Signal(np.zeros(tp_size if name in BY_RANK else 1, np.int32)) for name in _SIGNALS}

    @property
    def is_launched(self) -> bool:
        """Whether there are ranks and signals."""
        return self._words is not None

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

        What was cached before is forgotten. `pod_ip` is where others reach this host, for `local_rdma_comm_ports`. Who
        makes the KV arrays is said by `cache_config.fastdeploy_cache["transfer"]["kv_owner"]`. The first argument and
        the last two are not used.

        Raises:
            ConfigError: blocks are held by tasks or the caller, or an impossible setting.
            RankStartError: a rank did not start in time. PeerRefusedError: the link cannot be opened as configured.
            IPCError: another engine has these signals. Nothing is left.
        """
        del cache_config, ipc_suffix, create_cache_tensor
        self._tasks.check_nothing_is_held()
        self.close_signals()
        suffix = str(engine_worker_queue_port)
        words = WorkerSignals(suffix, tensor_parallel_size, on_asked=self._do_asked, state=self._transfer_state)
        try:
            self._current.launch(device_ids, tensor_parallel_size, pod_ip)
        except BaseException:
            words.close()
            raise
        if self._arrivals is not None:
            self._arrivals.start(self._attach_kv)
        self._words, self._suffix = words, suffix
        self.signals = {name: words.signal(name) for name in _SIGNALS}
        cache = self._current.cache
        words.set_ready(with_swap_space=cache.blocks.view.tier_stats(CPU).num_blocks > 0)
        ranks = [RankProcess(lambda: self._current.cache.stats().ranks, each.rank) for each in cache.stats().ranks]
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

        `launch_cache_manager` starts them: where that was not called yet it is now, and all of it is started. The
        configuration, the shapes and `ipc_suffix` are not used.

        Raises:
            ConfigError: no blocks go between instances, or it was launched with another port. Whatever
            `launch_cache_manager` raises.
        """
        del key_cache_shape, value_cache_shape
        role = self._current.splitwise_role
        if not has_peers(role, extra_settings(self._current.their_config.cache_config).get("peer")):
            what = f"launch_cache_messager with splitwise_role {role!r}"
            raise ConfigError(f"{what}: no blocks go between instances; use 'prefill' and 'decode'")
        if not self.is_launched:
            try:
                self.launch_cache_manager(
                    cache_config, tensor_parallel_size, device_ids, pod_ip, engine_worker_queue_port, ipc_suffix
                )
            except PeersLateError as error:
                logger.error("event=messager_late error=%r", str(error))
                return None
        elif self._suffix != str(engine_worker_queue_port):
            what = f"launch_cache_messager with engine_worker_queue_port {engine_worker_queue_port!r}"
            raise ConfigError(f"{what}, but launched with {self._suffix!r}")
        are_ready = self._current.wait_for_peers(self._current.cache.config.transfer.start_timeout_seconds)
        return self._peer_processes() if are_ready else None

    def _attach_kv(self, rank: int, handle: KVHandle) -> None:
        self._current.cache.ranks.attach_kv(rank, handle)  # of the cache that there is then

    def _peer_processes(self) -> list[RankProcess]:
        statuses = self._current.peer_statuses  # of the cache that there is then
        return [RankProcess(statuses, status.rank) for status in statuses()]

    def update_cache_config(self, cache_config: Any) -> None:
        """Take over a new pool size, after profiling. What was cached is forgotten; the ranks are started anew, and a
        metrics endpoint of before is gone.

        Raises:
            ConfigError: blocks are held by tasks or the caller.
        """
        self._tasks.check_nothing_is_held()
        self._current.resize(cache_config, launched=self.is_launched)

    # -- states

    def _transfer_state(self) -> tuple[bool, int]:
        cache = self._current.cache
        return cache.life.status is not LifeCycleStatus.RUNNING, cache.stats().num_transfers_in_flight

    def _do_asked(self, asked: TreeStatus) -> bool:
        """A worker has written to `prefix_tree_status`; False where it has to be tried again."""
        try:
            self._current.cache.life.clear() if asked is TreeStatus.CLEARING else self._current.cache.reset()
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
                getattr(self._current.cache.life, native)(**settings)
        except (ConfigError, LayoutError) as error:
            return 400, f"{verb}: {error}"
        except CacheError as error:
            return 500, f"{verb}: {error}"
        if self._words is not None:
            self._words.refresh()
        return 200, self._current.cache.life.status.value

    def close(self) -> None:
        """Remove the words that were made here, and take no more KV arrays. Safe to call twice."""
        if self._arrivals is not None:
            self._arrivals.close()
        self.close_signals()

    def close_signals(self) -> None:
        """Remove the words that were made here; those who have them keep them. Safe to call twice."""
        if self._words is not None:
            self._words.close()
            self._words = None
