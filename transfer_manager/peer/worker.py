"""The rank's peer process: lets other instances read the rank's KV arrays, and reads theirs into it.

A process of its own, because a read may go on in a library after it was given up: it is killed then, and once it has
been reaped nothing writes into the blocks any more.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path
from typing import NamedTuple

from fastdeploy_cache.errors import CodecError, IPCError, PeerRefusedError, QueueDisconnectedError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.peer_channel import PeerListener, load_keys, new_context
from fastdeploy_cache.ipc.poller import Poller, Wakeup
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shortage import EXIT_SHORT, is_shortage
from fastdeploy_cache.transfer_manager.kv.memory import KVMemory
from fastdeploy_cache.transfer_manager.peer import open_link
from fastdeploy_cache.transfer_manager.peer.checkpoint_read import why_no_units
from fastdeploy_cache.transfer_manager.peer.link import Link, LinkError
from fastdeploy_cache.transfer_manager.peer.link_peers import LinkPeers
from fastdeploy_cache.transfer_manager.peer.messages import (
    Confirm,
    EndReceiveDetail,
    Hello,
    Leave,
    ReceiveDetail,
    SendDetail,
    Subscribe,
    ToOwner,
    ToReader,
    Welcome,
    Why,
)
from fastdeploy_cache.transfer_manager.peer.peer_signal import NUM_PEER_SLOTS, PeerSignal
from fastdeploy_cache.transfer_manager.peer.receiver import Here, RankReceive, ReceiveFailedError
from fastdeploy_cache.transfer_manager.peer.sender import Sender
from fastdeploy_cache.transfer_manager.peer.setup import PeerSetup
from fastdeploy_cache.transfer_manager.process.lane_ends import LaneEnds
from fastdeploy_cache.transfer_manager.process.main import serve_process
from fastdeploy_cache.transfer_manager.process.wire import EXIT_ENGINE_GONE, TaskMessage
from fastdeploy_cache.transfer_manager.process.words import RankSignal
from fastdeploy_cache.transfer_manager.task import Lane, RankResult, TaskKind, TransferTask

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25  # while there is something that may be late
_IDLE_SECONDS = 60.0
_ANSWER_SECONDS = 0.5  # before a task's deadline, at which the engine begins to think that this process is stuck
_MAX_READS = 4  # at a time: more only share the bandwidth
_MAX_MESSAGES = 4096
_STOP_SECONDS = 1.0


class _Ended(NamedTuple):
    """A receive has come to its end: which, and what is told to the engine."""

    number: int
    task_id: int
    result: RankResult


class PeerServer:
    """One thread owns the sockets and all sends; each receive has a thread of its own, another one follows the model's
    step."""

    def __init__(self, setup: PeerSetup, signal: RankSignal) -> None:
        """Attach the KV arrays and let the link know them.

        Raises:
            IPCError, LayoutError: the KV arrays cannot be attached.
            PeerRefusedError, LinkError, IPCError: the link's library is missing, or does not start; or the control
                socket's address cannot be had.
        """
        self._setup, self._signal = setup, signal
        self._kv = KVMemory.open(setup.layout, setup.num_gpu_blocks, setup.kv)
        for segment in self._kv.segments:
            segment.prefault()  # or the first receives would be several times as slow
        self._words = PeerSignal(SharedArray(setup.peer_signal_fd, PeerSignal.NUM_BYTES))
        try:
            self._link: Link = open_link(setup.link, setup.link_options)
            self._link.register(self._kv.segments)
            self._welcome = encode(Welcome(setup.instance_id, setup.rank, self._link.endpoint(), self._kv.places))
            self._context = new_context()
            keys = load_keys(Path(setup.keys_folder)) if setup.keys_folder is not None else None
            self._listener = PeerListener(self._context, setup.address, keys, _MAX_MESSAGES)
        except (LinkError, IPCError) as error:
            # at the very first start it is the settings; later the library, or the port, may have had a bad moment
            if setup.incarnation == 1 or (isinstance(error, LinkError) and error.reason == "refused"):
                raise PeerRefusedError(str(error)) from error
            raise
        self._sender = Sender(
            setup.instance_id, setup.layout.num_layers, setup.silence_seconds, self._put, lambda: self._words.step_word,
            has_rows=bool(setup.layout.rows),
        )  # fmt: skip
        self._num_in_flight = [0] * NUM_PEER_SLOTS
        for slot in range(NUM_PEER_SLOTS):  # what a killed process was reading is read no more
            self._words.count_in_flight(slot, 0)
        self._counting = threading.Lock()
        self._here = Here(
            setup.instance_id, setup.name, setup.rank, setup.tp_size, setup.layout, self._kv.places, self._link,
            LinkPeers(self._link), self._context, keys, setup.silence_seconds, threading.Semaphore(_MAX_READS),
            self._count_in_flight,
        )  # fmt: skip
        self._wakeup = Wakeup()
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._receives: dict[int, RankReceive] = {}
        self._lanes = LaneEnds(setup, signal)
        self._is_busy = False

    def run(self) -> None:
        """Serve until told to stop. Ends the process: what links' libraries do at an interpreter's end is not known."""
        try:
            threading.Thread(target=self._follow_step, name="step", daemon=True).start()
            poller = self._open_lanes()
            while self._turn(poller):
                pass
            self._stop()
        except QueueDisconnectedError:
            os._exit(EXIT_ENGINE_GONE)
        except BaseException as error:
            logger.exception("event=peer_failed rank=%d", self._setup.rank)
            os._exit(EXIT_SHORT if is_shortage(error) else 1)
        os._exit(0)

    def _open_lanes(self) -> Poller:
        setup, poller = self._setup, Poller()
        self._lanes.open(poller)
        poller.register(self._listener.socket, self._listener)
        poller.register(self._wakeup.fd, self._wakeup)
        logger.info("event=ready rank=%d link=%s address=%s", setup.rank, setup.link, setup.address)
        return poller

    def _turn(self, poller: Poller) -> bool:
        """False when every lane has been told to stop."""
        keys = poller.wait(_TICK_SECONDS if self._is_busy else _IDLE_SECONDS)
        if self._wakeup in keys:
            self._wakeup.clear()
        self._sender.tell_step()
        for lane, message in self._lanes.take():
            self._do(lane, message)
        if self._lanes.are_stopped:
            return False
        while (named := self._listener.get_now()) is not None:  # after the lanes: offers before those who ask for them
            self._hear(*named)
        self._sender.tick(SYSTEM_CLOCK.now())
        self._answer()
        self._is_busy = self._here.peers.drop_idle() or bool(self._receives) or self._sender.has_sends
        return True

    # -- tasks of the engine

    def _do(self, lane: Lane, message: TaskMessage) -> None:
        task = message.task
        if message.incarnation != self._setup.incarnation:
            self._done(lane, task, Why("failed", f"task is for incarnation {message.incarnation}"))
        elif task.kind is TaskKind.SEND:
            detail: SendDetail = decode(task.detail, SendDetail)
            self._sender.begin(task, detail, task.deadline - _ANSWER_SECONDS, SYSTEM_CLOCK.now())
        elif task.kind is TaskKind.UPDATE_SEND:
            self._sender.update(task, decode(task.detail, SendDetail))
            self._done(lane, task)
        elif task.kind is TaskKind.RECEIVE:
            self._receive(task, decode(task.detail, ReceiveDetail))
        elif task.kind is TaskKind.END_RECEIVE:
            ended: EndReceiveDetail = decode(task.detail, EndReceiveDetail)
            if ended.receive_number in self._receives:
                self._receives[ended.receive_number].cancel()
            self._done(lane, task)
        else:
            self._done(lane, task, Why("failed", f"a peer process does not {task.kind.value}"))

    def _done(self, lane: Lane, task: TransferTask, why: Why | None = None) -> None:
        self._lanes.reply(lane, task.task_id, self._result(why))

    def _result(
        self, why: Why | None, num_bytes: int = 0, num_blocks: int = 0, seconds: float = 0.0, peer: str = ""
    ) -> RankResult:
        return RankResult(
            rank=self._setup.rank,
            num_bytes=num_bytes,
            num_blocks=num_blocks if why is None else 0,
            seconds=seconds,
            error=f"{why.reason}: {why.text}" if why is not None else None,
            peer=peer,
        )

    def _receive(self, task: TransferTask, detail: ReceiveDetail) -> None:
        if (error := self._why_not(task, detail)) is not None:
            self._done(Lane.IN, task, Why("refused", error))
            return
        receive = RankReceive(self._here, detail, task.destination_ids, task.deadline - _ANSWER_SECONDS)
        self._receives[detail.receive_number] = receive

        def run() -> None:
            started, num_bytes, why = SYSTEM_CLOCK.now(), 0, None
            try:
                num_bytes = receive.run()
            except ReceiveFailedError as failure:
                why = failure.why
            except LinkError as error:
                logger.error("event=read_given_up task_id=%d reason=%s action=end_process", task.task_id, error)
                os._exit(1)  # bytes may still arrive: the blocks are free once this process is reaped
            except BaseException:
                logger.exception("event=receive_failed task_id=%d", task.task_id)
                os._exit(1)
            result = self._result(why, num_bytes, len(task.destination_ids), SYSTEM_CLOCK.now() - started)
            self._ended.put(_Ended(detail.receive_number, task.task_id, result))
            self._wakeup.set()

        threading.Thread(target=run, name=f"receive-{detail.receive_number}", daemon=True).start()

    def _why_not(self, task: TransferTask, detail: ReceiveDetail) -> str | None:
        """What would be written elsewhere than into the task's blocks is refused before anything is read."""
        ids, num_blocks = task.destination_ids, self._setup.num_gpu_blocks
        if detail.receive_number in self._receives:
            return f"receive {detail.receive_number} is under way already"
        if len(ids) != detail.num_blocks - detail.first_block:
            return f"{len(ids)} blocks for blocks {detail.first_block} to {detail.num_blocks} of an offer"
        outside = ids[(ids < 0) | (ids >= num_blocks)]
        if len(outside):
            return f"block {outside[0]} is outside a pool of {num_blocks}"
        return why_no_units(self._setup.layout, detail.num_blocks, detail.units) if detail.units is not None else None

    def _answer(self) -> None:
        for end in self._sender.take_ended():
            self._lanes.reply(
                Lane.OUT, end.task_id, self._result(end.why, end.num_bytes, end.num_blocks, peer=end.peer)
            )
        while not self._ended.empty():
            ended = self._ended.get()
            del self._receives[ended.number]
            self._lanes.reply(Lane.IN, ended.task_id, ended.result)

    # -- other instances

    def _hear(self, connection: bytes, data: bytes) -> None:
        try:
            message: ToOwner = decode(data, ToOwner)
        except CodecError as error:
            logger.warning("event=bad_message num_bytes=%d error=%r", len(data), str(error))
            return
        now = SYSTEM_CLOCK.now()
        if isinstance(message, Hello):
            self._listener.put(connection, self._welcome)
        elif isinstance(message, Subscribe):
            self._sender.subscribe(connection, message, now)
        elif isinstance(message, Confirm):
            self._sender.confirm(connection, message, now)
        elif isinstance(message, Leave):
            self._sender.leave(message)

    def _put(self, connection: bytes, message: ToReader) -> None:
        self._listener.put(connection, encode(message))

    # -- other threads

    def _follow_step(self) -> None:
        word = self._words.step_word
        while True:
            seen = self._words.wait_step(word, _IDLE_SECONDS)
            if seen != word:
                word = seen
                if self._sender.has_sends:
                    self._wakeup.set()

    def _count_in_flight(self, slot: int, change: int) -> None:
        with self._counting:
            self._num_in_flight[slot] += change
            self._words.count_in_flight(slot, self._num_in_flight[slot])

    def _stop(self) -> None:
        """Tell whoever reads or is read from; the engine answers what is left."""
        for receive in self._receives.values():
            receive.cancel()
        until = SYSTEM_CLOCK.now() + _STOP_SECONDS
        while self._receives and (left := until - SYSTEM_CLOCK.now()) > 0:
            try:
                del self._receives[self._ended.get(timeout=left).number]
            except queue.Empty:
                break
        self._sender.stop()
        self._listener.close()
        if not self._receives:  # else a socket is open, and this would wait for it
            self._context.term()
        self._link.close()
        logger.info("event=stopped rank=%d", self._setup.rank)


def main() -> int:
    """The process's entry."""
    return serve_process(PeerSetup, PeerServer)
