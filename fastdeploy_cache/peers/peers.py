"""Other instances: offers of what is computed here, and receives of what they offer. `cache.peers`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Forgotten
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import PeerError, PeerRefusedError, RequestError
from fastdeploy_cache.ipc.clock import seconds_to_wait
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.peers.absent import NoRoad
from fastdeploy_cache.peers.borrowing import Borrowing, Lenders, Receiving
from fastdeploy_cache.peers.transfers import OTHERS, Receive, Send
from fastdeploy_cache.request import Request, no_request
from fastdeploy_cache.requests.active_request import ActiveRequest, Committed
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.transfer_manager.task import TaskKind

if TYPE_CHECKING:
    from fastdeploy_cache.peers.opening import Road
    from fastdeploy_cache.transfer_manager.client import RankStatus
    from fastdeploy_cache.transfer_manager.peer.client import PeerClient
    from fastdeploy_cache.transfer_manager.peer.offer import Offer
    from fastdeploy_cache.transfer_manager.peer.peer_signal import StepProgress

logger = event_log(__name__)


class Peers:
    """Prefill and decode apart. Any thread; each verb is a turn of its own."""

    def __init__(self, config: CacheConfig, books: Books, requests: Requests, metrics: CacheMetrics) -> None:
        self._config, self._books, self._requests, self._metrics = config, books, requests, metrics
        self.road: Road | NoRoad = NoRoad()
        self._borrowing: Borrowing | None = None
        self._is_borrowing = False
        self._is_worth_borrowing: Callable[[int], bool] = bool
        requests.keep_offered = lambda active, ids: self.road.sends.released(active, ids)  # noqa: PLW0108 (of that road)
        books.listen(Forgotten, self._on_forgotten)
        books.listen(Committed, lambda committed: self.road.sends.committed(committed.active))

    def open(self, movement: Movement, storage: StorageAccess, client: PeerClient | None) -> None:
        """Start what the configuration asks for. `client` replaces the peer processes (tests, simulation).

        Raises:
            PeerRefusedError: the link's settings, or the group's secret, are wrong.
        """
        if self._config.peer is None:
            return
        from fastdeploy_cache.peers.opening import open_road  # late: most caches have no other instances

        generations = self._books.tree.generations
        self._is_worth_borrowing = movement.speeds.is_worth_borrowing
        last_loss = generations.last_gpu_loss
        road = open_road(
            self._config, self._books, movement, self._requests, storage, metrics=self._metrics, client=client
        )
        road.start()
        self.road = road  # only now: one that has not started has nothing to be told, and nothing to stop
        # A rank may have died with its KV arrays meanwhile, and have new ones: nobody has told the road, whose
        # processes would go on to read and to fill those of the dead one.
        for rank in range(self._config.transfer.tp_size) if generations.last_gpu_loss != last_loss else ():
            road.processes.lose_kv(rank)
            road.processes.attach_kv(rank)

    # -- the side that has computed

    def offer(self, request: Request) -> Send:
        """Offer the full blocks of a matched request's tokens to another instance, whose `receive` takes `Send.offer`.

        Hand it over at once: each block can be read as soon as it is computed. (With `peer.link` "storage": once the
        send is `done`.) What the match found is; the rest is with each `commit`, or layer by layer where `begin_step`
        has announced the step. All of it has to be committed before `release`, or the send fails; released or not, the
        blocks stay until it has ended.

        Raises:
            PeerRefusedError: this instance only receives.
            PeerError: not now: too many sends, ranks that are down, a cache that is paused.
            RequestError: no full block, or it is offered already.
            UnknownRequestError: not matched, or released already.
        """
        with self._books:
            road, active = self._road_for("offer", "decode"), self._requests.active(request)
            return self._offer(road, active, road.num_offered(request))

    def lend(self, request: Request) -> Send:
        """Offer what the match of a request has found, and nothing that is yet to be computed; `release` it then.

        The other instance gives the offer to `receive` with `is_lent`, for a request of the same tokens. What the match
        is still loading is not offered: wait for the match first. Raises as `offer`; `PeerRefusedError` also with the
        link `storage`.
        """
        if self._config.peer is not None and self._config.peer.link == "storage":
            raise PeerRefusedError("lend: with peer.link 'storage' the other instance finds in the store what is there")
        with self._books:
            road, active = self._road_for("lend", "decode"), self._requests.active(request)
            self._requests.matcher.settle(active)
            return self._offer(road, active, min(active.num_matched_blocks, road.num_offered(request)))

    def _offer(self, road: Road, active: ActiveRequest, num_blocks: int) -> Send:
        """The first blocks of a request. Under the lock."""
        request, matcher = active.request, self._requests.matcher
        if not num_blocks or request.request_id in road.sends:
            behind = "" if self._books.rows is None else " behind which the prompt can be gone on with"
            why = (
                f"has {request.num_tokens} tokens, and no full block{behind}"
                if not num_blocks
                else "is offered already"
            )
            raise RequestError(f"offer of request {request.request_id!r}, which {why}")
        matcher.settle(active)
        if active.is_detached or matcher.is_stale(active) or matcher.is_lost(active):
            what = f"request {request.request_id!r} is older than a reset, or holds other blocks than are cached"
            raise PeerError(f"{what}; release and match it again")
        self._check_room(road, TaskKind.SEND)
        send = road.offer(active, num_blocks)
        self._requests.offered.add(active)
        return send

    def begin_step(self, request: Request, num_computed_tokens: int, step: int) -> None:
        """Say, before a step, that it computes the offered request's tokens up to `num_computed_tokens`.

        The workers mark the step's layers under the number `step` (`StepProgress.mark`).

        Numbers rise; each is for one step. Only for requests that are offered, and only to send earlier: `commit`
        tells the same at the end of the step.

        Raises:
            RequestError: more tokens than the request's blocks hold, or a number that is over.
            UnknownRequestError: not matched, or released already.
        """
        num_tokens, step = operator.index(num_computed_tokens), operator.index(step)
        with self._books:
            active = self._requests.active(request)
            num_held = len(active.block_ids) * self._config.block_size
            if not 0 <= num_tokens <= num_held or step < 0:
                what = f"step {step} of request {request.request_id!r} computes {num_tokens} tokens"
                raise RequestError(f"{what}; its blocks hold {num_held}")
            self.road.sends.step(active, num_tokens, step)

    def cancel_send(self, send: Send) -> None:
        """Nobody is to read it any more. It ends once every rank knows; blocks of a released request go home then."""
        with self._books:
            self.road.sends.cancel(send)

    def step_progress(self, rank: int) -> StepProgress:
        """The place where the model worker of a rank marks the layers that it has computed.

        Raises:
            ConfigError: no such rank, or no link that moves single layers.
        """
        self._config.check_rank(rank)
        return self.road.processes.step_progress(rank)

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until every peer process is ready, after one has died, too; False when the time is over first.

        True where there are none: without a table `peer`, and through storage.
        """
        return self.road.processes.wait_ready(seconds_to_wait("wait_ready", timeout_seconds))

    def statuses(self) -> list[RankStatus]:
        """One entry for each peer process; none where there are none."""
        return self.road.processes.statuses()

    # -- the side that has not

    def receive(self, request: Request, offer: bytes, *, is_lent: bool = False) -> Receive:
        """Bring what another instance offers of the request's tokens to the GPU; returns at once.

        Call it when the request is queued, and `match` it once it is `done`: then what came is found. What is cached
        here is not sent. Without success nothing has changed, and the request is computed here, or given up. Room is
        taken at once. `cancel_receive` where no `match` follows.

        `is_lent`: it was offered by `lend`, so that all of it is there. It is then refused under `load_policy` "never",
        and under "auto" where computing it takes less time, as far as both have been seen.

        Raises:
            PeerRefusedError: an offer that is none, is for another prompt, or of an instance that does not fit this
                one; or this instance only computes; or computing it is faster. Trying again will not help.
            PeerError: not now: too many receives, ranks that are down, a cache that is paused.
            PromptTooLongError: it can never fit.
            OutOfBlocksError: no room now; the offer stays good until its own deadline.
            RequestError: it is matched or being received already.
        """
        if not isinstance(request, Request):
            raise no_request(request)
        return self._receive(request, offer, is_lent=is_lent, must_be_worth=is_lent)

    def borrow_from(self, lenders: Lenders) -> None:
        """Let `cache.prefetch` have these lend what they have of a queued request, where that is faster than computing.

        It is received as `receive` does it with `is_lent`, once nothing more comes from storage, and may be evicted
        again before the match. Wait for the prefetch: a match ends what is on its way. Once for a cache.

        Raises:
            PeerRefusedError: this instance only computes, has no peers or the link `storage`, or borrows already.
            PeerError: no thread can be started now.
        """
        road = self._road_for("borrow_from", "prefill")
        if self._config.peer is not None and self._config.peer.link == "storage":
            raise PeerRefusedError("borrow_from: with peer.link 'storage' a prefetch finds in the store what is there")
        receiving = Receiving(
            functools.partial(self._receive, is_lent=True),
            road.receives.forget,
            self._is_worth_borrowing,
            self._requests.prefetches.matched,
        )
        with self._books:
            if self._is_borrowing:
                raise PeerRefusedError("borrow_from: this cache borrows already; lenders are for all its life")
            self._is_borrowing = True
        try:
            self._borrowing = Borrowing(self._config, self._books, receiving, lenders)
        except RuntimeError as error:
            self._is_borrowing = False
            raise PeerError(f"borrow_from: {error}; try again") from error
        self._requests.prefetches.borrow_from(self._borrowing)

    def close(self) -> None:
        """End what is on its way, and the processes."""
        if self._borrowing is not None:
            self._borrowing.close()
        self.road.close()

    def check_offer(self, request: Request, offer: bytes) -> None:
        """Whether an offer is for this request at all, before the request is queued: `receive` checks it again.

        Raises:
            PeerRefusedError: it is none of this instance's group, was changed, or is for another prompt; or this
                instance takes none.
        """
        road = self._road_for("receive", "prefill")
        road.offers.check_prompt(request, request.extra_keys(self._config.block_size), self._open_offer(offer))

    def cancel_receive(self, request: Request) -> None:
        """The request has gone without being matched: what has come may be evicted, what has not need not come."""
        if not isinstance(self.road, NoRoad):
            self.road.cancel_receive(request)

    # -- steps

    def _receive(self, request: Request, offer: bytes, *, is_lent: bool, must_be_worth: bool = False) -> Receive:
        opened = self._open_offer(offer)
        try:
            keys = request.keys(self._config.block_size)
            road = self._road_for("receive", "prefill")
            road.offers.check(request, keys.extras, opened)  # hashes the prompt: not under the lock
            check = functools.partial(self._check_may_receive, road, request, opened)
            return road.receive(request, keys, opened, check, is_lent=is_lent, must_be_worth=must_be_worth)
        except PeerRefusedError:
            self._count_refused(opened.source.name)
            logger.warning("event=receive_refused request=%s peer=%s", request.request_id, opened.source.name)
            raise

    def _open_offer(self, offer: bytes) -> Offer:
        try:
            return self._road_for("receive", "prefill").offers.open(offer)
        except PeerRefusedError as error:  # whose it is cannot be known: what it says is anybody's
            self._count_refused(OTHERS)
            logger.warning("event=offer_refused error=%r", str(error))
            raise

    def _count_refused(self, peer: str) -> None:
        record = functools.partial(self._metrics.record_peer, "receive", peer, 0, 0.0, "refused")
        self._books.mishaps.contain("metrics", record)

    def _road_for(self, verb: str, wrong_role: str) -> Road:
        self._books.check_open()
        if isinstance(self.road, NoRoad):
            raise PeerRefusedError(f"{verb}: this cache has no other instances; give its configuration a table 'peer'")
        if self._config.role == wrong_role:
            raise PeerRefusedError(f"{verb}: the role of this instance is {wrong_role!r}")
        return self.road

    def _check_may_receive(self, road: Road, request: Request, offer: Offer) -> None:
        """Raise where this request may not be received now. Under the lock."""
        self._books.check_open()
        road.offers.check_fits(offer)  # again: the weights may have changed meanwhile
        self._requests.check_new(request)
        if request.request_id in road.receives:
            raise RequestError(f"request {request.request_id!r} is matched, or being received, already")
        self._check_room(road, TaskKind.RECEIVE)

    def _check_room(self, road: Road, kind: TaskKind) -> None:
        num_open = len(road.sends if kind is TaskKind.SEND else road.receives)
        assert self._config.peer is not None
        if road.is_quiet:
            raise PeerError(f"{kind.value}: the cache is not running; try again when it is")
        if num_open >= self._config.peer.max_transfers:
            raise PeerError(f"{kind.value}: {num_open} are under way, as many as peer.max_transfers allows")
        road.check_room(kind)

    def _on_forgotten(self, forgotten: Forgotten) -> None:
        if not isinstance(self.road, NoRoad) and forgotten.weights_id is not None:
            self.road.offers.rename_weights(forgotten.weights_id)  # first: with the old name, old KV would be taken
        self.road.cancel_all("the cache was reset")
