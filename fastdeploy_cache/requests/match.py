"""What a request found in the cache, and how to wait for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from fastdeploy_cache.books.mishaps import call_user
from fastdeploy_cache.ipc.clock import Event, seconds_to_wait
from fastdeploy_cache.requests.tables import RowTable

if TYPE_CHECKING:
    import asyncio

    from fastdeploy_cache.requests.explanation import Explanation


_MOST_SECONDS = 86400.0  # a loan ends by itself long before


class MatchHandle(Protocol):
    """The way from a match back to its cache."""

    timeout_seconds: float

    def explain(self) -> Explanation: ...
    def poll(self) -> Match: ...
    def wait(self, timeout_seconds: float) -> Match: ...
    def call_when_ready(self, call: Callable[[], None]) -> None: ...

    @property
    def fetch_seconds_left(self) -> float | None:
        """How long storage may still take; None: nothing is on its way from there."""
        ...


class Fetch(Protocol):
    """Blocks on their way from storage."""

    done: Event
    num_landed: int

    @property
    def is_pending(self) -> bool: ...

    @property
    def seconds_left(self) -> float: ...


class Borrowed(Protocol):
    """Blocks that another instance is asked for, and sends."""

    num_blocks: int

    @property
    def done(self) -> bool: ...
    def wait(self, timeout_seconds: float) -> bool: ...
    def on_done(self, call: Callable[[], None]) -> None: ...


class Prefetch(msgspec.Struct, frozen=True, kw_only=True):
    """What is cached of a queued request now; see `PrefixCacheManager.prefetch`. The three add up to its tokens."""

    num_gpu_tokens: int
    num_cpu_tokens: int
    num_missing_tokens: int
    _fetch: Fetch | None = None
    _loan: Borrowed | None = None

    def with_fetch(self, fetch: Fetch) -> Prefetch:
        """The same, with what is being fetched of the rest."""
        return msgspec.structs.replace(self, _fetch=fetch)

    def with_loan(self, loan: Borrowed) -> Prefetch:
        """The same, with what another instance may lend of the rest."""
        return msgspec.structs.replace(self, _loan=loan)

    @property
    def is_borrowing(self) -> bool:
        """Another instance is asked, or sends: a match now would end that."""
        return self._loan is not None and not self._loan.done

    @property
    def num_borrowed_blocks(self) -> int:
        """Blocks that have come from another instance, to the GPU."""
        return self._loan.num_blocks if self._loan is not None and self._loan.done else 0

    def on_borrowed(self, call: Callable[[], None]) -> None:
        """Have it called once it is not borrowing any more: by a thread of the cache, or here and now."""
        if self._loan is not None:
            self._loan.on_done(call)
        else:
            call_user(call)

    @property
    def num_fetched_blocks(self) -> int:
        """Blocks that have come from storage so far, right behind those that were cached."""
        return self._fetch.num_landed if self._fetch is not None else 0

    @property
    def ready(self) -> bool:
        """Nothing is worth waiting for any more: a match now finds what has come."""
        return not self.is_borrowing and (self._fetch is None or not self._fetch.is_pending)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until ready, at most as long as the prefetch policy allows; False when `timeout_seconds` is over first.

        Call it outside any lock that other cache calls need.
        """
        given = None if timeout_seconds is None else seconds_to_wait("wait", timeout_seconds)
        if self._loan is not None:  # behind what comes from storage; it ends by itself
            self._loan.wait(_MOST_SECONDS if given is None else given)
            return self.ready if given is not None else True
        while not self.ready and self._fetch is not None:
            left = self._fetch.seconds_left
            if given is not None and given < left:
                return self._fetch.done.wait(given)
            self._fetch.done.wait(max(0.0, left))
        return True


