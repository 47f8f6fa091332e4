"""Other instances over a link: tasks for the peer processes, and what becomes of them.

Under the lock, but for what is marked as a turn of its own.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Matched
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import PeerError, PeerRefusedError, counted
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.movement.outbox import Outbox
from fastdeploy_cache.peers.offers import PeerOffers, last_boundary
from fastdeploy_cache.peers.processes import LinkProcesses
from fastdeploy_cache.peers.receives import OpenReceive, PeerReceives
from fastdeploy_cache.peers.sends import PeerSends
from fastdeploy_cache.peers.transfers import OTHERS, Receive, Send, why_of
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.transfer_manager.peer.client import PeerClient
from fastdeploy_cache.transfer_manager.peer.messages import Detail
from fastdeploy_cache.transfer_manager.peer.offer import Offer
from fastdeploy_cache.transfer_manager.peer.peer_signal import NUM_PEER_SLOTS
from fastdeploy_cache.transfer_manager.task import Lane, TaskKind, TransferResult, TransferTask

T = TypeVar("T")
logger = event_log(__name__)

_NO_IDS = np.empty(0, np.int32)


class LinkRoad:
    """Sends to, and receives from, other instances over a link; numbers of tasks are never used twice."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        *,
        offers: PeerOffers,
        client: PeerClient,
        movement: Movement,
        metrics: CacheMetrics,
    ) -> None:
        assert config.peer is not None
        self._peer, self.offers, self._client = config.peer, offers, client
        self.processes = LinkProcesses(client, movement.client)
        self._timeout_seconds = config.transfer.task_timeout_seconds  # of tasks that are answered at once
        self._stop_seconds = config.transfer.stop_timeout_seconds
        self._books, self._metrics, self._speeds = books, metrics, movement.speeds
        self._outbox = Outbox(client, self.on_result, books.mishaps)
        books.add_outlet(self._outbox)
        books.listen(Matched, lambda matched: self.receives.forget(matched.request_id))
        self.sends = PeerSends(books, self._put)
        self.receives = PeerReceives(books, movement, self._put, self._on_load, config.checkpoints_per_path)
        self._settled = books.clock.event()  # nothing is on its way
        self._settled.set()
        self.is_quiet = False
        self._names: list[str] = []  # of the first few peers
        self._next_task_id = 1

    def start(self) -> None:
        """Start the peer processes. Raises `PeerRefusedError`."""
        self._client.start(self.on_result, self._on_failing)
        self._metrics.observe_peers(self.num_layers_in_flight)

    # -- verbs

    def num_offered(self, request: Request) -> int:
        """Full blocks of a request that can be offered; of a hybrid model, those up to its prompt's last boundary."""
        size = self.offers.info.block_size
        return request.num_tokens // size if self._books.rows is None else last_boundary(request, size)

    def check_room(self, kind: TaskKind) -> None:
        """Raise `PeerError` where no task can start now."""
        if not self._client.has_room(kind):
            why = "too many tasks are under way" if self._client.available else "not every peer process is ready"
            raise PeerError(f"{kind.value}: {why}; try again")

    def offer(self, active: ActiveRequest, num_blocks: int) -> Send:
        """Offer the first blocks of a settled request."""
        send = self.offers.new_send(active, num_blocks, self._books.clock.event())
        self.sends.begin(active, send)
        return send

    def receive(
        self,
        request: Request,
        keys: BlockKeys,
        offer: Offer,
        check: Callable[[], None],
        *,
        is_lent: bool,
        must_be_worth: bool,
    ) -> Receive:
        """A turn of its own. `is_lent`: all of it is there already, so that the time that it takes says something.

        Raises `OutOfBlocksError`, what `check` raises under the lock, and `PeerRefusedError` where it
        `must_be_worth` it and is computed sooner."""
        with self._books:
            check()
            if must_be_worth:
                self._check_worth(request, keys, offer.num_blocks)
            number, slot = self.offers.next_number(), self._slot(offer.source.name)
            mine = self.receives.begin(request, keys, offer, number, slot)
            mine.is_lent = is_lent
        return mine.receive

    def _check_worth(self, request: Request, keys: BlockKeys, num_offered: int) -> None:
        """Raise `PeerRefusedError` where computing what is missing takes less time than receiving it."""
        _, num_here = self._books.tree.find(request.namespace, keys, num_offered)
        num_blocks = num_offered - num_here
        if num_blocks and not self._speeds.is_worth_borrowing(num_blocks):
            compute, borrow = (self._speeds.compute_seconds(num_blocks), self._speeds.borrow_seconds(num_blocks))
            times = f"{borrow:.3f} s to receive them and {compute:.3f} s to compute them" if borrow and compute else ""
            why = f"{times} are expected" if times else "load_policy is 'never'"
            raise PeerRefusedError(f"{counted(num_blocks, 'block')} that another instance lends are not taken: {why}")

    def cancel_receive(self, request: Request) -> None:
        """What has come may be evicted, what has not need not come. A turn of its own."""
        with self._books:
            self.receives.forget(request.request_id)

    def be_quiet(self, quiet: bool) -> None:
        """Start nothing from now on, and end what is on its way; or go on. Under the lock."""
        self.is_quiet = quiet
        if quiet:
            self.cancel_all("the instance moves nothing now")

    def cancel_all(self, text: str) -> None:
        """What blocks hold is not what it was, or is not to be moved. Under the lock."""
        self.sends.cancel_all(text)
        self.receives.cancel_all()

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until nothing is on its way, after `be_quiet`; False when the time is over first."""
        return self._settled.wait(timeout_seconds)

    def close(self) -> None:
        """Tell whom it concerns, and end the processes."""
        with self._books:
            self.cancel_all("the cache is closed")
        self._settled.wait(self._stop_seconds)
        self._client.stop()
        with self._books:  # hand over what the last answers led to
            pass
        self._books.remove_outlet(self._outbox)

    # -- turns of the client's threads

    def on_result(self, result: TransferResult) -> None:
        """Every rank has answered a task, or is reaped."""
        with self._books:
            self._books.mishaps.contain("landing", functools.partial(self._finish, result))
        if result.error is not None:
            kind = result.task.kind.value
            logger.info("event=peer_task_failed kind=%s task_id=%d error=%r", kind, result.task.task_id, result.error)

    def _on_failing(self, task: TransferTask) -> None:
        """A rank has failed it: the others need not go on."""
        with self._books:
            if task.kind is TaskKind.SEND:
                self.sends.failing(task.task_id)
            elif task.kind is TaskKind.RECEIVE:
                self.receives.failing(task.task_id)

    def _on_load(self, mine: OpenReceive) -> None:
        with self._books:
            self._books.mishaps.contain("landing", functools.partial(self._try_land, mine))

    # -- ends

    def _finish(self, result: TransferResult) -> None:
        kind, why = result.task.kind, why_of(result)
        try:
            if kind is TaskKind.SEND:
                send = self.sends.ended(result.task.task_id)
                self._books.call_later(functools.partial(send.end, why))
                self._record(result, why, next((r.peer for r in result.ranks if r.peer), ""))
            elif kind is TaskKind.UPDATE_SEND:
                self.sends.updated(result.task.task_id, is_lost=result.error is not None)
            elif kind is TaskKind.RECEIVE:
                mine = self.receives.answered(result.task.task_id, why)
                if mine.is_lent and why is None:
                    per_rank = max(result.ranks, key=lambda rank: rank.num_bytes)
                    self._speeds.peer.note(per_rank.num_bytes, max(rank.seconds for rank in result.ranks))
                self._try_land(mine)
                self._record(result, why, mine.source_name)
        finally:
            self._note_settled()

    def _try_land(self, mine: OpenReceive) -> None:
        """Its answer, or a load that it waits for, has come."""
        if self.receives.try_land(mine):
            self._books.call_later(functools.partial(mine.receive.end, mine.why))
            self._note_settled()

    def num_layers_in_flight(self) -> dict[str, int]:
        """The layers that each peer has computed and that are not here yet, over all ranks and receives."""
        names = [*self._names, OTHERS] if len(self._names) == NUM_PEER_SLOTS - 1 else self._names
        return {name: self._client.num_layers_in_flight(slot) for slot, name in enumerate(names)}

    def _record(self, result: TransferResult, why: tuple[str, str] | None, peer: str) -> None:
        num_bytes = sum(r.num_bytes for r in result.ranks)
        seconds = max((r.seconds for r in result.ranks), default=0.0)
        reason, kind = why[0] if why is not None else None, result.task.kind.value
        slot = self._slot(peer)
        name = self._names[slot] if slot < len(self._names) else OTHERS
        self._books.mishaps.contain(
            "metrics", lambda: self._metrics.record_peer(kind, name, num_bytes, seconds, reason)
        )

    def _slot(self, name: str) -> int:
        """The first few peers have one each, all others the last."""
        if name not in self._names and len(self._names) < NUM_PEER_SLOTS - 1:
            self._names.append(name)
        return self._names.index(name) if name in self._names else NUM_PEER_SLOTS - 1

    def _note_settled(self) -> None:
        if not len(self.sends) and not len(self.receives):
            self._settled.set()

    def _put(self, kind: TaskKind, ids: array[int], detail: Detail, noted: dict[int, T], of: T) -> int:
        """Hand out a task, which is `noted` as one `of` its hand-over. Returns its id.

        Raises:
            MemoryError: there is no such task.
        """
        task_id, self._next_task_id = self._next_task_id, self._next_task_id + 1
        packed = np.frombuffer(ids, np.int32) if ids else _NO_IDS
        is_send = kind.lane is Lane.OUT
        task = TransferTask(
            task_id=task_id,
            kind=kind,
            source_ids=packed if is_send else _NO_IDS,
            destination_ids=_NO_IDS if is_send else packed,
            deadline=self._books.clock.now() + self._seconds(kind),
            detail=detail.to_bytes(),
        )
        self._outbox.put(task, noted, of)
        self._settled.clear()
        return task_id

    def _seconds(self, kind: TaskKind) -> float:
        if kind is TaskKind.SEND:
            return self._peer.offer_timeout_seconds
        return self._peer.receive_timeout_seconds if kind is TaskKind.RECEIVE else self._timeout_seconds
