"""One receive of one rank: reads an offer's blocks, layer by layer, as another instance computes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_cache.errors import CodecError, IPCError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.codec import Int32Array, decode, encode, unpack_int32
from fastdeploy_cache.ipc.peer_channel import CurveKeys, PeerConnection
from fastdeploy_cache.ipc.poller import Poller, Wakeup
from fastdeploy_cache.transfer_manager.kv.layout import Places, RankLayout
from fastdeploy_cache.transfer_manager.peer.checkpoint_read import CheckpointRead
from fastdeploy_cache.transfer_manager.peer.heads import PieceMaker, Share, Side, num_readers, shares_of
from fastdeploy_cache.transfer_manager.peer.link import Link, LinkError, Peer, Pieces
from fastdeploy_cache.transfer_manager.peer.link_peers import LinkPeers
from fastdeploy_cache.transfer_manager.peer.messages import (
    Confirm,
    Confirmed,
    Hello,
    Leave,
    ReaderKey,
    Reason,
    ReceiveDetail,
    SendKey,
    SendState,
    Subscribe,
    ToOwner,
    ToReader,
    Welcome,
    Why,
)
from fastdeploy_cache.transfer_manager.peer.progress import Progress

_ASK_SECONDS = 0.5  # a reader asks again, and shows that it lives
_STEP_BYTES = 16 * 2**20  # read at a time: between two it looks at its messages
_MAX_MESSAGES = 1000
_ID_BYTES = 4
_MAX_OFFSET = 2**62


class ReceiveFailedError(Exception):
    """The receive came to nothing."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.why = Why(reason, text)


class Here(NamedTuple):
    """What all receives of a rank share."""

    instance_id: bytes
    name: str
    rank: int
    tp_size: int
    layout: RankLayout
    places: Places
    link: Link
    peers: LinkPeers
    context: Any  # ZeroMQ's
    keys: CurveKeys | None
    silence_seconds: float
    reading: threading.Semaphore  # so many reads at a time
    count_in_flight: Callable[[int, int], None]  # slot, change in layers


class _Source:
    """One rank of the other instance."""

    def __init__(self, here: Here, detail: ReceiveDetail, share: Share) -> None:
        address, key = detail.source.addresses[share.rank], detail.source.public_key
        self.share, self.address = share, address
        self.connection = PeerConnection(here.context, address, here.keys, key, _MAX_MESSAGES)
        self.welcome: Welcome | None = None
        self.ids = [-1] * detail.first_block
        num_blocks = detail.num_blocks if share.num_heads else detail.first_block
        self.progress = Progress(detail.first_block, num_blocks, here.layout.num_layers)
        self.is_complete = False  # as far as its owner says
        self.is_confirmed = False
        self.heard_at = SYSTEM_CLOCK.now()
        self.asked_at = 0.0
        self.makers: list[PieceMaker] = []  # by row
        self.checkpoint: CheckpointRead | None = None
        if detail.units is not None:
            self.checkpoint = CheckpointRead(here.layout, detail.num_blocks, detail.units)
        self.peer: Peer | None = None
        self.num_bytes = 0

    @property
    def is_read(self) -> bool:
        return self.is_complete and self.progress.is_done and (self.checkpoint is None or self.checkpoint.is_done)


