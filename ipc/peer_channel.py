"""Control messages between instances: a listener that many connect to, over ZeroMQ.

On one host the address is a socket in a private folder; over TCP both ends need CURVE keys, and know each other's
beforehand. Messages are lost where an end is gone or does not read, so users of this ask again.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, NamedTuple

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK

_OWN = "own"
_TRUSTED = "trusted"
_MAX_MESSAGE_BYTES = 64 * 2**20
_DOMAIN = "peers"
_LINGER_MILLISECONDS = 300


class CurveKeys(NamedTuple):
    """A host's own key pair, and the public keys of those that it talks to, as Z85 texts."""

    public: bytes
    secret: bytes
    trusted: frozenset[bytes]
    folder: str


def make_keys(folder: Path) -> Path:
    """Make a key pair in a new folder; returns the file of the public one, for other hosts' `trusted` folders.

    Raises:
        IPCError: there are keys already, or the folder cannot be written.
    """
    if (folder / f"{_OWN}.key_secret").exists():
        raise IPCError(f"{folder} has keys already; choose another folder")
    try:
        (folder / _TRUSTED).mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # before the secret is in it
        public, secret = zmq.auth.create_certificates(folder, _OWN)
        Path(secret).chmod(0o600)
    except OSError as error:
        raise IPCError(f"no keys can be made in {folder}: {error}") from error
    return Path(public)


def load_keys(folder: Path) -> CurveKeys:
    """What `make_keys` has made, and the `trusted/*.key` that have come from other hosts up to now.

    Raises:
        IPCError: something is missing, unreadable or damaged, or others may read the secret.
    """
    path = folder / f"{_OWN}.key_secret"
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise IPCError(f"{path} may be read by others; chmod 600 it")
        public, secret = zmq.auth.load_certificate(path)
        trusted = zmq.auth.load_certificates(folder / _TRUSTED)
    except (OSError, ValueError, IndexError) as error:  # IndexError: a line of a key file that ends before its key
        raise IPCError(f"keys of {folder}: {error}; make them with `fastdeploy-cache peer-keys`") from error
    if secret is None:
        raise IPCError(f"{path} has no secret key; make new ones with `fastdeploy-cache peer-keys`")
    if not _is_pair(public, secret):  # found out here, and not by handshakes that fail without a word
        raise IPCError(f"{path} is damaged; make new keys with `fastdeploy-cache peer-keys`")
    return CurveKeys(public, secret, frozenset(trusted), str(folder))


def _is_pair(public: bytes, secret: bytes) -> bool:
    """Whether both are whole, and belong together."""
    try:
        return bool(zmq.curve_public(secret) == public)
    except (ValueError, zmq.ZMQError):
        return False


def check_address(address: str, keys: CurveKeys | None) -> None:
    """Raise `IPCError` where an address and the keys do not go together."""
    if not address.startswith(("ipc://", "tcp://")):
        raise IPCError(f"address {address!r} of a peer; use tcp://HOST:PORT")
    if address.startswith("tcp://") and keys is None:
        raise IPCError(
            f"{address} would be open to everybody; give peer.keys_folder (see `fastdeploy-cache peer-keys`)"
        )


def new_context() -> zmq.Context[Any]:
    """The ZeroMQ context of a process that talks to others."""
    return zmq.Context(io_threads=1)


class PeerListener:
    """The end that is bound to an address. It knows each connection by the name that it chose. One thread at a time."""

    def __init__(self, context: zmq.Context[Any], address: str, keys: CurveKeys | None, max_messages: int) -> None:
        """Raises `IPCError`: no keys for TCP, or the address cannot be had."""
        check_address(address, keys)
        self._authenticator: ThreadAuthenticator | None = None
        self.socket = new_socket(context, zmq.ROUTER, address, max_messages)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        if keys is not None and address.startswith("tcp://"):
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve(domain=_DOMAIN, location=str(Path(keys.folder) / _TRUSTED))
            self.socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            self.socket.set(zmq.CURVE_SERVER, 1)
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise IPCError(f"cannot listen at {address}: {error}") from error

    def get_now(self) -> tuple[bytes, bytes] | None:
        """The name of a sender and its message, or None when there is none."""
        try:
            name, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return name, frames[0] if len(frames) == 1 else b""

    def put(self, name: bytes, message: bytes) -> bool:
        """Send it, unless that one is gone or does not read; never waits."""
        try:
            self.socket.send_multipart([name, message], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Drop the socket and everything unread."""
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class PeerConnection:
    """An end that has connected to a `PeerListener`. One thread at a time."""

    def __init__(
        self, context: zmq.Context[Any], address: str, keys: CurveKeys | None, public_key: bytes, max_messages: int
    ) -> None:
        """`public_key`: of the listener. Raises `IPCError` where the address is not to be used."""
        check_address(address, keys)
        self.socket = new_socket(context, zmq.DEALER, address, max_messages)
        self.socket.set(zmq.ROUTING_ID, b"c" + SYSTEM_CLOCK.random_bytes(12))  # a first byte of zero is ZeroMQ's own
        if keys is not None and address.startswith("tcp://"):
            if public_key not in keys.trusted:
                self.socket.close()
                where = f"{keys.folder}/{_TRUSTED}"
                raise IPCError(f"the key of {address} is not among {where}; put its own.key there and start again")
            self.socket.set(zmq.CURVE_SERVERKEY, public_key)
            self.socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.socket.close()
            raise IPCError(f"cannot connect to {address}: {error}") from error

    def get_now(self) -> bytes | None:
        """The next message, or None when there is none."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def put(self, message: bytes) -> bool:
        """Send it, unless too many wait to be sent; never waits."""
        try:
            self.socket.send(message, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Send what is queued, for a moment at most, and disconnect."""
        self.socket.close()


def new_socket(context: zmq.Context[Any], kind: int, address: str, max_messages: int) -> zmq.Socket[Any]:
    """A socket for an address, with bounds. Raises `IPCError`: there are no descriptors left."""
    try:
        socket: zmq.Socket[Any] = context.socket(kind)
    except zmq.ZMQError as error:
        raise IPCError(f"cannot make a socket: {error}; raise the limit of open files") from error
    socket.set(zmq.LINGER, _LINGER_MILLISECONDS)
    socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.set_hwm(max_messages)
    socket.set(zmq.IPV6, address.startswith("tcp://["))
    return socket
