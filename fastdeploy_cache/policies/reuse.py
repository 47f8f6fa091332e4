"""`reuse`: evict what is least likely to be used again per second of room held; plain LRU where that does better."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Sequence

import numpy as np

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.run import Run, Tier, Usage
from fastdeploy_cache.policies.eviction import Asked, Clock, Hints, LeastRecentlyUsed, Split
from fastdeploy_cache.policies.leaf_order import IsLeaf
from fastdeploy_cache.policies.reuse_history import (
    ENDED_CLASS,
    PENDING_CLASS,
    ReuseHistory,
    Span,
    private_class,
    score_at,
    shared_class,
)

_NUM_CANDIDATES = 64
_NUM_COLDEST = 512  # leaves that copying ahead looks at
_MIN_SWEEP = 64
_TICKS_PER_SECOND = 1000.0
_TOKENS_PER_TICK = 512  # so that time goes on where a clock is coarse or stands still
_MAX_REGRET = 0.0015  # of the observed references
_REGRET_SLACK_BLOCKS = 8.0
_MIN_GUARD_WINDOW = 32768.0  # observed references that the regret is taken over; in a large cache those remembered
_NUM_FIRST_REQUESTS = 500  # under LRU: before, one lost request would exceed the regret


class Reuse(LeastRecentlyUsed):
    """Classes, learning and scores are `ReuseHistory`'s; this chooses among leaves and guards the choice.

    A class is how often a shared run was used, or a private one's turn, last pause and prompt length. A request that
    goes on where a leaf ended is one turn further; so is one whose lost blocks the history knows to have been a leaf's.
    The engine's hints (session ended, tool call pending) make classes of their own, which are learned like the others.

    The guard compares observed blocks hit with those that LRU would have hit. While the recent loss is above 0.15 % of
    the references, victims are LRU's.
    """

    wants_hashes = True

    def __init__(
        self, clock: Clock, num_blocks: int, block_tokens: int, history_bytes: int, guard: bool = True
    ) -> None:
        super().__init__(clock)
        self.history = ReuseHistory(num_blocks, history_bytes)
        self._block_tokens = block_tokens
        self._guard = guard
        self._threshold = np.uint64(min(2**64 - 1, int(self.history.ratio * 2**64)))
        self._random = random.Random(1).random  # noqa: S311 (a sample, no secret)
        self._window = max(_MIN_GUARD_WINDOW, float(self.history.num_entries))
        self._num_referenced_tokens = 0
        self._regret = self._num_references = 0.0
        self._num_requests = 0

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        super().clear(is_leaf, split)
        self._is_leaf, self._split = is_leaf, split
        self._leaves: tuple[list[Run], list[Run]] = ([], [])  # by Tier; some are none any more
        self._places: tuple[dict[Run, int], dict[Run, int]] = ({}, {})  # their indices
        self._sweep_at = [_MIN_SWEEP, _MIN_SWEEP]
        self._chosen: list[Run | None] = [None, None]  # by Tier, until the next use
        self._num_resident = 0  # observed blocks in the cache

    # -- learning

    def grow(self, run: Run, first_block: int) -> None:
        self._num_resident += len(self._observed(run, first_block))

    def shrink(self, run: Run, first_block: int) -> None:
        self._num_resident -= len(self._observed(run, first_block))

    def use(self, path: Sequence[Run], request: Hints, asked: Asked) -> None:
        goes_on = path[-1].usage.num_uses > 0  # else its last run is new
        self.touch(path)
        self._chosen = [None, None]
        num_tokens = sum([run.num_blocks for run in path]) * self._block_tokens
        self._num_referenced_tokens += num_tokens
        now = self._now()
        observed = [self._observed(run, 0) for run in path]
        lost = self._behind(path, asked.num_found)
        num_new = len(self._behind(path, max(asked.num_asked, asked.num_found)))
        keys = [key for part in observed for key in part]
        self._judge(keys[: len(keys) - num_new], len(lost) - num_new)
        if goes_on:
            self._continue(path[-1].usage, now)
        else:
            path = self._remember(path, lost, now)
        if len(path) > len(observed):  # its last run was cut in two
            observed[-1:] = [self._observed(run, 0) for run in path[-2:]]
        spans = []
        for run, keys in zip(path, observed, strict=True):
            usage = run.usage
            usage.num_uses += 1
            usage.used_at = now
            usage.reuse_class = _class_of(usage, request, num_tokens)
            if keys:
                spans.append(Span(keys, usage.reuse_class, usage.turn, usage.num_uses, usage.is_shared))
        self.history.observe(now, spans, self._num_resident)

    def _observed(self, run: Run, first_block: int) -> list[int]:
        """The keys of a run's observed blocks from `first_block` on: the first 8 bytes of their hashes."""
        names = np.frombuffer(run.hashes, np.uint64)[first_block * 4 :: 4]
        observed: list[int] = (names if self.history.ratio >= 1 else names[names < self._threshold]).tolist()
        return observed

    def _behind(self, path: Sequence[Run], num_blocks: int) -> list[int]:
        """The observed blocks of a path behind its first `num_blocks`."""
        behind, end = list[int](), 0
        for run in path:
            end += run.num_blocks
            if end > num_blocks:
                behind += self._observed(run, max(0, num_blocks - end + run.num_blocks))
        return behind

    @staticmethod
    def _continue(usage: Usage, now: float) -> None:
        """A request went on where a leaf ended."""
        usage.turn, usage.gap = (1, 0.0) if usage.is_shared else (usage.turn + 1, now - usage.used_at)

    def _remember(self, path: Sequence[Run], lost: Sequence[int], now: float) -> Sequence[Run]:
        """A request made the last run of `path`: maybe again. Says of it what was known of its deepest lost block.

        Where a lost conversation goes on, its turns go on. Else what was lost had been shared, up to there.
        """
        run = path[-1]
        for key in reversed(lost):
            remembered = self.history.note(key)
            if remembered is None:
                continue
            used_at, note = remembered
            if note.ends_request and not note.is_shared:
                run.usage.turn, run.usage.gap = note.turn + 1, now - used_at
                return path
            num_shared = run.hashes.find(key.to_bytes(8, sys.byteorder)) // HASH_BYTES + 1
            upper = run
            if 0 < num_shared < run.num_blocks:
                upper = self._split(run, num_shared)
                path = [*path[:-1], upper, run]
                run.usage.is_shared = False
            if num_shared:
                upper.usage.is_shared, upper.usage.num_uses = True, note.num_uses
            return path
        return path

    # -- the guard

    def _judge(self, keys: Sequence[int], num_lost: int) -> None:
        """`keys`: what the match asked for, of which the last `num_lost` were not there."""
        self._num_requests += 1
        keep = max(0.0, 1 - len(keys) / self._window)
        self._regret = self._regret * keep + self.history.num_lru_hits(keys) - (len(keys) - num_lost)
        self._num_references = self._num_references * keep + len(keys)

    def _by_lru(self) -> bool:
        if self.history.table is None:
            return True
        too_bad = self._regret > _MAX_REGRET * self._num_references + _REGRET_SLACK_BLOCKS
        return self._guard and (too_bad or self._num_requests < _NUM_FIRST_REQUESTS)

    # -- choosing

    def push(self, run: Run, tier: Tier) -> None:
        super().push(run, tier)
        places = self._places[tier]
        if run not in places:
            places[run] = len(self._leaves[tier])
            self._leaves[tier].append(run)
            if len(places) >= self._sweep_at[tier]:
                for leaf in [leaf for leaf in self._leaves[tier] if not self._is_leaf(leaf, tier)]:
                    self._forget(leaf, tier)
                self._sweep_at[tier] = max(_MIN_SWEEP, 2 * len(places))

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        if self._by_lru():
            return super().victim(tier, num_blocks)
        chosen = self._chosen[tier]
        if chosen is None or not self._is_leaf(chosen, tier):
            chosen = self._chosen[tier] = self._lowest(tier)
        return chosen, num_blocks

    def _lowest(self, tier: Tier) -> Run:
        """The leaf with the lowest score among some random ones; of equal ones that which was used longest ago."""
        leaves, now = self._leaves[tier], self._now()
        best, lowest, num_left = None, (0.0, 0), _NUM_CANDIDATES
        while num_left and (leaves or best is None):
            run = leaves[int(self._random() * len(leaves))]
            if not self._is_leaf(run, tier):
                self._forget(run, tier)
                continue
            num_left -= 1
            rank = self._score(run, now)
            if best is None or rank < lowest:
                best, lowest = run, rank
        assert best is not None
        return best

    def _now(self) -> float:
        return self._clock() * _TICKS_PER_SECOND + self._num_referenced_tokens / _TOKENS_PER_TICK

    def _score(self, run: Run, now: float) -> tuple[float, int]:
        table, usage = self.history.table, run.usage
        assert table is not None
        return score_at(table[usage.reuse_class], now - usage.used_at), usage.last_used

    def coldest(self, tier: Tier) -> Generator[Run]:
        if self._by_lru():
            yield from super().coldest(tier)
            return
        leaves, now = self._leaves[tier], self._now()
        if len(leaves) > _NUM_COLDEST:
            leaves = [leaves[int(self._random() * len(leaves))] for _ in range(_NUM_COLDEST)]
        some = {leaf for leaf in leaves if self._is_leaf(leaf, tier)}
        yield from sorted(some, key=lambda run: self._score(run, now))

    def is_colder(self, run: Run, than: Run) -> bool:
        if self._by_lru():
            return super().is_colder(run, than)
        now = self._now()
        return self._score(run, now) < self._score(than, now)

    def _forget(self, run: Run, tier: Tier) -> None:
        """Take a run out of the leaves; the last one moves to its place."""
        leaves, places = self._leaves[tier], self._places[tier]
        place, last = places.pop(run), leaves.pop()
        if last is not run:
            leaves[place] = last
            places[last] = place

    def alike(self, upper: Run, lower: Run) -> bool:
        a, b = upper.usage, lower.usage
        return a.is_shared and b.is_shared and a.reuse_class == b.reuse_class


def _class_of(usage: Usage, request: Hints, num_tokens: int) -> int:
    if usage.is_shared:
        return shared_class(usage.num_uses)
    if request.session_ended:
        return ENDED_CLASS
    return PENDING_CLASS if request.tool_call_pending else private_class(usage.turn, usage.gap, num_tokens)