class RankReceive:
    """One rank's part of a receive. `run` is called once, by a thread of its own; `cancel` by any."""

    def __init__(self, here: Here, detail: ReceiveDetail, destination_ids: Int32Array, deadline: float) -> None:
        self._here, self._detail, self._deadline = here, detail, deadline
        self._ids = destination_ids
        self._key = SendKey(detail.source.instance_id, detail.number)
        self._reader = ReaderKey(here.instance_id, detail.receive_number, here.rank)
        self._cancelled = Wakeup()
        self._is_cancelled = False
        self._sources: list[_Source] = []
        self._all_read = False
        self._counted = 0

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._is_cancelled = True
        self._cancelled.set()

    def run(self) -> int:
        """Returns the bytes that were read; all of them count.

        Raises:
            ReceiveFailedError: see its reason; nothing counts.
            LinkError: with `may_write_later`: the destinations are safe only once this process has ended.
        """
        sources = self._sources
        try:
            self._open(sources)
            if self._detail.wants_nothing:
                self._leave(sources, None)
                return 0
            self._read_all(sources)
            return sum(source.num_bytes for source in sources)
        except ReceiveFailedError as failure:
            self._leave(sources, failure.why)
            raise
        except LinkError as error:
            self._leave(sources, Why(error.reason, str(error)))
            if error.may_write_later:
                raise
            raise ReceiveFailedError(error.reason, str(error)) from error
        finally:
            self._sources = []
            self._count_in_flight()
            for source in sources:
                if source.peer is not None:
                    self._here.peers.release(source.peer)
                source.connection.close()
            self._cancelled.close()

    # -- steps

    def _open(self, sources: list[_Source]) -> None:
        here, detail = self._here, self._detail
        num_heads = detail.source.layout.num_kv_heads
        try:
            for share in shares_of(num_heads, here.tp_size, here.rank, detail.source.tp_size):
                sources.append(_Source(here, detail, share))  # noqa: PERF401  those before a failure are closed
        except IPCError as error:
            raise ReceiveFailedError("refused", str(error)) from error

    def _read_all(self, sources: list[_Source]) -> None:
        poller = Poller()
        poller.register(self._cancelled.fd, self._cancelled)
        for source in sources:
            poller.register(source.connection.socket, source)
        while not all(source.is_confirmed for source in sources):
            self._check(sources)
            self._ask(sources)
            if not any(self._read_some(source) for source in sources):
                poller.wait(min(_ASK_SECONDS / 2, self._seconds_left()))
            for source in sources:
                self._hear(source)

    def _check(self, sources: list[_Source]) -> None:
        now = SYSTEM_CLOCK.now()
        if self._is_cancelled:
            raise ReceiveFailedError("cancelled", "nobody wants it any more")
        if now > self._deadline:
            raise ReceiveFailedError("late", "its time is over")
        for source in sources:
            if not source.is_confirmed and now - source.heard_at > self._here.silence_seconds:
                hint = " (or does not trust this host's key)" if source.address.startswith("tcp://") else ""
                raise ReceiveFailedError("gone", f"{source.address} of rank {source.share.rank} is silent{hint}")

    def _ask(self, sources: list[_Source]) -> None:
        """Say what each source has to know; again after a while, as messages may be lost."""
        now, all_read = SYSTEM_CLOCK.now(), all(source.is_read for source in sources)
        is_new, self._all_read = all_read and not self._all_read, all_read
        for source in sources:
            if is_new:
                source.asked_at = 0.0
            if source.is_confirmed or now - source.asked_at < _ASK_SECONDS:
                continue
            source.asked_at = now
            if source.welcome is None:
                self._put(source, Hello())
            self._put(source, self._question(source, all_read))

    def _question(self, source: _Source, all_read: bool) -> ToOwner:
        if all_read:
            return Confirm(self._key, self._reader, source.num_bytes)
        there = self._detail.source
        readers = num_readers(there.layout.num_kv_heads, self._here.tp_size, there.tp_size, source.share.rank)
        return Subscribe(self._key, self._reader, readers, len(source.ids), self._here.name)

    def _put(self, source: _Source, message: ToOwner) -> None:
        source.connection.put(encode(message))

    def _hear(self, source: _Source) -> None:
        while (data := source.connection.get_now()) is not None:
            try:
                message: ToReader = decode(data, ToReader)
            except CodecError as error:
                raise ReceiveFailedError("failed", f"{source.address} sent what is no message: {error}") from error
            source.heard_at = SYSTEM_CLOCK.now()
            if isinstance(message, Welcome):
                self._meet(source, message)
            elif message.key == self._key and message.reader == self._reader:
                if isinstance(message, Confirmed):
                    source.is_confirmed |= self._all_read  # else nobody has asked
                else:
                    self._follow(source, message)

    def _meet(self, source: _Source, welcome: Welcome) -> None:
        if source.welcome is not None:
            return
        here, there, share = self._here, self._detail.source, source.share
        if (welcome.instance_id, welcome.rank) != (there.instance_id, share.rank):
            raise ReceiveFailedError("gone", f"another run of an instance answers at {source.address}")
        source.welcome = welcome
        if not share.num_heads:
            return
        layout = there.layout.for_rank(there.tp_size, there.block_size)
        numbers = [n for in_layer in welcome.places for place in in_layer for n in place]
        num_parts = [len(layout.parts_of(layer)) for layer in range(layout.num_layers)]
        is_other = [len(in_layer) for in_layer in welcome.places] != num_parts
        if is_other or not all(0 <= n < _MAX_OFFSET for n in numbers):
            raise ReceiveFailedError("refused", f"{source.address} has KV arrays of another layout than its offer says")
        source.peer = here.peers.acquire(welcome.endpoint, min(self._seconds_left(), here.silence_seconds))
        remote = Side(layout, welcome.places, share.first_remote)
        local = Side(here.layout, here.places, share.first_local)
        rows = range(len(here.layout.rows) or 1)
        source.makers = [PieceMaker(local, remote, share.num_heads, row=row) for row in rows]

    def _follow(self, source: _Source, state: SendState) -> None:
        if state.why is not None:
            raise ReceiveFailedError(state.why.reason, state.why.text)
        if len(state.block_ids) % _ID_BYTES:
            raise ReceiveFailedError("failed", f"{source.address} sent {len(state.block_ids)} bytes of block ids")
        new, known = unpack_int32(state.block_ids).tolist(), len(source.ids)
        if state.first_id > known:  # something was lost in between
            source.asked_at = 0.0
            return
        source.ids += new[known - state.first_id :]
        if state.num_complete > len(source.ids) or any(chunk.end > len(source.ids) for chunk in state.chunks):
            raise ReceiveFailedError("failed", f"{source.address} speaks of blocks that it has not named")
        source.is_complete = state.num_complete >= self._detail.num_blocks
        source.progress.note(state.num_complete, state.chunks)
        if state.units is not None and source.checkpoint is not None:
            self._note_units(source, source.checkpoint, state)
        self._count_in_flight()

    def _note_units(self, source: _Source, checkpoint: CheckpointRead, state: SendState) -> None:
        units, num_blocks = state.units or b"", self._detail.num_blocks
        if state.num_blocks != num_blocks:
            what = f"a checkpoint behind {state.num_blocks} blocks, and not {num_blocks}"
            raise ReceiveFailedError("failed", f"{source.address} has {what}")
        if not checkpoint.note(units):
            raise ReceiveFailedError("failed", f"{source.address} sent {len(units)} bytes of other units")

    def _read_some(self, source: _Source) -> bool:
        """One piece of what is ready; False where there is none, or others are reading."""
        if (peer := source.peer) is None or (found := self._next_pieces(source)) is None:
            return False
        pieces, note_read = found
        if not self._here.reading.acquire(timeout=_ASK_SECONDS / 2):
            return False  # it has to show that it lives meanwhile
        try:
            seconds = min(self._seconds_left(), self._here.silence_seconds)
            source.num_bytes += self._here.link.read(peer, pieces, seconds) if len(pieces.num_bytes) else 0
        finally:
            self._here.reading.release()
        note_read()
        self._count_in_flight()
        return True

    def _next_pieces(self, source: _Source) -> tuple[Pieces, Callable[[], None]] | None:
        """What to read next, and what notes that it has been read: blocks, and behind them the checkpoint."""
        first, maker = self._detail.first_block, source.makers[0]
        step = source.progress.next_step(_STEP_BYTES * self._here.layout.num_layers // maker.block_bytes)
        if step is not None:
            mine = self._ids[step.first - first : step.end - first]
            theirs = np.asarray(source.ids[step.first : step.end], np.int32)
            pieces = maker.pieces(mine, theirs, step.first_layer, step.end_layer)
            return pieces, partial(source.progress.note_read, step)
        if (checkpoint := source.checkpoint) is None or (units := checkpoint.next_step(_STEP_BYTES)) is None:
            return None
        pieces = source.makers[units.row].pieces(units.mine, units.theirs, units.first_layer, units.end_layer)
        return pieces, partial(checkpoint.note_read, units)

    def _leave(self, sources: list[_Source], why: Why | None) -> None:
        for source in sources:
            if not source.is_confirmed:
                self._put(source, Leave(self._key, self._reader, why, self._here.name))

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - SYSTEM_CLOCK.now())

    def _count_in_flight(self) -> None:
        num_layers = sum(source.progress.num_layers_in_flight for source in self._sources)
        if num_layers != self._counted:
            self._here.count_in_flight(self._detail.slot, num_layers - self._counted)
            self._counted = num_layers
