"""What past reuse says about the future: a sampled history of blocks, survival curves, a table of scores.

A block is observed if its hash falls below a threshold, so a sample of about `SAMPLE_BLOCKS` stands for the cache. The
observed blocks are kept in order of last use, the latest ones (as many as the cache holds) in `young`, older ones in
`old`. Two things follow without looking at the cache's own choices:

- `young` is what plain LRU would hold (an LRU of prefixes equals one of blocks if each request touches its blocks from
  last to first), so its hit rate is known too: spatial sampling as in SHARDS (Waldspurger et al., FAST'15).
- every reuse and every block that fell out of `old` unused says how long blocks of its class live.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from math import log2
from typing import Any, NamedTuple

import numpy as np

SAMPLE_BLOCKS = 4096
HISTORY_FACTOR = 7  # observed blocks remembered for each that the cache holds: six of seven are of evicted ones
ENTRY_BYTES = 360  # of an observed block: two dictionary entries, key, slot, note
_PER_OCTAVE, NUM_AGES = 2, 56  # age buckets: two for each doubling, up to three days in milliseconds
_PRIOR_BLOCKS = 40.0  # how many observed blocks a class's parent counts for
_HALF_LIFE = 16  # in lengths of the history
_EDGES = 2.0 ** (np.arange(NUM_AGES + 1) / _PER_OCTAVE) - 1

NUM_USES, NUM_TURNS, NUM_GAPS, NUM_LENGTHS = 6, 5, 4, 4
_END_PRIVATE = NUM_USES + NUM_TURNS * NUM_GAPS * NUM_LENGTHS
ENDED_CLASS, PENDING_CLASS = _END_PRIVATE, _END_PRIVATE + 1  # by hints of the engine
NUM_CLASSES = _END_PRIVATE + 2

Array = np.ndarray[Any, np.dtype[np.float64]]


def shared_class(num_uses: int) -> int:
    """Blocks where prompts have parted behind: by uses 1, 2-3, 4-7, 8-15, 16-31, more."""
    return min(NUM_USES - 1, max(1, num_uses).bit_length() - 1)


def private_class(turn: int, gap: float, num_tokens: int) -> int:
    """Blocks of one conversation: by turn 1, 2, 3-4, 5-8, more; by the last pause in milliseconds; by prompt length."""
    turns = min(NUM_TURNS - 1, (turn - 1).bit_length())
    gaps = max(0, min(NUM_GAPS - 1, (int(gap).bit_length() - 11) // 2)) if turn > 1 else 0  # to 4 s, 16 s, 66 s
    lengths = min(NUM_LENGTHS - 1, (num_tokens >> 11).bit_length())  # below 2k, 4k, 8k
    return NUM_USES + (turns * NUM_GAPS + gaps) * NUM_LENGTHS + lengths


class Note(NamedTuple):
    """What was known of an observed block at its last use."""

    turn: int
    num_uses: int
    is_shared: bool
    ends_request: bool  # the last observed block of its request


class Span(NamedTuple):
    """The observed blocks of a run on a request's path, first to last, and what is noted of them."""

    keys: Sequence[int]
    reuse_class: int
    turn: int
    num_uses: int
    is_shared: bool


