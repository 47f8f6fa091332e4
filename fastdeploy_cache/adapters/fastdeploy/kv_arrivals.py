"""How the KV arrays of FastDeploy's workers come to the cache: one message from each worker to the engine's process.

It goes to a socket with an abstract name, which leaves no file behind: a null byte, then `fastdeploy-cache-kv.PORT`.
Anyone in the same network namespace could take part, so both ends look whether the other one is a process of the same
user (SO_PEERCRED).
The message: the rank, 4 bytes, little endian; then a `KVHandle`; then the end of the stream.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.private_socket import peer_uid
from fastdeploy_cache.ipc.shortage import AcceptRests
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle

logger = logging.getLogger(__name__)

_RANK = struct.Struct("<I")
_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 1 << 24


class KVArrivals:
    """Listens from its construction on, so that no worker comes too early; what comes before `start` waits."""

    def __init__(self, port: int | str) -> None:
        """`port`: FastDeploy's `local_engine_worker_queue_port`.

        Raises:
            IPCError: another engine of this network namespace listens under that port.
        """
        self._port = port
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(None)  # whatever the program's default is: it waits for who connects
        try:
            self._socket.bind(_name(port))
        except OSError as error:
            self._socket.close()
            raise IPCError(
                f"cannot listen for KV arrays of port {port}: {error}; does another engine use it?"
            ) from error
        self._socket.listen(128)
        self._thread: threading.Thread | None = None
        self._closed = SYSTEM_CLOCK.event()

    def start(self, attach: Callable[[int, KVHandle], None]) -> None:
        """Attach what has come and what comes, each in the thread of this object; only the first call counts."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, args=(attach,), name="kv-arrivals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more. Safe to call twice."""
        self._closed.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            return
        if self._thread is not None:
            self._thread.join(_TIMEOUT_SECONDS)  # a sender that trickles may keep it; it is a daemon's
        self._socket.close()

    def _run(self, attach: Callable[[int, KVHandle], None]) -> None:
        rests = AcceptRests(f"kv_arrivals:{self._port}")
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._closed.wait(rests.met(error))
                continue
            rests.over()
            with connection:
                try:
                    rank, handle = _receive(connection)
                    attach(rank, handle)
                except Exception as error:  # the next worker is to be heard, whatever this one has sent
                    logger.error("event=kv_refused port=%s error=%r", self._port, error)
                else:
                    logger.info("event=kv_attached port=%s rank=%d", self._port, rank)


def send_kv(port: int | str, rank: int, handle: KVHandle) -> None:
    """Hand a worker's KV arrays to the engine; returns when the message is on its way.

    Raises:
        IPCError: no engine of this user listens under that port.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_SECONDS)
        try:
            connection.connect(_name(port))
            _check_user(connection)
            connection.sendall(_RANK.pack(rank) + handle.to_bytes())
        except OSError as error:
            raise IPCError(f"no engine takes the KV arrays of port {port}: {error}; is it run by the door?") from error


def _receive(connection: socket.socket) -> tuple[int, KVHandle]:
    _check_user(connection)
    connection.settimeout(_TIMEOUT_SECONDS)
    data = bytearray()
    while part := connection.recv(1 << 16):
        data += part
        if len(data) > _MAX_BYTES:
            raise IPCError(f"a message with KV arrays has more than {_MAX_BYTES} bytes; no worker's has")
    if len(data) < _RANK.size:
        raise IPCError(f"a message with KV arrays has {len(data)} bytes; its sender ended early")
    return _RANK.unpack_from(data)[0], KVHandle.from_bytes(bytes(data[_RANK.size :]))


def _check_user(connection: socket.socket) -> None:
    if (user := peer_uid(connection)) != os.getuid():
        raise IPCError(f"KV arrays go between processes of one user; the other one is user {user}")


def _name(port: int | str) -> str:
    return f"\0fastdeploy-cache-kv.{port}"
