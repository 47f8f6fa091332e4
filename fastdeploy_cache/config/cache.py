"""The cache's configuration: built once, checked at once, passed down whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.config.row_pools import check_row_pools, check_row_values, gpu_blocks_in, with_units
from fastdeploy_cache.config.tables import LISTS, OPTIONAL_TABLES, TABLES, as_settings, check_tables
from fastdeploy_cache.config.tenants import TenantConfig, check_tenants, store_shares, tier_tenants
from fastdeploy_cache.errors import ConfigError, LayoutError, counted
from fastdeploy_cache.ipc.codec import taken_apart
from fastdeploy_cache.policies import DEFAULT_HISTORY_BYTES, EVICTION_POLICIES, MIN_HISTORY_BYTES
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.settings import check_integers, names_checked
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig

if TYPE_CHECKING:
    from pathlib import Path

WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")
_ALTERNATIVES = (("num_gpu_blocks", "gpu_memory_bytes"), ("num_cpu_blocks", "cpu_memory_bytes", "cpu_to_gpu_ratio"))
ROLES = ("mixed", "prefill", "decode")
PREFETCH_POLICIES = ("timeout", "best_effort", "wait_complete")
LOAD_POLICIES = ("auto", "always", "never")


@names_checked
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What the cache is made of. Every name is the same in Python, TOML, environment and `--set`.

    Args:
        block_size: tokens per block, 1 to 1024.
        num_gpu_blocks: blocks of the GPU pool. Give these, or `gpu_memory_bytes`.
        gpu_memory_bytes: bytes per rank to fill with GPU blocks. They need a layout.
        num_gpu_units: units (blocks of a window or chunk, or states) of each row behind the full one, in the order in
            which `config check` prints them. Without them each row has what `max_running` requests need, and a
            checkpoint for each 4,096 tokens of the GPU pool.
        max_running: for how many running requests of a hybrid model the pools are made. It bounds none.
        checkpoint_every_tokens: of a hybrid model's prompt a checkpoint is made every so many tokens, beside those at
            its end and where prompts part. 0 makes none.
        checkpoints_per_path: how many checkpoints stay on the way to the last one of a prompt, where no prompts part.
        num_cpu_blocks: blocks of the CPU pool; 0 means no CPU tier. Give these, `cpu_memory_bytes` or
            `cpu_to_gpu_ratio`.
        cpu_memory_bytes: bytes per rank to fill with CPU blocks.
        cpu_to_gpu_ratio: CPU blocks for each GPU block.
        eviction_policy: which cached blocks go first when room is short: lru, fifo, lfu, slru, priority, pin, mru, filo
            or reuse.
        eviction_history_bytes: how many bytes `reuse` may spend on remembering blocks, evicted ones included.
        cpu_write_policy: which blocks are copied to the CPU tier. `write_back` copies all blocks while that tier has
            free ones, in batches: less than one may be lost in a burst. Then it copies those that would be evicted
            next, before they are. `write_through` copies all, at commit and release. `write_through_selective` copies
            those that have been used `cpu_write_min_uses` times or more.
        cpu_write_high_water: for `write_back` once the CPU tier is full, how much of the GPU pool may be filled with
            blocks that have no copy there. When there are more of them, those that would be evicted next are copied. So
            with 0.75 a quarter of the pool can then be allocated at once without losing anything.
        cpu_write_min_uses: how often a block has to be used before `write_through_selective` copies it to the CPU tier.
        cache_outputs: false keeps blocks that hold output tokens out of the cache and out of storage.
        storage_write_policy: which blocks of the CPU tier are written to storage. `write_through` writes all; they are
            copied down at once, whatever `cpu_write_policy` says. `write_through_selective` writes those that have been
            used `storage_write_min_uses` times or more. `write_back` writes those that the CPU tier would evict next.
        storage_write_min_uses: how often a block has to be used before `write_through_selective` writes it to storage.
        prefetch_policy: how long a request may wait for storage, from its `prefetch` on. `best_effort`: not at all.
            `timeout`: for `prefetch_timeout_seconds`, and longer for long prompts. `wait_complete`: until the task
            ends.
        prefetch_timeout_seconds: how long a request may wait with `prefetch_policy` `timeout`, whatever its length.
        prefetch_seconds_per_1024_tokens: how much longer it may wait for each 1,024 tokens.
        min_prefetch_tokens: where fewer tokens are missing, storage is not asked.
        max_prefetch_share: the share of the CPU pool that may be on its way from storage at a time.
        load_policy: `auto` loads what is faster to load than to compute, by what both have been seen to take. `always`
            loads, and `never` does not.
        prefill_tokens_per_second: how fast the engine computes one request, for `load_policy` `auto`. Where it is not
            given, it is learned from `allocate` and `commit`.
        min_load_tokens: fewer tokens than these are computed rather than loaded from the CPU tier.
        max_load_share: the share of the GPU pool that a load may take. A longer prefix is not loaded.
        recompute_last_token: what is computed when a prompt that fills its blocks exactly is cached whole on the GPU.
            An engine needs at least one token to compute. With false that is the whole last block. With true it is the
            last token alone, which is computed into a copy of the last block, and of the last unit of each window.
        state_copy: for kernels that write a state where they read it. A match of a model with states waits for a copy
            of the state, in a slot of the request's own, which `Match.tables` shows then.
        enable_prefix_caching: with false all calls work as before, but no prefix is ever found.
        transfer_client: `processes` runs a rank process for each tensor-parallel rank. `inline` starts none: bytes are
            copied in the caller's thread, or not at all without a layout (simulation, tests). Storage has its process
            all the same.
        layout: what the keys and values of a token look like. Rank processes need it.
        transfer: the ranks and their deadlines.
        storage: a store below the CPU tier. None means that there is none.
        role: `prefill` computes prompts and offers their blocks to other instances, and `decode` receives them. `mixed`
            may do either where there is a table `peer`.
        peer: how blocks go from instance to instance. None means that they do not.
        lost_blocks_bytes: how much is remembered of blocks that are cached no more, to say why a request missed them.
            With 0 nothing is, and every block that no tier has is `new_or_forgotten`.
        num_explained_requests: of how many of the last requests `explain` can tell. With 0 it can tell of none.
        hit_rate_window_seconds: how far back the hit-rate gauges look.
        insight: what an operator sees beside the metrics.
        events: who may hear which blocks are cached. None means that nobody does.
        tenants: namespaces that have a share of the tiers, or a time to live. Of a hybrid model only shares of a store.

    Raises:
        ConfigError: an impossible value, with the numbers.
    """

    block_size: int = 64
    num_gpu_blocks: int | None = None
    gpu_memory_bytes: int | None = None
    num_gpu_units: tuple[int, ...] = ()
    max_running: int = 64
    checkpoint_every_tokens: int = 0
    checkpoints_per_path: int = 4
    num_cpu_blocks: int | None = None
    cpu_memory_bytes: int | None = None
    cpu_to_gpu_ratio: float | None = None
    eviction_policy: str = "lru"
    eviction_history_bytes: int = DEFAULT_HISTORY_BYTES
    cpu_write_policy: Literal["write_back", "write_through", "write_through_selective"] = "write_back"
    cpu_write_high_water: float = 0.75
    cpu_write_min_uses: int = 2
    cache_outputs: bool = True
    storage_write_policy: Literal["write_back", "write_through", "write_through_selective"] = "write_through"
    storage_write_min_uses: int = 2
    prefetch_policy: Literal["timeout", "best_effort", "wait_complete"] = "timeout"
    prefetch_timeout_seconds: float = 0.5
    prefetch_seconds_per_1024_tokens: float = 0.25
    min_prefetch_tokens: int = 256
    max_prefetch_share: float = 0.5
    load_policy: Literal["auto", "always", "never"] = "auto"
    prefill_tokens_per_second: float | None = None
    min_load_tokens: int = 0
    max_load_share: float = 1.0
    recompute_last_token: bool = False
    state_copy: bool = False
    enable_prefix_caching: bool = True
    transfer_client: Literal["processes", "inline"] = "processes"
    layout: KVLayout | None = None
    transfer: TransferConfig = field(default_factory=TransferConfig)
    storage: StorageConfig | None = None
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    peer: PeerConfig | None = None
    lost_blocks_bytes: int = 8 * 2**20
    num_explained_requests: int = 1024
    hit_rate_window_seconds: float = 300.0
    insight: InsightConfig = field(default_factory=InsightConfig)
    events: EventsConfig | None = None
    tenants: tuple[TenantConfig, ...] = ()

    def __post_init__(self) -> None:
        self._check_values()
        check_tenants(self.tenants)
        if tier_tenants(self.tenants):
            self.check_uniform("a cache with tenants")
        in_bytes = self.gpu_memory_bytes is not None or self.cpu_memory_bytes is not None
        if self.layout is None and (in_bytes or self.transfer_client == "processes"):
            raise ConfigError(
                "layout is missing; transfer_client='processes' (the default) and pools sized in bytes need it; "
                "without bytes use transfer_client='inline'"
            )
        try:
            layout = self.rank_layout()
            if self.storage is not None:
                store_shares(self.tenants, self.storage)
                self.storage.check_capacity(self.block_bytes(), self.transfer.tp_size)
        except LayoutError as error:
            raise ConfigError(str(error)) from error
        gpu, cpu = self.pool_sizes()
        if layout is not None:
            check_row_pools(self, layout, (gpu, cpu))
        if gpu < 1:
            beside = " beside the units of the other rows" if layout is not None and layout.rows[1:] else ""
            given = f"gpu_memory_bytes {self.gpu_memory_bytes} holds {gpu} blocks of {self.block_bytes()} bytes{beside}"
            raise ConfigError(f"{given}; the GPU pool needs at least 1 block")
        if max(gpu, cpu) >= 2**31:
            raise ConfigError(f"pools of {gpu} and {cpu} blocks; block ids are 32 bits wide, use fewer than 2**31")

    def _check_values(self) -> None:
        """Each value by itself."""
        check_integers(self, ConfigError)
        for name, table in TABLES.items():
            value = getattr(self, name)
            if not isinstance(value, table) and not (name in OPTIONAL_TABLES and value is None):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give a {table.__name__}")
        if not 1 <= self.block_size <= 1024:
            raise ConfigError(f"block_size is {self.block_size}; use 1 to 1024 tokens")
        self._check_pools()
        if not 0 < self.hit_rate_window_seconds < 2**31:
            raise ConfigError(f"hit_rate_window_seconds is {self.hit_rate_window_seconds}; it must be above 0")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(f"eviction_policy is {self.eviction_policy!r}; use one of {', '.join(EVICTION_POLICIES)}")
        if self.eviction_history_bytes < MIN_HISTORY_BYTES:
            raise ConfigError(
                f"eviction_history_bytes is {self.eviction_history_bytes}; use {MIN_HISTORY_BYTES} or more"
            )
        for name in ("lost_blocks_bytes", "num_explained_requests"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name} is {value}; use 0 or more")
        self._check_movement()
        self._check_storage()
        check_row_values(self)
        self._check_peer()
        if self.transfer_client not in ("processes", "inline"):
            raise ConfigError(f"transfer_client is {self.transfer_client!r}; use 'processes' or 'inline'")

    def _check_pools(self) -> None:
        _one_of(self, _ALTERNATIVES[0], required=True)
        _one_of(self, _ALTERNATIVES[1], required=False)
        for name in _ALTERNATIVES[0]:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}; the GPU pool needs at least 1 block")
        for name in _ALTERNATIVES[1]:
            if (value := getattr(self, name)) is not None and not 0 <= value < 2**63:
                raise ConfigError(f"{name} is {value}; it must not be negative (0 means no CPU tier)")

    def _check_movement(self) -> None:
        choices = (
            ("cpu_write_policy", WRITE_POLICIES),
            ("storage_write_policy", WRITE_POLICIES),
            ("prefetch_policy", PREFETCH_POLICIES),
            ("load_policy", LOAD_POLICIES),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(known)}")
        for name in ("cpu_write_high_water", "max_load_share", "max_prefetch_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a share, use 0 to 1")
        limits = (
            ("cpu_write_min_uses", 1),
            ("storage_write_min_uses", 1),
            ("min_load_tokens", 0),
            ("min_prefetch_tokens", 0),
            ("prefetch_timeout_seconds", 0),
            ("prefetch_seconds_per_1024_tokens", 0),
        )
        for name, least in limits:
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    def _check_storage(self) -> None:
        speed = self.prefill_tokens_per_second
        if speed is not None and not speed > 0:
            raise ConfigError(f"prefill_tokens_per_second is {speed}; it must be above 0")
        if self.storage is not None and self.layout is None:
            raise ConfigError("storage needs a layout: it keeps bytes")

    def _check_peer(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role is {self.role!r}; use one of {', '.join(ROLES)}")
        peer = self.peer
        if peer is None:
            if self.role != "mixed":
                raise ConfigError(f"role is {self.role!r} without a table 'peer'; say how blocks go between instances")
            return
        if self.layout is None or not self.enable_prefix_caching:
            raise ConfigError("peer needs a layout, and enable_prefix_caching: what is received is found as a prefix")
        if peer.port is not None and peer.port + self.transfer.tp_size > 65536:
            raise ConfigError(
                f"peer.listen is {peer.listen!r} with {counted(self.transfer.tp_size, 'rank')}; each takes a port"
            )
        if peer.link == "storage" and self.storage is None:
            raise ConfigError("peer.link is 'storage' without a table 'storage'; give both instances the same store")
        if peer.link == "storage" and self.storage is not None and self.storage.kind == "file":
            raise ConfigError(
                "peer.link is 'storage' with storage.kind 'file', which is one engine's own; use a shared one"
            )
        if self.storage is not None and peer.weights_id != self.storage.weights_id:
            names = f"peer.weights_id is {peer.weights_id!r} and storage.weights_id {self.storage.weights_id!r}"
            raise ConfigError(f"{names}; they name the same weights")
        if peer.link != "storage" and self.transfer.device != "cpu":
            given = f"peer.link is {peer.link!r} with transfer.device {self.transfer.device!r}"
            raise ConfigError(f"{given}; links read KV arrays in CPU memory only: use peer.link 'storage' on a GPU")

    def check_rank(self, rank: int) -> None:
        """Raise `ConfigError` where there is no such rank."""
        if not 0 <= rank < self.transfer.tp_size:
            raise ConfigError(f"there is no rank {rank}; this cache has {self.transfer.tp_size}")

    def load_limits(self) -> tuple[int, int]:
        """Blocks of the CPU tier below which, and above which, a prefix is not loaded."""
        return max(1, -(-self.min_load_tokens // self.block_size)), int(self.pool_sizes()[0] * self.max_load_share)

    def block_bytes(self) -> int:
        """Bytes of one rank's share of a block; 0 without a layout."""
        layout = self.rank_layout()
        return layout.block_bytes if layout is not None else 0

    def rank_layout(self) -> RankLayout | None:
        """One rank's share of a block, or None without a layout."""
        if self.layout is None:
            return None
        layout = self.layout.for_rank(self.transfer.tp_size, self.block_size)
        return with_units(self, layout, self._num_gpu_blocks(layout)) if layout.rows else layout

    def pool_sizes(self) -> tuple[int, int]:
        """Blocks of the GPU pool and of the CPU pool."""
        gpu = self._num_gpu_blocks(self.rank_layout() if self.num_gpu_blocks is None else None)
        if (num_cpu := self._num_cpu_blocks(gpu)) or self.storage is None:
            return gpu, num_cpu
        return gpu, max(8, self.storage.staging_bytes // self.block_bytes())  # what storage goes through then

    def _num_gpu_blocks(self, layout: RankLayout | None) -> int:
        if self.num_gpu_blocks is not None:
            return self.num_gpu_blocks
        assert self.gpu_memory_bytes is not None and layout is not None
        fit = layout.num_gpu_blocks_in if not layout.rows else partial(gpu_blocks_in, self, layout)
        return fit(self.gpu_memory_bytes)

    def unit_counts(self) -> tuple[int, ...]:
        """Units of the GPU pool of each row behind the full one; none where all layers are alike."""
        layout = self.rank_layout()
        return layout.num_units if layout is not None else ()

    def check_uniform(self, who: str) -> Self:
        """Return itself. Raise `ConfigError` where not all layers keep everything: `who` serves no other models."""
        if self.layout is not None and self.layout.groups:
            kinds = ", ".join(group.kind for group in self.layout.groups)
            raise ConfigError(f"layout.groups has kinds {kinds}, which {who} does not serve; leave layout.groups out")
        return self

    def _num_cpu_blocks(self, num_gpu_blocks: int) -> int:
        if self.num_cpu_blocks is not None:
            return self.num_cpu_blocks
        if self.cpu_memory_bytes is not None:
            return self.cpu_memory_bytes // self.block_bytes()
        return int(num_gpu_blocks * (self.cpu_to_gpu_ratio or 0.0))

    @classmethod
    def load(
        cls, path: str | Path | None = None, *, environment: Mapping[str, str] | None = None, **overrides: Any
    ) -> CacheConfig:
        """Build from a TOML file, then environment variables, then arguments; the later wins, key by key.

        Environment names are upper case behind `FASTDEPLOY_CACHE_`, tables joined by two underscores:
        `FASTDEPLOY_CACHE_TRANSFER__TP_SIZE=3`. Table arguments are mappings: `transfer={"tp_size": 3}`. Sizes in bytes
        may be texts: `cpu_memory_bytes="10GB"`.

        Raises:
            ConfigError: an unreadable file, an unknown key (with the right one), a value of the wrong type.
        """
        return cls.load_with_origins(path, environment=environment, **overrides)[0]

    @classmethod
    def load_with_origins(
        cls, path: str | Path | None = None, *, environment: Mapping[str, str] | None = None, **overrides: Any
    ) -> tuple[CacheConfig, Mapping[str, str]]:
        """Build as `load` does, and say where each setting that is no default comes from (`transfer.tp_size`)."""
        # late: an engine may make its configuration itself
        from fastdeploy_cache.config.sources import Sources, check_types, from_arguments, from_environment, from_file
        from fastdeploy_cache.transfer_manager.sizes import with_sizes

        sources = from_file(path) if path is not None else Sources()
        try:
            check_types(sources.settings, SETTING_KINDS)
        except ConfigError as error:
            raise sources.blame(error, SETTING_KINDS) from error
        sources.merge(from_environment(os.environ if environment is None else environment), _ALTERNATIVES)
        arguments = {key: as_settings(value) for key, value in overrides.items()}
        sources.merge(from_arguments(arguments), _ALTERNATIVES)
        try:
            check_keys(sources.settings)
            config: CacheConfig = msgspec.convert(with_sizes(sources.settings), taken_apart(cls), strict=False)
        except (msgspec.ValidationError, ConfigError, LayoutError) as error:
            raise sources.blame(error, SETTING_KINDS) from error
        return config, sources.origins


CONFIG_KINDS: Mapping[str, type] = {"": CacheConfig, **TABLES}  # the class of the whole, and those of its tables
SETTING_KINDS: Mapping[str, type] = {**CONFIG_KINDS, **LISTS}  # and those of the entries of lists of tables


def check_keys(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first unknown key, naming the right one that is near, or all."""
    check_tables(settings, CacheConfig)


def _one_of(config: CacheConfig, names: tuple[str, ...], required: bool) -> None:
    given = [name for name in names if getattr(config, name) is not None]
    if len(given) > 1 or (required and not given):
        one = "one" if required else "at most one"
        found = f"{' and '.join(given)} are given" if given else "the size of the GPU pool is missing"
        raise ConfigError(f"{found}; give {one} of {', '.join(names)}")
