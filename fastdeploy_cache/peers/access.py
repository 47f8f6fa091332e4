"""What a manager offers of other instances: offer, receive, steps."""

from __future__ import annotations

import dataclasses
import operator
import os
import socket
import threading
from pathlib import Path

from fastdeploy_cache.books.prefix_tree import BlockKeys, PrefixTree
from fastdeploy_cache.errors import ConfigError, LayoutError, PeerError, PeerRefusedError, RequestError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.match import Prefetch
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.parts import new_peer_client
from fastdeploy_cache.peers.link_road import OTHERS, PeerTier
from fastdeploy_cache.peers.offers import PeerOffers
from fastdeploy_cache.peers.receives import OpenReceive
from fastdeploy_cache.peers.store_road import StoredPeers
from fastdeploy_cache.peers.transfers import Receive, Send
from fastdeploy_cache.ranks import RankAccess
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.client import RankStatus
from fastdeploy_cache.transfer_manager.peer.client import PeerClient
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.peer.offer import ID_BYTES, InstanceInfo, Offer
from fastdeploy_cache.transfer_manager.peer.peer_signal import StepProgress
from fastdeploy_cache.transfer_manager.peer.signature import OfferSigner, load_secret
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

logger = event_log(__name__)


class PeerAccess(RankAccess):
    """The part of `PrefixCacheManager` that is about other instances; any thread."""

    metrics: CacheMetrics
    _copy_down: CopyDown
    _lock: threading.Lock
    _matcher: Matcher
    _mover: BlockMover
    _peers: PeerTier | StoredPeers | None = None
    _requests: dict[str, ActiveRequest]
    _storage: StorageTier | None
    _tree: PrefixTree

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
        with self._lock:
            peers, active = self._peers_for("offer", "decode"), self._active(request)
            num_blocks = self._num_offered(request, peers)
            if not num_blocks or request.request_id in peers.sends:
                why = "is offered already" if num_blocks else f"has {request.num_tokens} tokens, no full block"
                raise RequestError(f"offer of request {request.request_id!r}, which {why}")
            self._matcher.settle(active)
            if active.epoch != self._tree.epoch or self._matcher.is_lost(active):
                what = f"request {request.request_id!r} is older than a reset, or holds other blocks than are cached"
                raise PeerError(f"{what}; release and match it again")
            self._check_room(peers, TaskKind.SEND)
            send = peers.offer(active, num_blocks)
        self._submit()
        return send

    def begin_step(self, request: Request, num_computed_tokens: int, step: int) -> None:
        """Before a step: it computes the offered request's tokens up to `num_computed_tokens`, and the workers mark its
        layers under the number `step` (`StepProgress.mark`).

        Numbers rise; each is for one step. Only for requests that are offered, and only to send earlier: `commit`
        tells the same at the end of the step.

        Raises:
            RequestError: more tokens than the request's blocks hold, or a number that is over.
            UnknownRequestError: not matched, or released already.
        """
        num_tokens, step = operator.index(num_computed_tokens), operator.index(step)
        with self._lock:
            active = self._active(request)
            num_held = len(active.block_ids) * self.config.block_size
            if not 0 <= num_tokens <= num_held or step < 0:
                what = f"step {step} of request {request.request_id!r} computes {num_tokens} tokens"
                raise RequestError(f"{what}; its blocks hold {num_held}")
            if self._peers is not None:
                self._peers.sends.step(active, num_tokens, step)
        self._submit()

    def cancel_send(self, send: Send) -> None:
        """Nobody is to read it any more. It ends once every rank knows; blocks of a released request go home then."""
        with self._lock:
            if self._peers is not None:
                self._peers.sends.cancel(send)
        self._submit()

    def step_progress(self, rank: int) -> StepProgress:
        """For the model worker of a rank: where it marks the layers that it has computed.

        Raises:
            ConfigError: no such rank, or no link that moves single layers.
        """
        self._check_rank(rank)
        if not isinstance(self._peers, PeerTier):
            raise ConfigError("this cache sends no layers; give its configuration a table 'peer' with a link")
        return self._peers.client.step_progress(rank)

    def wait_for_peers(self, timeout_seconds: float) -> bool:
        """Wait until every peer process is ready, after one has died, too; False when the time is over first.

        True where there are none: without a table `peer`, and through storage.
        """
        peers = self._peers
        return not isinstance(peers, PeerTier) or peers.client.wait_ready(timeout_seconds)

    def peer_statuses(self) -> list[RankStatus]:
        """One entry for each peer process; none where there are none."""
        return self._peers.client.statuses() if isinstance(self._peers, PeerTier) else []

    # -- the side that has not

    def receive(self, request: Request, offer: bytes) -> Receive:
        """Bring what another instance offers of the request's tokens to the GPU; returns at once.

        Call it when the request is queued, and `match` it once it is `done`: then what came is found. What is cached
        here is not sent. Without success nothing has changed, and the request is computed here, or given up. Room is
        taken at once. `cancel_receive` where no `match` follows.

        Raises:
            PeerRefusedError: an offer that is none, is for another prompt, or of an instance that does not fit this
                one; or this instance only computes. Trying again will not help.
            PeerError: not now: too many receives, ranks that are down, a cache that is paused.
            PromptTooLongError: it can never fit.
            OutOfBlocksError: no room now; the offer stays good until its own deadline.
            RequestError: it is matched or being received already.
        """
        opened = self._open_offer(offer)
        try:
            return self._receive(request, opened)
        except PeerRefusedError:
            self.metrics.record_peer("receive", opened.source.name, 0, 0.0, "refused")
            logger.warning("event=receive_refused request=%s peer=%s", request.request_id, opened.source.name)
            raise

    def check_offer(self, request: Request, offer: bytes) -> None:
        """Whether an offer is for this request at all, before the request is queued: `receive` checks it again.

        Raises:
            PeerRefusedError: it is none of this instance's group, was changed, or is for another prompt; or this
                instance takes none.
        """
        peers = self._peers_for("receive", "prefill")
        peers.offers.check_prompt(request, request.extra_keys(self.config.block_size), self._open_offer(offer))

    def _open_offer(self, offer: bytes) -> Offer:
        try:
            return self._peers_for("receive", "prefill").offers.open(offer)
        except PeerRefusedError as error:  # whose it is cannot be known: what it says is anybody's
            self.metrics.record_peer("receive", OTHERS, 0, 0.0, "refused")
            logger.warning("event=offer_refused error=%r", str(error))
            raise

    def _receive(self, request: Request, opened: Offer) -> Receive:
        keys = BlockKeys(request.tokens, request.extra_keys(self.config.block_size))
        peers = self._peers_for("receive", "prefill")
        peers.offers.check(request, keys.extras, opened)  # hashes the prompt: not under the lock
        if isinstance(peers, StoredPeers):
            return self._receive_stored(peers, request, opened)
        with self._lock:
            self._check_may_receive(peers, request, opened)
            mine = peers.receive(request, keys, opened)
            for load in mine.loads:
                load.on_done.append(lambda: self._on_peer_load(peers, mine))
        self._submit()
        return mine.receive

    def _receive_stored(self, peers: StoredPeers, request: Request, offer: Offer) -> Receive:
        with self._lock:
            self._check_may_receive(peers, request, offer)
        found = self.prefetch(request)
        num_here = (found.num_gpu_tokens + found.num_cpu_tokens) // self.config.block_size
        with self._lock:
            number = peers.offers.next_number()
            receive = Receive(request.request_id, number, max(0, offer.num_blocks - num_here))
            storage = self._storage
            prefetch = storage.reads.of(request.request_id) if storage is not None else None
            peers.receives.begin(receive, prefetch)
        self._submit()
        return receive

    def cancel_receive(self, request: Request) -> None:
        """The request has gone without being matched: what has come may be evicted, what has not need not come."""
        with self._lock:
            if self._peers is not None:
                self._peers.receives.forget(request.request_id)
        if isinstance(self._peers, StoredPeers):
            self.end_prefetch(request)
        self._submit()

    # -- steps

    def _num_offered(self, request: Request, peers: PeerTier | StoredPeers) -> int:
        """Full blocks; a store takes only what may be cached."""
        only_prompt = isinstance(peers, StoredPeers) and not self.config.cache_outputs
        num_tokens = request.num_prompt_tokens if only_prompt else request.num_tokens
        return num_tokens // self.config.block_size

    def _peers_for(self, verb: str, wrong_role: str) -> PeerTier | StoredPeers:
        self._check_open()
        peers = self._peers
        if peers is None:
            raise PeerRefusedError(f"{verb}: this cache has no other instances; give its configuration a table 'peer'")
        if self.config.role == wrong_role:
            raise PeerRefusedError(f"{verb}: the role of this instance is {wrong_role!r}")
        return peers

    def _check_may_receive(self, peers: PeerTier | StoredPeers, request: Request, offer: Offer) -> None:
        """Under the lock."""
        self._check_open()
        peers.offers.check_fits(offer)  # again: the weights may have changed meanwhile
        self._check_new(request)
        if request.request_id in self._requests or request.request_id in peers.receives:
            raise RequestError(f"request {request.request_id!r} is matched, or being received, already")
        self._check_room(peers, TaskKind.RECEIVE)

    def _check_room(self, peers: PeerTier | StoredPeers, kind: TaskKind) -> None:
        num_open = len(peers.sends if kind is TaskKind.SEND else peers.receives)
        if peers.is_quiet:
            raise PeerError(f"{kind.value}: the cache is not running; try again when it is")
        if num_open >= peers.config.max_transfers:
            raise PeerError(f"{kind.value}: {num_open} are under way, as many as peer.max_transfers allows")
        if isinstance(peers, PeerTier) and not peers.client.has_room(kind):
            why = "too many tasks are under way" if peers.client.available else "not every peer process is ready"
            raise PeerError(f"{kind.value}: {why}; try again")
        if isinstance(peers, StoredPeers) and self._storage is None:
            raise PeerError(f"{kind.value}: no store is attached; attach_storage first")

    def _open_peers(self, client: PeerClient | None) -> None:
        """At the end of the constructor; nothing stays where it is refused."""
        config, given = self.config, self.config.peer
        if given is None:
            return
        name = given.name or f"{socket.gethostname()}-{config.transfer.data_parallel_id}"[:64]
        peer, instance_id = dataclasses.replace(given, name=name), os.urandom(ID_BYTES)
        try:
            signer = OfferSigner(load_secret(Path(peer.secret_file)) if peer.secret_file is not None else b"")
            if peer.link == "storage":
                self._peers = StoredPeers(
                    config=peer,
                    offers=PeerOffers(self._instance_info(peer, instance_id), signer),
                    tree=self._tree,
                    mover=self._mover,
                    copy_down=self._copy_down,
                    matcher=self._matcher,
                    expire=self._expire_send,
                )
            else:
                client = client or new_peer_client(config, peer, instance_id, self._client)
                offers = PeerOffers(self._instance_info(peer, instance_id, client), signer)
                self._peers = self._open_link(peer, client, offers)
        except BaseException:
            self.close()
            raise

    def _instance_info(self, peer: PeerConfig, instance_id: bytes, client: PeerClient | None = None) -> InstanceInfo:
        assert self.config.layout is not None
        return InstanceInfo(
            instance_id=instance_id,
            name=peer.name,
            link=peer.link,
            weights_id=peer.weights_id,
            block_size=self.config.block_size,
            tp_size=self.config.transfer.tp_size,
            layout=self.config.layout,
            addresses=client.addresses if client is not None else (),
            public_key=client.public_key if client is not None else b"",
        )

    def _open_link(self, peer: PeerConfig, client: PeerClient, offers: PeerOffers) -> PeerTier:
        def on_result(result: TransferResult) -> None:
            self._on_peer_result(tier, result)

        tier = PeerTier(
            config=peer,
            offers=offers,
            tree=self._tree,
            client=client,
            matcher=self._matcher,
            copy_down=self._copy_down,
            metrics=self.metrics,
            task_timeout_seconds=self.config.transfer.task_timeout_seconds,
            on_result=on_result,
        )
        client.start(on_result, lambda task: self._on_peer_failing(tier, task))
        self.metrics.observe_peers(tier.num_layers_in_flight)
        return tier

    def _close_peers(self) -> None:
        peers = self._peers
        if peers is None:
            return
        with self._lock:
            peers.cancel_all("the cache is closed")
        peers.submit()
        if isinstance(peers, PeerTier):
            peers.settled.wait(self.config.transfer.stop_timeout_seconds)
            peers.client.stop()
            peers.submit()

    def _expire_send(self, send: Send) -> None:
        with self._lock:
            if isinstance(self._peers, StoredPeers):
                self._peers.sends.cancel(send, ("late", "it was not stored in time"))
        self._submit()

    def _peers_attach_kv(self, rank: int) -> None:
        """The rank has other KV arrays."""
        if isinstance(self._peers, PeerTier):
            try:
                self._peers.client.attach_kv(rank, self._client.kv_handle(rank))
            except LayoutError:  # not there yet
                logger.info("event=peer_waits_for_kv rank=%d", rank)

    def _peers_lose_kv(self, rank: int) -> None:
        if isinstance(self._peers, PeerTier):
            self._peers.client.kv_lost(rank)

    def _cancel_peers(self, text: str) -> None:
        """Under the lock: what blocks hold is not what it was."""
        if self._peers is not None:
            self._peers.cancel_all(text)

    def _on_peer_result(self, peers: PeerTier, result: TransferResult) -> None:
        with self._lock:
            self._tree.mishaps.contain("landing", lambda: peers.finish(result))
        if result.error is not None:
            kind = result.task.kind.value
            logger.info("event=peer_task_failed kind=%s task_id=%d error=%r", kind, result.task.task_id, result.error)
        self._submit()

    def _on_peer_failing(self, peers: PeerTier, task: TransferTask) -> None:
        with self._lock:
            peers.failing(task)
        self._submit()

    def _on_peer_load(self, peers: PeerTier, mine: OpenReceive) -> None:
        with self._lock:
            self._tree.mishaps.contain("landing", lambda: peers.try_land(mine))
        self._submit()

    def _active(self, request: Request) -> ActiveRequest:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _check_new(self, request: Request) -> int:
        raise NotImplementedError

    def prefetch(self, request: Request) -> Prefetch:
        """See `StorageAccess`."""
        raise NotImplementedError

    def end_prefetch(self, request: Request) -> None:
        """See `StorageAccess`."""
        raise NotImplementedError

    def _submit(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """See `PrefixCacheManager`."""
        raise NotImplementedError
