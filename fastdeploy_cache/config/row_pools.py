"""The pools of the rows behind the full one: how many units each has, and which settings go with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fastdeploy_cache.errors import ConfigError, counted
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.groups import rows_of
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout

MOST_UNITS = 2**31
TOKENS_PER_CHECKPOINT = 4096  # of the full row's pool: for so many, each other pool has room for a checkpoint


class RowSettings(Protocol):
    """The settings that rows need or exclude, as `CacheConfig` describes them."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_gpu_units(self) -> tuple[int, ...]: ...
    @property
    def max_running(self) -> int: ...
    @property
    def checkpoint_every_tokens(self) -> int: ...
    @property
    def checkpoints_per_path(self) -> int: ...
    @property
    def layout(self) -> KVLayout | None: ...
    @property
    def storage(self) -> object: ...
    @property
    def recompute_last_token(self) -> bool: ...
    @property
    def state_copy(self) -> bool: ...
    @property
    def transfer(self) -> TransferConfig: ...

    def pool_sizes(self) -> tuple[int, int]: ...


_LOAD_TASKS = 2


def with_units(config: RowSettings, layout: RankLayout, num_gpu_blocks: int) -> RankLayout:
    """The layout with the units of each row behind the full one: as given, or what `max_running` requests need, and a
    checkpoint for each 4,096 tokens of the full row's pool."""
    num_checkpoints = -(-num_gpu_blocks * config.block_size // TOKENS_PER_CHECKPOINT)
    units = config.num_gpu_units or tuple(
        config.max_running * row.num_request_units + num_checkpoints * row.num_checkpoint_units
        for row in layout.rows[1:]
    )
    return replace(layout, num_units=units)


def gpu_blocks_in(config: RowSettings, layout: RankLayout, memory_bytes: int) -> int:
    """The most blocks of the full row that fit in so many bytes, together with the units of all other rows."""
    low, high = 0, memory_bytes // layout.block_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if with_units(config, layout, middle).gpu_bytes(middle) <= memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def check_row_values(config: RowSettings) -> None:
    """Raise `ConfigError` for a value that cannot be, whatever the layout is."""
    if config.max_running < 1:
        raise ConfigError(f"max_running is {config.max_running}; it must be at least 1")
    every = config.checkpoint_every_tokens
    if every < 0 or every % config.block_size:
        raise ConfigError(
            f"checkpoint_every_tokens is {every}; use a multiple of block_size {config.block_size}, or 0 to make no "
            "regular ones"
        )
    if config.checkpoints_per_path < 0:
        raise ConfigError(f"checkpoints_per_path is {config.checkpoints_per_path}; use 0 or more")
    has_groups = config.layout is not None and bool(config.layout.groups)
    has_states = has_groups and config.layout is not None and any(each.kind == "state" for each in config.layout.groups)
    if config.state_copy and not has_states:
        raise ConfigError("state_copy is True, and no group of layout.groups is of the kind 'state'; leave it out")
    if config.recompute_last_token and has_states:
        raise ConfigError(
            "recompute_last_token is True with layout.groups of which one is a state, kept where a block ends; "
            "leave it out"
        )
    _check_units(config)


def _check_units(config: RowSettings) -> None:
    if not isinstance(config.num_gpu_units, tuple | list):
        raise ConfigError(f"num_gpu_units is {config.num_gpu_units!r}; give a list of whole numbers, one for each row")
    given, layout = list(config.num_gpu_units), config.layout
    for units in given:
        if type(units) is not int or not 0 <= units < MOST_UNITS:
            raise ConfigError(f"num_gpu_units is {given}; give whole numbers, each below {MOST_UNITS}")
    if given and (layout is None or not layout.groups):
        raise ConfigError(f"num_gpu_units is {given} without layout.groups; leave it out")
    rows = rows_of(layout.groups, config.block_size)[1:] if layout is not None and layout.groups else ()
    if given and len(given) != len(rows):
        names = ", ".join(map(str, rows))
        raise ConfigError(
            f"num_gpu_units is {given}, and layout.groups makes {counted(len(rows), 'row')} behind the full one: "
            f"{names}; give a number for each, in this order, or leave it out"
        )


def _check_places(config: RowSettings, num_rows: int, *, has_tier: bool) -> None:
    given, load = config.transfer.max_tasks_in_flight, "a load of full KV and its checkpoint is 2 tasks"
    if num_rows and has_tier and given < _LOAD_TASKS:
        raise ConfigError(f"transfer.max_tasks_in_flight is {given}, and {load}; give {_LOAD_TASKS} or more")
    if num_rows and config.recompute_last_token and given < num_rows + 1:
        copies = f"recompute_last_token copies a block and a unit of {counted(num_rows, 'row')}"
        raise ConfigError(f"transfer.max_tasks_in_flight is {given}, and {copies}; give {num_rows + 1} or more")


def check_row_pools(config: RowSettings, layout: RankLayout, pool_sizes: tuple[int, int]) -> None:
    """Raise `ConfigError` for pools that are too small for one request or one checkpoint, with the numbers."""
    rows, given = layout.rows[1:], list(config.num_gpu_units)
    for row, units in zip(rows, layout.num_units, strict=True):
        if units >= MOST_UNITS:
            raise ConfigError(
                f"the row {str(row)!r} needs {units} units for max_running {config.max_running}; ids are 32 bits wide: "
                "use a smaller max_running, or give num_gpu_units"
            )
    for index, (row, units) in enumerate(zip(rows, given, strict=False)):
        if units < row.num_least_units:
            raise ConfigError(
                f"num_gpu_units[{index}] is {units}, and one request with its checkpoint needs {row.num_least_units} "
                f"units of the row {str(row)!r}; give {row.num_least_units} or more"
            )
    _check_places(config, len(rows), has_tier=pool_sizes[1] > 0)
    num_least = layout.num_checkpoint_pages + 1
    if rows and 0 < pool_sizes[1] < num_least:
        raise ConfigError(
            f"the CPU pool has {counted(pool_sizes[1], 'block')}, and a checkpoint and one block take {num_least}; "
            f"give num_cpu_blocks {num_least} or more, or 0 for no CPU tier"
        )
