"""A stream of messages that many hear: numbered, sent again on request, and questions beside it. Over ZeroMQ.

Wire format, as vLLM's publisher has it: PUB frames `topic, sequence (8 bytes, big-endian), payload`. ROUTER: a request
`"", start (8 bytes)` is answered by frames `"", topic, sequence, payload` for each message from there on that is still
kept, and by `"", "", -1, ""` behind the last. Any other request `"", question` is its owner's to answer: `"", answer`.
"""

from __future__ import annotations

import contextlib
import os
import socket as unix
import stat
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.peer_channel import CurveKeys, new_socket

_END = (-1).to_bytes(8, "big", signed=True)
_MOST_SEQUENCE = 2**63 - 1
_MAX_REQUEST_BYTES = 2**23  # more than the owner answers: it says so
_MOST_UNHEARD, _MOST_UNREAD = 4096, 256  # messages to one that does not read: of the stream, and of answers
_MOST_REPLAYS = 64  # that are being answered
_ALIVE_MILLISECONDS, _DEAD_MILLISECONDS = 5_000, 20_000
_DOMAIN = "events"


class StreamAddress(NamedTuple):
    """Where a stream is heard, and where questions about it are asked. `keys`: of a host that others may reach."""

    endpoint: str
    replay_endpoint: str
    topic: bytes = b""
    keys: CurveKeys | None = None


