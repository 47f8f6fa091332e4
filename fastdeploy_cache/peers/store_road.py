"""Other instances that share a store with this one: it writes what they prefetch.

Under the lock, but for what is marked as a turn of its own.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Matched
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import Pin
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import PeerError
from fastdeploy_cache.ipc.clock import Alarm
from fastdeploy_cache.movement.block_mover import TaskEnded
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.peers.end_checkpoints import EndCheckpoints
from fastdeploy_cache.peers.offers import PeerOffers, last_boundary
from fastdeploy_cache.peers.processes import NoProcesses
from fastdeploy_cache.peers.transfers import Receive, Send
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.prefetches import Prefetches
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.storage.prefetch import StoragePrefetch, StorageTaskEnded, StorageWentIdle
from fastdeploy_cache.transfer_manager.peer.offer import Offer
from fastdeploy_cache.transfer_manager.task import TaskKind

Why = tuple[str, str]


@dataclass(eq=False)
class _Stored:
    """A send. `pin`, from when all is computed until it has ended: copies and writes find the blocks. Of a hybrid model
    `checkpoint` is pinned with them: the one at which the offer ends."""

    send: Send
    generation: int
    alarm: Alarm
    pin: Pin | None = None
    checkpoint: Checkpoint | None = None


class StoredSends:
    """A send succeeds when the store has all its blocks, and of a hybrid model the checkpoint behind them; only then is
    its offer worth handing over."""

    def __init__(self, books: Books, movement: Movement, storage: StorageAccess) -> None:
        self._books, self._tree = books, books.tree
        self._movement, self._storage, self._ends = movement, storage, EndCheckpoints(books)
        self._open: dict[str, _Stored] = {}
        books.listen(TaskEnded, lambda _: self._check(is_idle=storage.is_idle and storage.is_attached))
        books.listen(StorageTaskEnded, lambda _: self._check(is_idle=False))
        books.listen(StorageWentIdle, lambda _: self._check(is_idle=True))

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def pins(self) -> list[Pin]:
        """The pins on what is being written."""
        return [each.pin for each in self._open.values() if each.pin is not None]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that are being written with them."""
        return [each.checkpoint for each in self._open.values() if each.checkpoint is not None]

    held_ids: tuple[int, ...] = ()

    def begin(self, active: ActiveRequest, send: Send, timeout_seconds: float) -> None:
        """Its blocks are written once all are committed."""
        clock = self._books.clock
        alarm = clock.call_at(clock.now() + timeout_seconds, functools.partial(self._expire, send))
        self._open[send.request_id] = _Stored(send, self._tree.generation, alarm)
        self.committed(active)

    def _expire(self, send: Send) -> None:
        """A turn of its own, on a thread of the clock's."""
        with self._books:
            self.cancel(send, ("late", "it was not stored in time"))

    def step(self, active: ActiveRequest, num_tokens: int, step: int) -> None:
        """A store takes whole blocks: see `committed`."""

    def committed(self, active: ActiveRequest) -> None:
        """The request's step is complete."""
        mine = self._open.get(active.request.request_id)
        if mine is None or mine.pin is not None or active.pin is None:
            return
        if active.num_committed_blocks >= mine.send.num_blocks and mine.generation == self._tree.generation:
            num_blocks = mine.send.num_blocks
            pin = self._tree.move_pin(None, *self._tree.place(active.pin.run.path(), num_blocks))
            assert pin is not None
            mine.checkpoint = self._ends.keep(pin, num_blocks, on_gpu=False)
            if mine.checkpoint is None and self._books.rows is not None:
                self._tree.unpin(pin)
                return  # it comes with a snapshot of these tokens
            mine.pin = pin
            self._storage.write(pin.run.path())
            self._check(is_idle=self._storage.is_idle)  # where nothing could be begun, nothing will end

    def released(self, active: ActiveRequest, private_ids: array[int]) -> Callable[[], array[int]]:
        """The request is to go: see `PeerSends`. Its blocks are the tree's, and those of its own go home."""

        def take_over() -> array[int]:
            mine = self._open.get(active.request.request_id)
            if mine is not None and mine.pin is None:
                what = "blocks" if self._books.rows is None else "blocks, and the checkpoint behind them,"
                text = f"the request was released before its {mine.send.num_blocks} {what} were computed and cached"
                self._end(mine, ("failed", text))
            return private_ids

        return take_over

    def _check(self, *, is_idle: bool) -> None:
        """A copy or a write has ended: what is stored now. `is_idle`: the store has nothing to do any more."""
        for mine in [each for each in self._open.values() if each.pin is not None]:
            assert mine.pin is not None
            if mine.generation != self._tree.generation:
                self._end(mine, ("cancelled", "the cache was reset meanwhile"))
            elif self._is_stored(mine.pin) and self._has_image(mine.checkpoint):
                self._end(mine, None)
            elif is_idle and not self._is_copying(mine.checkpoint):
                self._end(mine, ("failed", "the store has not taken all of it"))

    @staticmethod
    def _is_stored(pin: Pin) -> bool:
        *above, last = pin.run.path()
        return last.stored.num_blocks >= pin.end and all(run.stored.num_blocks == run.num_blocks for run in above)

    def _is_copying(self, checkpoint: Checkpoint | None) -> bool:
        """Whether anything is on its way to the CPU tier, from which the store takes it."""
        images = self._movement.images
        is_storing = images is not None and checkpoint is not None and images.is_storing(checkpoint)
        return is_storing or self._movement.mover.num_storing > 0

    def _has_image(self, checkpoint: Checkpoint | None) -> bool:
        if checkpoint is None or checkpoint.stored.num_blocks:
            return True
        rows = self._books.rows
        return rows is not None and not rows.checkpoints.sizes.num_pages(checkpoint.boundary)  # one of chunks

    def cancel(self, send: Send, why: Why = ("cancelled", "the sending side has cancelled it")) -> None:
        """Its caller does not want it any more, or its time is over."""
        mine = self._open.get(send.request_id)
        if mine is not None and mine.send is send:
            self._end(mine, why)

    def cancel_all(self, text: str) -> None:
        """What blocks hold is not what it was, or is not to be moved."""
        for mine in list(self._open.values()):
            self._end(mine, ("cancelled", text))

    def _end(self, mine: _Stored, why: Why | None) -> None:
        del self._open[mine.send.request_id]
        mine.alarm.cancel()
        checkpoint, mine.checkpoint = mine.checkpoint, None
        self._ends.unpin(checkpoint)  # first: its path is pinned as long as it is
        pin, mine.pin = mine.pin, None
        if pin is not None:
            self._tree.unpin(pin)
        self._books.call_later(functools.partial(mine.send.end, why))