class Match(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request's cached prefix at the moment of the call; pinned until the request is released.

    Attributes:
        block_ids: GPU blocks that may be read now, first to last. The engine never writes them, but for the last token
            of a whole prompt's hit under `recompute_last_token`: there the last block is the request's own copy.
        num_tokens: tokens in them; the engine computes from here on.
        num_gpu_tokens: of these, found on the GPU.
        num_cpu_tokens: of these, loaded from the CPU tier.
        num_storage_tokens: of these, loaded from storage.
        num_coming_tokens: further tokens on their way to the GPU; wait for them, run ahead of them, or allocate and do
            without: `allocate` and `commit` count by what this match shows, even if more has landed meanwhile.
        num_unloaded_tokens: further tokens in the CPU tier that were not loaded: too few or too many for the configured
            limits, no room, a full queue, or a rank is down. With `state_copy` also those in front of a state for which
            there was no slot.
        coming_block_ids: where the coming tokens are being loaded to; see `PrefixCacheManager.allocate`.
        load_ids: the loads that bring them, for `LayerProgress.wait_layer` in a worker.
        tables: of a hybrid model, units of each row behind the full one, in the order in which `config check` prints
            them: what is read behind the matched tokens. They are never written, but for copies that are the
            request's own: the slot of a state under `state_copy`, and the last unit under `recompute_last_token`.
        checkpoint_tokens: of a hybrid model, after how many tokens a piece of the prompt should end, so that others can
            go on there: where it parts from what is cached, and at its last whole block. With states a snapshot is
            taken there (`cache.rows.snapshot`).
    """

    block_ids: list[int]
    num_tokens: int
    num_gpu_tokens: int
    num_cpu_tokens: int
    num_storage_tokens: int
    num_coming_tokens: int
    num_unloaded_tokens: int
    coming_block_ids: tuple[int, ...]
    load_ids: tuple[int, ...]
    _loads: MatchHandle
    tables: tuple[RowTable, ...] = ()
    checkpoint_tokens: tuple[int, ...] = ()

    def explain(self) -> Explanation:
        """Where the tokens of the prompt came from, and why the others did not.

        After the release, too, as long as it is among the last requests: then it raises `UnknownRequestError`.
        """
        return self._loads.explain()

    @property
    def ready(self) -> bool:
        """Nothing more is on its way."""
        return self.num_coming_tokens == 0

    def poll(self) -> Match:
        """The match as it stands now; unlike `wait` it cuts nothing off while loads are on their way."""
        return self._loads.poll()

    def wait(self, timeout_seconds: float | None = None) -> Match:
        """The match as it then stands: with what arrived in time, cut at what did not.

        Returns when nothing is on its way any more or the time is over; without a time, that of a transfer task. Call
        it outside any lock that other cache calls need.
        """
        return self._loads.wait(seconds_to_wait("wait", timeout_seconds, self._loads.timeout_seconds))

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when nothing is on its way any more: now, or later on the cache's I/O thread.

        It may call the cache, and must not block: all transfers wait for it. A `poll` in it is a look like any other:
        `allocate` counts by the last look of any thread. So hand the `Match` that it returned to whoever allocates, or
        let that one look. Raises `RuntimeError` where storage has a deadline and no thread can be started to keep it.
        """
        self._loads.call_when_ready(callback)

    async def arrived(self, timeout_seconds: float | None = None) -> Match:
        """`wait` for asyncio: other tasks of the event loop run meanwhile. Cancelling it cuts nothing off."""
        import asyncio  # late: most engines do without

        seconds = seconds_to_wait("arrived", timeout_seconds, self._loads.timeout_seconds)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def set_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(set_ready)

        self.on_ready(wake)
        while seconds > 0 and not ready.done():
            left = self._loads.fetch_seconds_left
            started = loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ready), seconds if left is None else min(seconds, max(left, 0.0)))
            seconds -= max(loop.time() - started, 0.001)
            if left is not None and self._loads.fetch_seconds_left is None and not ready.done():
                self.on_ready(wake)  # storage was too late: what is left are the loads
        return self.wait(0)
