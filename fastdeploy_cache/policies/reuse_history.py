"""What past reuse says about the future: a sampled history of blocks, survival curves, a table of scores.

A sample of blocks (see `BlockSampler`) stands for the cache. They are kept in the order of their last use, the latest
ones (as many as the cache holds) in `young`, older ones in `old`. Two things follow without looking at the cache's own
choices:

- `young` is what plain LRU would hold (an LRU of prefixes equals one of blocks if each request touches its blocks from
  last to first), so its hit rate is known too: spatial sampling as in SHARDS (Waldspurger et al., FAST'15).
- every reuse and every block that fell out of `old` unused says how long blocks of its class live.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import log2
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fastdeploy_cache.policies.reuse_classes import ancestors_of

SAMPLE_TOKENS = 1024  # of the cache for each observed block: blocks of one prompt mostly share their fate
SAMPLE_BLOCKS = 512, 4096  # at least and at most
HISTORY_FACTOR = 7  # observed blocks remembered for each that the cache holds: six of seven are of evicted ones
ENTRY_BYTES = 360  # of an observed block: two dictionary entries, key, slot, note
_PER_OCTAVE, NUM_AGES = 2, 56  # age buckets: two for each doubling, up to three days in milliseconds
_PRIOR_BLOCKS = 40.0  # how many observed blocks a class's parent counts for
_HALF_LIFE = 16  # in lengths of the history
_HALF_WIDTHS = 0.5 * np.diff(2.0 ** (np.arange(NUM_AGES + 1) / _PER_OCTAVE))
_NO_COUNTS = (0.0,) * NUM_AGES
_LATER = np.triu(np.ones((NUM_AGES + 1, NUM_AGES + 1)), 1)  # [age, horizon]: whether that is behind it

Array = np.ndarray[Any, np.dtype[np.float64]]


class Note(msgspec.Struct, gc=False, eq=False):
    """What was known of the observed blocks of a run at their last use. Many are remembered, and they refer to nothing,
    so the garbage collector does not look at them."""

    reuse_class: int
    turn: int
    num_uses: int
    is_shared: bool


Observed = tuple[Sequence[int], Note]  # the keys of a run's observed blocks, first to last, and what is noted of them


class Remembered(NamedTuple):
    """An observed block's last use."""

    used_at: float
    note: Note
    ends_request: bool  # the last observed block of that request