class StoredReceives:
    """Prefetches under another name: they end as prefetches do, and `match` follows them."""

    pins: tuple[Pin, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    held_ids: tuple[int, ...] = ()
    held_units: tuple[list[array[int]], ...] = ()
    loads: tuple[Transfer, ...] = ()

    def __init__(self, books: Books) -> None:
        self._books = books
        self._open: dict[str, Receive] = {}

    def __len__(self) -> int:
        return sum(not receive.done for receive in self._open.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def begin(self, receive: Receive, prefetch: StoragePrefetch | None) -> None:
        """Ends with the prefetch; with none there is nothing to wait for."""
        self._open[receive.request_id] = receive
        if prefetch is None or prefetch.done.is_set():
            self._books.call_later(lambda: receive.end(_why_not(receive, prefetch)))
        else:
            prefetch.on_done.append(lambda: receive.end(_why_not(receive, prefetch)))

    def forget(self, request_id: str) -> None:
        """Its request is matched, or wants it no more."""
        self._open.pop(request_id, None)


def _why_not(receive: Receive, prefetch: StoragePrefetch | None) -> Why | None:
    if not receive.num_blocks:
        return None
    if prefetch is not None and prefetch.revoked:
        return "cancelled", "it is not wanted any more, or the store is to be quiet"
    if prefetch is None:
        return "refused", "storage was not asked: it is away, busy, or slower than computing so few tokens"
    num_wanted = receive.num_blocks if prefetch.stops else prefetch.num_wanted  # of a hybrid model: with a checkpoint
    if prefetch.num_landed < num_wanted:
        return "failed", f"{prefetch.num_landed} of {num_wanted} blocks came from storage"
    return None


class StoreRoad:
    """Sends and receives that need no link: whoever has the store's keys finds the blocks there."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        *,
        offers: PeerOffers,
        movement: Movement,
        storage: StorageAccess,
        prefetches: Prefetches,
    ) -> None:
        assert config.peer is not None
        self._config, self._peer, self._books = config, config.peer, books
        self.offers, self._storage, self._prefetches = offers, storage, prefetches
        self.sends = StoredSends(books, movement, storage)
        self.receives = StoredReceives(books)
        books.listen(Matched, lambda matched: self.receives.forget(matched.request_id))
        self.processes = NoProcesses()
        self.is_quiet = False

    def num_offered(self, request: Request) -> int:
        """Full blocks of a request that can be offered: a store takes only what may be cached. Of a hybrid model they
        end where its prompt can be gone on with."""
        size = self._config.block_size
        if self._books.rows is not None:
            return last_boundary(request, size)
        return (request.num_tokens if self._config.cache_outputs else request.num_prompt_tokens) // size

    def check_room(self, kind: TaskKind) -> None:
        """Raise `PeerError` where there is no store."""
        if not self._storage.is_attached:
            raise PeerError(f"{kind.value}: no store is attached; attach one with cache.storage.attach first")

    def offer(self, active: ActiveRequest, num_blocks: int) -> Send:
        """Offer the first blocks of a settled request."""
        send = self.offers.new_send(active, num_blocks, self._books.clock.event())
        self.sends.begin(active, send, self._peer.offer_timeout_seconds)
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
        """Turns of its own. Raises what `check` raises under the lock."""
        del keys, is_lent, must_be_worth  # a prefetch looks itself, and asks itself whether it is worth it
        with self._books:
            check()
        found = self._prefetches.begin(request)
        num_here = (found.num_gpu_tokens + found.num_cpu_tokens) // self._config.block_size
        with self._books:
            num_coming, done = max(0, offer.num_blocks - num_here), self._books.clock.event()
            receive = Receive(request.request_id, self.offers.next_number(), num_coming, done)
            self.receives.begin(receive, self._storage.reads.of(request.request_id))
        return receive

    def cancel_receive(self, request: Request) -> None:
        """What has come may be evicted, what has not need not come. A turn of its own, or two."""
        with self._books:
            self.receives.forget(request.request_id)
        self._prefetches.end(request)

    def be_quiet(self, quiet: bool) -> None:
        """Start nothing from now on, and end what is on its way; or go on."""
        self.is_quiet = quiet
        if quiet:
            self.cancel_all("the instance moves nothing now")

    def cancel_all(self, text: str) -> None:
        """Prefetches are storage's to end."""
        self.sends.cancel_all(text)

    def wait_settled(self, timeout_seconds: float) -> bool:  # noqa: ARG002 (see `LinkRoad`)
        """Storage's own tasks are waited for as such."""
        return True

    def start(self) -> None:
        """There are no processes."""

    def close(self) -> None:
        """Tell whom it concerns."""
        with self._books:
            self.cancel_all("the cache is closed")
