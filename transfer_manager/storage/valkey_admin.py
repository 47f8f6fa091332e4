"""What an operator does with a Valkey store from outside: list its spaces, clear weights, verify every object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from transfer_manager.errors import StorageError, StorageRefusedError
from transfer_manager.storage.base import SEAL_BYTES, seal
from transfer_manager.storage.keys import KeySpace
from transfer_manager.storage.valkey import (
    SPACES_KEY,
    connect,
    describe_server,
    failures,
    is_refusal,
    unlink_all,
    weights_prefix,
)

_NUM_SCANNED = 1000


class Verified(NamedTuple):
    """Objects that were read, and how many of them were damaged and have been removed."""

    num_objects: int
    num_damaged: int


def list_spaces(options: Mapping[str, Any]) -> list[tuple[KeySpace, int]]:
    """The spaces that caches have opened, each with the number of its objects (a change meanwhile may miscount some).

    Options are those of the store: `server_url`, `password_file`, `tls_ca_file`.

    Raises:
        StorageRefusedError: as at opening the store.
        StorageError: the server cannot be reached or does not answer.
    """
    with _server(options) as client:
        spaces = _spaces(client)
        counts = dict.fromkeys((space.prefix for space in spaces), 0)
        for key in client.scan_iter(match="fdc*", count=_NUM_SCANNED):
            prefix = _prefix(key)
            if prefix in counts:
                counts[prefix] += 1
        return [(space, counts[space.prefix]) for space in spaces]


def clear(options: Mapping[str, Any], weights_id: str) -> int:
    """Remove all objects of these weights, and their spaces from the list; returns how many objects there were."""
    with _server(options) as client:
        gone = [space.digest for space in _spaces(client) if space.weights_id == weights_id]
        if gone:
            client.hdel(SPACES_KEY, *gone)
        return unlink_all(client, weights_prefix(weights_id))


def verify(options: Mapping[str, Any]) -> Verified:
    """Read every object of the listed spaces; the damaged ones are removed."""
    num_objects = num_damaged = 0
    with _server(options) as client:
        spaces = {space.prefix: space for space in _spaces(client)}
        for key in client.scan_iter(match="fdc*", count=_NUM_SCANNED, _type="string"):
            space = spaces.get(_prefix(key))
            value = client.get(key) if space else None
            if space is None or value is None:
                continue
            num_objects += 1
            if not _is_whole(space, key, value):
                num_damaged += 1
                client.unlink(key)
    return Verified(num_objects, num_damaged)


@contextmanager
def _server(options: Mapping[str, Any]) -> Iterator[Any]:
    client = connect(options)
    try:
        with failures(describe_server(options["server_url"])):
            yield client
    except StorageError as error:
        raise (StorageRefusedError(str(error)) if is_refusal(error) else error) from error
    finally:
        client.close()
        client.connection_pool.disconnect()


def _spaces(client: Any) -> list[KeySpace]:
    """The listed spaces; entries that another version has written are left out."""
    found = []
    for value in client.hvals(SPACES_KEY):
        try:
            found.append(msgspec.json.decode(value, type=KeySpace))
        except msgspec.MsgspecError:
            continue
    return found


def _prefix(key: bytes) -> str:
    """Of an object's key: all but the block hash; empty where it is no such key."""
    return key.rpartition(b":")[0].decode("utf-8", "replace") + ":"


def _is_whole(space: KeySpace, key: bytes, value: bytes) -> bool:
    try:
        block_hash = bytes.fromhex(key.rpartition(b":")[2].decode())
    except ValueError:
        return False
    data = memoryview(value)[SEAL_BYTES:]
    return len(data) == space.object_bytes and value[:SEAL_BYTES] == seal(block_hash, data)
