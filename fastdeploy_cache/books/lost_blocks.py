"""A memory of blocks that were cached and are gone, so that a miss can be told from something never seen."""

from __future__ import annotations

import time
from collections import deque
from enum import IntEnum

from fastdeploy_cache.books.block_marks import MARK_BYTES, WINDOW_BYTES, block_marks, num_equal, place_key
from fastdeploy_cache.books.run import Run

_ENTRY_BYTES = 320  # of a loss without its marks: the key, the tuple, the time, a place in the dictionary
_NUM_PARTS = 4  # of the memory: the oldest part is forgotten at once
_MAX_FORKS, _MAX_WAYS = 4096, 8  # places where lost blocks were parted, and ways that go on from one
_BURST, _BURST_SECONDS = 256, 0.005  # losses noted in so long, at most: a third of a millisecond of the lock


class Loss(IntEnum):
    """How cached blocks were lost: evicted from the GPU, or from the CPU tier; forgotten by a reset; with a rank's or a
    tier's memory."""

    GPU = 0
    CPU = 1
    RESET = 2
    RANK = 3


# The marks of blocks in a row, how they were lost, and when, by the monotonic clock.
Lost = tuple[bytes, int, float]


class LostBlocks:
    """Blocks in a row that left all tiers, by the key of the first one's place.

    Keys and marks may meet by chance, which makes an explanation wrong and nothing else. The oldest go when `max_bytes`
    are full. What goes is counted in `num_forgotten`, and so is what a large eviction has no time for. Under the lock.
    """

    def __init__(self, max_bytes: int, block_bytes: int) -> None:
        """`max_bytes` 0: it remembers nothing. `block_bytes`: of the packed tokens of a block."""
        self.is_on = max_bytes > 0
        self._part_bytes, self._block_bytes = max_bytes // _NUM_PARTS, block_bytes
        self._newest: dict[int, Lost] = {}
        self._parts: deque[dict[int, Lost]] = deque([self._newest])  # the newest first
        self._num_bytes = 0  # of the newest part
        self._forks: dict[int, tuple[Lost, ...]] = {}
        self.num_forgotten = 0  # blocks
        self.kind = Loss.GPU  # of what is lost now, but for what a reset has forgotten
        self.reset_kind = Loss.RESET
        self._num_left, self._burst_at = 0, -_BURST_SECONDS
        self._last: tuple[Run, int, int] | None = None  # the run that lost its end last: where, and under which key

    def note(self, run: Run, first_block: int, *, is_reset: bool = False) -> None:
        """A run is about to lose its blocks from `first_block` on."""
        num_blocks = run.num_blocks - first_block
        if not self._num_left and not self._refill():
            self.num_forgotten += num_blocks
            return
        self._num_left -= 1
        try:
            self._note(run, first_block, num_blocks, self.reset_kind if is_reset else self.kind)
        except MemoryError:  # whatever the loss is part of goes on
            self.num_forgotten += num_blocks

    def _note(self, run: Run, first_block: int, num_blocks: int, kind: Loss) -> None:
        size, tokens, extras = self._block_bytes, run.tokens, run.extras
        start, depth, root = first_block * size, first_block, run
        while (parent := root.parent) is not None:
            depth += parent.num_blocks
            root = parent
        marks = block_marks(tokens, start, num_blocks, size)
        if start < WINDOW_BYTES and run.parent is not root:
            tokens = _with_window(run, start + size)
            start = len(tokens) - size
        key = place_key(root.hashes, depth, tokens, start, size)
        if extras is not None and first_block in extras:
            key ^= hash(extras[first_block])
        last = self._last
        if last is not None and last[0] is run and last[1] == run.num_blocks:  # it goes on losing its end
            before = self._newest.pop(last[2], None)
            if before is not None:
                marks += before[0]
        if (older := self.get(key)) is not None:  # what went on in another way, or further, is not forgotten
            num_same = num_equal(older[0], marks)
            window = _with_window(run, (first_block + num_same) * size)[-WINDOW_BYTES:]
            self.fork(root.hashes, depth + num_same, window, older, num_same)
        self.add(key, (marks, int(kind), time.monotonic()))  # with an enumeration the collector would look at it
        self._last = (run, first_block, key)

    def add(self, key: int, lost: Lost) -> None:
        """Remember these under the key of the first one's place."""
        self._newest[key] = lost
        self._num_bytes += len(lost[0]) + _ENTRY_BYTES
        if self._num_bytes > self._part_bytes:
            self._newest, self._num_bytes = {}, 0
            self._parts.appendleft(self._newest)
            if len(self._parts) > _NUM_PARTS:
                self.num_forgotten += sum([len(marks) // MARK_BYTES for marks, _, _ in self._parts.pop().values()])

    def _refill(self) -> bool:
        """Whether the last burst began long enough ago for another."""
        now = time.monotonic()
        if not self._part_bytes or now - self._burst_at < _BURST_SECONDS:
            return False
        self._num_left, self._burst_at = _BURST, now
        return True

    def get(self, key: int) -> Lost | None:
        """What was lost from the place of this key on, the last time."""
        for part in self._parts:
            lost = part.get(key)
            if lost is not None:
                return lost
        return None

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
        self._forks[key] = (*known[-_MAX_WAYS + 1 :], (rest, lost[1], lost[2]))
        if len(self._forks) > _MAX_FORKS:
            first = next(iter(self._forks))
            self.num_forgotten += sum([len(marks) // MARK_BYTES for marks, _, _ in self._forks.pop(first)])

    @property
    def has_forks(self) -> bool:
        """Whether `fork` has noted anything."""
        return bool(self._forks)

    def forked(self, root: bytes | bytearray, block: int, window: bytes) -> tuple[Lost, ...]:
        """What `fork` has noted of this place; the newest last."""
        return self._forks.get(hash((bytes(root), block, window)), ()) if self._forks else ()


def _with_window(run: Run, end: int) -> bytes:
    """The tokens of a run up to the byte `end`, with a window of those in front of the run."""
    tokens, missing = bytes(run.tokens[:end]), WINDOW_BYTES
    while run.parent is not None and run.parent.parent is not None and missing > 0:
        run = run.parent
        window = bytes(run.tokens[-missing:])
        tokens, missing = window + tokens, missing - len(window)
    return tokens