class ReuseHistory:
    """Ages are in ticks: milliseconds plus block references (see `Reuse`). One thread at a time."""

    def __init__(self, num_blocks: int, history_bytes: int) -> None:
        """Make a history for a cache of `num_blocks`. It takes about `history_bytes` at most."""
        sample = max(64, min(SAMPLE_BLOCKS, history_bytes // (ENTRY_BYTES * HISTORY_FACTOR), num_blocks))
        self.ratio = min(1.0, sample / num_blocks)
        self.num_entries = int(HISTORY_FACTOR * num_blocks * self.ratio) + 1
        self.table: list[list[float]] | None = None  # [class][age bucket]: the score; None until something is known
        self._young: OrderedDict[int, int] = OrderedDict()  # block's key: slot
        self._old: OrderedDict[int, int] = OrderedDict()
        self._when = array("d", [0.0]) * self.num_entries  # by slot
        self._class = array("h", [-1]) * self.num_entries
        self._notes: list[Note | None] = [None] * self.num_entries
        self._num_slots = 0
        self._ends, self._reuses = np.zeros((NUM_CLASSES, NUM_AGES)), np.zeros((NUM_CLASSES, NUM_AGES))
        self._new_ends, self._new_reuses = (array("d", [0.0]) * (NUM_CLASSES * NUM_AGES) for _ in range(2))
        self._rebuild_every = max(512, self.num_entries // 8)
        self._keep = 0.5 ** (self._rebuild_every / (_HALF_LIFE * self.num_entries))
        self._num_observed = 0

    def note(self, key: int) -> tuple[float, Note] | None:
        """When a block was last used, and its note; None if it is not remembered."""
        slot = self._young.get(key)
        if slot is None:
            slot = self._old.get(key)
        note = self._notes[slot] if slot is not None else None
        return (self._when[slot], note) if slot is not None and note is not None else None

    def num_lru_hits(self, keys: Sequence[int]) -> int:
        """How many of a request's observed blocks, from the first on, an LRU would have hit."""
        for i, key in enumerate(keys):
            if key not in self._young:
                return i
        return len(keys)

    def observe(self, now: float, spans: Sequence[Span], num_resident: int) -> None:
        """A request used these runs, first to last; the cache holds `num_resident` observed blocks now."""
        young, old, when, classes, notes = self._young, self._old, self._when, self._class, self._notes
        ends_request = True
        for span in reversed(spans):
            note = Note(span.turn, span.num_uses, span.is_shared, False)
            last_life, place = (-1.0, -1), 0  # blocks of a run mostly share their past
            for key in reversed(span.keys):
                slot = young.pop(key, None)
                if slot is None:
                    slot = old.pop(key, None)
                if slot is None:
                    slot = self._new_slot(now)
                else:
                    life = (when[slot], classes[slot])
                    if life != last_life:
                        last_life, place = life, life[1] * NUM_AGES + _bucket(now - life[0])
                    self._new_ends[place] += 1
                    self._new_reuses[place] += 1
                when[slot], classes[slot] = now, span.reuse_class
                notes[slot] = note._replace(ends_request=True) if ends_request else note
                young[key] = slot
                ends_request = False
            self._num_observed += len(span.keys)
        while len(young) > num_resident:
            key, slot = young.popitem(last=False)
            old[key] = slot
        if self._num_observed >= (self._rebuild_every if self.table is not None else 128):
            self._rebuild(now)

    def _new_slot(self, now: float) -> int:
        """A slot for a block that is not remembered: an unused one, or that of the block used longest ago."""
        if self._num_slots < self.num_entries:
            self._num_slots += 1
            return self._num_slots - 1
        _, slot = (self._old or self._young).popitem(last=False)
        self._new_ends[self._class[slot] * NUM_AGES + _bucket(now - self._when[slot])] += 1
        return slot

    # -- from counts to scores

    def _rebuild(self, now: float) -> None:
        self._num_observed = 0
        for total, new in ((self._ends, self._new_ends), (self._reuses, self._new_reuses)):
            fresh = np.frombuffer(new)
            np.multiply(total, self._keep, out=total)
            np.add(total, fresh.reshape(total.shape), out=total)
            fresh[:] = 0
        classes = np.frombuffer(self._class, np.int16)[: self._num_slots].astype(np.int64)
        ages = np.maximum(now - np.frombuffer(self._when)[: self._num_slots], 0)
        buckets = np.minimum((np.log2(1 + ages) * _PER_OCTAVE).astype(np.int64), NUM_AGES - 1)
        alive = np.bincount(classes * NUM_AGES + buckets, minlength=NUM_CLASSES * NUM_AGES)
        self.table = _scores(_hazards(self._ends + alive.reshape(NUM_CLASSES, NUM_AGES), self._reuses)).tolist()


def _hazards(ends: Array, reuses: Array) -> Array:
    """[class, age]: the chance of a reuse within an age bucket, for a block that has reached it unused.

    Kaplan-Meier over lives that ended by reuse, by falling out of the history, or have not ended; those count half in
    their bucket. A class with few blocks leans on its parent (the same turn and gap; all shared blocks), that on all.
    """
    at_risk = np.cumsum(ends[:, ::-1], 1)[:, ::-1] - 0.5 * (ends - reuses)
    overall = reuses.sum(0) / np.maximum(at_risk.sum(0), 1e-9)

    def smoothed(part_reuses: Array, part_risk: Array, parent: Array) -> Array:
        return (part_reuses + _PRIOR_BLOCKS * parent) / (part_risk + _PRIOR_BLOCKS)

    def by_length(values: Array) -> Array:
        return np.asarray(values[NUM_USES:_END_PRIVATE].reshape(-1, NUM_LENGTHS, NUM_AGES).sum(1))

    parents = np.empty((NUM_CLASSES, NUM_AGES))
    parents[:NUM_USES] = smoothed(reuses[:NUM_USES].sum(0), at_risk[:NUM_USES].sum(0), overall)
    parents[_END_PRIVATE:] = overall
    parents[NUM_USES:_END_PRIVATE] = np.repeat(smoothed(by_length(reuses), by_length(at_risk), overall), NUM_LENGTHS, 0)
    hazards: Array = np.clip(smoothed(reuses, at_risk, parents), 0, 0.9999)
    return hazards


def _scores(hazards: Array) -> Array:
    """[class, age]: the best, over all horizons, of P(reused by then) / E[time held until then]; 0 behind the last."""
    alive = np.ones((NUM_CLASSES, NUM_AGES + 1))
    alive[:, 1:] = np.cumprod(1 - hazards, 1)
    held = np.zeros_like(alive)
    held[:, 1:] = np.cumsum((alive[:, 1:] + alive[:, :-1]) * 0.5 * np.diff(_EDGES), 1)
    scores = np.zeros_like(alive)
    for age in range(NUM_AGES):
        reused, time = alive[:, age : age + 1] - alive[:, age + 1 :], held[:, age + 1 :] - held[:, age : age + 1]
        scores[:, age] = (reused / np.maximum(time, 1e-12)).max(1)
    return scores


def _bucket(age: float) -> int:
    return min(NUM_AGES - 1, int(log2(1 + age) * _PER_OCTAVE)) if age > 0 else 0


def score_at(row: Sequence[float], age: float) -> float:
    """A class's score at an age, between buckets by interpolation."""
    if age <= 0:
        return row[0]
    place = log2(1 + age) * _PER_OCTAVE
    bucket = int(place)
    if bucket >= NUM_AGES:
        return row[NUM_AGES]
    return row[bucket] + (row[bucket + 1] - row[bucket]) * (place - bucket)
