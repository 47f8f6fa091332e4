"""A bad network: messages between peer processes pass through here, and are lost, doubled or held up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.poller import Wakeup
from fastdeploy_cache.ipc.private_directory import PrivateDirectory
from fastdeploy_cache.transfer_manager.peer.messages import ToOwner, ToReader
from fastdeploy_cache.transfer_manager.peer.offer import InstanceInfo

Message = ToOwner | ToReader
Rule = Callable[[Message], int | Message]  # how often it is passed on, or what is instead; called by the relay's thread
Source = int | tuple[int, bytes]  # an owner's rank towards readers; with a connection's name, towards the owner


class Relay:
    """Stands between the readers and every rank of an owner. One connection to the owner for each reader's."""

    def __init__(self, owner: InstanceInfo, rule: Rule) -> None:
        self._owner, self._rule = owner, rule
        self.failure: BaseException | None = None
        self._folder = PrivateDirectory()
        self._stop = Wakeup()
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._sources: dict[Any, Source] = {}
        self._backs: dict[tuple[int, bytes], Any] = {}
        self._fronts = [self._front(rank) for rank in range(owner.tp_size)]
        addresses = tuple(self._address(rank) for rank in range(owner.tp_size))
        self.source = msgspec.structs.replace(owner, addresses=addresses)
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def close(self) -> None:
        """Raises what the rule has raised."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)
        self._stop.close()
        self._folder.remove()
        if self.failure is not None:
            raise self.failure

    def _address(self, rank: int) -> str:
        return f"ipc://{self._folder.path}/relay{rank}"

    def _front(self, rank: int) -> Any:
        front = self._context.socket(zmq.ROUTER)
        front.bind(self._address(rank))
        self._watch(front, rank)
        return front

    def _watch(self, socket: Any, source: Source) -> None:
        self._sources[socket] = source
        self._poller.register(socket, zmq.POLLIN)

    def _run(self) -> None:
        self._poller.register(self._stop.fd, zmq.POLLIN)
        try:
            while True:
                ready = [handle for handle, _ in self._poller.poll()]
                if self._stop.fd in ready:
                    return
                for socket in ready:
                    self._pass_on(socket, self._sources[socket])
        except BaseException as failure:
            self.failure = failure

    def _pass_on(self, socket: Any, source: Source) -> None:
        frames = socket.recv_multipart()
        if isinstance(source, int):
            name, data = frames
            for message in self._ruled(data, ToOwner):
                self._back(source, name).send(message)
        else:
            rank, name = source
            (data,) = frames
            for message in self._ruled(data, ToReader):
                self._fronts[rank].send_multipart([name, message])

    def _ruled(self, data: bytes, kind: Any) -> list[bytes]:
        what = self._rule(decode(data, kind))
        return [data] * what if isinstance(what, int) else [encode(what)]

    def _back(self, rank: int, name: bytes) -> Any:
        if (rank, name) not in self._backs:
            back = self._backs[rank, name] = self._context.socket(zmq.DEALER)
            back.connect(self._owner.addresses[rank])
            self._watch(back, (rank, name))
        return self._backs[rank, name]


@contextmanager
def relayed(pair: Any, rule: Rule) -> Iterator[None]:
    """The pair's receives go through a relay with this rule."""
    relay, direct = Relay(pair.owner.info, rule), pair.source
    pair.source = relay.source
    try:
        yield
    finally:
        pair.source = direct
        relay.close()
