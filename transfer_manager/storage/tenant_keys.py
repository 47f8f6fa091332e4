"""The keys by which objects are encrypted, one for each owner."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fastdeploy_cache.errors import StorageRefusedError, reason_of
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.transfer_manager.storage.keys import PROBE_OWNER, owner_mark

_SIZES: Final = (16, 24, 32)  # of a key of AES, in bytes
_ALL: Final = "*"  # every namespace that has no key of its own


class TenantKeys:
    """Keys by owner (`keys.owner_mark`). Any thread."""

    def __init__(self, keys: Mapping[bytes, bytes], master: bytes | None) -> None:
        """`master`: from which that of an owner with no key of its own is derived; None: it has none."""
        self._keys, self._master = {PROBE_OWNER: SYSTEM_CLOCK.random_bytes(32), **keys}, master

    def has(self, owner: bytes) -> bool:
        """Whether an owner has a key; none is derived for that."""
        return owner in self._keys or self._master is not None

    def of(self, owner: bytes) -> bytes | None:
        """The key of an owner; None: it has none, and nothing of it may be stored."""
        if owner in self._keys or self._master is None:
            return self._keys.get(owner)
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(SHA256(), 32, salt=None, info=b"fastdeploy_cache storage 1\0" + owner).derive(self._master)


def read_keys(path: str) -> TenantKeys:
    """The keys of a TOML file: a table `keys` of namespaces and hexadecimal keys of 32, 48 or 64 digits.

    Raises:
        StorageRefusedError: it cannot be read, others may read it, or it has no keys in that form.
    """
    said = f"storage.keys_file is {path!r}"
    try:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode):  # a pipe would be waited for
            raise StorageRefusedError(f"{said}, which is no file")
        if stat.S_IMODE(mode) & 0o077:
            raise StorageRefusedError(f"{said}, which others may read; chmod 600 it")
        found = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise StorageRefusedError(f"{said}, and cannot be read: {reason_of(error)}") from error
    table = found.get("keys")
    if not isinstance(table, dict) or not table or set(found) != {"keys"}:
        raise StorageRefusedError(f"{said}; give it one table, [keys], with a key for each namespace")
    keys = {str(namespace): _key(said, str(namespace), text) for namespace, text in table.items()}
    master = keys.pop(_ALL, None)
    return TenantKeys({owner_mark(namespace): key for namespace, key in keys.items()}, master)


def _key(said: str, namespace: str, text: object) -> bytes:
    try:
        key = bytes.fromhex(str(text))
    except ValueError:
        key = b""
    if len(key) not in _SIZES:  # the key itself is not shown
        raise StorageRefusedError(f"{said}; the key of {namespace!r} is not 32, 48 or 64 hexadecimal digits")
    return key
