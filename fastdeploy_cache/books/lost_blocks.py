"""A memory of blocks that were cached and are gone, so that a miss can be told from something never seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, islice

from fastdeploy_cache.books.block_marks import (
    MARK_BYTES,
    WINDOW_BYTES,
    block_marks,
    num_equal,
    place_key,
    with_extras,
    word_of,
)
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.ipc.clock import Clock

_ENTRY_BYTES = 320  # of a loss without its marks: the key, the tuple, the time, a place in the dictionary
_NUM_PARTS = 8  # of the memory: the oldest part is forgotten at once
_MOST_PIECES = 512  # of a run that loses its end bit by bit, before they are put together
_MAX_FORKS, _MAX_WAYS = 4096, 8  # places where lost blocks were parted, and ways that go on from one
_BURST, _BURST_SECONDS = 256, 0.005  # losses noted in so long, at most: a third of a millisecond of the lock


# The marks of blocks in a row, how they were lost, when, by the monotonic clock, and the part of the memory.
Lost = tuple[bytes, int, float, int]


class _Tail:
    """What a run has lost of its end so far."""

    __slots__ = (
        "at",
        "extra",
        "first_block",
        "has_images",
        "head",
        "kind",
        "num_before",
        "parent",
        "pieces",
        "root",
        "run",
    )
    num_before: int  # blocks in front of the run
    first_block: int  # where the run ends now
    parent: Run | None  # of the run then: where it has another one, it was cut, and begins elsewhere
    root: bytes | bytearray  # the hash of its namespace
    head: bytes | bytearray  # the tokens of the first lost block, with a window of those in front of it
    has_images: bool  # the run, or one in front of it
    extra: int  # of the first lost block and all in front of it
    kind: Loss
    at: float

    def __init__(self) -> None:
        self.run: Run | None = None
        self.pieces = list[bytes]()  # marks; the last piece was lost last


class LostBlocks:
    """Blocks in a row that left all tiers, by the key of the first one's place.

    Keys and marks may meet by chance, which makes an explanation wrong and nothing else. The oldest go when `max_bytes`
    are full. What goes is counted in `num_forgotten`, and so is what a large eviction has no time for. Under the lock.

    Most blocks are evicted one or a few at a time, each time from the end of the same run. What it has lost is
    gathered, and gets its key when another run loses blocks, or when somebody asks for its place: whoever looks for
    what was lost from a place on calls `look_at` first.
    """

    def __init__(self, max_bytes: int, block_bytes: int, clock: Clock) -> None:
        """`max_bytes` 0: it remembers nothing. `block_bytes`: of the packed tokens of a block."""
        self.is_on, self._now = max_bytes > 0, clock.now
        self._part_bytes, self._block_bytes = max_bytes // _NUM_PARTS, block_bytes
        self._least_block = -(-WINDOW_BYTES // block_bytes)  # that has a window in front of it in every run
        self._by_key: dict[int, Lost] = {}
        self.get = self._by_key.get  # what was lost from the place of this key on, the last time
        self._keys: list[int] = []  # of the newest part
        self._parts = deque([self._keys])  # the newest first
        self._part = self._num_bytes = 0  # the number of the newest part, and what it takes
        self.forks: dict[int, tuple[Lost, ...]] = {}  # see `fork`
        self.num_forgotten = 0  # blocks
        self._num_left, self._burst_at = 0, -_BURST_SECONDS
        self._tail = _Tail()

    def ended(self, run: Run, first_block: int, kind: Loss) -> None:
        """See `Taps`."""
        tail = self._tail
        try:
            is_more = tail.run is run and tail.first_block == run.num_blocks and tail.parent is run.parent
            if not (is_more or self._num_left or self._refill()):
                self.num_forgotten += run.num_blocks - first_block
                return
            if not is_more or first_block < self._least_block or run.extras is not None:
                self._note(run, first_block, kind, is_more=is_more)
                return
            tokens, size, now = run.tokens, self._block_bytes, self._now
            at = now()
            start, pieces = first_block * size, tail.pieces
            head = tokens[start - WINDOW_BYTES : start + size]
            pieces.append(block_marks(tokens, start, run.num_blocks - first_block, size))
            tail.head, tail.first_block, tail.at, tail.kind = head, first_block, at, kind  # needs no memory any more
            if len(pieces) > _MOST_PIECES:
                tail.pieces = [b"".join(reversed(pieces))]
        except MemoryError:  # whatever the loss is part of goes on
            self.num_forgotten += run.num_blocks - first_block

    def ended_together(self, runs: Sequence[Run], kind: Loss) -> None:
        """The same of runs that go whole, in one eviction."""
        is_full, num_forgotten = False, 0
        for run in runs:
            is_full = is_full or not (self._num_left or self._tail.run is run or self._refill())
            if is_full:
                num_forgotten += run.num_blocks
            else:
                self.ended(run, 0, kind)
        self.num_forgotten += num_forgotten

    def _note(self, run: Run, first_block: int, kind: Loss, *, is_more: bool) -> None:
        """The same of any run. `is_more`: it is the one that has lost its end before."""
        tail, size, extras = self._tail, self._block_bytes, run.extras
        if not is_more:
            self._end_tail()
            self._num_left -= 1
            root, num_before, has_images = run, -run.num_blocks, False
            while (parent := root.parent) is not None:
                num_before += root.num_blocks
                has_images = has_images or root.extras is not None
                root = parent
            tail.root, tail.num_before, tail.has_images = root.hashes, num_before, has_images
        start, at = first_block * size, self._now()
        head = _window(run, start) + run.tokens[start : start + size]
        marks = block_marks(run.tokens, start, run.num_blocks - first_block, size)
        tail.pieces.append(with_extras(marks, extras, first_block) if extras is not None else marks)
        tail.run, tail.parent, tail.first_block = run, run.parent, first_block
        tail.head, tail.at, tail.kind = head, at, kind
        tail.extra = _extra_up_to(run, first_block) if tail.has_images else 0
        if not first_block:  # it goes
            self._end_tail()

    def newest(self, num_places: int) -> list[bytes]:
        """The marks of the blocks that were lost last, from so many places on."""
        keys = islice(chain.from_iterable(map(reversed, self._parts)), num_places)
        return [lost[0] for key in keys if (lost := self.get(key)) is not None]

    def look_at(self, block: int) -> None:
        """Somebody will look for what was lost from so many blocks behind the begin of a prompt on."""
        tail = self._tail
        if tail.run is not None and tail.num_before + tail.first_block == block:
            self._end_tail()

    def _end_tail(self) -> None:
        """Give what was gathered its key."""
        tail, size = self._tail, self._block_bytes
        if tail.run is None:
            return
        block, pieces = tail.num_before + tail.first_block, tail.pieces
        tail.pieces, tail.run = [], None
        try:
            marks = pieces[0] if len(pieces) == 1 else b"".join(reversed(pieces))
            key = place_key(tail.root, block, tail.head, len(tail.head) - size, size) ^ tail.extra
            self._put(tail.root, block, key, marks, kind=tail.kind, at=tail.at, has_images=tail.has_images)
        except MemoryError:
            self.num_forgotten += sum(map(len, pieces)) // MARK_BYTES

    def note_output(self, root: bytes | bytearray, block: int, key: int, marks: bytes, *, has_images: bool) -> None:
        """Blocks from this place on, whose key is given, were computed and are kept out of the cache."""
        if self.is_on:
            self._put(root, block, key, marks, kind=Loss.OUTPUT, at=self._now(), has_images=has_images)

    def _put(
        self, root: bytes | bytearray, block: int, key: int, marks: bytes, *, kind: Loss, at: float, has_images: bool
    ) -> None:
        older = self.get(key)
        # Which images stand in front of the place where the two part is not known here any more.
        if older is not None and not has_images and (num_same := num_equal(older[0], marks)):
            self.fork(root, block, older, num_same, 0)  # what went on in another way, or further
        self._add(key, marks, int(kind), at)  # with an enumeration the collector would look at it

    def _add(self, key: int, marks: bytes, kind: int, at: float) -> None:
        self._by_key[key] = (marks, kind, at, self._part)
        self._keys.append(key)
        self._num_bytes += len(marks) + _ENTRY_BYTES
        if self._num_bytes > self._part_bytes:
            self._keys, self._num_bytes = [], 0
            self._part += 1
            self._parts.appendleft(self._keys)
            if len(self._parts) > _NUM_PARTS:
                self._forget(self._parts.pop(), self._part - _NUM_PARTS)

    def _forget(self, keys: list[int], part: int) -> None:
        """Those that no newer loss has replaced."""
        for key in keys:
            lost = self.get(key)
            if lost is not None and lost[3] == part:
                del self._by_key[key]
                self.num_forgotten += len(lost[0]) // MARK_BYTES

    def _refill(self) -> bool:
        """Whether the last burst began long enough ago for another."""
        if not self.is_on:
            return False
        now = self._now()
        if now - self._burst_at < _BURST_SECONDS:
            return False
        self._num_left, self._burst_at = _BURST, now
        return True

    # A prompt that goes another way in the midst of lost blocks, or ends there, will be cached up to there. The rest is
    # to be found behind that place, by what is in front of it alone: its first block is not here to make a key of.

    def fork(self, root: bytes | bytearray, block: int, lost: Lost, num_same: int, extra: int) -> None:
        """Note that others stand behind the first `num_same` of some blocks that were lost from `block` on. `extra`: of
        all images in front of those others; 0: there are none."""
        border = num_same * MARK_BYTES
        marks, rest = lost[0], lost[0][border:]
        if not rest:
            return
        key = word_of(root, block + num_same, extra, marks[border - MARK_BYTES : border])
        known = [each for each in self.forks.pop(key, ()) if each[0] != rest]
        self.forks[key] = (*known[-_MAX_WAYS + 1 :], (rest, *lost[1:]))
        if len(self.forks) > _MAX_FORKS:
            first = next(iter(self.forks))
            self.num_forgotten += sum([len(marks) // MARK_BYTES for marks, *_ in self.forks.pop(first)])

    def forked(self, root: bytes | bytearray, block: int, extra: int, mark_before: bytes) -> tuple[Lost, ...]:
        """What `fork` has noted of this place, behind a block with this mark; the newest last."""
        return self.forks.get(word_of(root, block, extra, mark_before), ())


def _window(run: Run, end: int) -> bytes:
    """What stands in front of the byte `end` of a run's tokens; in front of the run, too, where it begins there."""
    window = bytes(run.tokens[max(0, end - WINDOW_BYTES) : end])
    while len(window) < WINDOW_BYTES and run.parent is not None and run.parent.parent is not None:
        run = run.parent
        window = bytes(run.tokens[len(window) - WINDOW_BYTES :]) + window
    return window


def _extra_up_to(run: Run, block: int) -> int:
    """A hash of what the blocks up to this one of a run have beside their tokens; 0: nothing."""
    found = b"".join([extra for place, extra in sorted((run.extras or {}).items()) if place <= block])
    while (parent := run.parent) is not None:
        run = parent
        found = b"".join([extra for _, extra in sorted((run.extras or {}).items())]) + found
    return word_of(found)
