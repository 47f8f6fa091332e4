"""Queued requests of which another instance has more cached: `prefetch` has that lent, and brings it here.

It is a hand-over of what is cached: the lender offers what its `lend` says, and here `receive` takes it. What has come
is let go at once, so that no request which waits keeps blocks from those that run.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Matched
from fastdeploy_cache.books.mishaps import call_user
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.ipc.clock import Alarm
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.peers.transfers import PeerTransfer, Receive
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.match import Prefetch

logger = event_log(__name__)

_NUM_THREADS = 4
_MOST_OPEN = 64
_LEND_SECONDS, _STORE_SECONDS = 3.0, 1.0  # that a lender may take, and that storage is waited for before
_PARTS = 4  # of the GPU's blocks, this part may be on its way for prefetches at a time
_GONE = "cancelled", "its request was matched, or gave it up"
_CLOSED = "cancelled", "the cache is closed"


class Loan(NamedTuple):
    """What another instance lends: its `Send.offer`, and what is called where nobody takes it."""

    offer: bytes
    give_up: Callable[[], object]


class Lenders(Protocol):
    """Other instances, as a program knows them."""

    def num_tokens(self, request: Request) -> int:
        """How many leading tokens of the prompt one of them has in its tiers, as far as is known. It is called by who
        calls `prefetch`, and must not wait."""
        ...

    def lend(self, request: Request, timeout_seconds: float) -> Loan | None:
        """Have that one lend it, in at most so long; None: it does not. It is called by a thread of the cache."""
        ...


class Receiving(NamedTuple):
    """What is needed of `Peers`. `begin` as `receive` of what is lent, but for the question whether it is worth it;
    `forget`, under the lock: nobody keeps what has come for a request; `is_worth`: receiving so many blocks takes less
    time than computing them, which counts as a question; `matched`: ids of requests."""

    begin: Callable[[Request, bytes], Receive]
    forget: Callable[[str], object]
    is_worth: Callable[[int], bool]
    matched: Container[str]


@dataclass(eq=False)
class _Borrow:
    """One request's. `num_blocks` are to come; `alarm` ends it, whatever its lender does."""

    request: Request
    found: Prefetch
    num_blocks: int
    transfer: PeerTransfer
    alarm: Alarm | None = None
    is_coming: bool = False  # it is received, which has a deadline of its own


