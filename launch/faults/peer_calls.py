"""Calls for messages between instances, with the face of ZeroMQ as far as `ipc.peer_channel` uses it.

A message is queued where nobody listens yet, and lost where the other end is gone, or does not read; each connection
keeps its order, two connections have none between them. Source: zmq_socket(3), ZMQ_ROUTER and ZMQ_DEALER.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import Any

import zmq

from fastdeploy_cache.launch.faults.message_calls import MessageCalls, SimulatedPoller
from fastdeploy_cache.launch.faults.namespaces import Namespace
from fastdeploy_cache.launch.faults.open_files import OpenFile
from fastdeploy_cache.launch.faults.scheduler import Waiters
from fastdeploy_cache.launch.faults.trouble import Trouble


class Network:
    """Who listens where."""

    def __init__(self, calls: MessageCalls, trouble: Trouble, lost_share: float) -> None:
        """`lost_share`: of its messages, where all is well."""
        self.calls, self._trouble, self._lost_share = calls, trouble, lost_share
        self.listeners: dict[str, _Listener] = {}
        self.waiting: dict[str, list[_Connection]] = {}  # that have connected to an address, by it

    def is_lost(self) -> bool:
        """Whether the message that is sent now does not come."""
        share = max(self._trouble.lost_share, self._lost_share)
        return self._trouble.fails(share, self.calls.scheduler.chance)

    def namespaces(self) -> dict[str, Namespace]:
        """The module whose place it takes, by name."""
        space = Namespace(
            zmq,
            {
                "Poller": lambda: SimulatedPoller(self.calls),
                "POLLIN": 1,
                "Context": lambda *_, **__: _Context(self),
                "ROUTER": int(zmq.ROUTER),
                "DEALER": int(zmq.DEALER),
                "NOBLOCK": int(zmq.NOBLOCK),
            },
            ("LINGER", "MAXMSGSIZE", "IPV6", "ROUTER_MANDATORY", "ROUTING_ID", "auth"),
        )
        return {"zmq": space}


class _Inbox:
    """Messages on their way to a socket."""

    def __init__(self, network: Network) -> None:
        self._network, self.waiters = network, Waiters()
        self._messages: deque[tuple[float, Any]] = deque()
        self._last_arrival = 0.0

    def is_readable(self) -> bool:
        """Whether one has come."""
        return bool(self._messages) and self._messages[0][0] <= self._network.calls.scheduler.now

    def put(self, message: Any, capacity: int) -> bool:
        """False: too many are there already."""
        calls = self._network.calls
        if len(self._messages) >= capacity:
            return False
        arrival = self._last_arrival = max(self._last_arrival, calls.scheduler.now + calls.transit())
        self._messages.append((arrival, message))
        calls.scheduler.call_at(arrival, self.waiters.wake)
        self.waiters.wake()
        return True

    def take(self) -> Any:
        """The next. Raises `zmq.Again`."""
        if not self.is_readable():
            raise zmq.Again(errno.EAGAIN)
        return self._messages.popleft()[1]


class _Listener(OpenFile):
    """The end that is bound."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network, self.inbox, self.address = network, _Inbox(network), ""
        self.waiters = self.inbox.waiters
        self.connections: dict[bytes, _Connection] = {}

    def is_readable(self) -> bool:
        return self.inbox.is_readable()

    def bind(self, address: str) -> None:
        """The one that was there before is dead, or this is refused. Raises `zmq.ZMQError`."""
        network = self._network
        if address in network.listeners:
            raise zmq.ZMQError(errno.EADDRINUSE)
        self.address = address
        network.listeners[address] = self
        for connection in network.waiting.get(address, ()):
            connection.reach(self)

    def end(self) -> None:
        self._network.listeners.pop(self.address, None)
        for connection in self.connections.values():
            connection.listener = None


class _Connection(OpenFile):
    """The end that connects."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network, self.inbox = network, _Inbox(network)
        self.name, self.address, self.waiters = b"", "", self.inbox.waiters
        self.listener: _Listener | None = None
        self._unsent: deque[bytes] = deque()

    def is_readable(self) -> bool:
        return self.inbox.is_readable()

    def connect(self, address: str) -> None:
        """Now, or once somebody listens there."""
        network = self._network
        self.address = address
        network.waiting.setdefault(address, []).append(self)
        if address in network.listeners:
            self.reach(network.listeners[address])

    def reach(self, listener: _Listener) -> None:
        """It listens now."""
        self.listener = listener
        listener.connections[self.name] = self
        while self._unsent:
            listener.inbox.put((self.name, self._unsent.popleft()), 10**6)

    def send(self, message: bytes, capacity: int) -> bool:
        """False: too many wait."""
        if self._network.is_lost():
            return True
        if self.listener is None:
            if len(self._unsent) >= capacity:
                return False
            self._unsent.append(message)
            return True
        return self.listener.inbox.put((self.name, message), capacity)

    def end(self) -> None:
        waiting = self._network.waiting.get(self.address, [])
        if self in waiting:
            waiting.remove(self)
        if self.listener is not None:
            self.listener.connections.pop(self.name, None)


class _Context:
    """See `zmq.Context`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def socket(self, kind: int) -> _Socket:
        return _Socket(self._network, kind)

    def term(self) -> None:
        """All sockets are closed."""


class _Socket:
    """See `zmq.Socket`."""

    def __init__(self, network: Network, kind: int) -> None:
        self._network, self._capacity = network, 1000
        self.file: _Listener | _Connection = (_Listener if kind == zmq.ROUTER else _Connection)(network)
        try:
            self._fd = network.calls.files.install(self.file)
        except OSError as error:
            raise zmq.ZMQError(error.errno) from error

    def set(self, option: int, value: Any) -> None:
        if option == zmq.ROUTING_ID:
            assert isinstance(self.file, _Connection)
            self.file.name = value

    def set_hwm(self, num_messages: int) -> None:
        self._capacity = num_messages

    def bind(self, address: str) -> None:
        assert isinstance(self.file, _Listener)
        self.file.bind(address)

    def connect(self, address: str) -> None:
        assert isinstance(self.file, _Connection)
        self.file.connect(address)

    def send_multipart(self, parts: list[bytes], flags: int) -> None:
        """Send to a connection by its name. Raises `zmq.ZMQError` where it is gone."""
        self._step()
        name, message = parts
        assert isinstance(self.file, _Listener)
        connection = self.file.connections.get(name)
        if connection is None:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        if not self._network.is_lost() and not connection.inbox.put(message, self._capacity):
            raise zmq.Again(errno.EAGAIN)

    def send(self, message: bytes, flags: int) -> None:
        """Send to who listens. Raises `zmq.Again` where too many wait."""
        self._step()
        assert isinstance(self.file, _Connection)
        if not self.file.send(message, self._capacity):
            raise zmq.Again(errno.EAGAIN)

    def recv_multipart(self, flags: int) -> list[bytes]:
        """The name of a sender, and what it says."""
        self._step()
        return list(self.file.inbox.take())

    def recv(self, flags: int) -> bytes:
        """What the listener says."""
        self._step()
        message: bytes = self.file.inbox.take()
        return message

    def _step(self) -> None:
        calls = self._network.calls
        calls.num_messages += 1
        calls.scheduler.step("message")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._network.calls.files.close(fd)
