"""Oracles over the order of things, which see a promise broken before any byte is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fastdeploy_cache.books import arrivals
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.movement import cargo
from fastdeploy_cache.transfer_manager.peer.messages import Confirmed
from fastdeploy_cache.transfer_manager.peer.receiver import RankReceive
from fastdeploy_cache.transfer_manager.peer.sender import Sender


class OrderOracles:
    """What was seen to be out of order, in all stories that run meanwhile.

    - A rank of an owner gives its last word only while it holds the send, or again after it has.
    - A receive ends well only after the last word of each rank that it has read from.
    - What a copy down has copied is where the task was told to put it, block by block.
    """

    def __init__(self) -> None:
        self.broken: list[str] = []
        self._words: set[tuple[object, object, int]] = set()  # the send, the reader, whose word it is

    def confirm(self, original: Any, sender: Any, connection: bytes, message: Any, now: float) -> None:
        """Stands in for `Sender.confirm`."""
        key, reader, put = message.key, message.reader, sender._put
        send = sender._sends.get(key.number) if key.instance_id == sender._instance_id else None
        is_bound = send is not None and send.is_final and send.receiver == (reader.instance_id, reader.number)
        is_held = is_bound or (key, reader, id(sender)) in self._words  # the answer may have been lost

        def heard(to: bytes, said: Any) -> None:
            if isinstance(said, Confirmed):
                self._words.add((said.key, said.reader, id(sender)))
                if not is_held:
                    self.broken.append("an owner confirms what it does not hold")
            put(to, said)

        sender._put = heard
        try:
            original(sender, connection, message, now)
        finally:
            sender._put = put

    def read_all(self, original: Any, receive: Any, sources: Any) -> None:
        """Stands in for `RankReceive._read_all`."""
        original(receive, sources)
        num_words = sum(word[:2] == (receive._key, receive._reader) for word in self._words)
        if num_words < len(sources):
            self.broken.append("a receive ends well without its owner's last word")

    def land(self, original: Any, tree: Any, segment: Any, succeeded: bool) -> int:
        """Stands in for `land`."""
        run, ids = segment.run, segment.ids
        num_joined: int = original(tree, segment, succeeded)
        if num_joined and segment.transfer.tier is CPU:
            first = segment.end - num_joined - run.cpu_start
            # not `ids_in`, which may be given no memory here as well as in the product's own calls
            there = memoryview(run.packed_ids(CPU)).cast("i")
            if first < 0 or there[first : first + num_joined] != memoryview(ids)[-num_joined:]:
                self.broken.append("a copy is not where its task has put it")
        return num_joined


@contextmanager
def watching_order() -> Iterator[OrderOracles]:
    """Every story that runs meanwhile is looked at."""
    oracles = OrderOracles()

    def hooked(original: Any, hook: Any) -> Any:
        return lambda *arguments: hook(original, *arguments)

    with (
        patch.object(Sender, "confirm", hooked(Sender.confirm, oracles.confirm)),
        patch.object(RankReceive, "_read_all", hooked(RankReceive._read_all, oracles.read_all)),
        patch.object(cargo, "land", hooked(arrivals.land, oracles.land)),
    ):
        yield oracles
