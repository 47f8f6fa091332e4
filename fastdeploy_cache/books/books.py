"""The books: what is cached, where and whose, the lock around them, and the turns that are taken under it."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol, TypeVar

from fastdeploy_cache.books.block_pool import Owner
from fastdeploy_cache.books.changes import Change, Forgotten, RoomCame
from fastdeploy_cache.books.evicting import evict, make_room
from fastdeploy_cache.books.graves import A_TURN
from fastdeploy_cache.books.leaves.policy import Asked
from fastdeploy_cache.books.path import gpu_ids
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.references import References, User
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import GPU, Pin, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.tenants.shares import REST
from fastdeploy_cache.errors import ClosedError, LifeCycleError, RequestError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.ipc.event_log import event_log

logger = event_log(__name__)

_STUCK_SECONDS = 60.0  # a turn takes milliseconds
_STUCK = f"a turn of another thread has not ended for {_STUCK_SECONDS:.0f} s, or was interrupted on its way in or out"
MAX_ROUNDS = 16  # of settling in one turn, and of turns after one that did not come to rest

C = TypeVar("C", bound=Change)


class Outlet(Protocol):
    """What hands over, without the lock, what was decided on under it."""

    @property
    def queued(self) -> deque[Any]:
        """What waits to be handed over."""
        ...

    def hand_over(self) -> None: ...


class Books:
    """The tree, the pools and who is in them. `with books:` is a turn.

    A turn takes the lock. On leaving it, still under the lock, every room hears of what has changed (`changes.py`), and
    of what follows from that, until nothing changes any more. Then the lock goes, and everything that was decided is
    handed over: tasks to the processes, and calls to whoever waits. So no verb has to remember to, and one that raises
    hands over, too.

    Turns never nest. What a room raises while it settles costs that room's work; it is logged and counted, and never
    fails the verb. Threads wait, and callers are called, between turns only.
    """

    def __init__(self, tree: PrefixTree, clock: Clock = SYSTEM_CLOCK) -> None:
        self.tree, self._graves, self.clock = tree, tree.graves, clock
        self.pools, self.residency, self.mishaps = tree.pools, tree.residency, tree.mishaps
        self.pinned: dict[Pin, PinnedPrefix] = {}  # by callers that have no request
        self.weights_id: str | None = None  # of what is cached, as far as a store or a peer has told
        self.is_closed = False
        self.asleep: frozenset[Tier] = frozenset()  # tiers that have no memory now
        self.references: References | None = None  # where somebody learns from them
        self.rows: RowBooks | None = None  # of a model whose layers do not all keep everything
        self._has_sessions = False  # a request has named one
        self._lock = threading.Lock()
        self._thread: int | None = None  # whose turn it is
        self._changes: deque[Change] = deque()
        self.listeners: dict[type[Change], list[Callable[[Any], object]]] = {}
        self._outlets: tuple[Outlet, ...] = ()
        self._calls: list[Callable[[], object]] = []  # of this turn
        self._waiters: dict[Tier, set[object]] = {}  # for blocks of a tier that somebody waits for
        self._num_room: dict[Tier, object] = {}  # blocks that could be had when this was last looked at
        self.num_moved = self._num_told = 0  # GPU blocks that were taken or let go since the start
        self._hear_moved: Callable[[int], object] | None = None

    # -- the turn

    def __enter__(self) -> None:
        me = get_ident()
        if self._thread == me:  # nobody else can have written our own number: no lock is needed to read it
            raise RuntimeError("a turn is taken inside another one of the same thread; leave that one first")
        if not self._lock.acquire(False) and not self._lock.acquire(True, _STUCK_SECONDS):
            raise LifeCycleError(f"{_STUCK}; close the manager and make a new one")
        self._thread = me

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        calls: Sequence[Callable[[], object]]
        if self._changes or self._waiters or self._graves.open or (self.rows is not None and self.rows.is_behind):
            is_at_rest, calls = self._settle_and_leave()
        else:
            is_at_rest, calls = True, ()
            if self._calls:  # an empty list stays: taken along, it would show us the calls of the turns behind ours
                calls, self._calls = self._calls, []
            try:
                if self._hear_moved is not None and self.num_moved != self._num_told:
                    self._tell_moved()  # an interrupt in its midst costs what it was about, and not the lock
            except Exception:  # no memory: the verb has happened all the same
                self.mishaps.note("settling")
            finally:
                self._thread = None
                self._lock.release()
        for outlet in self._outlets:
            if outlet.queued:
                outlet.hand_over()
        if calls:
            self._make(calls)
        if not is_at_rest:
            self._take_more_turns()

    def _settle_and_leave(self) -> tuple[bool, Sequence[Callable[[], object]]]:
        """Whether settling has come to an end, and the calls to make."""
        try:
            try:
                if self._graves.open:
                    self._graves.clear(A_TURN if self.rows is None else A_TURN // 2)  # its rows are as much work again
                if self.rows is not None:
                    self.rows.trimmer.go_on()
                is_at_rest = self._settle()
            except Exception:  # memory has run out between the rooms: what is left is the next turn's
                self.mishaps.note("settling")
                is_at_rest = True
            calls, self._calls = self._calls, []
            return is_at_rest, calls
        finally:
            self._thread = None
            self._lock.release()

    def _settle(self) -> bool:
        """Let every room hear of what has changed, and of what changes by that; whether it has come to an end."""
        for _ in range(MAX_ROUNDS):
            if self._waiters:
                self._look_for_room()
            if not self._changes:
                if self._hear_moved is None or self.num_moved == self._num_told:
                    return True
                self._tell_moved()
            for _ in range(len(self._changes)):
                self._tell(self._changes.popleft())
        if self._changes:
            self.mishaps.count("settling", f"rooms still change each other after {MAX_ROUNDS} rounds")
        return not self._changes

    def _tell(self, change: Change) -> None:
        """Everybody hears of it, then its run is let go: also where a listener is interrupted."""
        try:
            for hear in self.listeners.get(type(change), ()):
                try:
                    hear(change)
                except Exception:  # a room's fault costs that room's work, and not the verb
                    self.mishaps.note("settling")
        finally:
            if change.pin is not None:
                self.let_go(change.pin)

    def _tell_moved(self) -> None:
        assert self._hear_moved is not None
        self._num_told = self.num_moved
        self._hear_moved(self.num_moved)

    def _look_for_room(self) -> None:
        for tier in self._waiters:
            shares = self.residency.shares  # what one can have may change while all together is the same
            num_room = self.residency.num_available(tier) if shares is None else shares.room(tier)
            if num_room != self._num_room.get(tier):
                self._num_room[tier] = num_room
                self.note(RoomCame(tier=tier))

    def _take_more_turns(self) -> None:
        """The last turn did not come to rest. Others get the lock in between; what is left then is the next turn's."""
        is_at_rest = False
        for _ in range(MAX_ROUNDS):
            if is_at_rest:
                return
            self._lock.acquire()
            self._thread = get_ident()
            is_at_rest, calls = self._settle_and_leave()
            for outlet in self._outlets:
                outlet.hand_over()
            self._make(calls)

    def _make(self, calls: Sequence[Callable[[], object]]) -> None:
        """Only the thread whose turn decided on a call makes it, and each turn has a list of its own.

        With one list for all, a callback of a load would be made inside whatever verb another thread is in, under
        that thread's own locks; and a call that takes a turn would make the next call inside itself, and so on.
        """
        for call in calls:
            try:
                call()
            except Exception:  # whoever is called: the others are called all the same
                self.mishaps.note("callback")

    # -- what rooms give and hear; all of it in a turn, but for `add_outlet` while rooms are built

    def listen(self, change: type[C], hear: Callable[[C], object]) -> None:
        """Have `hear` called with each such change, under the lock, at the end of the turn in which it happened."""
        self.listeners.setdefault(change, []).append(hear)

    def ignore(self, change: type[C], hear: Callable[[C], object]) -> None:
        """The reverse of `listen`."""
        listeners = [each for each in self.listeners.get(change, ()) if each != hear]
        if listeners:
            self.listeners[change] = listeners
        else:
            self.listeners.pop(change, None)

    def listen_to_moves(self, hear: Callable[[int], object]) -> None:
        """Have `hear` called with `num_moved` at the end of each turn that has raised it; it must not raise."""
        self._hear_moved = hear

    def note(self, change: Change) -> None:
        """A change has happened. Where nobody listens to its kind it is forgotten."""
        if type(change) in self.listeners:
            if change.pin is not None:
                self.tree.pin(change.pin)
            self._changes.append(change)

    def await_room(self, waiter: object, is_waiting: bool, tier: Tier) -> None:
        """Whether this one waits for blocks of a tier: then `RoomCame` is noted whenever their number has changed."""
        waiters = self._waiters.setdefault(tier, set())
        (waiters.add if is_waiting else waiters.discard)(waiter)
        if not waiters:
            del self._waiters[tier]

    def call_later(self, call: Callable[[], object]) -> None:
        """Make this call when the lock has been given back. What it raises is counted as a failed callback."""
        self._calls.append(call)

    def add_outlet(self, outlet: Outlet) -> None:
        """Let this one hand over after each turn, behind those that were added before."""
        self._outlets = (*self._outlets, outlet)

    def remove_outlet(self, outlet: Outlet) -> None:
        """The reverse of `add_outlet`."""
        self._outlets = tuple([each for each in self._outlets if each is not outlet])

    # -- whether the cache may be used

    def close(self) -> None:
        """Let every verb raise `ClosedError` from now on. Not in a turn.

        An interrupt (Ctrl-C) between the lock and the note of its owner, or before the lock is given back, leaves it
        taken: no code of Python can rule that out. Nothing may hinder the end of the processes, so then it is replaced.
        """
        is_left_over = self._thread == get_ident()
        if is_left_over or not self._lock.acquire(True, _STUCK_SECONDS):
            logger.error("event=turn_stuck is_own=%s", is_left_over)
            self._lock, self._thread = threading.Lock(), None
            self.is_closed = True
            return
        self.is_closed = True
        self._lock.release()

    def fall_asleep(self, tiers: frozenset[Tier]) -> None:
        """These tiers have no memory from now on; all others have."""
        self.asleep = tiers

    def check_open(self) -> None:
        """Raise `ClosedError` once the manager is closed."""
        if self.is_closed:
            raise ClosedError("the cache manager is closed; make a new one")

    def check_awake(self) -> None:
        """Raise `LifeCycleError` where the GPU has no memory now, `ClosedError` once the manager is closed."""
        self.check_open()
        if GPU in self.asleep:
            raise LifeCycleError("the cache is asleep; wake it before its GPU blocks are used")

    def check_uniform(self, verb: str) -> None:
        """Raise `RequestError` where not all layers of the model keep everything: the verb knows the full row alone.
        `ClosedError` once the manager is closed."""
        self.check_open()
        if self.rows is not None:
            raise RequestError(
                f"{verb} moves blocks of one row, and this model has several; its requests go through `cache.rows`"
            )

    # -- whose KV it is

    def forget(self, weights_id: str | None, why: Loss = Loss.WEIGHTS) -> None:
        """Nothing that is cached counts any more. `weights_id`: what is cached from now on is of these weights."""
        self.tree.reset(why)
        self.weights_id = weights_id or self.weights_id
        self.note(Forgotten(weights_id=weights_id))
        logger.info("event=reset epoch=%d", self.tree.epoch)

    def follow_weights(self, weights_id: str) -> None:
        """What is cached from now on is of these weights: what is of others is forgotten."""
        if self.weights_id not in {None, weights_id}:
            self.forget(weights_id)
        self.weights_id = weights_id

    # -- blocks

    def note_references(self, references: References | None) -> None:
        """Note there what is used from now on; None: nowhere."""
        self.references = references

    def use(self, path: list[Run], request: User, asked: Asked) -> None:
        """A request whose prefix lies on `path` is released, the first time after it was admitted."""
        if self.references is not None:
            self.mishaps.ask("policy", partial(self.references.note, path, request, asked.num_asked), None)
        if request.session_id or self._has_sessions:
            self._note_session(path, request)
        self.tree.policy.use(path, request, asked)

    def _note_session(self, path: list[Run], request: User) -> None:
        """Whose alone each run is, before its use is counted."""
        hint, self._has_sessions = request.session_hint, True
        session = hint.session if hint is not None else 0
        for run in path:
            if session and not run.session and not run.num_uses:
                run.session = session
            elif session != run.session and (session or run.session):
                run.session = -1

    def take(self, num_blocks: int, tier: Tier, owner: Owner, tenant: int | None = None) -> array[int]:
        """So many blocks for an owner, lowest ids first, after what the policy names has been evicted for them.
        `tenant`: whose need it is, where that is known and there are tenants.

        The caller has checked `Residency.num_available`, for that tenant.
        """
        pool, shares = self.tree.pools[tier], self.residency.shares
        if not tier:
            self.num_moved += num_blocks
        if shares is not None:
            make_room(self.residency, tier, num_blocks, tenant)
            ids = pool.allocate(num_blocks, owner)
            shares.label(ids, tier, tenant or REST)
            return ids
        if num_blocks > pool.num_free:
            evict(self.tree.residency, tier, num_blocks - pool.num_free)
        return pool.allocate(num_blocks, owner)

    def pin_prefix(self, path: list[Run], num_blocks: int) -> PinnedPrefix:
        """Keep the first blocks of a path where they are, for a caller, until `unpin_prefix`."""
        ids = gpu_ids(path, num_blocks).tolist()  # first: it may need memory
        pin = self.tree.move_pin(None, *self.tree.place(path, num_blocks))
        pinned = PinnedPrefix(pin, num_blocks, ids)
        if pin is not None:
            self.pinned[pin] = pinned
            if self.rows is not None:
                self.rows.keep(pinned)
        return pinned

    def unpin_prefix(self, pinned: PinnedPrefix) -> None:
        """The reverse; doing it again does nothing."""
        pin = pinned.end()
        if pin is not None:
            del self.pinned[pin]
            if self.rows is not None:
                self.rows.end_keeping(pinned)
            self.let_go(pin)

    def let_go(self, pin: Pin) -> None:
        """Take a pin back: what of its run it alone held may be evicted from now on."""
        run, num_held = pin.run, pin.run.num_held
        self.tree.unpin(pin)
        if num_held > run.num_held:
            self.num_moved += num_held - run.num_held

    def tenant_of(self, namespace: str) -> int | None:
        """The tenant whose needs are those of a namespace; None where there are no tenants."""
        shares = self.residency.shares
        return shares.tenant_of(namespace) if shares is not None else None

    def note_moved(self, num_blocks: int) -> None:
        """So many GPU blocks were taken without `take`."""
        self.num_moved += num_blocks
