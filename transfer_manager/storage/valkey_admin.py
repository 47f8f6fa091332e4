"""What an operator does with a Valkey store from outside: list its spaces, clear weights, verify every object."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from fastdeploy_cache.errors import StorageError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.admin import (
    Checked,
    Cleared,
    Outcome,
    Space,
    SpaceSummary,
    StorageAdmin,
    Tally,
    unheard,
)
from fastdeploy_cache.transfer_manager.storage.base import SEAL_BYTES, seal
from fastdeploy_cache.transfer_manager.storage.keys import KEY_VERSION, KeySpace, ObjectKey, is_page, weights_prefix
from fastdeploy_cache.transfer_manager.storage.valkey import (
    SPACES_KEY,
    connect,
    describe_server,
    failures,
    is_refusal,
    unlink_all,
)

_NUM_SCANNED = 1000


class ValkeyAdmin(StorageAdmin):
    """See `StorageAdmin`. A space is what its keys begin with; nobody knows whether an engine has it open.

    Caches enter their spaces in `SPACES_KEY`. Objects of one that is not there (after `clear`, of an engine that went
    on) are counted and checked all the same. What changes meanwhile may be counted twice or not at all.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Options: `server_url`, `password_file`, `tls_ca_file`. Connects at each call."""
        self._options = options
        try:
            self.where = describe_server(options["server_url"])
        except ValueError as error:
            raise StorageRefusedError(f"storage.server_url is not understood: {error}") from error

    def spaces(self) -> list[SpaceSummary]:
        """See `StorageAdmin`."""
        with self._server() as client:
            listed = _listed(client)
            last_keys, counts = dict[Space, bytes](), Counter[Space]()
            num_pages = Counter[Space]()
            for name, key in _keys(client, f"fdc{KEY_VERSION}:"):
                space = _space(name, listed)
                last_keys[space] = key
                counts[space] += 1
                num_pages[space] += is_page(name.block_hash)
            found = {_space_of(key_space) for key_space in listed.values()} | counts.keys()
            return [
                SpaceSummary(
                    space=space,
                    num_objects=counts[space],
                    num_bytes=_object_bytes(client, space, last_keys) * counts[space],
                    num_pages=num_pages[space],
                )
                for space in sorted(found, key=lambda space: space.where)
            ]

    def weights_ids(self) -> set[str]:
        """See `StorageAdmin`."""
        with self._server() as client:
            return {key_space.weights_id for key_space in _listed(client).values()}

    def verify(
        self, weights_id: str | None = None, *, remove: bool = False, on_object: Callable[[], object] = unheard
    ) -> list[Checked]:
        """See `StorageAdmin`. The server is asked not to take these reads for use."""
        prefix = f"fdc{KEY_VERSION}:" if weights_id is None else weights_prefix(weights_id)
        with self._server() as client:
            listed = _listed(client)
            tally = Tally(_space_of(each) for each in listed.values() if weights_id in (None, each.weights_id))
            with suppress(importlib.import_module("valkey").exceptions.ResponseError):  # Valkey and Redis 7.2 know it
                client.client_no_touch("ON")
            for name, key in _keys(client, prefix):
                space = _space(name, listed)
                outcome = _outcome(space, name, client.get(key))
                tally.note(space, name, f"{name.prefix}{name.block_hash.hex()}", outcome)
                if outcome == "damaged" and remove:
                    client.unlink(key)
                on_object()
        return tally.checked(is_mended=remove)

    def clear(self, weights_id: str, *, dry_run: bool = False) -> Cleared:
        """See `StorageAdmin`. Also takes their spaces from the list."""
        prefix = weights_prefix(weights_id)
        with self._server() as client:
            gone = [key_space for key_space in _listed(client).values() if key_space.weights_id == weights_id]
            removed = tuple(map(_space_of, gone))
            if dry_run:
                return Cleared(
                    num_objects=sum(1 for _ in client.scan_iter(f"{prefix}*", _NUM_SCANNED)), removed=removed
                )
            if gone:
                client.hdel(SPACES_KEY, *(key_space.digest for key_space in gone))
            return Cleared(num_objects=unlink_all(client, prefix), removed=removed)

    def gc(self, capacity_bytes: int, *, dry_run: bool = False) -> Cleared:
        """See `StorageAdmin`."""
        del capacity_bytes, dry_run  # of folders
        raise StorageRefusedError(f"{self.where} evicts by itself (its maxmemory); gc is for folders")

    @contextmanager
    def _server(self) -> Iterator[Any]:
        """A connection of one's own, so that what it is told holds."""
        client = connect(self._options)
        try:
            with failures(self.where):
                yield client.client()
        except StorageError as error:
            raise (StorageRefusedError(str(error)) if is_refusal(error) else error) from error
        finally:
            client.close()
            client.connection_pool.disconnect()


def _listed(client: Any) -> dict[str, KeySpace]:
    """The listed spaces by what their keys begin with; entries that are damaged or another version's are left out."""
    spaces = map(KeySpace.parse, client.hvals(SPACES_KEY))
    return {space.prefix: space for space in spaces if space is not None}


def _keys(client: Any, prefix: str) -> Iterator[tuple[ObjectKey, bytes]]:
    for key in client.scan_iter(match=f"{prefix}*", count=_NUM_SCANNED, _type="string"):
        name = ObjectKey.parse(key.decode("utf-8", "replace"))
        if name is not None:
            yield name, key


def _space_of(key_space: KeySpace) -> Space:
    return Space(where=key_space.prefix, weights_digest=key_space.weights_digest, key_space=key_space)


def _space(name: ObjectKey, listed: Mapping[str, KeySpace]) -> Space:
    return Space(where=name.prefix, weights_digest=name.weights_digest, key_space=listed.get(name.prefix))


def _object_bytes(client: Any, space: Space, last_keys: Mapping[Space, bytes]) -> int:
    """The length of each object; where the space is not listed, one object is asked for it."""
    if space.key_space is not None:
        return space.key_space.object_bytes
    return max(0, int(client.strlen(last_keys[space])) - SEAL_BYTES)


def _outcome(space: Space, name: ObjectKey, value: bytes | None) -> Outcome:
    if value is None:
        return "gone"
    data = memoryview(value)[SEAL_BYTES:]
    is_whole = space.key_space is None or len(data) == space.key_space.object_bytes
    return "whole" if is_whole and value[:SEAL_BYTES] == seal(name.block_hash, data) else "damaged"
