"""Other instances that share a store with this one: it writes what they prefetch. Under the manager's lock, but for
`submit`."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import Pin, Transfer
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.movement.outbox import Calls
from fastdeploy_cache.peers.offers import PeerOffers
from fastdeploy_cache.peers.transfers import Receive, Send
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.storage.prefetch import StoragePrefetch
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig

Why = tuple[str, str]


@dataclass(eq=False)
class _Stored:
    """A send. `pin`, from when all is computed until it has ended: copies and writes find the blocks."""

    send: Send
    generation: int
    timer: threading.Timer
    pin: Pin | None = None


class StoredSends:
    """A send succeeds when the store has all its blocks; only then is its offer worth handing over."""

    def __init__(
        self,
        tree: PrefixTree,
        mover: BlockMover,
        copy_down: CopyDown,
        matcher: Matcher,
        *,
        calls: Calls,
        expire: Callable[[Send], None],
    ) -> None:
        """`expire` is called, without the lock, with a send whose time is over."""
        self._tree, self._mover, self._copy_down, self._matcher = tree, mover, copy_down, matcher
        self._calls, self._expire = calls, expire
        self._open: dict[str, _Stored] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def pins(self) -> list[Pin]:
        """On what is being written."""
        return [each.pin for each in self._open.values() if each.pin is not None]

    held_ids: tuple[int, ...] = ()

    def begin(self, active: ActiveRequest, send: Send, timeout_seconds: float) -> None:
        """Its blocks are written once all are committed."""
        timer = threading.Timer(timeout_seconds, self._expire, (send,))
        timer.daemon = True
        timer.start()
        self._open[send.request_id] = _Stored(send, self._tree.generation, timer)
        self.committed(active)

    def step(self, active: ActiveRequest, num_tokens: int, step: int) -> None:
        """A store takes whole blocks: see `committed`."""

    def committed(self, active: ActiveRequest) -> None:
        """The request's step is complete."""
        mine = self._open.get(active.request.request_id)
        if mine is None or mine.pin is not None or active.pin is None:
            return
        if active.num_committed_blocks >= mine.send.num_blocks and active.epoch == self._tree.epoch:
            path = active.pin.run.path()
            mine.pin = self._tree.move_pin(None, *self._tree.place(path, mine.send.num_blocks))
            assert mine.pin is not None
            self._write(mine.pin)
            self.check(None)

    def _write(self, pin: Pin) -> None:
        path = pin.run.path()
        if self._matcher.write_out is not None:
            self._matcher.write_out.write(path)
            self._copy_down.store(path, unstored=True)

    def released(self, active: ActiveRequest) -> array[int]:
        """The request goes; its blocks are the tree's."""
        mine = self._open.get(active.request.request_id)
        if mine is not None and mine.pin is None:
            text = f"the request was released before its {mine.send.num_blocks} blocks were computed and cached"
            self._end(mine, ("failed", text))
        return array("i")

    def check(self, tier: StorageTier | None) -> None:
        """A copy or a write has ended: what is stored now. Without a tier only what is stored already ends."""
        for mine in [each for each in self._open.values() if each.pin is not None]:
            assert mine.pin is not None
            if mine.generation != self._tree.generation:
                self._end(mine, ("cancelled", "the cache was reset meanwhile"))
            elif self._is_stored(mine.pin):
                self._end(mine, None)
            elif tier is not None and tier.is_idle and not self._mover.num_storing:
                self._end(mine, ("failed", "the store has not taken all of it"))

    @staticmethod
    def _is_stored(pin: Pin) -> bool:
        *above, last = pin.run.path()
        return last.num_stored >= pin.end and all(run.num_stored == run.num_blocks for run in above)

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
        mine.timer.cancel()
        pin, mine.pin = mine.pin, None
        if pin is not None:
            self._tree.unpin(pin)
        self._calls.put(lambda: mine.send.end(why))


class StoredReceives:
    """Prefetches under another name: they end as prefetches do, and `match` follows them."""

    pins: tuple[Pin, ...] = ()
    held_ids: tuple[int, ...] = ()
    loads: tuple[Transfer, ...] = ()

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._open: dict[str, Receive] = {}

    def __len__(self) -> int:
        return sum(not receive.done for receive in self._open.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def begin(self, receive: Receive, prefetch: StoragePrefetch | None) -> None:
        """Ends with the prefetch; with none there is nothing to wait for."""
        self._open[receive.request_id] = receive
        if prefetch is None or prefetch.done.is_set():
            self._calls.put(lambda: receive.end(_why_not(receive, prefetch)))
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
    if prefetch.num_landed < prefetch.num_wanted:
        return "failed", f"{prefetch.num_landed} of {prefetch.num_wanted} blocks came from storage"
    return None


class StoredPeers:
    """See `PeerTier`, of which this has the part that needs no link."""

    def __init__(
        self,
        *,
        config: PeerConfig,
        offers: PeerOffers,
        tree: PrefixTree,
        mover: BlockMover,
        copy_down: CopyDown,
        matcher: Matcher,
        expire: Callable[[Send], None],
    ) -> None:
        """`expire`: see `StoredSends`."""
        self.config, self.offers = config, offers
        self.outbox: tuple[()] = ()
        self.calls = Calls(tree.mishaps)  # to be made without the lock
        self.sends = StoredSends(tree, mover, copy_down, matcher, calls=self.calls, expire=expire)
        self.receives = StoredReceives(self.calls)
        self.settled = threading.Event()  # storage's own tasks are waited for as such
        self.settled.set()
        self.is_quiet = False

    def offer(self, active: ActiveRequest, num_blocks: int) -> Send:
        """Of a settled request."""
        send = self.offers.new_send(active, num_blocks)
        self.sends.begin(active, send, self.config.offer_timeout_seconds)
        return send

    def submit(self) -> None:
        """Call whom it concerns. Without the lock."""
        self.calls.make()

    def be_quiet(self, quiet: bool) -> None:
        """From now on start nothing, and end what is on its way."""
        self.is_quiet = quiet
        if quiet:
            self.cancel_all("the instance moves nothing now")

    def cancel_all(self, text: str) -> None:
        """Prefetches are storage's to end."""
        self.sends.cancel_all(text)