class EventOutlet:
    """The publisher's end. Nothing here waits: who does not read in time misses messages, and sees that by their
    numbers. One thread at a time."""

    def __init__(self, address: StreamAddress, num_kept: int, num_kept_bytes: int) -> None:
        """The last `num_kept` messages are kept, or fewer that have so many bytes together.

        Raises:
            IPCError: an address cannot be had.
        """
        self._topic, self._num_kept, self._num_kept_bytes = address.topic, num_kept, num_kept_bytes
        self.next_sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._replays: dict[bytes, int] = {}  # by asker, where to go on
        self._paths = [each.removeprefix("ipc://") for each in address[:2] if each.startswith("ipc://")]
        self._authenticator: ThreadAuthenticator | None = None
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        try:
            if address.keys is not None:
                self._authenticator = ThreadAuthenticator(self._context)
                self._authenticator.start()
                self._authenticator.configure_curve(domain=_DOMAIN, location=str(Path(address.keys.folder) / "trusted"))
            self._publisher = self._bound(zmq.PUB, address.endpoint, address.keys)
            self.requests = self._bound(zmq.ROUTER, address.replay_endpoint, address.keys)
            self.requests.set(zmq.ROUTER_MANDATORY, 1)
        except BaseException:
            self.close()
            raise

    def _bound(self, kind: int, endpoint: str, keys: CurveKeys | None) -> zmq.Socket[Any]:
        socket = _new_socket(self._context, kind, endpoint)
        socket.set(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        if kind == zmq.ROUTER:
            socket.set(zmq.SNDHWM, _MOST_UNREAD)
        if keys is not None:
            socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        _check_path(endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise IPCError(f"cannot publish at {endpoint}: {error}; choose another address") from error
        return socket

    def publish(self, payload: bytes) -> int:
        """Send a message to all who listen; returns its sequence."""
        sequence = self.next_sequence
        self.next_sequence += 1
        self._kept.append((sequence, payload))
        self._num_bytes += len(payload)
        while len(self._kept) > self._num_kept or (self._num_bytes > self._num_kept_bytes and len(self._kept) > 1):
            self._num_bytes -= len(self._kept.popleft()[1])
        self._publisher.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK, copy=False)
        return sequence

    def get_question(self) -> tuple[bytes, bytes] | None:
        """The next question, and who asks; b"" for a request of messages, which is begun. None: there is nothing."""
        try:
            frames = self.requests.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        asker = frames[0]
        if len(frames) != 3 or frames[1]:
            return asker, b""
        if len(frames[2]) != len(_END):
            return asker, frames[2] or b"?"
        if len(self._replays) < _MOST_REPLAYS or asker in self._replays:
            self._replays[asker] = int.from_bytes(frames[2], "big")
            self.go_on()
        return asker, b""

    @property
    def is_replaying(self) -> bool:
        """Whether somebody waits for messages again who does not read as fast as they are sent: see `go_on`."""
        return bool(self._replays)

    def go_on(self) -> None:
        """Send messages again, as far as who asked for them has read those before."""
        for asker, start in list(self._replays.items()):
            self._replays[asker] = sent = self._replay(asker, start)
            if sent < 0:
                del self._replays[asker]

    def answer(self, asker: bytes, answer: bytes) -> None:
        """Answer a question, unless its asker has gone or does not read."""
        self._send(asker, [answer])

    def _replay(self, asker: bytes, start: int) -> int:
        """Send what is kept from there on; returns where to go on, or -1 when that is all, or the asker has gone."""
        for sequence, payload in self._kept if start <= _MOST_SEQUENCE else ():
            if sequence >= start:
                sent = self._send(asker, [self._topic, sequence.to_bytes(8, "big"), payload])
                if sent is not True:
                    return sequence if sent is False else -1
        return self.next_sequence if self._send(asker, [b"", _END, b""]) is False else -1

    def _send(self, asker: bytes, frames: list[bytes]) -> bool | None:
        """False: it has not read what it asked for before. None: it has gone."""
        try:
            self.requests.send_multipart([asker, b"", *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return None
        return True

    def close(self) -> None:
        """Close the sockets; what nobody has read is lost."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.destroy(linger=0)
        for path in self._paths if hasattr(self, "requests") else ():  # else they may be another's
            with contextlib.suppress(OSError):
                Path(path).unlink()


class Heard(NamedTuple):
    """A message of the stream; `is_replayed`: it was asked for. Sequence -1 stands for the end of those."""

    sequence: int
    payload: bytes
    is_replayed: bool


class Answered(NamedTuple):
    """The answer to a question."""

    answer: bytes


class Disconnected(NamedTuple):
    """The connection to the stream is gone. It is made again by itself; what comes next comes by the new one."""


class EventInlet:
    """A listener's end. One thread at a time."""

    def __init__(self, address: StreamAddress, publisher_key: bytes = b"") -> None:
        """`publisher_key`: its public key, where it has keys.

        Raises:
            IPCError: an address is none.
        """
        self._address, self._publisher_key = address, publisher_key
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._watch: zmq.Socket[Any] | None = None
        try:
            self.stream = self._new(zmq.SUB, address.endpoint)
            self.stream.set(zmq.SUBSCRIBE, address.topic)
            self._watch = self.stream.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._connect(self.stream, address.endpoint)
            self.answers = self._new(zmq.DEALER, address.replay_endpoint)
            self._connect(self.answers, address.replay_endpoint)
        except BaseException:
            self.close()
            raise

    def _new(self, kind: int, endpoint: str) -> zmq.Socket[Any]:
        socket, keys = _new_socket(self._context, kind, endpoint), self._address.keys
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            socket.set(zmq.CURVE_SERVERKEY, self._publisher_key)
            socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        return socket

    @staticmethod
    def _connect(socket: zmq.Socket[Any], endpoint: str) -> None:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise IPCError(f"cannot listen to {endpoint}: {error}; give tcp://HOST:PORT or ipc://PATH") from error

    def get(self) -> Heard | Answered | Disconnected | None:
        """What has come next; None: nothing.

        A disconnection is looked for behind each message that was read, and told in front of it. The context's thread
        notes it before it connects anew: so a message of the next connection is never taken for one of the last.
        """
        heard = self._heard()
        if self._has_disconnected():
            return Disconnected()  # what was heard may be of either connection: it counts as lost
        return heard if heard is not None else self._answered()

    def _heard(self) -> Heard | None:
        while True:
            try:
                frames = self.stream.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) == 3 and len(frames[1]) == 8:
                return Heard(int.from_bytes(frames[1], "big"), frames[2], is_replayed=False)

    def _answered(self) -> Heard | Answered | None:
        try:
            frames = self.answers.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) == 2:
            return Answered(frames[1])
        if len(frames) == 4 and len(frames[2]) == 8:
            return Heard(int.from_bytes(frames[2], "big", signed=True), frames[3], is_replayed=True)
        return Answered(b"")

    def _has_disconnected(self) -> bool:
        assert self._watch is not None
        has = False
        with contextlib.suppress(zmq.Again):
            while True:
                self._watch.recv_multipart(zmq.NOBLOCK)
                has = True
        return has

    def renew(self) -> None:
        """Forget what was asked: answers to that come no more. Raises `IPCError`: there are no descriptors left."""
        self.answers.close(linger=0)
        self.answers = self._new(zmq.DEALER, self._address.replay_endpoint)
        self._connect(self.answers, self._address.replay_endpoint)

    def ask(self, question: bytes) -> None:
        """Send a question, or eight bytes for messages from there on; lost where the other end does not read."""
        with contextlib.suppress(zmq.Again):
            self.answers.send_multipart([b"", question], zmq.NOBLOCK)

    def sources(self) -> list[zmq.Socket[Any]]:
        """What is readable when `get` has something; another list after each `renew`."""
        assert self._watch is not None
        return [self.stream, self._watch, self.answers]

    def close(self) -> None:
        """Close the sockets."""
        if self._watch is not None:
            self.stream.disable_monitor()
            self._watch.close(linger=0)
            self._watch = None
        self._context.destroy(linger=0)


def _check_path(endpoint: str) -> None:
    """Raise `IPCError` where the path of a socket is somebody else's: ZeroMQ would take it away, whatever it is."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        return
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:  # nothing is there; or the path is none, which ZeroMQ says
        return
    if not is_socket:
        raise IPCError(f"cannot publish at {endpoint}: that is there and is no socket; choose another path")
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise IPCError(f"cannot publish at {endpoint}: another process listens there; choose another path")


def _new_socket(context: zmq.Context[Any], kind: int, endpoint: str) -> zmq.Socket[Any]:
    """One that forgets what is unsent when it is closed, and finds out when the other end is gone."""
    socket = new_socket(context, kind, endpoint, _MOST_UNHEARD)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.HEARTBEAT_IVL, _ALIVE_MILLISECONDS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _DEAD_MILLISECONDS)
    return socket