class Borrowing:
    """Threads of its own ask and wait, so that `prefetch` waits for nobody. `begin` and `end` by any thread.

    A borrow is open while it stands in `_open`. Whoever takes it out from there ends it: its thread, its alarm, the
    match or the end of its request, or `close`.
    """

    def __init__(self, config: CacheConfig, books: Books, peers: Receiving, lenders: Lenders) -> None:
        """Raises `RuntimeError`: there is no thread."""
        assert config.peer is not None
        self._books, self._peers, self._lenders = books, peers, lenders
        self._size, self._most_blocks = config.block_size, max(1, config.pool_sizes()[0] // _PARTS)
        self._receive_seconds = config.peer.receive_timeout_seconds
        self._open: dict[str, _Borrow] = {}  # by request; under the lock
        self._queue: queue.SimpleQueue[_Borrow | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(_NUM_THREADS):
                thread = threading.Thread(target=self._run, name="borrow", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close()
            raise
        with books:
            books.listen(Matched, lambda matched: self._take_out(matched.request_id, _GONE))

    def begin(self, request: Request, found: Prefetch) -> Prefetch:
        """The same, with what is borrowed of the rest. Who asks for the same prompt waits for it, too."""
        num_usable = max(0, request.num_tokens - 1) // self._size  # the last token is computed
        num_here = (found.num_gpu_tokens + found.num_cpu_tokens) // self._size
        if num_here >= num_usable or self._is_closed:
            return found
        told: list[int] = []
        call_user(lambda: told.append(self._lenders.num_tokens(request) // self._size))
        num_blocks = min(max(told, default=0), num_usable) - num_here
        with self._books:
            for other in self._open.values():
                mine = other.request
                if mine is request or _prompt_of(mine) == _prompt_of(request):
                    return found.with_loan(other.transfer)
            num_open = sum([other.num_blocks for other in self._open.values()])
            is_full = len(self._open) >= _MOST_OPEN or num_open + num_blocks > self._most_blocks
            is_known = request.request_id in self._open or request.request_id in self._peers.matched
            if num_blocks <= 0 or is_full or is_known or not self._peers.is_worth(num_blocks):
                return found
            transfer = PeerTransfer(request.request_id, 0, 0, self._books.clock.event())
            borrow = self._open[request.request_id] = _Borrow(request, found, num_blocks, transfer)
        clock, seconds = self._books.clock, _STORE_SECONDS + 2 * _LEND_SECONDS
        try:
            borrow.alarm = clock.call_at(clock.now() + seconds, lambda: self._give_up(borrow))
        except RuntimeError:  # no thread: nobody would end it
            self._end(borrow, ("full", "there are no threads"))
            return found
        self._queue.put(borrow)
        if self._is_closed:  # meanwhile
            self._end(borrow, _CLOSED)
        return found.with_loan(transfer)

    def end(self, request_id: str) -> None:
        """The request has gone: what has not come is not wanted."""
        with self._books:
            self._take_out(request_id, _GONE)

    def close(self) -> None:
        """Borrow no more. A lender that is being asked is not waited for any longer than it may take."""
        self._is_closed = True
        with self._books:
            for request_id in list(self._open):
                self._take_out(request_id, _CLOSED)
        for _ in self._threads:
            self._queue.put(None)
        until = self._books.clock.now() + _LEND_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # by a callback
                thread.join(max(0.0, until - self._books.clock.now()))

    # -- ends

    def _take_out(self, request_id: str, why: tuple[str, str] | None) -> None:
        """It is open no more; who waits hears of it after the turn. Under the lock."""
        borrow = self._open.pop(request_id, None)
        if borrow is not None:
            self._peers.forget(request_id)  # what has come stays cached, and may be evicted like anything else
            if borrow.alarm is not None:
                borrow.alarm.cancel()
            self._books.call_later(functools.partial(borrow.transfer.end, why))

    def _end(self, borrow: _Borrow, why: tuple[str, str] | None) -> None:
        with self._books:
            if self._is_open(borrow):
                self._take_out(borrow.request.request_id, why)

    def _give_up(self, borrow: _Borrow) -> None:
        if not borrow.is_coming:
            self._end(borrow, ("late", "nothing was lent in time"))

    def _is_open(self, borrow: _Borrow) -> bool:
        return self._open.get(borrow.request.request_id) is borrow

    # -- the threads

    def _run(self) -> None:
        while (borrow := self._queue.get()) is not None:
            call_user(functools.partial(self._serve, borrow))  # whatever a program's lenders raise
            self._end(borrow, ("failed", "its lenders failed; see the log"))  # where it has not ended

    def _serve(self, borrow: _Borrow) -> None:
        borrow.found.wait(_STORE_SECONDS)  # what storage brings needs not be borrowed
        if not self._is_open(borrow):
            return
        loan = self._lenders.lend(borrow.request, _LEND_SECONDS)
        if loan is None:
            self._end(borrow, None)
            return
        receive: Receive | None = None
        try:
            with self._books:
                borrow.is_coming = self._is_open(borrow)
            if borrow.is_coming:  # a match from here on ends the receive
                receive = self._peers.begin(borrow.request, loan.offer)
                with self._books:
                    if not self._is_open(borrow):  # it was given up in between, and nobody has seen the receive
                        self._peers.forget(borrow.request.request_id)
                receive.wait(self._receive_seconds)
                borrow.transfer.num_blocks = receive.num_blocks if receive.succeeded else 0
                self._end(borrow, None if receive.succeeded else (receive.reason or "late", receive.error or "late"))
        except CacheError as error:
            logger.info("event=not_borrowed request=%s reason=%r", borrow.request.request_id, str(error))
            self._end(borrow, ("refused", str(error)))
        finally:
            if receive is None or not receive.succeeded:
                call_user(loan.give_up)


def _prompt_of(request: Request) -> tuple[object, ...]:
    return request.namespace, request.images, request.prompt
