"""A Valkey or Redis server as a store: one string for each block, its checksum in front."""

from __future__ import annotations

import importlib
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from fastdeploy_cache.errors import StorageError, StorageRefusedError, reason_of
from fastdeploy_cache.transfer_manager.storage.base import SEAL_BYTES, Blocks, Segment, StorageStats, Written, seal
from fastdeploy_cache.transfer_manager.storage.keys import KEY_VERSION, MARK_AT, KeySpace, weights_prefix

SPACES_KEY = f"fdc{KEY_VERSION}:spaces"  # a hash: a space's digest -> its fields as JSON
CONNECT_SECONDS, OPERATION_SECONDS = 1.0, 2.0
_BATCH_BYTES = 8 * 2**20  # of one pipeline: what lies in this process's memory a second time
_READ_BYTES = 2**20  # of one recv
_NUM_SCANNED = 1000
_TLS_SCHEMES = ("valkeys", "rediss")


class ValkeyStorage:
    """Blocks as strings of a server, which evicts or expires them as it was told to.

    A server that is full declines writes (`num_declined`): what it has can still be read. Every other refusal of the
    server and every time-out is a `StorageError`. Connections that broke are made anew by the next call.
    """

    needs_token_ids = False

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        """See `OpenStorage`. Enters the space in `SPACES_KEY`, where operators find it."""
        del segment  # objects go through buffers of the connection
        self._space = space
        self._seconds_to_live = int(options.get("time_to_live_seconds") or 0)
        self._batch_blocks = max(1, _BATCH_BYTES // (space.object_bytes + SEAL_BYTES))
        self._num_declined = 0
        self._num_damaged = 0
        self._where = describe_server(options["server_url"])
        self._client = connect(options)
        try:
            with failures(self._where):
                self._client.hset(SPACES_KEY, space.digest, msgspec.json.encode(space))
        except StorageError as error:
            self._client.close()
            raise (StorageRefusedError(str(error)) if is_refusal(error) else error) from error

    def count_leading(self, blocks: Blocks) -> int:
        """See `Storage`. One round trip; an object of the wrong length does not count."""
        return [*self.find(blocks.hashes), False].index(False)

    def find(self, hashes: Sequence[bytes]) -> list[bool]:
        """See `Storage`. One round trip."""
        whole = self._space.object_bytes + SEAL_BYTES
        return [length == whole for length in self._lengths(hashes)]

    def read(self, blocks: Blocks) -> int:
        """See `Storage`. What is not exactly what was written is removed, and the read ends there."""
        for start in range(0, len(blocks.hashes), self._batch_blocks):
            hashes = blocks.hashes[start : start + self._batch_blocks]
            for index, value in enumerate(self._get(hashes)):
                if value is None:
                    return start + index
                if not self._fill(hashes[index], value, blocks.buffers[start + index]):
                    self._num_damaged += 1
                    self.remove([hashes[index]])
                    return start + index
        return len(blocks.hashes)

    def write(self, blocks: Blocks) -> Written:
        """See `Storage`."""
        whole = self._space.object_bytes + SEAL_BYTES
        lengths = self._lengths(blocks.hashes)
        missing = [index for index, length in enumerate(lengths) if length != whole]
        num_bytes = 0
        for start in range(0, len(missing), self._batch_blocks):
            batch = missing[start : start + self._batch_blocks]
            for index, answer in zip(batch, self._set(blocks, batch, lengths), strict=True):
                if _is_full(answer):
                    self._num_declined += len(blocks.hashes) - index
                    return Written(index, num_bytes)
                if isinstance(answer, Exception):
                    raise StorageError(f"{self._where} did not take an object: {answer}") from answer
                num_bytes += whole if answer else 0  # not taken: another writer has been faster
        return Written(len(blocks.hashes), num_bytes)

    def remove(self, hashes: Sequence[bytes]) -> int:
        """See `Storage`."""
        if not hashes:
            return 0
        with failures(self._where):
            return int(self._client.unlink(*map(self._space.key, hashes)))

    def clear(self, weights_id: str) -> int:
        """See `Storage`. Walks all keys of the server's database."""
        with failures(self._where):
            return unlink_all(self._client, weights_prefix(weights_id))

    def remove_owned(self, weights_id: str, owner: bytes) -> int:
        """See `Storage`. Walks all keys of the server's database."""
        with failures(self._where):
            return unlink_all(self._client, weights_prefix(weights_id), owner)

    def stats(self) -> StorageStats:
        """See `StorageStats`; sizes are the server's affair."""
        return StorageStats(num_declined=self._num_declined, num_damaged=self._num_damaged)

    def close(self) -> None:
        """Close the connections. Closing again does nothing."""
        self._client.close()
        self._client.connection_pool.disconnect()

    def _lengths(self, hashes: Sequence[bytes]) -> list[Any]:
        """The lengths of the strings; 0 where there is none, an exception for what is no string. Copies no data."""
        if not hashes:
            return []
        with failures(self._where), self._client.pipeline(transaction=False) as pipeline:
            for block_hash in hashes:
                pipeline.strlen(self._space.key(block_hash))
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def _get(self, hashes: Sequence[bytes]) -> list[bytes | None]:
        with failures(self._where), self._client.pipeline(transaction=False) as pipeline:
            for key in map(self._space.key, hashes):
                if self._seconds_to_live:
                    pipeline.getex(key, ex=self._seconds_to_live)
                else:
                    pipeline.get(key)
            values: list[bytes | None] = pipeline.execute()
        return values

    def _set(self, blocks: Blocks, batch: Sequence[int], lengths: Sequence[Any]) -> list[Any]:
        with failures(self._where), self._client.pipeline(transaction=False) as pipeline:
            for index in batch:
                block_hash, data = blocks.hashes[index], blocks.buffers[index]
                value = b"".join((seal(block_hash, data), data))
                # NX, so that two writers store once; something of a wrong length is in the way and has to go
                pipeline.set(
                    self._space.key(block_hash), value, nx=lengths[index] == 0, ex=self._seconds_to_live or None
                )
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def _fill(self, block_hash: bytes, value: bytes, buffer: memoryview) -> bool:
        data = memoryview(value)[SEAL_BYTES:]
        if len(data) != len(buffer) or value[:SEAL_BYTES] != seal(block_hash, data):
            return False
        buffer[:] = data
        return True


def connect(options: Mapping[str, Any]) -> Any:
    """A `valkey.Valkey` for `server_url`, `password_file` and `tls_ca_file`. Connects at its first command.

    Raises:
        StorageRefusedError: the package is missing, or a setting is wrong; the message never shows a password.
    """
    try:
        library = importlib.import_module("valkey")
    except ImportError as error:
        raise StorageRefusedError(f"storage.kind 'valkey' needs pip install 'valkey[libvalkey]': {error}") from error
    url = options["server_url"]
    settings: dict[str, Any] = {
        "socket_timeout": OPERATION_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_read_size": _READ_BYTES,
        **_credentials(options.get("password_file")),
        **_trust(options.get("tls_ca_file"), url),
    }
    if urlsplit(url).scheme == "unix":
        del settings["socket_connect_timeout"]  # a Unix socket takes one time-out for both
    try:
        return library.Valkey(connection_pool=library.ConnectionPool.from_url(url, **settings))
    except (ValueError, TypeError) as error:
        raise StorageRefusedError(
            f"storage.server_url ({describe_server(url)}) is not understood: {error}; "
            "use unix:///path, valkey://host:port/db or valkeys://host:port/db"
        ) from error


def check_options(options: Mapping[str, Any]) -> None:
    """Raise what `connect` raises, and connect to nothing."""
    connect(options).close()


@contextmanager
def failures(where: str) -> Iterator[None]:
    """Makes whatever the client library raises a `StorageError`."""
    library = importlib.import_module("valkey")
    try:
        yield
    except (library.ValkeyError, OSError) as error:
        raise StorageError(f"{where}: {type(error).__name__}: {error}") from error


def is_refusal(error: StorageError) -> bool:
    """Whether it came of what the user has to change: a password, rights, or a certificate."""
    errors = importlib.import_module("valkey").exceptions
    cause = error.__cause__
    return isinstance(
        cause, (errors.AuthenticationError, errors.AuthenticationWrongNumberOfArgsError, errors.NoPermissionError)
    ) or isinstance(cause and cause.__context__, ssl.SSLCertVerificationError)


def describe_server(url: str) -> str:
    """The server without user and password, for messages."""
    parts = urlsplit(url)
    return f"valkey server {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def unlink_all(client: Any, prefix: str, owner: bytes = b"") -> int:
    """Remove every key that begins so, or of these an owner's; returns how many there were. A key that SCAN meets twice
    counts once."""
    pattern = f"{prefix}{'?' * 32}:{'?' * 2 * MARK_AT}{owner.hex()}*" if owner else f"{prefix}*"
    num_removed, cursor = 0, 0
    while True:
        cursor, keys = client.scan(cursor, match=pattern, count=_NUM_SCANNED)
        if keys:
            num_removed += client.unlink(*keys)
        if not cursor:
            return num_removed


def _credentials(password_file: str | None) -> dict[str, str]:
    if not password_file:
        return {}
    try:
        text = Path(password_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageRefusedError(
            f"storage.password_file {password_file!r} cannot be read: {reason_of(error)}"
        ) from error
    user, colon, password = text.partition(":")  # a password that has a colon in it needs its user before it
    return {"username": user, "password": password} if colon else {"password": text}


def _trust(tls_ca_file: str | None, url: str) -> dict[str, Any]:
    with_tls = urlsplit(url).scheme in _TLS_SCHEMES
    if not tls_ca_file:
        return {"ssl_check_hostname": True} if with_tls else {}  # the library checks the chain alone if not told so
    if not with_tls:
        raise StorageRefusedError(
            f"storage.tls_ca_file is set, but {describe_server(url)} goes without TLS; use valkeys://host:port/db"
        )
    try:
        ssl.create_default_context(cafile=tls_ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise StorageRefusedError(f"storage.tls_ca_file {tls_ca_file!r} cannot be used: {reason_of(error)}") from error
    return {"ssl_ca_certs": tls_ca_file, "ssl_check_hostname": True}


def _is_full(answer: object) -> bool:
    """Whether the server has no memory left and evicts nothing."""
    return isinstance(answer, importlib.import_module("valkey").exceptions.OutOfMemoryError)
