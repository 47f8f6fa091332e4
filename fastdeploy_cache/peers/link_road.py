"""Other instances, as this one deals with them: tasks for the peer processes, and what becomes of them. Under the
manager's lock, but for `submit`."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable

import numpy as np

from fastdeploy_cache.books.prefix_tree import BlockKeys, PrefixTree
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.movement.outbox import Calls, Outbox
from fastdeploy_cache.peers.offers import PeerOffers
from fastdeploy_cache.peers.receives import OpenReceive, PeerReceives
from fastdeploy_cache.peers.sends import PeerSends
from fastdeploy_cache.peers.transfers import Send, why_of
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.transfer_manager.peer.client import PeerClient
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.peer.messages import Detail
from fastdeploy_cache.transfer_manager.peer.offer import Offer
from fastdeploy_cache.transfer_manager.peer.peer_signal import NUM_PEER_SLOTS
from fastdeploy_cache.transfer_manager.task import Lane, TaskKind, TransferResult, TransferTask

OTHERS = "others"  # the label of all peers behind the first few: names come from outside
_NO_IDS = np.empty(0, np.int32)


class PeerTier:
    """Sends to, and receives from, other instances over a link; numbers of tasks are never used twice."""

    def __init__(
        self,
        *,
        config: PeerConfig,
        offers: PeerOffers,
        tree: PrefixTree,
        client: PeerClient,
        matcher: Matcher,
        copy_down: CopyDown,
        metrics: CacheMetrics,
        task_timeout_seconds: float,
        on_result: Callable[[TransferResult], None],
    ) -> None:
        """`task_timeout_seconds`: of tasks that are answered at once; `on_result`: what the client is started with."""
        self.config, self.offers, self.client = config, offers, client
        self.outbox = Outbox(client, on_result, tree.mishaps)
        self.sends = PeerSends(tree, self._put)
        self.receives = PeerReceives(tree, matcher, copy_down, self._put)
        self.calls = Calls(tree.mishaps)  # to be made without the lock
        self.settled = threading.Event()  # nothing is on its way
        self.settled.set()
        self.is_quiet = False
        self._names: list[str] = []  # of the first few peers
        self._tree, self._metrics, self._timeout_seconds = tree, metrics, task_timeout_seconds
        self._next_task_id = 1

    def submit(self) -> None:
        """Hand over what was decided on, and call whom it concerns. Without the lock."""
        self.outbox.submit()
        self.calls.make()

    # -- verbs

    def offer(self, active: ActiveRequest, num_blocks: int) -> Send:
        """Of a settled request."""
        send = self.offers.new_send(active, num_blocks)
        self.sends.begin(active, send)
        return send

    def receive(self, request: Request, keys: BlockKeys, offer: Offer) -> OpenReceive:
        """Raises `OutOfBlocksError`. The caller follows its loads: each one's end may be the last that was missing."""
        number, slot = self.offers.next_number(), self._slot(offer.source.name)
        return self.receives.begin(request, keys, offer, number, slot)

    def be_quiet(self, quiet: bool) -> None:
        """From now on start nothing, and end what is on its way."""
        self.is_quiet = quiet
        if quiet:
            self.cancel_all("the instance moves nothing now")

    def cancel_all(self, text: str) -> None:
        """What blocks hold is not what it was, or is not to be moved."""
        self.sends.cancel_all(text)
        self.receives.cancel_all()

    # -- ends

    def finish(self, result: TransferResult) -> None:
        """Every rank has answered a task."""
        kind, why = result.task.kind, why_of(result)
        try:
            if kind is TaskKind.SEND:
                send = self.sends.ended(result.task.task_id)
                self.calls.put(lambda: send.end(why))
                self._record(result, why, next((r.peer for r in result.ranks if r.peer), ""))
            elif kind is TaskKind.UPDATE_SEND:
                self.sends.updated(result.task.task_id, is_lost=result.error is not None)
            elif kind is TaskKind.RECEIVE:
                mine = self.receives.answered(result.task.task_id, why)
                self.try_land(mine)
                self._record(result, why, mine.source_name)
        finally:
            self._note_settled()

    def failing(self, task: TransferTask) -> None:
        """A rank has failed it: the others need not go on."""
        if task.kind is TaskKind.SEND:
            self.sends.failing(task.task_id)
        elif task.kind is TaskKind.RECEIVE:
            self.receives.failing(task.task_id)

    def try_land(self, mine: OpenReceive) -> None:
        """Its answer, or a load that it waits for, has come."""
        if self.receives.try_land(mine):
            self.calls.put(lambda: mine.receive.end(mine.why))
            self._note_settled()

    def num_layers_in_flight(self) -> dict[str, int]:
        """By peer: layers that it has computed and that are not here yet, over all ranks and receives."""
        names = [*self._names, OTHERS] if len(self._names) == NUM_PEER_SLOTS - 1 else self._names
        return {name: self.client.num_layers_in_flight(slot) for slot, name in enumerate(names)}

    def _record(self, result: TransferResult, why: tuple[str, str] | None, peer: str) -> None:
        num_bytes = sum(r.num_bytes for r in result.ranks)
        seconds = max((r.seconds for r in result.ranks), default=0.0)
        reason, kind = why[0] if why is not None else None, result.task.kind.value
        self._tree.mishaps.contain(
            "metrics",
            lambda: self._metrics.record_peer(kind, self._label(peer), num_bytes, seconds, reason),
        )

    def _label(self, name: str) -> str:
        slot = self._slot(name)
        return self._names[slot] if slot < len(self._names) else OTHERS

    def _slot(self, name: str) -> int:
        """The first few peers have one each, all others the last."""
        if name not in self._names and len(self._names) < NUM_PEER_SLOTS - 1:
            self._names.append(name)
        return self._names.index(name) if name in self._names else NUM_PEER_SLOTS - 1

    def _note_settled(self) -> None:
        if not len(self.sends) and not len(self.receives):
            self.settled.set()

    def _put(self, kind: TaskKind, ids: array[int], detail: Detail) -> int:
        task_id, self._next_task_id = self._next_task_id, self._next_task_id + 1
        packed = np.frombuffer(ids, np.int32) if ids else _NO_IDS
        is_send = kind.lane is Lane.OUT
        self.outbox.put(
            TransferTask(
                task_id=task_id,
                kind=kind,
                source_ids=packed if is_send else _NO_IDS,
                destination_ids=_NO_IDS if is_send else packed,
                deadline=time.monotonic() + self._seconds(kind),
                detail=detail.to_bytes(),
            )
        )
        self.settled.clear()
        return task_id

    def _seconds(self, kind: TaskKind) -> float:
        if kind is TaskKind.SEND:
            return self.config.offer_timeout_seconds
        return self.config.receive_timeout_seconds if kind is TaskKind.RECEIVE else self._timeout_seconds
