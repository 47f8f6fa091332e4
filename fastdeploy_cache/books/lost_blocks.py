"""A memory of blocks that were cached and are gone, so that a miss can be told from something never seen."""

from __future__ import annotations

import time
from collections import deque
from enum import IntEnum

from fastdeploy_cache.books.block_marks import MARK_BYTES, WINDOW_BYTES, block_marks, num_equal, place_key
from fastdeploy_cache.books.run import Run

_ENTRY_BYTES = 320  # of a loss without its marks: the key, the tuple, the time, a place in the dictionary
_NUM_PARTS = 8  # of the memory: the oldest part is forgotten at once
_MOST_TAIL_BYTES = 2**18  # of packed tokens, that are gathered of a run that loses its end bit by bit
_MAX_FORKS, _MAX_WAYS = 4096, 8  # places where lost blocks were parted, and ways that go on from one
_BURST, _BURST_SECONDS = 256, 0.005  # losses noted in so long, at most: a third of a millisecond of the lock


class Loss(IntEnum):
    """How cached blocks were lost: evicted from the GPU, or from the CPU tier; forgotten by a reset; with a rank's or a
    tier's memory."""

    GPU = 0
    CPU = 1
    RESET = 2
    RANK = 3


# The marks of blocks in a row, how they were lost, when, by the monotonic clock, and the part of the memory.
Lost = tuple[bytes, int, float, int]


class _Tail:
    """What a run has lost of its end so far, the last piece last."""

    __slots__ = (
        "at",
        "end",
        "extra",
        "first_block",
        "kind",
        "least_block",
        "num_before",
        "pieces",
        "root",
        "run",
        "window",
    )
    num_before: int  # blocks in front of the run
    end: int  # the block where it ended before
    first_block: int  # where the run ends now
    least_block: int  # as far as more is gathered in short
    root: bytes | bytearray  # the hash of its namespace
    window: bytes | bytearray  # the tokens in front of what is lost
    extra: int
    kind: Loss
    at: float

    def __init__(self) -> None:
        self.run: Run | None = None
        self.pieces = list[bytes | bytearray]()


