"""The process that publishes: takes records from the engine, and tells whoever listens.

A process of its own: sockets that others connect to may run out of descriptors, and a hundred listeners cost time. The
engine waits for nothing of it.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

from fastdeploy_cache.errors import ConfigError, IPCError, PeerRefusedError, QueueDisconnectedError
from fastdeploy_cache.events.journal import decode_delivery
from fastdeploy_cache.events.publisher.answers import Answers
from fastdeploy_cache.events.publisher.setup import PublisherSetup
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.events.wire import AllBlocksCleared, Event, encode_batch
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.event_stream import EventOutlet, StreamAddress
from fastdeploy_cache.ipc.peer_channel import load_keys
from fastdeploy_cache.ipc.poller import Poller
from fastdeploy_cache.ipc.shortage import EXIT_SHORT, is_shortage
from fastdeploy_cache.transfer_manager.process.lane_ends import LaneEnds
from fastdeploy_cache.transfer_manager.process.main import serve_process
from fastdeploy_cache.transfer_manager.process.wire import EXIT_ENGINE_GONE, TaskMessage
from fastdeploy_cache.transfer_manager.process.words import RankSignal
from fastdeploy_cache.transfer_manager.task import Lane, RankResult

logger = logging.getLogger(__name__)

_ANSWERING_SECONDS = 0.1  # between two looks at what the engine says
_REPLAY_SECONDS = 0.02  # until somebody who is sent messages again may have read some
_MESSAGE_BLOCKS = 4096  # told in one message


class PublisherServer:
    """One thread owns the sockets and does everything."""

    def __init__(self, setup: PublisherSetup, signal: RankSignal) -> None:
        """Bind the addresses.

        Raises:
            PeerRefusedError: names of this kind cannot be made, the keys are missing, or, at the first start, an
                address cannot be had.
            IPCError: a later start cannot have an address.
        """
        self._setup = setup
        try:
            self._tree = ToldTree(setup.scheme, setup.rows)
            keys = load_keys(Path(setup.keys_folder)) if setup.keys_folder is not None else None
            address = StreamAddress(setup.endpoint, setup.replay_endpoint, setup.topic.encode(), keys)
            self._outlet = EventOutlet(address, setup.num_kept, setup.kept_bytes)
        except (ConfigError, IPCError) as error:
            if setup.incarnation == 1 and not is_shortage(error):
                raise PeerRefusedError(str(error)) from error
            raise
        epoch = int.from_bytes(SYSTEM_CLOCK.random_bytes(8), "big") >> 1
        self._answers = Answers(self._tree, setup, epoch, SYSTEM_CLOCK)
        self._next_delivery = 0
        self._lanes = LaneEnds(setup, signal)
        self._sent_at = SYSTEM_CLOCK.now()

    def run(self) -> None:
        """Serve until told to stop."""
        try:
            poller = self._open()
            while not self._lanes.are_stopped:
                self._turn(poller)
            self._outlet.close()
        except QueueDisconnectedError:
            os._exit(EXIT_ENGINE_GONE)
        except BaseException as error:
            logger.exception("event=publisher_failed")
            os._exit(EXIT_SHORT if is_shortage(error) else 1)
        os._exit(0)

    def _open(self) -> Poller:
        setup, poller = self._setup, Poller()
        self._lanes.open(poller)
        poller.register(self._outlet.requests, self._outlet)
        logger.info("event=ready endpoint=%s replay_endpoint=%s", setup.endpoint, setup.replay_endpoint)
        return poller

    def _turn(self, poller: Poller) -> None:
        next_beat = max(0.0, self._sent_at + self._setup.interval_seconds - SYSTEM_CLOCK.now())
        poller.wait(min(next_beat, _REPLAY_SECONDS) if self._outlet.is_replaying else next_beat)
        for lane, message in self._lanes.take():
            self._do(lane, message)
        until = SYSTEM_CLOCK.now() + _ANSWERING_SECONDS
        while SYSTEM_CLOCK.now() < until and (asked := self._outlet.get_question()) is not None:
            if asked[1]:
                self._outlet.answer(asked[0], self._answers.answer(asked[1], self._outlet.next_sequence))
        self._outlet.go_on()
        self._answers.drop_idle()
        if SYSTEM_CLOCK.now() - self._sent_at >= self._setup.interval_seconds:
            self._publish([])

    # -- what the engine tells

    def _do(self, lane: Lane, message: TaskMessage) -> None:
        delivery = decode_delivery(message.task.detail)
        if delivery.number != self._next_delivery:
            self._tree.distrust()
        self._next_delivery = delivery.number + 1
        for record in delivery.records:  # what does not fit ends this process: all is told anew then
            self._tree.apply(record)
        events = self._tree.take()
        self._answers.take_in(events)
        for batch in _batches(events):
            self._publish(batch)
        counts = {"sequence": self._outlet.next_sequence}
        result = RankResult(rank=self._setup.rank, num_bytes=len(message.task.detail), counts=counts)
        self._lanes.reply(lane, message.task.task_id, result)

    def _publish(self, events: list[Event]) -> None:
        self._outlet.publish(encode_batch(SYSTEM_CLOCK.unix(), events, self._setup.data_parallel_rank))
        self._sent_at = SYSTEM_CLOCK.now()


def _batches(events: list[Event]) -> list[list[Event]]:
    """The events, in messages of bounded size."""
    batches, room = list[list[Event]](), -math.inf
    for event in events:
        size = 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        if room < size:
            batches.append([])
            room = _MESSAGE_BLOCKS
        batches[-1].append(event)
        room -= size
    return batches


def main() -> int:
    """The process's entry."""
    return serve_process(PublisherSetup, PublisherServer)
