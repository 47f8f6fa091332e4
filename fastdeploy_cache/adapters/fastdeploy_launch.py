"""FastDeploy's start of the ranks, changes of size, signals to workers, and control requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy_cache.adapters.fastdeploy_config import cache_config
from fastdeploy_cache.adapters.fastdeploy_task import HeldTask
from fastdeploy_cache.errors import CacheError, ConfigError, LifeCycleError
from fastdeploy_cache.life_cycle import LifeCycleStatus
from fastdeploy_cache.manager import PrefixCacheManager as NativeManager
from transfer_manager.client import RankStatus
from transfer_manager.worker_signals import TreeStatus, WorkerSignals

_CONTROL = ("pause", "resume", "sleep", "wakeup", "clear", "update_weights")


@dataclasses.dataclass(frozen=True)
class RankProcess:
    """A rank, with as much of `subprocess.Popen` as a launcher looks at. The cache itself restarts and ends it."""

    cache: NativeManager
    rank: int

    def _status(self) -> RankStatus | None:
        return next((s for s in self.cache.stats().ranks if s.rank == self.rank), None)

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
    """The part of the adapter about processes and states. Not while requests are served, but for `control`."""

    cache: NativeManager
    splitwise_role: str
    _dp_id: int
    _num_blocks: int
    _signals: WorkerSignals | None
    _tasks: dict[str, HeldTask]
    _their_config: Any
    _tp_size: int

    def launch_cache_manager(  # noqa: PLR0917 (theirs)
        self,
        cache_config: Any,
        tensor_parallel_size: int,
        device_ids: Sequence[int],
        pod_ip: str,
        engine_worker_queue_port: int,
        ipc_suffix: int | str,
        create_cache_tensor: bool = True,
    ) -> list[RankProcess]:
        """Start the ranks and wait until all are ready; make the signals, with `ipc_suffix` behind their names.

        What was cached before is forgotten. `pod_ip` and the port are not used: nothing listens on the network; who
        makes the KV arrays is said by `cache_config.fastdeploy_cache["transfer"]["kv_owner"]`, not by
        `create_cache_tensor`.

        Raises:
            ConfigError: blocks are held by tasks or the caller, or an impossible setting.
            RankStartError: a rank did not start in time. IPCError: another engine has these signals. Nothing is left.
        """
        del cache_config, pod_ip, engine_worker_queue_port, create_cache_tensor
        self._tp_size = tensor_parallel_size
        signals = WorkerSignals(ipc_suffix, tensor_parallel_size, on_asked=self._do_asked, state=self._transfer_state)
        try:
            self._replace_cache(self._num_blocks, device_ids)
        except BaseException:
            signals.close()
            raise
        self._close_signals()
        self._signals = signals
        signals.set_ready(with_swap_space=self.cache.stats().cpu.num_blocks > 0)
        return [RankProcess(self.cache, status.rank) for status in self.cache.stats().ranks]

    def launch_cache_messager(self, *_: Any, **__: Any) -> list[RankProcess]:
        """Refused: blocks are not sent to other instances yet."""
        raise ConfigError(
            f"launch_cache_messager for splitwise_role {self.splitwise_role!r}: this version sends no blocks to other "
            "instances; use splitwise_role 'mixed', or hand prefixes over through storage"
        )

    def update_cache_config(self, cache_config: Any) -> None:
        """Take over a new pool size, after profiling. What was cached is forgotten.

        Raises:
            ConfigError: blocks are held by tasks or the caller.
        """
        self._their_config.cache_config = cache_config
        total = getattr(cache_config, "total_block_num", None)
        num_blocks = int(total if total is not None else cache_config.prefill_kvcache_block_num)
        ids = self.cache.config.transfer.device_ids or None
        self._replace_cache(num_blocks, ids if self._signals is not None else None, launched=self._signals is not None)
        self._num_blocks = num_blocks

    def _replace_cache(self, num_blocks: int, device_ids: Sequence[int] | None, *, launched: bool = True) -> None:
        gpu = self.cache.stats().gpu
        num_held = gpu.num_private + gpu.num_callers
        if self._tasks or num_held:
            raise ConfigError(
                f"{len(self._tasks)} tasks hold something, {num_held} blocks are held; release them first"
            )
        on_gpu = device_ids is not None and self._transfer_settings().get("device") == "cuda"
        ours = cache_config(
            self._their_config,
            tp_size=self._tp_size,
            num_blocks=num_blocks,
            data_parallel_id=self._dp_id,
            device_ids=device_ids if on_gpu else None,
            launched=launched,
        )
        before, self.cache = self.cache, NativeManager(ours)
        before.close()

    def _transfer_settings(self) -> Mapping[str, Any]:
        extra = getattr(self._their_config.cache_config, "fastdeploy_cache", None) or {}
        settings: Mapping[str, Any] = extra.get("transfer", {})
        return settings

    # -- states

    def _transfer_state(self) -> tuple[bool, int]:
        cache = self.cache
        return cache.life_cycle_status is not LifeCycleStatus.RUNNING, cache.stats().num_transfers_in_flight

    def _do_asked(self, asked: TreeStatus) -> bool:
        """A worker has written to `prefix_tree_status`; False where it has to be tried again."""
        try:
            self.cache.clear() if asked is TreeStatus.CLEARING else self.cache.reset()
        except LifeCycleError:
            return False
        return True

    def control(self, verb: str, args: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """One of pause, resume, sleep, wakeup, clear, update_weights: (200, status), (400, what is wrong with the
        call), or (500, why it could not be done; the cache is as it was before)."""
        settings = dict(args or {})
        if verb not in _CONTROL:
            return 400, f"unknown verb {verb!r}; use one of {', '.join(_CONTROL)}"
        try:
            getattr(self.cache, "wake" if verb == "wakeup" else verb)(**settings)
        except (ConfigError, TypeError) as error:
            return 400, f"{verb}: {error}"
        except CacheError as error:
            return 500, f"{verb}: {error}"
        return 200, self.cache.life_cycle_status.value

    def _close_signals(self) -> None:
        if self._signals is not None:
            self._signals.close()
            self._signals = None