class LostBlocks:
    """Blocks in a row that left all tiers, by the key of the first one's place.

    Keys and marks may meet by chance, which makes an explanation wrong and nothing else. The oldest go when `max_bytes`
    are full. What goes is counted in `num_forgotten`, and so is what a large eviction has no time for. Under the lock.

    Most blocks are evicted one or a few at a time, each time from the end of the same run. What it has lost is
    gathered, 256 KiB of tokens at most, and gets its key when another run loses blocks, or when somebody asks for its
    place: whoever looks for what was lost from a place on calls `look_at` first.
    """

    def __init__(self, max_bytes: int, block_bytes: int) -> None:
        """`max_bytes` 0: it remembers nothing. `block_bytes`: of the packed tokens of a block."""
        self.is_on = max_bytes > 0
        self._part_bytes, self._block_bytes = max_bytes // _NUM_PARTS, block_bytes
        self._by_key: dict[int, Lost] = {}
        self.get = self._by_key.get  # what was lost from the place of this key on, the last time
        self._keys: list[int] = []  # of the newest part
        self._parts = deque([self._keys])  # the newest first
        self._part = self._num_bytes = 0  # the number of the newest part, and what it takes
        self._forks: dict[int, tuple[Lost, ...]] = {}
        self.num_forgotten = 0  # blocks
        self.kind = Loss.GPU  # of what is lost now, but for what a reset has forgotten
        self.reset_kind = Loss.RESET
        self._num_left, self._burst_at = 0, -_BURST_SECONDS
        self._tail = _Tail()

    def note(self, run: Run, first_block: int, *, is_reset: bool = False) -> None:
        """A run is about to lose its blocks from `first_block` on."""
        tail = self._tail
        try:
            if tail.run is run and tail.first_block == run.num_blocks and first_block >= tail.least_block:
                tokens, start, at = run.tokens, first_block * self._block_bytes, time.monotonic()
                piece, window = tokens[start:], tokens[start - WINDOW_BYTES : start]
                tail.pieces.append(piece)  # for what is behind it there is memory
                tail.window, tail.first_block, tail.at = window, first_block, at
                tail.kind = self.reset_kind if is_reset else self.kind
            else:
                self._note(run, first_block, self.reset_kind if is_reset else self.kind)
        except MemoryError:  # whatever the loss is part of goes on
            self.num_forgotten += run.num_blocks - first_block

    def _note(self, run: Run, first_block: int, kind: Loss) -> None:
        """The same of any run: of one that has not lost its end before, or that goes altogether."""
        if not self.is_on:
            return
        if not self._num_left and not self._refill():
            self.num_forgotten += run.num_blocks - first_block
            return
        self._num_left -= 1
        tail, start, extras = self._tail, first_block * self._block_bytes, run.extras
        is_long = tail.run is run and (tail.end - tail.first_block) * self._block_bytes > _MOST_TAIL_BYTES
        if is_long or tail.run is not run or tail.first_block != run.num_blocks:
            self._end_tail()
            self._begin_tail(run)
        window, at = _window(run, start), time.monotonic()
        tail.pieces.append(run.tokens[start:] if start else run.tokens)
        tail.run, tail.first_block, tail.window, tail.at, tail.kind = run, first_block, window, at, kind
        tail.extra = hash(extras[first_block]) if extras is not None and first_block in extras else 0
        if not start:  # its tokens go with it
            self._end_tail()

    def _begin_tail(self, run: Run) -> None:
        tail, root, num_before = self._tail, run, -run.num_blocks
        while (parent := root.parent) is not None:
            num_before += root.num_blocks
            root = parent
        tail.root, tail.num_before, tail.end = root.hashes, num_before, run.num_blocks
        num_most, num_in_window = _MOST_TAIL_BYTES // self._block_bytes, -(-WINDOW_BYTES // self._block_bytes)
        tail.least_block = max(num_in_window, run.num_blocks - num_most) if run.extras is None else run.num_blocks

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
            tokens = pieces[0] if len(pieces) == 1 else b"".join(reversed(pieces))
            marks = block_marks(tokens, 0, len(tokens) // size, size)
            key = place_key(tail.root, block, tail.window + tokens[:size], len(tail.window), size) ^ tail.extra
            if (older := self.get(key)) is not None:  # what went on in another way, or further, is not forgotten
                num_same = num_equal(older[0], marks)
                window = bytes(tail.window + tokens[: num_same * size])[-WINDOW_BYTES:]
                self.fork(tail.root, block + num_same, window, older, num_same)
            self._add(key, marks, int(tail.kind), tail.at)  # with an enumeration the collector would look at it
        except MemoryError:
            self.num_forgotten += tail.end - tail.first_block

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
        now = time.monotonic()
        if not self._part_bytes or now - self._burst_at < _BURST_SECONDS:
            return False
        self._num_left, self._burst_at = _BURST, now
        return True

    def num_lost(self, lost: Lost, tokens: bytes, start: int, num_blocks: int) -> int:
        """How many of so many blocks, from the byte `start` of `tokens` on, are those that were lost."""
        num_blocks = min(num_blocks, len(lost[0]) // MARK_BYTES)
        return num_equal(lost[0], block_marks(tokens, start, num_blocks, self._block_bytes))

    # A prompt that goes another way in the midst of lost blocks, or ends there, will be cached up to there. The rest is
    # to be found behind that place, by what is in front of it alone: its first block is not here to make a key of.

    def fork(self, root: bytes | bytearray, block: int, window: bytes, lost: Lost, num_same: int) -> None:
        """Note that others stand behind the first `num_same` of some lost blocks; `block` and `window` are of the place
        behind these."""
        rest = lost[0][num_same * MARK_BYTES :]
        if not rest:
            return
        key = hash((bytes(root), block, window))
        known = [each for each in self._forks.pop(key, ()) if each[0] != rest]
        self._forks[key] = (*known[-_MAX_WAYS + 1 :], (rest, *lost[1:]))
        if len(self._forks) > _MAX_FORKS:
            first = next(iter(self._forks))
            self.num_forgotten += sum([len(marks) // MARK_BYTES for marks, *_ in self._forks.pop(first)])

    @property
    def has_forks(self) -> bool:
        """Whether `fork` has noted anything."""
        return bool(self._forks)

    def forked(self, root: bytes | bytearray, block: int, window: bytes) -> tuple[Lost, ...]:
        """What `fork` has noted of this place; the newest last."""
        return self._forks.get(hash((bytes(root), block, window)), ()) if self._forks else ()


def _window(run: Run, end: int) -> bytes:
    """What stands in front of the byte `end` of a run's tokens; in front of the run, too, where it begins there."""
    window = bytes(run.tokens[max(0, end - WINDOW_BYTES) : end])
    while len(window) < WINDOW_BYTES and run.parent is not None and run.parent.parent is not None:
        run = run.parent
        window = bytes(run.tokens[len(window) - WINDOW_BYTES :]) + window
    return window
