"""Prefetches: what no tier here has is looked up in storage and read into the CPU tier, piece by piece."""

from __future__ import annotations

import functools
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from fastdeploy_cache.books.arrivals import insert_copies
from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import RoomCame
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.mishaps import contained
from fastdeploy_cache.books.residency import FORGOTTEN
from fastdeploy_cache.books.run import CPU, Pin
from fastdeploy_cache.storage.checkpoint_reads import CheckpointReads
from fastdeploy_cache.storage.link import StorageLink
from fastdeploy_cache.storage.prefetch import Fetched, PrefetchEnded, StorageLimits, StoragePrefetch
from fastdeploy_cache.storage.room import PrefetchRoom
from fastdeploy_cache.storage.unasked import UnaskedStore
from fastdeploy_cache.transfer_manager.storage.keys import NO_STOP
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

T = TypeVar("T")
_MAX_REMEMBERED = 1024  # prefetches of requests that were never matched
_PIECE_SECONDS = 0.02
_MAX_LOOKUPS = 3  # of a prefetch
_PIECES_AT_A_TIME = 2  # of a prefetch: one is read while the next waits in the queue


@dataclass(eq=False)
class _Piece:
    """Blocks of a prefetch, from `first` of the prompt on: its destinations are the task's. Or the pages of the image
    behind them."""

    prefetch: StoragePrefetch
    first: int
    ids: array[int]
    is_image: bool = False


