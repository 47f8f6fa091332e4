"""Queued requests of which another instance has more cached: `prefetch` has that lent, and brings it here.

It is a hand-over of what is cached: the lender offers what its `lend` says, and here `receive` takes it. What has come
is let go at once, so that no request which waits keeps blocks from those that run.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Matched
from fastdeploy_cache.books.mishaps import call_user
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.peers.transfers import PeerTransfer, Receive
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.match import Prefetch

logger = event_log(__name__)

_NUM_THREADS = 2
_MOST_QUEUED = 64
_LEND_SECONDS = 3.0
_CLOSED = "cancelled", "the cache is closed"
_PARTS = 4  # of the GPU's blocks, this part may have been borrowed for requests that are not matched yet


class Loan(NamedTuple):
    """What another instance lends: its `Send.offer`, and what is called where nobody takes it."""

    offer: bytes
    give_up: Callable[[], object]


class Lenders(Protocol):
    """Other instances, as a program knows them. Called by threads of the cache."""

    def num_tokens(self, request: Request) -> int:
        """How many leading tokens of the prompt one of them has in its tiers, as far as is known. Waits for nobody."""
        ...

    def lend(self, request: Request, timeout_seconds: float) -> Loan | None:
        """Have that one lend it, in at most so long; None: it does not."""
        ...


class Receiving(Protocol):
    """The verbs of `Peers` that are needed."""

    def receive(self, request: Request, offer: bytes, *, is_lent: bool = False) -> Receive: ...
    def cancel_receive(self, request: Request) -> None: ...


class Borrowing:
    """Threads of its own ask and wait, so that `prefetch` waits for nobody. `begin` and `end` by any thread."""

    def __init__(
        self, config: CacheConfig, books: Books, peers: Receiving, lenders: Lenders, is_worth: Callable[[int], bool]
    ) -> None:
        """`is_worth`: whether so many blocks are received sooner than computed. Raises `RuntimeError`: no thread."""
        assert config.peer is not None
        self._books, self._peers, self._lenders, self._is_worth = books, peers, lenders, is_worth
        self._size, self._most_blocks = config.block_size, max(1, config.pool_sizes()[0] // _PARTS)
        self._receive_seconds = config.peer.receive_timeout_seconds
        self._open: dict[str, int] = {}  # by request that waits, blocks that were borrowed for it; under the lock
        self._queue: queue.Queue[tuple[Request, Prefetch, PeerTransfer] | None] = queue.Queue(_MOST_QUEUED)
        self._pending: set[PeerTransfer] = set()  # under the lock
        self._is_closed = False
        books.listen(Matched, lambda matched: self._open.pop(matched.request_id, None))
        self._threads = [threading.Thread(target=self._run, name="borrow", daemon=True) for _ in range(_NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    def begin(self, request: Request, found: Prefetch) -> Prefetch:
        """The same, with what is borrowed of the rest. Where too many are being borrowed for, this one is not."""
        if found.num_missing_tokens < self._size or self._is_closed:
            return found
        borrow = PeerTransfer(request.request_id, 0, 0, self._books.clock.event())
        with self._books:
            if request.request_id in self._open:
                return found
            self._open[request.request_id] = 0
            self._pending.add(borrow)
        try:
            self._queue.put_nowait((request, found, borrow))
        except queue.Full:
            self.end(request.request_id)
            self._ended(borrow, ("full", "too many are being borrowed for"))
            return found
        if self._is_closed:  # meanwhile: nobody takes it any more
            self._ended(borrow, _CLOSED)
        return found.with_loan(borrow)

    def _ended(self, borrow: PeerTransfer, why: tuple[str, str] | None) -> None:
        with self._books:
            self._pending.discard(borrow)
        borrow.end(why)

    def end(self, request_id: str) -> None:
        """The request has gone: what has not come is not wanted."""
        with self._books:
            self._open.pop(request_id, None)

    def close(self) -> None:
        """Borrow no more. A lender that is being asked is not waited for any longer than it may take."""
        self._is_closed = True
        for _ in self._threads:
            try:
                self._queue.put_nowait(None)
            except queue.Full:  # who takes the next one sees that it is closed
                break
        for thread in self._threads:
            thread.join(_LEND_SECONDS)
        with self._books:
            pending = list(self._pending)
        for borrow in pending:
            self._ended(borrow, _CLOSED)

    # -- the threads

    def _run(self) -> None:
        while (taken := self._queue.get()) is not None and not self._is_closed:
            call_user(functools.partial(self._serve, *taken))  # whatever a program's lenders raise
            self._ended(taken[2], ("failed", "its lenders failed; see the log"))  # where it has not ended

    def _serve(self, request: Request, found: Prefetch, borrow: PeerTransfer) -> None:
        try:
            borrow.num_blocks = self._borrow(request, found)
        except CacheError as error:
            logger.info("event=not_borrowed request=%s reason=%r", request.request_id, str(error))
            self._ended(borrow, ("refused", str(error)))
        else:
            self._ended(borrow, None)

    def _borrow(self, request: Request, found: Prefetch) -> int:
        """How many blocks have come."""
        found.wait(self._receive_seconds)  # what storage brings needs not be borrowed
        num_known = self._lenders.num_tokens(request) // self._size
        with self._books:
            _, num_here = self._books.tree.find(request.namespace, request.keys(self._size), num_known)
            num_more = num_known - num_here
            is_too_much = sum(self._open.values()) + num_more > self._most_blocks
            if request.request_id not in self._open or num_more <= 0 or is_too_much:
                return 0
            if not self._is_worth(num_more):
                return 0
            self._open[request.request_id] = num_more
        loan = self._lenders.lend(request, _LEND_SECONDS)
        return self._take(request, loan) if loan is not None else 0

    def _take(self, request: Request, loan: Loan) -> int:
        receive: Receive | None = None
        try:
            with self._books:
                is_wanted = request.request_id in self._open
            if is_wanted:  # a match from here on ends the receive
                receive = self._peers.receive(request, loan.offer, is_lent=True)
                receive.wait(self._receive_seconds)
        finally:
            if receive is None or not receive.succeeded:
                call_user(loan.give_up)
            if receive is not None:  # what has come stays cached, and may be evicted like anything else
                self._peers.cancel_receive(request)
        return receive.num_blocks if receive is not None and receive.succeeded else 0
