"""KeptSnapshots that subscribers take piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fastdeploy_cache.events.publisher.tree import Part
from fastdeploy_cache.events.wire import BlockStored, Event

_MOST = 64  # at a time
_IDLE_SECONDS = 3.0  # after which nobody takes one any more
_PIECE_BLOCKS = 512  # of 64 tokens


class _Snapshot:
    """What there was at one moment, as it is told."""

    def __init__(self, parts: Sequence[Part], stored: Callable[[Part], Sequence[BlockStored]], block_size: int) -> None:
        self._pieces = _pieces(parts, stored, max(1, _PIECE_BLOCKS * 64 // block_size))
        self._next: list[Event] = next(self._pieces, [])
        self._number = 0
        self.asked_at = 0.0

    def piece(self, number: int) -> tuple[list[Event], bool]:
        """This piece, and whether it is the last; `LookupError` where it is not the next one."""
        if number != self._number:
            raise LookupError
        events, self._number, following = self._next, number + 1, next(self._pieces, None)
        self._next = following or []
        return events, following is None


class KeptSnapshots:
    """Those that are being taken. One thread.

    Each refers to copies of what there was, so their number is bounded; of one moment all have the same. One that
    nobody goes on with is dropped.
    """

    def __init__(self, stored: Callable[[Part], Sequence[BlockStored]], block_size: int) -> None:
        """`stored`: gives the events that tell of a part."""
        self._stored, self._block_size = stored, block_size
        self._by_number: dict[int, _Snapshot] = {}
        self._last = 0

    def check_room(self, now: float) -> None:
        """Raise `LookupError` where there are too many."""
        self.drop_idle(now)
        if len(self._by_number) >= _MOST:
            raise LookupError

    def begin(self, parts: Sequence[Part], now: float) -> int:
        """Keep these; returns the snapshot's number."""
        self._last += 1
        snapshot = self._by_number[self._last] = _Snapshot(parts, self._stored, self._block_size)
        snapshot.asked_at = now
        return self._last

    def piece(self, snapshot: int, number: int, now: float) -> tuple[list[Event], bool]:
        """A piece, and whether it is the last. Raises `LookupError`: there is no such snapshot, or piece now."""
        found = self._by_number[snapshot]
        events, is_last = found.piece(number)
        found.asked_at = now
        if is_last:
            del self._by_number[snapshot]
        return events, is_last

    def drop_idle(self, now: float) -> None:
        """Forget those that nobody asks for any more."""
        for number, snapshot in list(self._by_number.items()):
            if now - snapshot.asked_at > _IDLE_SECONDS:
                del self._by_number[number]

    def __len__(self) -> int:
        return len(self._by_number)


def _pieces(
    parts: Sequence[Part], stored: Callable[[Part], Sequence[BlockStored]], most_blocks: int
) -> Iterator[list[Event]]:
    events, num_blocks = list[Event](), 0
    for part in parts:
        for event in stored(part):
            events.append(event)
            num_blocks += len(event.block_hashes)
            if num_blocks >= most_blocks:
                yield events
                events, num_blocks = [], 0
    if events:
        yield events
