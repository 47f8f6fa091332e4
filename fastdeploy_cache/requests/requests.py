"""The requests that are matched now."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from fastdeploy_cache.books.block_pool import REQUEST
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Matched
from fastdeploy_cache.books.leaves.policy import Asked
from fastdeploy_cache.books.row_books import usable_checkpoints
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.books.tenants.shares import REST
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import OutOfBlocksError, PromptTooLongError, RequestError, UnknownRequestError
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.request import Request, no_request
from fastdeploy_cache.requests.accounts import Accounts
from fastdeploy_cache.requests.active_request import AHEAD, WAITING, ActiveRequest, Committed
from fastdeploy_cache.requests.anchors import Anchors
from fastdeploy_cache.requests.explanation import Explanation
from fastdeploy_cache.requests.listener import ALLOCATED, COMMITTED, MOST_NOTED, REFUSED, SNAPSHOT, RequestListener
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.requests.misses import Misses
from fastdeploy_cache.requests.prefetches import Prefetches
from fastdeploy_cache.requests.publisher import Publisher
from fastdeploy_cache.requests.room_queue import RoomNeed, RoomQueue, Taking
from fastdeploy_cache.requests.row_copies import RowCopies
from fastdeploy_cache.requests.row_loads import RowLoads
from fastdeploy_cache.requests.row_matches import RowMatches
from fastdeploy_cache.requests.runs_ahead import RunsAhead
from fastdeploy_cache.requests.trail import Trail
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.storage.prefetch import Fetched

T = TypeVar("T")


def _keep_none(active: ActiveRequest, private_ids: array[int]) -> Callable[[], array[int]]:  # noqa: ARG001
    return lambda: private_ids


def _new_anchors(config: CacheConfig, books: Books, movement: Movement, room: RoomQueue) -> Anchors | None:
    rows, images, units = books.rows, movement.images, movement.units
    if rows is None or images is None or units is None:
        return None
    has_tier = config.pool_sizes()[1] > 0
    loads = RowLoads(config, books, rows, movement, room=room) if has_tier else None
    copies = RowCopies(rows, units, copies_states=config.state_copy)
    matches = RowMatches(config, books, rows, images, loads=loads, copies=copies)
    return Anchors(config, books, rows, images, matches=matches)


class Requests:
    """Each from match to release, by its id. Under the lock.

    Attributes:
        offered: those that are offered to another instance.
        keep_offered: called for such a one, and its own blocks, when it is to be released. It may lack memory; what it
            returns may not, and takes over what has to stay until the send has ended. That returns the other blocks.
    """

    def __init__(
        self, config: CacheConfig, books: Books, movement: Movement, storage: StorageAccess, accounts: Accounts
    ) -> None:
        self.books, self.accounts, self._now = books, accounts, books.clock.now
        self._requests: dict[str, ActiveRequest] = {}
        accounts.follow(books, movement.speeds)
        self._misses = misses = Misses(books)
        self.room = RoomQueue(books, movement.mover, self.num_coming, movement.images)
        self.anchors = _new_anchors(config, books, movement, self.room)
        self.matcher = Matcher(config, books, movement, storage, misses=misses, room=self.room, anchors=self.anchors)
        self.ahead = RunsAhead(self.matcher, movement.mover, accounts, self.anchors)
        self.publisher = Publisher(config, books, movement, self.matcher, misses=misses, anchors=self.anchors)
        self._config, self._mover, self._storage = config, movement.mover, storage
        # with tenants each prompt is checked against a share
        has_shares = books.residency.shares is not None
        self._most_tokens = books.pools[GPU].num_blocks * config.block_size if not has_shares else -1
        self.prefetches = Prefetches(config, books, storage, self._requests)
        self.listener: RequestListener | None = None
        self.offered, self._forgotten = set[ActiveRequest](), set[ActiveRequest]()
        self.keep_offered: Callable[[ActiveRequest, array[int]], Callable[[], array[int]]] = _keep_none
        books.listen(Fetched, self._on_fetched)

    def tell(self, listener: RequestListener) -> None:
        """Let this one hear of every verb from now on."""
        self.listener = listener
        self.matcher.tell(listener)
        self.publisher.tell(listener)
        self.ahead.tell(listener)
        self.prefetches.tell(listener)
        if self.anchors is not None:
            self.anchors.snapshots.tell(listener)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def active(self, request: Request) -> ActiveRequest:
        """What is kept of a matched request. Raises `UnknownRequestError`, or `ClosedError`."""
        try:
            active = self._requests.get(request.request_id)
        except AttributeError:
            raise no_request(request) from None
        if active is None or active.request is not request or self.books.is_closed:
            self.books.check_open()
            if active is not None:
                raise UnknownRequestError(
                    f"another request with the id {request.request_id!r} is matched, not this one; "
                    "give each request an id of its own"
                )
            raise UnknownRequestError(f"request {request.request_id!r} is not matched or was released; match it first")
        return active

    def check_new(self, request: Request) -> None:
        """Raise `RequestError` where it is none, or is matched already, `PromptTooLongError` where it can never fit."""
        if not isinstance(request, Request):
            raise no_request(request)
        if request.request_id in self._requests:
            is_same = self._requests[request.request_id].request is request
            raise RequestError(
                f"request {request.request_id!r} is matched already; release it first"
                if is_same
                else f"the id {request.request_id!r} is matched already, by another request; give each an id of its own"
            )
        num_blocks = -(-request.num_tokens // self._config.block_size)
        num_all, shares = self.books.pools[GPU].num_blocks, self.books.residency.shares
        said = f"request {request.request_id!r} has {request.num_tokens} tokens, {num_blocks} blocks"
        if num_blocks > num_all:
            raise PromptTooLongError(f"{said}; the GPU pool has {num_all}: shorten it or raise num_gpu_blocks")
        if shares is not None:
            most = shares.most_blocks(GPU, shares.tenant_of(request.namespace))
            if num_blocks > most:
                of = f"the tenants' shares leave {most} of {num_all} GPU blocks to its namespace {request.namespace!r}"
                raise PromptTooLongError(f"{said}; {of}: shorten it, or change the table 'tenants'")

    def explain(self, request_id: str) -> Explanation:
        """See `PrefixCacheManager.explain`."""
        active = self._requests.get(request_id)
        if active is None:
            kept = self.accounts.recent(request_id)
            if kept is None:
                raise UnknownRequestError(
                    f"request {request_id!r} is not matched now, and not among the last "
                    f"{self._config.num_explained_requests} that were; raise num_explained_requests to remember more"
                )
            return kept
        num_shown = 0 if self.matcher.is_lost(active) else len(self.matcher.arrived(active)[0])
        return self.accounts.of(active, num_shown)

    def explain_active(self, request_id: str) -> tuple[ActiveRequest, Explanation] | None:
        """What is kept of a request that is matched now, and the explanation of it; None where it is not matched."""
        active = self._requests.get(request_id)
        return (active, self.explain(request_id)) if active is not None else None

    # -- one by one

    def begin(self, request: Request, called_at: float) -> ActiveRequest:
        """Find its prefix. Where this raises, the request holds nothing and may be matched again. `called_at`: when the
        caller asked for it, by the monotonic clock."""
        is_plain = type(request) is Request and request.num_tokens <= self._most_tokens
        if not is_plain or request.request_id in self._requests:
            self.check_new(request)
        keys = request.keys(self._config.block_size)
        active = ActiveRequest(request, keys, self.books.tree.generations.current, Trail(), array("i"))
        active.trail.matched_at = called_at
        self._requests[request.request_id] = active
        try:
            if self.anchors is not None:
                self.anchors.begin(active)
            if self._config.enable_prefix_caching and GPU not in self.books.asleep:
                if self._storage.is_attached:
                    self.matcher.take_prefetch(active)
                self.matcher.find(active)
            if Matched in self.books.listeners:
                self.books.note(Matched(request_id=request.request_id))
            if self.listener is not None:
                self.listener.matched(active)
        except BaseException:
            self.abandon(active)
            raise
        return active

    def abandon(self, active: ActiveRequest) -> None:
        """Its match has failed half way: it holds nothing, and may be matched again."""
        del self._requests[active.request.request_id]
        self._misses.computing.end(active)
        self.matcher.abandon(active)

    def allocate(
        self, active: ActiveRequest, num_blocks: int, *, ahead_of_loads: bool, is_told: bool = True
    ) -> array[int]:
        """See `PrefixCacheManager.allocate`. Not `is_told`: a commit that says it all comes in the same turn."""
        pool, shares = self.books.pools[GPU], self.books.residency.shares
        tenant = shares.tenant_of(active.request.namespace) if shares is not None else None
        if num_blocks > pool.num_free or tenant is not None:
            missing = num_blocks - self.books.residency.num_available(GPU, tenant)
            if missing > 0:
                num_all = max(len(active.block_ids), active.num_matched_blocks) + num_blocks
                most = pool.num_blocks if shares is None else shares.most_blocks(GPU, tenant or REST)
                self.tell_refused(active, num_blocks, missing)
                is_more, of = num_all > most, active.request.namespace if shares is not None else None
                raise OutOfBlocksError(missing, self.num_coming(), num_all=most if is_more else None, namespace=of)
        if active.phase is WAITING:
            if ahead_of_loads:
                self.ahead.begin(active)
            else:
                self.matcher.settle(active)
        ids = self.books.take(num_blocks, GPU, REQUEST, tenant)
        try:
            active.block_ids += ids
        except BaseException:  # no memory for a longer table: the blocks are nobody's else
            pool.free(ids, REQUEST)
            raise
        clock = self._now
        active.trail.stepped_at = now = clock()
        if not active.is_admitted:
            self._admit(active, now)
        if is_told and (listener := self.listener) is not None:
            note = listener.note
            note((ALLOCATED, active.trail.number, num_blocks, ahead_of_loads))
        return ids

    def wait_for_blocks(
        self,
        request: Request,
        num_blocks: int,
        take: Callable[[], T],
        undo: Callable[[ActiveRequest, T], None],
        seconds: float,
    ) -> T:
        """What `take` allocates for the request, now or when copies in flight have given back enough; `undo` is its
        reverse. Not under the lock. See `RoomQueue.when_room`."""

        def need() -> RoomNeed:
            active = self._requests.get(request.request_id) if self.anchors is not None else None
            if active is None or active.rows is None or self.anchors is None:
                return RoomNeed(num_blocks, (), self.books.tenant_of(request.namespace))
            return self.anchors.need(active, num_blocks)

        def give_back(taken: T) -> None:
            active = self._requests.get(request.request_id)
            if active is not None and active.request is request:
                undo(active, taken)

        def ready() -> None:
            self.matcher.stop_waiting_for_room(self.active(request))

        return self.room.when_room(Taking(need, take, give_back), seconds, ready)

    def tell_allocated(self, active: ActiveRequest, num_blocks: int, *, ahead_of_loads: bool = False) -> None:
        """It got blocks, and no commit has told of them."""
        if (listener := self.listener) is not None:
            note = listener.note
            note((ALLOCATED, active.trail.number, num_blocks, ahead_of_loads))

    def tell_refused(self, active: ActiveRequest, num_blocks: int, missing: int) -> None:
        """It did not get blocks, or units of a row."""
        if self.listener is not None:
            counts = min(num_blocks, MOST_NOTED), min(missing, MOST_NOTED)
            self.listener.note((REFUSED, active.trail.number, *counts))

    def tell_snapshot(self, active: ActiveRequest, num_tokens: int, *, given: bool) -> None:
        """It has asked for a snapshot behind so many tokens, and has an answer: that it is not noted costs no more than
        an equal replay."""
        try:
            if self.listener is not None:
                self.listener.note((SNAPSHOT, active.trail.number, num_tokens, given))
        except MemoryError:
            self.books.mishaps.note("metrics")

    def take_back(self, active: ActiveRequest, num_blocks: int) -> None:
        """The reverse of `allocate`, for the last blocks that it gave."""
        first = len(active.block_ids) - num_blocks
        self.books.pools[GPU].free_each(islice(active.block_ids, first, None), REQUEST)  # a slice would need memory
        del active.block_ids[first:]

    def take_back_ids(self, active: ActiveRequest, ids: list[int]) -> None:
        """The same, for these."""
        self.take_back(active, len(ids))

    def count(self, request: Request, hit_tokens: tuple[int, int, int]) -> None:
        """Count a request that was never matched here, and has hit so many tokens of each tier."""
        size, tree = self._config.block_size, self.books.tree
        active = ActiveRequest(request, request.keys(size), tree.generation, Trail(), array("i"))
        num_asked = (request.num_prompt_tokens - 1) // size
        path, num_found = tree.find(request.namespace, active.keys, num_asked)
        active.asked = Asked(num_asked, num_found)
        active.trail.num_searched_blocks = active.trail.num_whole_blocks = num_found
        if self.anchors is not None:
            self.anchors.begin(active)  # of such a model, only what a checkpoint follows can be hit
            deepest, _ = usable_checkpoints(path, num_found, request, size)
            active.trail.num_whole_blocks = deepest.boundary if deepest is not None else 0
        if num_found < num_asked:
            self._misses.find(active, path, num_found)
            self._misses.computing.end(active)
        self.accounts.count_other(active, hit_tokens)

    def commit(self, active: ActiveRequest, num_computed_tokens: int, now: float) -> bool:
        """So many tokens of a request are computed; the caller has checked the number. Whether that was told."""
        is_first = not active.is_admitted
        if is_first:
            self._admit(active, now)
        is_told = self.publisher.commit(active, num_computed_tokens, now)
        if is_first and self.listener is not None:
            self.listener.note((COMMITTED, active.trail.number, num_computed_tokens, len(active.block_ids)))
        if self.offered and active in self.offered:
            self.books.note(Committed(active=active))
        return is_told

    def num_coming(self) -> int:
        """GPU blocks that are held only by copies in flight."""
        return self._mover.num_coming([active.pin for active in self if active.pin is not None])

    def _admit(self, active: ActiveRequest, now: float) -> None:
        """It has its first blocks: it is counted, once."""
        if self._storage.is_attached and not active.request.counted:
            self._storage.note_admitted(active.request.num_tokens)
        self.accounts.admit(active, now)

    def release(self, active: ActiveRequest) -> None:
        """See `PrefixCacheManager.release`."""
        loads = active.loads
        if active.phase is AHEAD:
            self.ahead.end(active, arrived=False, is_told=False)
        elif active.phase is WAITING:
            self.matcher.settle(active)
        if active.ahead:
            self.ahead.leave(active)
        is_offered = bool(self.offered) and active in self.offered
        take_over = self.keep_offered(active, active.private_ids()) if is_offered else None
        if active.trail.computing_key is not None:
            self._misses.computing.end(active)
        if self.listener is not None:
            self.listener.released(active)
        if active in self._forgotten:
            self.books.pools[GPU].taint(active.private_ids())
            self._forgotten.discard(active)
        del self._requests[active.request.request_id]  # after what may lack memory: a failed release can be repeated
        if take_over is None:
            active.free_private(self.books.pools[GPU])
        else:
            self.offered.discard(active)
            if own := take_over():
                self.books.pools[GPU].free(own, REQUEST)
        self.publisher.release(active)
        if loads:
            self._mover.cancel_unwanted(loads)

    # -- all of them

    def forget_namespace(self, namespace: str) -> int:
        """Requests of a namespace that is forgotten go on with what they have: their blocks, and what they compute from
        now on, are found by nobody, and wiped when they are released. Returns how many there are."""
        found = [active for active in self if active.request.namespace == namespace]
        for active in found:
            self._forgotten.add(active)
            if active.phase is WAITING:
                self.matcher.settle(active)
            active.is_detached = True
            if active.rows is not None:
                active.rows.is_forgotten = True
        return len(found)

    def settle_all(self) -> None:
        """The bytes of a tier are about to go: fix every match at what is there, with nothing in flight."""
        for active in self:
            self.matcher.settle(active)
            if active.is_ahead and not all(transfer.succeeded for transfer in active.ahead):
                self.ahead.end(active, arrived=False)
            if self.anchors is not None:
                self.anchors.matches.keep_on_gpu(active)

    def _on_fetched(self, fetched: Fetched) -> None:
        active = self._requests.get(fetched.prefetch.request_id)
        if active is not None and active.prefetch is fetched.prefetch:
            self.matcher.grow(active)
