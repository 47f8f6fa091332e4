"""The tables of a configuration, the lists of tables in them, and what to say of a key that none of them has."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.config.tenants import TenantConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.settings import meant
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig

TABLES: Mapping[str, type] = {
    "layout": KVLayout,
    "transfer": TransferConfig,
    "storage": StorageConfig,
    "peer": PeerConfig,
    "insight": InsightConfig,
    "events": EventsConfig,
}
OPTIONAL_TABLES = ("layout", "storage", "peer", "events")
LISTS: Mapping[str, type] = {  # of tables
    "layout.groups": KVGroup,
    "layout.groups.parts": StatePart,
    "tenants": TenantConfig,
}
_PLACE = re.compile(r"\[\d+\]")  # of an entry in its list


def check_tables(settings: Mapping[str, Any], whole: type) -> None:
    """Raise `ConfigError` for the first unknown key, naming the right one that is near, or all.

    `whole`: the class of what lies in no table.
    """
    _check_table("", settings, whole)
    for name, table in TABLES.items():
        if name in settings:
            if not isinstance(settings[name], Mapping):
                raise ConfigError(f"{name} is {settings[name]!r}; it is a table")
            _check_table(f"{name}.", settings[name], table)


def _check_table(prefix: str, settings: Mapping[str, Any], table: Any) -> None:
    known = [f.name for f in dataclasses.fields(table)]
    for key, value in settings.items():
        if key not in known:
            part = next((name for name in TABLES if not prefix and key.startswith(f"{name}_")), None)
            if part is not None:  # `transfer_tp_size`: of a table, and joined to its name in another way
                names = [f.name for f in dataclasses.fields(TABLES[part])]
                what = meant(key.removeprefix(f"{part}_"), names, f"{part}.")
            else:
                what = meant(key, known, prefix)
            raise ConfigError(f"unknown key {prefix + key!r}; {what}")
        if (of := LISTS.get(_PLACE.sub("", prefix) + key)) is not None:
            _check_list(prefix + key, value, of)


def _check_list(name: str, entries: Any, table: type) -> None:
    is_list = isinstance(entries, (list, tuple))
    if not is_list or any(not isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{name} is {entries!r}; it is a list of tables, each written as [[{_PLACE.sub('', name)}]]")
    for index, entry in enumerate(entries):
        _check_table(f"{name}[{index}].", entry, table)


def as_settings(value: Any) -> Any:
    """What a caller gave, with objects of settings as the tables that they stand for."""
    if isinstance(value, Mapping):
        return {key: as_settings(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_settings(each) for each in value]
    is_table = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return as_settings(dataclasses.asdict(value)) if is_table else value