class StorageReads:
    """All prefetches. A prefetch that finds no room waits for others to end, or for the loads of the match that follows
    it: what these have brought to the GPU needs no CPU block any more. Under the lock."""

    def __init__(self, books: Books, link: StorageLink, limits: StorageLimits, unasked: UnaskedStore) -> None:
        self._books, self._tree, self._pool = books, books.tree, books.pools[CPU]
        self._link, self._limits, self.unasked = link, limits, unasked
        self.mishaps = books.mishaps
        self._lookups: dict[int, StoragePrefetch] = {}
        self._pieces: dict[int, _Piece] = {}
        self._waiting: OrderedDict[StoragePrefetch, None] = OrderedDict()  # for room
        self._answered: list[StoragePrefetch] = []  # to go on with at the end of the turn
        self._room = PrefetchRoom(books, limits)
        self._by_request: OrderedDict[str, StoragePrefetch] = OrderedDict()
        self.checkpoints = CheckpointReads(books, books.rows) if books.rows is not None else None
        self.num_fetched_blocks = self.num_unasked_blocks = self.num_fetched_checkpoints = 0
        self.num_prefetches = self.num_short_prefetches = 0

    @property
    def held_ids(self) -> list[int]:
        """CPU blocks that reads own."""
        return [i for piece in self._pieces.values() for i in piece.ids]

    @property
    def pins(self) -> Iterable[Pin]:
        """What is held of runs until a checkpoint has come."""
        return self.checkpoints.pins if self.checkpoints is not None else ()

    @property
    def held(self) -> Iterable[Checkpoint]:
        """Checkpoints that are held until a match has seen them."""
        return self.checkpoints.held if self.checkpoints is not None else ()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being looked up or read."""
        return not self._lookups and not self._pieces

    # -- of a request

    def wants(self, num_missing_blocks: int) -> bool:
        """Whether to ask for so many blocks at all."""
        self.unasked.note_asked()
        is_short = num_missing_blocks < self._limits.min_blocks
        self.num_prefetches += num_missing_blocks > 0
        self.num_short_prefetches += is_short and num_missing_blocks > 0
        if is_short or not self._link.can(TaskKind.LOOKUP):
            return False
        is_worth = self._link.speeds.is_worth_fetching(num_missing_blocks, self._room.num_fetching)
        self.num_unasked_blocks += 0 if is_worth else num_missing_blocks
        return is_worth

    def start(self, prefetch: StoragePrefetch) -> None:
        """Ask how much of it is there; `finish` goes on from the answer."""
        self.forget(prefetch.request_id)
        task = self._new_task(TaskKind.LOOKUP, prefetch, 0, prefetch.num_wanted, None)  # first: it may need memory
        prefetch.began_at = self._books.clock.now()
        self._by_request[prefetch.request_id] = prefetch
        try:
            self._send(prefetch, task, self._lookups, prefetch)
        except BaseException:
            del self._by_request[prefetch.request_id]
            raise
        while len(self._by_request) > _MAX_REMEMBERED:
            self.revoke(self._by_request.popitem(last=False)[1])

    def of(self, request_id: str) -> StoragePrefetch | None:
        """What is being fetched for a queued request."""
        return self._by_request.get(request_id)

    def take(self, request_id: str) -> StoragePrefetch | None:
        """The request's prefetch, which is the caller's to revoke from now on."""
        prefetch = self._by_request.pop(request_id, None)
        if prefetch is not None:
            self._room.keep_no_more(prefetch)
        return prefetch

    def forget(self, request_id: str) -> None:
        """The request has ended, or starts anew: what has not come is not wanted."""
        prefetch = self._by_request.pop(request_id, None)
        if prefetch is not None:
            self.revoke(prefetch)

    def revoke(self, prefetch: StoragePrefetch) -> None:
        """Nobody wants what has not come yet."""
        self._room.keep_no_more(prefetch)
        if not prefetch.revoked:
            prefetch.revoked, prefetch.is_followed = True, False
            self._cancel(prefetch)
            if prefetch in self._waiting:
                self._end(prefetch)

    def stop(self, namespace: str | None = None) -> None:
        """The store is being detached, or must be quiet: nobody waits for it any more. Nor does a match that follows
        one of which pieces are on their way: with its last piece it would wait for room here, and another store's
        reads would be asked to revoke it. Or a `namespace` is forgotten: nobody sees what is on its way of it."""
        flying = [*self._lookups.values(), *(piece.prefetch for piece in self._pieces.values())]
        for prefetch in (*self._by_request.values(), *self._waiting, *flying):
            if namespace in {None, prefetch.namespace}:
                prefetch.epoch = prefetch.epoch if namespace is None else FORGOTTEN
                self.revoke(prefetch)
        if namespace is None:
            self._by_request.clear()

    def _cancel(self, prefetch: StoragePrefetch) -> None:
        self._link.cancel(prefetch.task_ids)

    # -- pieces

    @contained("prefetch", None)
    def advance(self) -> None:
        """Go on with those that were answered, then with those that wait for room: at the end of a turn."""
        while self._answered:
            self._try_to_go_on(self._answered.pop(0))
        for prefetch in list(self._waiting):
            self._try_to_go_on(prefetch)

    def _try_to_go_on(self, prefetch: StoragePrefetch) -> None:
        """What fails costs one of them, and nobody waits for that."""
        goes_on = self.mishaps.contain("prefetch", functools.partial(self._go_on, prefetch))
        if not goes_on and not prefetch.num_in_flight and not prefetch.done.is_set():
            self._end(prefetch)

    def request_of(self, task_id: int) -> str | None:
        """Whose prefetch a task is for that has not ended; None: nobody's."""
        piece = self._pieces.get(task_id)
        prefetch = piece.prefetch if piece is not None else self._lookups.get(task_id)
        return prefetch.request_id if prefetch is not None else None

    def follow(self, prefetch: StoragePrefetch) -> None:
        """A match follows the prefetch, and holds what has come. One that ended for want of room goes on."""
        if prefetch.done.is_set():
            if not prefetch.has_more or self.checkpoints is not None:  # what had come is gone
                return
            prefetch.done.clear()
            prefetch.began_at = self._books.clock.now()
            self._waiting[prefetch] = None
        prefetch.is_followed = True
        self._books.note(RoomCame(tier=CPU))
        self._books.await_room(self, bool(self._waiting), CPU)

    def _go_on(self, prefetch: StoragePrefetch) -> None:
        """Give out the next pieces of a prefetch; where nothing more can come, it is done."""
        while prefetch.has_more and prefetch.num_in_flight < _PIECES_AT_A_TIME and self._link.can(TaskKind.PREFETCH):
            num_left = max(0, prefetch.num_present - prefetch.num_asked)
            if not num_left and prefetch.num_in_flight:  # its image comes last
                break
            num_blocks = min(self._num_piece_blocks(), num_left, self._room.num_blocks(prefetch))
            prefetch.lacks_room = num_blocks <= 0 if num_left else not self._fetch_image(prefetch)
            if prefetch.lacks_room or not num_left:
                break
            self._fetch(prefetch, num_blocks)
        if prefetch.num_in_flight:
            self._waiting.pop(prefetch, None)
        elif prefetch.has_more and (self._pieces or (prefetch.is_followed and prefetch.is_loading)):
            self._waiting[prefetch] = None
        elif not self._look_again(prefetch):
            self._end(prefetch)
        self._books.await_room(self, bool(self._waiting), CPU)

    def _look_again(self, prefetch: StoragePrefetch) -> bool:
        """What a look-up has promised was not whole, or not on every rank: ask for a checkpoint in front of that, while
        there is time. Whether it does."""
        tried, is_short, prefetch.is_short = prefetch.num_tried, prefetch.is_short, False
        is_wanted = is_short and not prefetch.revoked and prefetch.epoch == self._tree.epoch
        if not is_wanted or prefetch.num_lookups == _MAX_LOOKUPS or prefetch.seconds_left <= 0:
            return False
        prefetch.stops = prefetch.stops[: tried - 1].ljust(len(prefetch.stops), bytes([NO_STOP]))
        if not any(prefetch.stops) or not self._link.can(TaskKind.LOOKUP):
            return False
        task = self._new_task(TaskKind.LOOKUP, prefetch, 0, prefetch.num_wanted, None)
        self._send(prefetch, task, self._lookups, prefetch)
        prefetch.num_lookups += 1
        return True

    def _end(self, prefetch: StoragePrefetch) -> None:
        self._waiting.pop(prefetch, None)
        if self.checkpoints is not None:
            self._room.num_fetching -= prefetch.num_held
            prefetch.num_held, prefetch.lacks_image = 0, False
            num_of_use = prefetch.num_present if prefetch.has_checkpoint else 0  # nobody can use what is behind
            prefetch.num_landed = min(prefetch.num_landed, num_of_use)
            self.checkpoints.let_go(prefetch)
        self._books.await_room(self, bool(self._waiting), CPU)
        seconds, num_blocks = self._books.clock.now() - prefetch.began_at, prefetch.num_landed
        self._books.note(PrefetchEnded(seconds=seconds, request_id=prefetch.request_id, num_blocks=num_blocks))
        prefetch.done.set()
        for call in prefetch.on_done:
            self._books.call_later(call)
        prefetch.on_done = []

    def _num_piece_blocks(self) -> int:
        """So much that loads to the GPU follow soon, and that a fast store is not kept waiting between tasks."""
        limits, num_fast = self._limits, self._link.speeds.num_fetched_blocks_in(_PIECE_SECONDS)
        return max(limits.chunk_blocks, min(limits.max_chunk_blocks, num_fast))

    def _fetch(self, prefetch: StoragePrefetch, num_blocks: int) -> None:
        tenant, start = self._books.tenant_of(prefetch.namespace), prefetch.num_asked
        ids = self._books.take(num_blocks, CPU, TASK, tenant)
        try:
            task = self._new_task(TaskKind.PREFETCH, prefetch, start, num_blocks, ids)
            self._send(prefetch, task, self._pieces, _Piece(prefetch, prefetch.first + start, ids[:]))
        except BaseException:
            self._pool.free(ids, TASK)
            raise
        prefetch.num_asked += num_blocks
        self._room.num_fetching += num_blocks

    def _fetch_image(self, prefetch: StoragePrefetch) -> bool:
        """All that comes before its image is there: read that, if there is room for it; whether there was."""
        assert self.checkpoints is not None
        num_pages = self.checkpoints.num_pages(prefetch)
        if num_pages > self._room.num_blocks(prefetch):
            return False
        prefetch.lacks_image = False
        if not num_pages:  # at a boundary of chunks there is nothing to read
            self._land_image(prefetch, array("i"))
            return True
        ids = self._books.take(num_pages, CPU, TASK)
        try:
            names, namespace, priority = self.checkpoints.names(prefetch), prefetch.namespace, prefetch.priority
            task = self._link.new_task(TaskKind.PREFETCH, namespace, names, destinations=ids, priority=priority)
            self._send(prefetch, task, self._pieces, _Piece(prefetch, prefetch.first, ids[:], is_image=True))
        except BaseException:
            self._pool.free(ids, TASK)
            raise
        self._room.num_fetching += num_pages
        return True

    def _send(self, prefetch: StoragePrefetch, task: TransferTask, noted: dict[int, T], of: T) -> None:
        prefetch.task_ids.add(task.task_id)
        try:
            self._link.outbox.put(task, noted, of)
        except BaseException:
            prefetch.task_ids.discard(task.task_id)
            raise
        prefetch.num_in_flight += 1

    def _new_task(
        self, kind: TaskKind, prefetch: StoragePrefetch, start: int, num_blocks: int, ids: array[int] | None
    ) -> TransferTask:
        end, needs_tokens = start + num_blocks, self._link.client.needs_token_ids
        tokens = prefetch.keys.part(0, (prefetch.first + end) * self._tree.block_bytes) if needs_tokens else b""
        hashes = prefetch.hashes[start * HASH_BYTES : end * HASH_BYTES]
        stops = prefetch.stops if kind is TaskKind.LOOKUP else b""
        task = functools.partial(self._link.new_task, kind, prefetch.namespace, hashes)
        return task(destinations=ids, token_ids=tokens, priority=prefetch.priority, detail=stops)

    # -- ending

    def finish(self, result: TransferResult) -> None:
        """A look-up or a piece has ended; `advance` goes on from there."""
        task_id = result.task.task_id
        piece = self._pieces.pop(task_id, None)
        prefetch = piece.prefetch if piece is not None else self._lookups.pop(task_id)
        prefetch.num_in_flight -= 1
        prefetch.task_ids.discard(task_id)
        try:
            if piece is not None:  # before what may fail: its blocks are noted nowhere else
                (self._end_image if piece.is_image else self._end_piece)(piece, result)
            self._link.judge(result)
            if piece is not None:
                if result.error is None and result.num_blocks:
                    self._link.note_read(result)
            elif result.error is None:
                self._link.speeds.lookup.note(1, max(r.seconds for r in result.ranks))
                num_present = min(result.num_blocks, prefetch.num_wanted)
                if num_present >= self._limits.min_blocks and prefetch.epoch == self._tree.epoch:
                    prefetch.num_present = prefetch.num_found = num_present
                    if self.checkpoints is not None:
                        self._expect_image(prefetch)
        finally:  # whatever fails: nobody else would end it, and a match may wait for its end
            self._answered.append(prefetch)

    def _expect_image(self, prefetch: StoragePrefetch) -> None:
        """All that is read is held until the checkpoint behind it has come: where that is more than may be held at a
        time, nothing is read."""
        assert self.checkpoints is not None
        prefetch.num_tried, prefetch.num_asked = prefetch.num_present, prefetch.num_landed
        num_blocks = prefetch.num_present + self.checkpoints.num_pages(prefetch)
        prefetch.lacks_image = num_blocks <= self._limits.max_blocks
        if not prefetch.lacks_image:
            prefetch.num_present, prefetch.lacks_room = 0, True

    def _insert(self, piece: _Piece, num_good: int) -> int:
        prefetch, ids = piece.prefetch, piece.ids[:num_good]
        start = (piece.first - prefetch.first) * HASH_BYTES
        hashes = prefetch.hashes[start : start + len(ids) * HASH_BYTES]
        run = insert_copies(self._tree, prefetch.namespace, prefetch.keys, piece.first, ids, hashes=hashes)
        return run.num_blocks if run is not None else 0

    def _end_piece(self, piece: _Piece, result: TransferResult) -> None:
        prefetch, ids, num_blocks = piece.prefetch, piece.ids, len(piece.ids)
        self._room.num_fetching -= num_blocks
        num_good = min(result.num_blocks, num_blocks) if result.error is None else 0
        prefetch.read_seconds += max([rank.seconds for rank in result.ranks], default=0.0)
        continues = prefetch.first + prefetch.num_landed == piece.first and prefetch.epoch == self._tree.epoch
        num_joined = 0
        if num_good and continues:
            joined = self.mishaps.ask("landing", lambda: self._insert(piece, num_good), None)
            if joined is None:  # nothing has joined: it is a miss, and its blocks are free
                num_good = 0
            num_joined = joined or 0
            prefetch.num_landed += num_good
            self.num_fetched_blocks += num_joined
            del ids[num_good - num_joined : num_good]  # in place: a new array would need memory
            if num_good and self.checkpoints is not None:
                self._room.num_fetching += num_good
                prefetch.num_held += num_good
                hold = functools.partial(self.checkpoints.hold, prefetch)
                continues = self.mishaps.ask("landing", hold, otherwise=False)
        prefetch.is_short = result.error is None and result.num_blocks < num_blocks
        if num_good < num_blocks or not continues:  # what is behind it cannot be used
            prefetch.lacks_image = False
            prefetch.num_present = min(prefetch.num_present, prefetch.num_landed)
            if result.error is None and (num_good < num_blocks or prefetch.epoch != self._tree.epoch):
                prefetch.num_found = prefetch.num_present  # it has no more than that, or nobody may have it
            self._cancel(prefetch)
        if ids:
            self._pool.free(ids, TASK)
        if self.checkpoints is None:
            self._has_come(prefetch, num_joined)

    def _has_come(self, prefetch: StoragePrefetch, num_blocks: int) -> None:
        """So many more CPU blocks are of use to its request."""
        if num_blocks and prefetch.is_followed:
            self._books.note(Fetched(prefetch=prefetch))
        elif num_blocks and self._by_request.get(prefetch.request_id) is prefetch:
            self._room.keep(prefetch, num_blocks)

    def _end_image(self, piece: _Piece, result: TransferResult) -> None:
        prefetch, num_pages = piece.prefetch, len(piece.ids)
        self._room.num_fetching -= num_pages
        prefetch.read_seconds += max([rank.seconds for rank in result.ranks], default=0.0)
        prefetch.is_short = result.error is None and result.num_blocks < num_pages
        is_whole = result.error is None and not prefetch.is_short and prefetch.epoch == self._tree.epoch
        if not (is_whole and self._land_image(prefetch, piece.ids)):
            self._pool.free(piece.ids, TASK)

    def _land_image(self, prefetch: StoragePrefetch, pages: array[int]) -> bool:
        assert self.checkpoints is not None
        land = functools.partial(self.checkpoints.land, prefetch, pages)
        has_landed = self.mishaps.ask("landing", land, otherwise=False)
        self.num_fetched_checkpoints += has_landed
        if prefetch.has_checkpoint:
            self._has_come(prefetch, prefetch.num_landed + len(pages) * has_landed)
        return has_landed
