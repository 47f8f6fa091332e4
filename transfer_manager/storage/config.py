"""How storage is reached: settings of the engine's side, handed to the storage processes as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.settings import check_integers, names_checked

STORES = ("file", "mooncake", "valkey")
ADMISSIONS = ("second_use", "all", "priority")
PAGE_BYTES = 4096
NONCE_BYTES = 12
ENCRYPTED_BYTES = NONCE_BYTES + 16  # that an object is longer when it is encrypted: by the nonce, and a tag
_MAX_IO_THREADS = 256
_MIN_SLABS = 8
_OF_STORE = {
    "file": ("folder", "capacity_bytes", "slab_bytes", "admission", "min_priority", "num_io_threads"),
    "mooncake": (
        "master_address", "metadata_server", "protocol", "device_name", "local_hostname", "segment_bytes",
    ),
    "valkey": ("server_url", "password_file", "tls_ca_file", "time_to_live_seconds"),
}  # fmt: skip


@names_checked
@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """A store below the CPU tier.

    Args:
        kind: `file`, `mooncake`, `valkey`, or `module:Class` of a store of your own, which is looked for where the
            engine finds its modules; `fastdeploy_cache.transfer_manager.storage.base` has the protocol.
        weights_id: names the model's weights: a revision, or `weights_id_of(files)`. What other weights have computed
            must never be found, so new weights get a new id.
        staging_bytes: how much of a rank's CPU memory storage goes through where there is no CPU tier.
        start_timeout_seconds: how long the engine's start waits for the store. After that the engine starts without it,
            and the store is tried again and again.
        task_timeout_seconds: a read or write that takes longer is given up, and its process is replaced.
        breaker_failures: after so many failures in a row the store is left alone for a while.
        breaker_seconds: for so long it is left alone, and then it is probed. The time doubles with each failed probe,
            up to 60 s.
        options: texts by name, for a store of your own.
        keys_file: a TOML file of mode 600 with a key for each namespace, by which what is stored is encrypted
            (AES-GCM). It needs the extra `encryption`. Without a file nothing is encrypted.

        folder: (file) where the store lives. It is made where it is missing, and each engine needs one of its own.
        capacity_bytes: (file) the capacity of all ranks together; at least a block for each.
        slab_bytes: (file) the size that the store's files grow to; at most an eighth of what a rank may fill.
        admission: (file) which blocks are written. `second_use`: those that are offered again. `priority`: those of
            requests with at least `min_priority`. `all`: all of them.
        min_priority: (file) the least priority for `admission` `priority`.
        num_io_threads: (file) how many reads may be in flight at a time, and how many writes.
        master_address: (mooncake) HOST:PORT of the `mooncake_master`. Mooncake's clients listen on all interfaces and
            know no passwords, so use it in trusted networks only.
        metadata_server: (mooncake) how Mooncake's clients find each other. With the default they ask each other, and no
            server is needed. Otherwise it is the URL of a metadata server.
        protocol: (mooncake) what moves the bytes between hosts: `tcp` or `rdma`.
        device_name: (mooncake) the network device for `rdma`. It stays empty for `tcp`.
        local_hostname: (mooncake) the address at which other hosts reach this one.
        segment_bytes: (mooncake) the memory that each rank lends to the cluster. 0 lends none.
        server_url: (valkey) where the server is: `valkey://host:port/db`, `unix:///path`, or `valkeys://` and
            `rediss://` with TLS.
        password_file: (valkey) a file that holds the password, or user:password.
        tls_ca_file: (valkey) a certificate authority to trust beside the system's.
        time_to_live_seconds: (valkey) after this time unused objects go. 0 means never.
    """

    kind: str = "file"
    weights_id: str
    staging_bytes: int = 256 * 2**20
    start_timeout_seconds: float = 10.0
    task_timeout_seconds: float = 5.0
    breaker_failures: int = 3
    breaker_seconds: float = 5.0
    options: Mapping[str, str] = field(default_factory=dict)
    keys_file: str | None = None

    folder: str | None = None
    capacity_bytes: int = 10 * 10**9
    slab_bytes: int = 2**30
    admission: Literal["second_use", "all", "priority"] = "second_use"
    min_priority: float = 50.0
    num_io_threads: int = 4

    master_address: str = "127.0.0.1:50051"
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    local_hostname: str = "127.0.0.1"
    segment_bytes: int = 2**30

    server_url: str = "valkey://127.0.0.1:6379/0"
    password_file: str | None = None
    tls_ca_file: str | None = None
    time_to_live_seconds: int = 0

    def __post_init__(self) -> None:
        check_integers(self, ConfigError, prefix="storage.")
        self._check_texts()
        if self.kind not in STORES and ":" not in self.kind:
            raise ConfigError(f"storage.kind is {self.kind!r}; use one of {', '.join(STORES)}, or module:Class")
        if not isinstance(self.weights_id, str) or not self.weights_id.strip():
            raise ConfigError(
                f"storage.weights_id is {self.weights_id!r}; name the weights (a revision, or weights_id_of(files)): "
                "what other weights have computed must never be found"
            )
        if self.keys_file is not None and (
            not isinstance(self.keys_file, str) or "\0" in self.keys_file or not self.keys_file
        ):
            raise ConfigError(f"storage.keys_file is {self.keys_file!r}; give the path of a file, or leave it out")
        if "\0" in (self.folder or ""):
            raise ConfigError(f"storage.folder is {self.folder!r}; no folder has such a name")
        if self.kind == "file" and not self.folder:
            raise ConfigError("storage.folder is missing; a store of kind 'file' needs a folder of its own")
        if self.kind != "file" and self.folder is not None:
            raise ConfigError(
                f"storage.folder is {self.folder!r}, and storage.kind {self.kind!r} uses none; leave it out"
            )
        if self.options and not self.is_own_store:
            raise ConfigError(f"storage.options are for a store of your own; storage.kind is {self.kind!r}")
        if not all(isinstance(text, str) for item in self.options.items() for text in item):
            raise ConfigError(f"storage.options is {dict(self.options)!r}; give texts by name")
        if self.admission not in ADMISSIONS:
            raise ConfigError(f"storage.admission is {self.admission!r}; use one of {', '.join(ADMISSIONS)}")
        self._check_numbers()

    def _check_texts(self) -> None:
        for name in ("folder", "weights_id", "keys_file"):
            text = getattr(self, name)
            try:
                str(text).encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"storage.{name} is {text!r}, which is no UTF-8 text: {error}") from error

    def _check_numbers(self) -> None:
        for name in ("capacity_bytes", "slab_bytes", "staging_bytes", "breaker_failures", "num_io_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"storage.{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_io_threads > _MAX_IO_THREADS:
            raise ConfigError(f"storage.num_io_threads is {self.num_io_threads}; use at most {_MAX_IO_THREADS}")
        for name in ("start_timeout_seconds", "task_timeout_seconds", "breaker_seconds", "min_priority"):
            if type(getattr(self, name)) not in (int, float):
                raise ConfigError(f"storage.{name} is {getattr(self, name)!r}; give a number")
        for name in ("start_timeout_seconds", "task_timeout_seconds", "breaker_seconds"):
            if not 0 < getattr(self, name) < 86400:
                raise ConfigError(f"storage.{name} is {getattr(self, name)}; it must be above 0 and below a day")
        for name in ("segment_bytes", "time_to_live_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"storage.{name} is {getattr(self, name)}; it must not be negative")

    def check_capacity(self, object_bytes: int, tp_size: int) -> None:
        """Raise `ConfigError` where a rank's share of a file store holds no object of this size."""
        object_bytes += ENCRYPTED_BYTES if self.keys_file is not None else 0
        share, slot_bytes = self.capacity_bytes // tp_size, slot_bytes_of(object_bytes)
        if self.kind == "file" and share < slot_bytes:
            raise ConfigError(
                f"storage.capacity_bytes is {self.capacity_bytes}, {share} for each of {tp_size} ranks, and one block "
                f"takes {slot_bytes}; use at least {tp_size * slot_bytes}"
            )

    @property
    def is_own_store(self) -> bool:
        """Whether the store is the user's, named by its import path."""
        return self.kind not in STORES

    def store_options(self, tp_size: int) -> dict[str, Any]:
        """What the store of one rank is opened with: its own settings only; of `capacity_bytes` the rank's share."""
        if self.is_own_store:
            return dict(self.options)
        values = dataclasses.asdict(self)
        found = {name: values[name] for name in _OF_STORE[self.kind]}
        if "capacity_bytes" in found:
            found["capacity_bytes"] = self.capacity_bytes // tp_size
            # several spaces share it: one slab alone should not push out all others
            found["slab_bytes"] = max(1, min(self.slab_bytes, found["capacity_bytes"] // _MIN_SLABS))
        return found


def slot_bytes_of(object_bytes: int) -> int:
    """What an object takes in a file store: whole pages, unless it is smaller than one."""
    return object_bytes if object_bytes < PAGE_BYTES else -(-object_bytes // PAGE_BYTES) * PAGE_BYTES
