"""What an operator does with a Mooncake cluster from outside: list its spaces, clear weights, verify every object."""

from __future__ import annotations

import io
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import msgspec
import numpy as np

from fastdeploy_cache.errors import StorageError, StorageRefusedError
from fastdeploy_cache.ipc.codec import taken_apart
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
from fastdeploy_cache.transfer_manager.storage.base import SEAL_BYTES, Segment, seal
from fastdeploy_cache.transfer_manager.storage.keys import ObjectKey, is_page, weights_digest_of
from fastdeploy_cache.transfer_manager.storage.mooncake import answered, connect, register, remove_weights

METRICS_PORT = 9003
_HTTP_SECONDS = 30.0  # a master of millions of objects takes its time
_NOT_FOUND = 404
_NUM_LOOKS = 3


class _Replica(msgspec.Struct):
    size_: int


class _Queried(msgspec.Struct):
    """The master's answer to /query_key."""

    data: list[_Replica]


class MooncakeAdmin(StorageAdmin):
    """See `StorageAdmin`. A space is what its keys begin with; nobody knows whether an engine has it open.

    The master lists keys on its metrics port. Keys have digests in them, so what they are for is not known.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Options: those of the store, and `metrics_url` (by default port 9003 of the master's host)."""
        self._options = options
        address = options["master_address"]
        host, colon, _ = address.rpartition(":")
        if not colon:
            raise StorageRefusedError(f"storage.master_address is {address!r}; use host:port")
        self._url = (options.get("metrics_url") or f"http://{host}:{METRICS_PORT}").rstrip("/")
        self.where = f"Mooncake master at {address}"
        try:
            parts = urlsplit(self._url)
            is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.path
        except ValueError:
            is_url = False
        if not is_url:
            raise StorageRefusedError(f"metrics_url is {self._url!r}; use http://host:{METRICS_PORT}")
        self._opener = build_opener(ProxyHandler({}))  # what else goes to the cluster knows no proxy either

    def spaces(self) -> list[SpaceSummary]:
        """See `StorageAdmin`. The size of one object of each space stands for all."""
        last_keys, counts = dict[Space, str](), Counter[Space]()
        num_pages = Counter[Space]()
        for name, key in self._keys():
            space = _space(name)
            last_keys[space] = key
            counts[space] += 1
            num_pages[space] += is_page(name.block_hash)
        return [
            SpaceSummary(
                space=space,
                num_objects=counts[space],
                num_bytes=self._num_bytes(key, counts[space]),
                num_pages=num_pages[space],
            )
            for space, key in sorted(last_keys.items(), key=lambda item: item[0].where)
        ]

    def weights_ids(self) -> set[str]:
        """See `StorageAdmin`: the keys have digests alone."""
        return set()

    def verify(
        self, weights_id: str | None = None, *, remove: bool = False, on_object: Callable[[], object] = unheard
    ) -> list[Checked]:
        """See `StorageAdmin`. Mooncake takes these reads for use; it waits 30 s for an owner that hangs."""
        tally, keys = Tally(), self._keys(weights_id)
        with _client(self._options) as client, closing(_Reader(client)) as reader:
            for name, key in keys:
                outcome = _outcome(reader, name, key)
                tally.note(_space(name), name, key, outcome)
                if outcome == "damaged" and remove:
                    answered("batch_remove", client.batch_remove([key], True))
                on_object()
        return tally.checked(is_mended=remove)

    def clear(self, weights_id: str, *, dry_run: bool = False) -> Cleared:
        """See `StorageAdmin`."""
        if dry_run:
            return Cleared(num_objects=sum(1 for _ in self._keys(weights_id)))
        with _client(self._options) as client:
            return Cleared(num_objects=remove_weights(client, weights_id))

    def gc(self, capacity_bytes: int, *, dry_run: bool = False) -> Cleared:
        """See `StorageAdmin`."""
        del capacity_bytes, dry_run  # of folders
        raise StorageRefusedError(f"{self.where} evicts by itself; gc is for folders")

    def _keys(self, weights_id: str | None = None) -> Iterator[tuple[ObjectKey, str]]:
        """The objects that the master has now. Asks it at once."""
        lines = io.BytesIO(self._get("/get_all_keys") or b"")
        digest = weights_digest_of(weights_id) if weights_id is not None else None

        def parsed() -> Iterator[tuple[ObjectKey, str]]:
            for line in lines:
                key = line.decode("utf-8", "replace").removesuffix("\n")
                name = ObjectKey.parse(key)
                if name is not None and digest in (None, name.weights_digest):
                    yield name, key

        return parsed()

    def _num_bytes(self, key: str, num_objects: int) -> int | None:
        answer = self._get(f"/query_key?key={key}") or b""  # evicted meanwhile
        try:
            replicas = msgspec.json.decode(answer, type=taken_apart(_Queried)).data
        except (msgspec.MsgspecError, UnicodeDecodeError):  # that, or it is in no memory
            return None
        return num_objects * max(0, replicas[0].size_ - SEAL_BYTES) if replicas else None

    def _get(self, path: str) -> bytes | None:
        """The body of an answer; None: there is no such thing."""
        try:
            with self._opener.open(self._url + path, timeout=_HTTP_SECONDS) as answer:
                body: bytes = answer.read()
                return body
        except HTTPError as error:
            with error:
                if error.code == _NOT_FOUND and "?" in path:
                    return None
                raise StorageError(f"{self._url}{path}: {error}; is it the master's metrics port?") from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise StorageError(f"{self._url}: {reason}; the master's metrics port is needed to list keys") from error


class _Reader:
    """Reads objects of any size, one at a time, into memory of its own: `get` says nothing of why it failed."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._memory: Segment = np.zeros(0, np.uint8)

    def read(self, key: str) -> memoryview | None:
        """An object's bytes, until the next call; None: it is gone, or its memory's owner is. Raises `StorageError`."""
        (size,) = answered("get_size", [self._client.get_size(key)])
        if size < 0:
            return None
        self._hold(size)
        (code,) = answered("get_into", [self._client.get_into(key, self._memory.ctypes.data, self._memory.nbytes)])
        return self._memory.data[:code] if code >= 0 else None

    def close(self) -> None:
        """Give the memory back."""
        if self._memory.nbytes:
            self._client.unregister_buffer(self._memory.ctypes.data)
        self._memory = np.zeros(0, np.uint8)

    def _hold(self, num_bytes: int) -> None:
        """Have so much; in whole pages, as Mooncake registers those."""
        if self._memory.nbytes < num_bytes:
            self.close()
            memory: Segment = np.frombuffer(mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
            register(self._client, memory)
            self._memory = memory


@contextmanager
def _client(options: Mapping[str, Any]) -> Iterator[Any]:
    with _silence():
        client = connect(options, 0)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def _silence() -> Iterator[None]:
    """Lose what goes to standard error: Mooncake writes there beside each error that it returns, and when all is
    well, and no setting of its keeps it from that."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _space(name: ObjectKey) -> Space:
    return Space(where=name.prefix, weights_digest=name.weights_digest, key_space=None)


def _outcome(reader: _Reader, name: ObjectKey, key: str) -> Outcome:
    """What came of an object. A clearing waits for no reader, so its memory may become another's while it is read:
    hence a second look."""
    for _ in range(_NUM_LOOKS):
        value = reader.read(key)
        if value is None:
            return "gone"
        if value[-SEAL_BYTES:] == seal(name.block_hash, value[:-SEAL_BYTES]):
            return "whole"
    return "damaged"
