"""The process that publishes: takes records from the engine, and tells whoever listens.

A process of its own: sockets that others connect to may run out of descriptors, and a hundred listeners cost time. The
engine waits for nothing of it.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
from pathlib import Path

from fastdeploy_cache.errors import CodecError, ConfigError, IPCError, PeerRefusedError, QueueDisconnectedError
from fastdeploy_cache.events.index import BlockIndex
from fastdeploy_cache.events.journal import decode_records
from fastdeploy_cache.events.names import name_blocks
from fastdeploy_cache.events.publisher.setup import PublisherSetup
from fastdeploy_cache.events.publisher.snapshots import KeptSnapshots
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.events.questions import (
    Answer,
    AskPiece,
    AskPrefix,
    AskSnapshot,
    PrefixAnswer,
    PublisherState,
    Question,
    Refusal,
    SnapshotPiece,
)
from fastdeploy_cache.events.wire import AllBlocksCleared, Event, encode_batch
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.event_stream import EventOutlet, StreamAddress
from fastdeploy_cache.ipc.peer_channel import load_keys
from fastdeploy_cache.ipc.poller import Poller
from fastdeploy_cache.ipc.shortage import EXIT_SHORT, is_shortage
from fastdeploy_cache.ipc.task_queue import RankQueue
from fastdeploy_cache.transfer_manager.process.main import serve_process
from fastdeploy_cache.transfer_manager.process.wire import (
    EXIT_ENGINE_GONE,
    DoneMessage,
    ReadyMessage,
    StopMessage,
    TaskMessage,
    ToProcess,
)
from fastdeploy_cache.transfer_manager.process.words import RankSignal, RankState
from fastdeploy_cache.transfer_manager.task import Lane, RankResult

logger = logging.getLogger(__name__)

_MOST_QUESTIONS = 64  # that are answered between two looks at what the engine says
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
        self._setup, self._signal = setup, signal
        self._epoch = int.from_bytes(SYSTEM_CLOCK.random_bytes(8), "big") >> 1
        try:
            self._tree = ToldTree(setup.scheme, setup.rows)
            keys = load_keys(Path(setup.keys_folder)) if setup.keys_folder is not None else None
            address = StreamAddress(setup.endpoint, setup.replay_endpoint, setup.topic.encode(), keys)
            self._outlet = EventOutlet(address, setup.num_kept, setup.kept_bytes)
        except (ConfigError, IPCError) as error:
            if setup.incarnation == 1 and not is_shortage(error):
                raise PeerRefusedError(str(error)) from error
            raise
        self._naming = setup.scheme.names()
        self._index = BlockIndex() if setup.token is not None else None
        self._snapshots = KeptSnapshots(self._tree.stored, setup.scheme.block_size)
        self._lanes: dict[Lane, RankQueue] = {}
        self._stopped_lanes: set[Lane] = set()
        self._sent_at = SYSTEM_CLOCK.now()

    def run(self) -> None:
        """Serve until told to stop."""
        try:
            self._signal.state = RankState.READY
            poller = self._open()
            while len(self._stopped_lanes) < len(Lane):
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
        for lane in Lane:
            self._lanes[lane] = RankQueue(setup.queue_fds[lane])
            poller.register(self._lanes[lane].fd, lane)
            self._lanes[lane].put(encode(ReadyMessage(setup.incarnation, lane)))
        poller.register(self._outlet.requests, self._outlet)
        logger.info("event=ready endpoint=%s replay_endpoint=%s", setup.endpoint, setup.replay_endpoint)
        return poller

    def _turn(self, poller: Poller) -> None:
        poller.wait(max(0.0, self._sent_at + self._setup.interval_seconds - SYSTEM_CLOCK.now()))
        for lane, lane_queue in self._lanes.items():
            while (data := lane_queue.get_now()) is not None:
                message: ToProcess = decode(data, ToProcess)
                if isinstance(message, StopMessage):
                    self._stopped_lanes.add(lane)
                    self._signal.state = RankState.STOPPING
                else:
                    self._do(lane, message)
        for _ in range(_MOST_QUESTIONS):
            if (asked := self._outlet.get_question()) is None:
                break
            self._answer(*asked)
        now = SYSTEM_CLOCK.now()
        if now - self._sent_at >= self._setup.interval_seconds:
            self._snapshots.drop_idle(now)
            self._publish([])

    # -- what the engine tells

    def _do(self, lane: Lane, message: TaskMessage) -> None:
        for record in decode_records(message.task.detail):  # what does not fit ends this process: all is told anew then
            self._tree.apply(record)
        events = self._tree.take()
        if self._index is not None:
            for event in events:
                self._index.apply(event)
        for batch in _batches(events):
            self._publish(batch)
        counts = {"sequence": self._outlet.next_sequence, "snapshots": len(self._snapshots)}
        result = RankResult(rank=self._setup.rank, num_bytes=len(message.task.detail), counts=counts)
        self._lanes[lane].put(encode(DoneMessage(message.task.task_id, self._setup.incarnation, result)))

    def _publish(self, events: list[Event]) -> None:
        self._outlet.publish(encode_batch(SYSTEM_CLOCK.unix(), events, self._setup.data_parallel_rank))
        self._sent_at = SYSTEM_CLOCK.now()

    # -- what listeners ask

    def _answer(self, asker: bytes, data: bytes) -> None:
        try:
            question: Question = decode(data, Question)
        except CodecError as error:
            self._outlet.answer(asker, encode(Refusal(number=0, reason=f"{error}"[:200])))
            return
        try:
            answer = self._answer_to(question)
        except LookupError:
            answer = Refusal(number=question.number, reason="there is no such piece now, or too many take snapshots")
        except ValueError as error:
            answer = Refusal(number=question.number, reason=str(error))
        self._outlet.answer(asker, encode(answer))

    def _answer_to(self, question: Question) -> Answer:
        now = SYSTEM_CLOCK.now()
        if isinstance(question, AskPiece):
            events, is_last = self._snapshots.piece(question.snapshot, question.piece, now)
            payload = encode_batch(SYSTEM_CLOCK.unix(), events, self._setup.data_parallel_rank)
            where = {"snapshot": question.snapshot, "piece": question.piece}
            return SnapshotPiece(number=question.number, payload=payload, is_last=is_last, **where)
        if isinstance(question, AskPrefix):
            return self._prefix(question)
        snapshot = self._snapshots.begin(self._tree.freeze(), now) if isinstance(question, AskSnapshot) else None
        return PublisherState(
            number=question.number,
            epoch=self._epoch,
            sequence=self._outlet.next_sequence,
            scheme=self._setup.scheme,
            heartbeat_seconds=self._setup.interval_seconds,
            snapshot=snapshot,
        )

    def _prefix(self, question: AskPrefix) -> Answer:
        token = self._setup.token
        if self._index is None or token is None:
            raise ValueError("this publisher answers no questions about prompts; set events.query_token_file")
        if not hmac.compare_digest(question.token.encode(), token.encode()):
            raise ValueError("the token is wrong")
        if (question.token_ids is None) == (question.names is None):
            raise ValueError("give either token_ids or names")
        names = question.names
        if question.token_ids is not None:
            names = [*name_blocks(self._setup.scheme, self._naming, question.token_ids, question.namespace)]
        found = self._index.find(names or [], self._setup.scheme.block_size)
        return PrefixAnswer(
            number=question.number,
            num_tokens=found.num_tokens,
            num_gpu_tokens=found.num_gpu_tokens,
            num_cpu_tokens=found.num_cpu_tokens,
            num_disk_tokens=found.num_disk_tokens,
        )


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
