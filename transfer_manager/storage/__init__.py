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


def open_storage(kind: str, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> Storage:
    """Open a store: a built-in one, or `module:Class`, imported here and now.

    Raises:
        StorageRefusedError: it cannot be found, a package is missing, or its settings are wrong.
        StorageError: it cannot be reached now.
    """
    module, _, name = _CLASSES.get(kind, kind).partition(":")
    try:
        opener: OpenStorage = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise StorageRefusedError(
            f"storage.kind is {kind!r}, and {module}:{name} cannot be imported: {error}"
        ) from error
    try:
        return opener(options, space, segment)
    except _MISTAKES as error:
        raise StorageRefusedError(f"storage.kind is {kind!r}, and opening it fails: {error!r}") from error
