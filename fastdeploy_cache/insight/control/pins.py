"""Prefixes that an operator keeps in place for a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Forgotten, NamespaceForgotten, TierLost
from fastdeploy_cache.books.path import num_gpu
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.residency import FORGOTTEN
from fastdeploy_cache.books.run import GPU, Run
from fastdeploy_cache.books.tokens import TokenIds
from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.insight.looks.pieces import hash_in_pieces, is_cached, run_in_turns, runs_in
from fastdeploy_cache.ipc.clock import Alarm
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.request import Image, Request

logger = event_log(__name__)

MAX_PINS = 64
MAX_PIN_SECONDS = 7 * 86400.0
NAME_DIGITS = 16
_JOIN_SECONDS, _AGAIN_SECONDS = 5.0, 1.0


@dataclass(frozen=True, kw_only=True)
class PinView:
    """A pin. `name` is that of the prefix; `num_gpu_blocks` of its `num_blocks` are on the GPU now. Of a hybrid model a
    request goes on behind `checkpoint_tokens` of its tokens, where the checkpoint lies that is kept, too."""

    name: str
    num_tokens: int
    num_blocks: int
    num_gpu_blocks: int
    seconds_left: float
    checkpoint_tokens: int | None = None


@dataclass(slots=True, eq=False)
class _Held:
    prefix: PinnedPrefix
    ends_at: float


class Pins:
    """Each ends at its time, at `unpin`, and whenever what is cached is forgotten. Any thread."""

    def __init__(self, books: Books, max_pinned_share: float) -> None:
        self._books, self._size = books, books.tree.block_size
        self._max_blocks = int(books.pools[GPU].num_blocks * max_pinned_share)
        self._held: dict[str, _Held] = {}  # by name; under the lock of the books
        self._alarm: Alarm | None = None  # to the next end; under the lock of the books
        for change in (Forgotten, TierLost):
            books.listen(change, self._end_all)
        books.listen(NamespaceForgotten, self._end_forgotten)

    def pin_named(self, name: str, seconds: float) -> PinView:
        """Pin the prefix of that name. Raises `ControlError`: there is none, or there are too many pins."""
        wanted = _name_bytes(name)
        found: list[PinView] = []
        run_in_turns(self._books, self._look_for(wanted, seconds, found))
        if not found:
            raise ControlError(f"no prefix {name!r} is cached now; `top` and `tree` show the names of those that are")
        return found[0]

    def pin_tokens(self, tokens: TokenIds, namespace: str, seconds: float, images: Sequence[Image] = ()) -> PinView:
        """Pin the longest cached prefix of these tokens. Raises as `pin_named`."""
        keys = Request(request_id="pin", prompt_token_ids=tokens, namespace=namespace, images=images).keys(self._size)
        books, found = self._books, list[PinView]()

        def steps() -> Iterator[None]:
            path, num_blocks = books.tree.find(namespace, keys, num_all)
            if path:
                yield from hash_in_pieces(books.tree, path[-1])
                path, num_blocks = books.tree.find(namespace, keys, num_all)  # it may have changed since
            if path:
                found.append(self._pin(path, num_blocks, seconds))
            yield

        num_all = len(keys.prompt) // books.tree.block_bytes
        run_in_turns(books, steps())
        if not found:
            raise ControlError("none of these tokens is cached, in a whole block; nothing was pinned")
        return found[0]

    def unpin(self, name: str) -> int:
        """End a pin; returns how many blocks it had. Raises `ControlError` where there is none of that name."""
        with self._books:
            held = self._held.pop(name.lower(), None)
            num_blocks = held.prefix.num_blocks if held is not None else 0
            if held is not None:
                self._books.unpin_prefix(held.prefix)
                with contextlib.suppress(RuntimeError):  # the alarm from before comes too early, and looks again
                    self._arm()
        if held is None:
            raise ControlError(f"there is no pin {name!r}; `pins` shows those there are")
        return num_blocks

    def all(self) -> list[PinView]:
        """Those that are in force, the next to end first."""
        with self._books:
            views = [self._view(name, held) for name, held in self._held.items() if held.prefix.pin is not None]
        return sorted(views, key=lambda view: view.seconds_left)

    def close(self) -> None:
        """Nothing is called any more."""
        with self._books:
            alarm, self._alarm = self._alarm, None
            self._held.clear()
        if alarm is not None:
            alarm.cancel()
            alarm.join(_JOIN_SECONDS)

    # -- under the lock

    def _look_for(self, wanted: bytes, seconds: float, found: list[PinView]) -> Iterator[None]:
        """Go through the whole tree. Runs that `top` and `tree` have named keep their hashes."""
        stack = list[Run]()
        for root in runs_in(self._books.tree.roots):
            for top in runs_in(root.children):
                stack.append(top)
                while stack:
                    run = stack.pop()
                    if is_cached(self._books.tree, run):
                        place = _place_of(wanted, run.hashes)
                        if place is not None:
                            path = run.path()
                            num_above = sum([each.num_blocks for each in path]) - run.num_blocks
                            found.append(self._pin(path, num_above + place + 1, seconds))
                            return
                        stack.extend(runs_in(run.children))
                    yield
            yield

    def _pin(self, path: list[Run], num_blocks: int, seconds: float) -> PinView:
        self._books.check_open()
        name = self._books.tree.names.at(path, num_blocks).hex()[:NAME_DIGITS]
        known = self._held.get(name)
        if known is not None and known.prefix.pin is None:  # what it held has gone
            del self._held[name]
            known = None
        if known is None:
            self._check_room(num_blocks)
            self._check_checkpoint(path, num_blocks)
            known = self._held[name] = _Held(self._books.pin_prefix(path, num_blocks), 0.0)
        before, known.ends_at = known.ends_at, self._books.clock.now() + seconds
        try:
            self._arm()
        except RuntimeError as error:
            known.ends_at = before
            if not before:
                self._books.unpin_prefix(self._held.pop(name).prefix)
            raise ControlError(f"nothing was pinned: a pin ends by a thread of its own, and {error}") from error
        logger.info("event=pinned name=%s blocks=%d seconds=%g", name, num_blocks, seconds)
        return self._view(name, known)

    def _check_room(self, num_blocks: int) -> None:
        if len(self._held) >= MAX_PINS:
            raise ControlError(f"there are {MAX_PINS} pins already; unpin one, or wait until one ends")
        num_pinned = sum([held.prefix.num_blocks for held in self._held.values()])
        if num_pinned + num_blocks > self._max_blocks:
            raise ControlError(
                f"a pin of {num_blocks} blocks beside {num_pinned} pinned ones; together at most {self._max_blocks}, "
                "by insight.max_pinned_share: the rest is for requests"
            )

    def _check_checkpoint(self, path: list[Run], num_blocks: int) -> None:
        """Raise `ControlError` for a prefix of a hybrid model that nobody could use."""
        rows = self._books.rows
        if rows is None or rows.deepest_within(path, num_blocks) is not None:
            return
        boundary = rows.next_behind(path[-1], num_blocks)
        what = f"no checkpoint lies within these {num_blocks * self._size} tokens, so no request could go on there"
        if boundary is None:
            raise ControlError(f"{what}, and none behind them; nothing was pinned")
        raise ControlError(f"{what}; the next one lies behind {boundary * self._size} tokens. Nothing was pinned")

    def _view(self, name: str, held: _Held) -> PinView:
        pin, num_blocks, checkpoint = held.prefix.pin, held.prefix.num_blocks, held.prefix.checkpoint
        return PinView(
            name=name,
            num_tokens=num_blocks * self._size,
            num_blocks=num_blocks,
            num_gpu_blocks=num_gpu(pin.run.path(), num_blocks) if pin is not None else 0,
            seconds_left=max(0.0, held.ends_at - self._books.clock.now()),
            checkpoint_tokens=checkpoint.boundary * self._size if checkpoint is not None else None,
        )

    def _arm(self) -> None:
        """Be called when the next pin ends. Raises `RuntimeError`, with nothing changed, where no thread can start."""
        before, alarm = self._alarm, None
        if self._held:
            ends_at = min([held.ends_at for held in self._held.values()])
            alarm = self._books.clock.call_at(ends_at, self._end_some)
        self._alarm = alarm
        if before is not None:
            before.cancel()

    def _end_all(self, _: object) -> None:
        """What was cached is forgotten: what is pinned would only keep its blocks from being used again."""
        for held in self._held.values():
            self._books.unpin_prefix(held.prefix)
        self._held.clear()
        self._arm()

    def _end_forgotten(self, _: object) -> None:
        """What a forgotten namespace has is pinned no more."""
        for name, held in list(self._held.items()):
            if held.prefix.pin is not None and held.prefix.pin.run.epoch == FORGOTTEN:
                self._books.unpin_prefix(held.prefix)
                del self._held[name]
        with contextlib.suppress(RuntimeError):  # the alarm from before looks again
            self._arm()

    # -- a thread of the clock's

    def _end_some(self) -> None:
        while not self._end_those_due():
            self._books.clock.sleep(_AGAIN_SECONDS)

    def _end_those_due(self) -> bool:
        """End them, and be called when the next one ends; False where no other thread can be started for that."""
        with self._books:
            if self._books.is_closed:
                return True
            self._alarm, now = None, self._books.clock.now()
            for name, held in list(self._held.items()):
                if held.ends_at <= now or held.prefix.pin is None:
                    self._books.unpin_prefix(held.prefix)
                    del self._held[name]
                    logger.info("event=pin_ended name=%s", name)
            with contextlib.suppress(RuntimeError):
                self._arm()
            return self._alarm is not None or not self._held


def _name_bytes(name: str) -> bytes:
    try:
        wanted = bytes.fromhex(name)
    except ValueError:
        wanted = b""
    if len(name) != NAME_DIGITS or len(wanted) * 2 != NAME_DIGITS:
        raise ControlError(f"{name!r} is no name of a prefix: these have {NAME_DIGITS} hexadecimal digits, as in `top`")
    return wanted


def _place_of(wanted: bytes, hashes: bytes | bytearray) -> int | None:
    """The block whose hash begins like that."""
    at = hashes.find(wanted)
    while at >= 0 and at % HASH_BYTES:
        at = hashes.find(wanted, at + 1)
    return at // HASH_BYTES if at >= 0 else None