class ReuseHistory:
    """Ages are in ticks: milliseconds plus block references (see `Reuse`). One thread at a time."""

    def __init__(self, num_blocks: int, history_bytes: int, block_tokens: int) -> None:
        """Make a history for a cache of `num_blocks`. It takes about `history_bytes` at most."""
        wanted = min(max(num_blocks * block_tokens // SAMPLE_TOKENS, SAMPLE_BLOCKS[0]), SAMPLE_BLOCKS[1])
        sample = max(64, min(wanted, history_bytes // (ENTRY_BYTES * HISTORY_FACTOR), num_blocks))
        self.ratio = min(1.0, sample / num_blocks)
        self.num_entries = int(HISTORY_FACTOR * num_blocks * self.ratio) + 1
        self.table: Mapping[int, Sequence[float]] | None = (
            None  # [class][age bucket]: the score; None until something is known
        )
        self._young: OrderedDict[int, int] = OrderedDict()  # block's key: slot
        self._old: OrderedDict[int, int] = OrderedDict()
        self._when = array("d", [0.0]) * self.num_entries  # by slot
        self._class = array("h", [-1]) * self.num_entries
        self._notes: list[Note | None] = [None] * self.num_entries
        self._ends_request = bytearray(self.num_entries)
        self._num_slots = 0
        self._rows: dict[int, int] = {}  # by class: its row in the four below, as they are met
        self._ends, self._reuses = np.zeros((0, NUM_AGES)), np.zeros((0, NUM_AGES))
        self._new_ends, self._new_reuses = array("d"), array("d")
        self._rebuild_every = max(512, self.num_entries // 4)
        self._keep = 0.5 ** (self._rebuild_every / (_HALF_LIFE * self.num_entries))
        self._num_observed = 0

    def remembered(self, key: int) -> Remembered | None:
        """What is known of a block's last use; None if it is not remembered."""
        slot = self._young.get(key)
        if slot is None:
            slot = self._old.get(key)
        note = self._notes[slot] if slot is not None else None
        if slot is None or note is None:
            return None
        return Remembered(self._when[slot], note, bool(self._ends_request[slot]))

    def num_lru_hits(self, keys: Sequence[int]) -> int:
        """How many of a request's observed blocks, from the first on, an LRU would have hit."""
        for i, key in enumerate(keys):
            if key not in self._young:
                return i
        return len(keys)

    def observe(self, now: float, runs: Sequence[Observed], num_resident: int) -> bool:
        """A request used these runs, first to last; the cache holds `num_resident` observed blocks now.

        Returns whether there is a new table.
        """
        young, old, when, notes, ends = self._young, self._old, self._when, self._notes, self._ends_request
        classes, ends_request = self._class, True
        for keys, note in reversed(runs):
            last_used_at, last_note, num_alike = -1.0, None, 0
            reuse_class = note.reuse_class
            for key in reversed(keys):
                slot = young.pop(key, None)
                if slot is None and (slot := old.pop(key, None)) is None:
                    slot = self._new_slot(now)
                else:
                    used_at, past = when[slot], notes[slot]
                    if past is last_note and used_at == last_used_at:
                        num_alike += 1  # blocks of a run mostly share their past
                    else:
                        if last_note is not None:
                            self._count_reuses(last_note, now - last_used_at, num_alike)
                        last_used_at, last_note, num_alike = used_at, past, 1
                when[slot], classes[slot], notes[slot], ends[slot] = now, reuse_class, note, ends_request
                young[key] = slot
                ends_request = False
            if last_note is not None:
                self._count_reuses(last_note, now - last_used_at, num_alike)
            self._num_observed += len(keys)
        while len(young) > num_resident:
            key, slot = young.popitem(last=False)
            old[key] = slot
        if self._num_observed >= (self._rebuild_every if self.table is not None else 128):
            self._rebuild(now)
            return True
        return False

    def _count_reuses(self, past: Note, age: float, num_blocks: int) -> None:
        place = self._row(past.reuse_class) * NUM_AGES + _bucket(age)
        self._new_ends[place] += num_blocks
        self._new_reuses[place] += num_blocks

    def _new_slot(self, now: float) -> int:
        """A slot for a block that is not remembered: an unused one, or that of the block used longest ago."""
        if self._num_slots < self.num_entries:
            self._num_slots += 1
            return self._num_slots - 1
        _, slot = (self._old or self._young).popitem(last=False)
        self._new_ends[self._row(self._class[slot]) * NUM_AGES + _bucket(now - self._when[slot])] += 1
        return slot

    def _row(self, reuse_class: int) -> int:
        row = self._rows.get(reuse_class)
        if row is None:
            row = self._rows[reuse_class] = len(self._rows)
            for new in (self._new_ends, self._new_reuses):
                new.extend(_NO_COUNTS)
        return row

    # -- from counts to scores

    def _rebuild(self, now: float) -> None:
        self._num_observed = 0
        classes, inverse = np.unique(np.frombuffer(self._class, np.int16)[: self._num_slots], return_inverse=True)
        rows = np.array([self._row(each) for each in classes.tolist()], np.int64)[inverse]
        num_rows = len(self._rows)
        self._ends, self._reuses = (_with_rows(total, num_rows) for total in (self._ends, self._reuses))
        for total, new in ((self._ends, self._new_ends), (self._reuses, self._new_reuses)):
            fresh = np.frombuffer(new)
            np.multiply(total, self._keep, out=total)
            np.add(total, fresh.reshape(total.shape), out=total)
            fresh[:] = 0
        ages = np.maximum(now - np.frombuffer(self._when)[: self._num_slots], 0)
        buckets = np.minimum((np.log2(1 + ages) * _PER_OCTAVE).astype(np.int64), NUM_AGES - 1)
        alive = np.bincount(rows * NUM_AGES + buckets, minlength=num_rows * NUM_AGES)
        ends = self._ends + alive.reshape(num_rows, NUM_AGES)
        self.table = _Scores(_Hazards(ends, self._reuses.copy(), dict(self._rows)))


def _with_rows(total: Array, num_rows: int) -> Array:
    """With rows of zeros behind it, for classes that have been met since."""
    return np.concatenate([total, np.zeros((num_rows - len(total), NUM_AGES))]) if len(total) < num_rows else total


class _Hazards:
    """The chances of a reuse within each age bucket, by class, for a block that has reached it unused.

    Kaplan-Meier over lives that ended by reuse, by falling out of the history, or have not ended; those count half in
    their bucket. A class with few blocks leans on its group, that on a larger one, and that on all (`ancestors_of`).
    """

    def __init__(self, ends: Array, reuses: Array, rows: Mapping[int, int]) -> None:
        self._reuses, self._rows = reuses, rows
        self._at_risk = np.cumsum(ends[:, ::-1], 1)[:, ::-1] - 0.5 * (ends - reuses)
        self._overall: Array = reuses.sum(0) / np.maximum(self._at_risk.sum(0), 1e-9)
        self._members: dict[int, list[int]] = {}  # rows, by group
        for number, row in rows.items():
            for group in ancestors_of(number):
                self._members.setdefault(group, []).append(row)

    def of(self, number: int) -> Array:
        """Those of a class, which may be one that was never met."""
        found, row = self._overall, self._rows.get(number)
        for group in reversed(ancestors_of(number)):
            if (rows := self._members.get(group)) is not None:
                found = self._leaning(self._reuses[rows].sum(0), self._at_risk[rows].sum(0), found)
        if row is not None:
            found = self._leaning(self._reuses[row], self._at_risk[row], found)
        return np.asarray(np.clip(found, 0, 0.9999))

    @staticmethod
    def _leaning(reuses: Array, at_risk: Array, parent: Array) -> Array:
        return np.asarray((reuses + _PRIOR_BLOCKS * parent) / (at_risk + _PRIOR_BLOCKS))


class _Scores(dict[int, list[float]]):
    """Scores by class and age: the best, over all horizons, of P(reused by then) / E[time held until then]; 0 behind
    the last horizon. A class's are computed when they are asked for, as most classes are never met."""

    def __init__(self, hazards: _Hazards) -> None:
        super().__init__()
        self._hazards = hazards

    def __missing__(self, reuse_class: int) -> list[float]:
        alive, held = np.ones(NUM_AGES + 1), np.zeros(NUM_AGES + 1)
        np.cumprod(1 - self._hazards.of(reuse_class), out=alive[1:])
        np.cumsum((alive[1:] + alive[:-1]) * _HALF_WIDTHS, out=held[1:])
        per_second = alive[:, None] - alive
        per_second *= _LATER
        per_second /= np.maximum(held - held[:, None], 1e-12)
        scores: list[float] = per_second.max(1).tolist()
        self[reuse_class] = scores
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
