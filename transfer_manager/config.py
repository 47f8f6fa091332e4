"""How the transfer ranks are run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.settings import check_integers, names_checked

DEVICES = ("cpu", "cuda")
KV_OWNERS = ("engine", "worker", "transfer")
MAX_TASKS_IN_FLIGHT = 256  # each direction; progress words are kept for twice as many


@names_checked
@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Ranks, where they run, and every deadline they are held to.

    Args:
        tp_size: the number of tensor-parallel ranks. Each has a process.
        data_parallel_id: tells the engines of a data-parallel group apart. It is the label `dp` in metrics and part of
            log names.
        device: where the KV arrays live: `cpu` keeps them in shared memory, `cuda` on an NVIDIA GPU.
        device_ids: one device for each rank, counted among the visible devices, which ranks inherit. Where none are
            given, they are 0, 1, 2 and so on.
        kv_owner: who makes the KV arrays: `engine` (in shared memory only; they survive a rank), `worker` (the model's
            process, which hands them over by `attach_kv`) or `transfer` (the rank). Where it is not given, it is
            `engine` on the CPU and `worker` on a GPU.
        log_dir: the folder for the log of each rank, `transfer_dpD_rankR.log`. Without it logs serve error messages
            only.
        start_timeout_seconds: how long a start may take, until every rank is ready.
        task_timeout_seconds: how long one copy may take on all ranks. A rank that is later is killed and replaced.
        heartbeat_seconds: how often a rank shows that it lives; at least 0.25.
        heartbeat_timeout_seconds: how long a rank may be silent before it is killed and replaced.
        stop_timeout_seconds: how long a rank may take to end by itself when asked. After that it is killed.
        max_tasks_in_flight: how many tasks may be in flight in each direction, at most 256. More are not started, and
            are counted.
        max_restarts: how many deaths of one rank there may be within `restart_window_seconds`. One more switches the
            tiers below the GPU off, until the rank is tried again. A process that cannot be started for want of
            descriptors, threads or memory has not died, and is tried again until it can.
        restart_window_seconds: the length of that window.
        restart_backoff_seconds: the pause before the first restart. It doubles with each death in the window.
        off_retry_seconds: how often a rank that has died too often is tried again. `cache.ranks.restart` does so at
            once.
    """

    tp_size: int = 1
    data_parallel_id: int = 0
    device: str = "cpu"
    device_ids: tuple[int, ...] = ()
    kv_owner: Literal["engine", "worker", "transfer"] | None = None
    log_dir: str | None = None
    start_timeout_seconds: float = 30.0
    task_timeout_seconds: float = 10.0
    heartbeat_seconds: float = 0.5
    heartbeat_timeout_seconds: float = 10.0
    stop_timeout_seconds: float = 2.0
    max_tasks_in_flight: int = 256
    max_restarts: int = 5
    restart_window_seconds: float = 60.0
    restart_backoff_seconds: float = 0.1
    off_retry_seconds: float = 600.0

    def __post_init__(self) -> None:
        check_integers(self, ConfigError, prefix="transfer.")
        self._check_choices()
        for name in ("tp_size", "max_tasks_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"transfer.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("data_parallel_id", "max_restarts", "restart_backoff_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"transfer.{name} is {getattr(self, name)}; it must not be negative")
        for name in (n for n in self.__dataclass_fields__ if n.endswith("_seconds")):
            may_be_zero = name == "restart_backoff_seconds"
            if not (0 < getattr(self, name) < 86400 or (may_be_zero and getattr(self, name) == 0)):
                raise ConfigError(f"transfer.{name} is {getattr(self, name)}; it must be above 0 and below a day")
        if self.heartbeat_seconds < 0.25 or self.heartbeat_timeout_seconds < 4 * self.heartbeat_seconds:
            raise ConfigError(
                f"transfer.heartbeat_seconds is {self.heartbeat_seconds} and heartbeat_timeout_seconds "
                f"{self.heartbeat_timeout_seconds}; use at least 0.25 and at least four beats"
            )
        if self.device_ids and len(self.device_ids) != self.tp_size:
            raise ConfigError(
                f"transfer.device_ids has {len(self.device_ids)} entries for tp_size {self.tp_size}; give one per rank"
            )

    def _check_choices(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"transfer.device is {self.device!r}; known: {', '.join(DEVICES)}")
        if self.kv_owner is not None and self.kv_owner not in KV_OWNERS:
            raise ConfigError(f"transfer.kv_owner is {self.kv_owner!r}; use one of {', '.join(KV_OWNERS)}")
        if self.device == "cuda" and self.kv_owner == "engine":
            raise ConfigError(
                "transfer.kv_owner is 'engine'; on a GPU the worker or the rank ('transfer') owns the arrays"
            )

        if self.max_tasks_in_flight > MAX_TASKS_IN_FLIGHT:
            raise ConfigError(
                f"transfer.max_tasks_in_flight is {self.max_tasks_in_flight}; it must be at most {MAX_TASKS_IN_FLIGHT}"
            )

    @property
    def owner_of_kv(self) -> str:
        """`kv_owner`, or what follows from the device."""
        return self.kv_owner or ("engine" if self.device == "cpu" else "worker")

    def device_id(self, rank: int) -> int:
        """The device that a rank uses, counted among the visible ones."""
        return self.device_ids[rank] if self.device_ids else rank
