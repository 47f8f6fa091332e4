"""Stores below the CPU tier: one protocol, and how one is opened by its name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_cache.errors import StorageRefusedError

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.storage.base import OpenStorage, Segment, Storage
    from fastdeploy_cache.transfer_manager.storage.keys import KeySpace

_MISTAKES = (AttributeError, LookupError, NameError, TypeError, ValueError)  # of a store's code or its options
_CLASSES = {
    "file": "fastdeploy_cache.transfer_manager.storage.file_store:FileStorage",
    "mooncake": "fastdeploy_cache.transfer_manager.storage.mooncake:MooncakeStorage",
    "valkey": "fastdeploy_cache.transfer_manager.storage.valkey:ValkeyStorage",
}
_WITH_PACKAGE = {kind: _CLASSES[kind].partition(":")[0] for kind in ("mooncake", "valkey")}


def open_storage(kind: str, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> Storage:
    """Open a store: a built-in one, or `module:Class`, imported here and now.

    Raises:
        StorageRefusedError: it cannot be found, a package is missing, or its settings are wrong.
        StorageError: it cannot be reached now.
    """
    opener = _opener(kind)
    try:
        return opener(options, space, segment)
    except _MISTAKES as error:
        raise StorageRefusedError(f"storage.kind is {kind!r}, and opening it fails: {error!r}") from error


def check_store(kind: str, options: Mapping[str, Any]) -> None:
    """Try what can be told without the store: its code and its package can be imported, its settings are understood.

    Raises:
        StorageRefusedError: what `open_storage` would refuse for these.
    """
    _opener(kind)
    if (module := _WITH_PACKAGE.get(kind)) is not None:
        importlib.import_module(module).check_options(options)


def _opener(kind: str) -> OpenStorage:
    module, _, name = _CLASSES.get(kind, kind).partition(":")
    try:
        opener: OpenStorage = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise StorageRefusedError(
            f"storage.kind is {kind!r}, and {module}:{name} cannot be imported: {error}"
        ) from error
    return opener
