"""`reuse`: evict what is least likely to be used again per second of room held; plain LRU where that does better."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from fastdeploy_cache.books.leaves.leaf_order import IsLeaf
from fastdeploy_cache.books.leaves.policy import Asked, Clock, Hints, LeastRecentlyUsed, Split
from fastdeploy_cache.books.run import TIERS, Run, Tier
from fastdeploy_cache.books.run_notes import PolicyNotes
from fastdeploy_cache.policies.block_sampler import BlockSampler
from fastdeploy_cache.policies.leaf_classes import LeafClasses, Score, rank_of
from fastdeploy_cache.policies.reuse_classes import (
    ENDED_CLASS,
    PENDING_CLASS,
    private_class,
    session_class,
    shared_class,
)
from fastdeploy_cache.policies.reuse_history import Note, ReuseHistory, score_at
from fastdeploy_cache.policies.session_pauses import SessionPauses

_NUM_COLDEST = 512  # leaves that copying ahead looks at
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
    What a session has is in a class by the pause that is expected (`SessionPauses`). Where the chance of going on is
    stated, each of these and of the private classes is four more.

    The guard compares observed blocks hit with those that LRU would have hit. While the recent loss is above 0.15 % of
    the references, victims are LRU's.
    """

    name = "reuse"

    def __init__(
        self,
        clock: Clock,
        num_blocks: int,
        block_tokens: int,
        history_bytes: int,
        *,
        guard: bool = True,
        tree_tokens: int | None = None,
    ) -> None:
        """`tree_tokens`: how many tokens a block of the tree has, where they stand for `block_tokens`."""
        super().__init__(clock)
        self.history = ReuseHistory(num_blocks, history_bytes, block_tokens)
        self._pauses = SessionPauses()
        self._sampler = BlockSampler(self.history.ratio, tree_tokens or block_tokens)
        self._block_tokens = block_tokens
        self._guard = guard
        self._is_lru = True
        self._now = 0.0
        self._window = max(_MIN_GUARD_WINDOW, float(self.history.num_entries))
        self._num_referenced_tokens = 0
        self._regret = self._num_references = 0.0
        self._num_requests = 0

    def rank(self, run: Run) -> int:
        return rank_of(run)

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        super().clear(is_leaf, split)
        self._split = split
        self._leaves = tuple([LeafClasses(self._orders[tier], self._score) for tier in TIERS])
        for leaves in self._leaves:
            leaves.rescore(is_lru=self._is_lru)
        self._chosen: list[Run | None] = [None, None]  # by Tier, until the next use
        self._sampler.clear()

    # -- learning

    def touch(self, path: Sequence[Run]) -> None:
        super().touch(path)
        for leaves in self._leaves:
            leaves.age(self._num_uses)

    def shrink(self, run: Run, first_block: int) -> None:
        self._sampler.shrink(run, first_block)

    def use(self, path: Sequence[Run], request: Hints, asked: Asked) -> None:
        goes_on = path[-1].num_uses > 0  # else its last run is new
        self._num_uses += 1
        self._chosen = [None, None]
        for leaves in self._leaves:
            leaves.age(self._num_uses)
        num_tokens = sum([run.num_blocks for run in path]) * self._block_tokens
        self._num_referenced_tokens += num_tokens
        now = self._now = self._time()
        lost = self._observe(path, asked)
        if goes_on:
            self._continue(path[-1], now)
        elif lost:
            path = self._remember(path, lost, now)
        observed = []
        own, going = self._own_class(request, num_tokens)
        for run in path:
            old, sample = run.notes, run.notes.sample
            run.num_uses += 1
            run.last_used = self._num_uses
            if run.is_shared:
                reuse_class = shared_class(run.num_uses)
            else:
                reuse_class = own or private_class(old.turn, old.gap, num_tokens, going)
            run.notes = PolicyNotes(old.priority, old.keep_until, now, old.turn, old.gap, reuse_class, sample)
            if sample is not None and sample.keys:
                note = Note(reuse_class, old.turn, run.num_uses, run.is_shared)
                observed.append((sample.keys, note))
        self._push_leaves(path)
        has_learned = self.history.observe(now, observed, self._sampler.num_resident)
        by_lru = self._by_lru()
        if has_learned or by_lru != self._is_lru:
            self._is_lru = by_lru
            for leaves in self._leaves:
                leaves.rescore(is_lru=by_lru)

    def _own_class(self, request: Hints, num_tokens: int) -> tuple[int, int]:
        """The class of what only this request has used, 0 where that depends on the run; and what is said of its chance
        to go on."""
        hint = request.session_hint
        going = hint.going if hint is not None else 0
        if request.session_ended:
            if hint is not None:
                self._pauses.forget(hint.session)
            return ENDED_CLASS, going
        if hint is not None and hint.session:
            pending, now = request.tool_call_pending, self._clock() * _TICKS_PER_SECOND
            return session_class(self._pauses.forecast(hint, now, num_tokens, tool_call_pending=pending), going), going
        return (PENDING_CLASS if request.tool_call_pending else 0), going

    def _observe(self, path: Sequence[Run], asked: Asked) -> list[int]:
        """Look at the blocks of a path, and judge what the match has found; the keys that it has not."""
        keys: list[int] = []
        end = num_hits = num_asked = 0
        for run in path:
            sample = run.notes.sample
            if sample is None or sample.num_blocks != run.num_blocks:
                sample = self._sampler.sample(run)
            if sample.keys:
                num_hits += sample.num_before(asked.num_found - end)
                num_asked += sample.num_before(asked.num_asked - end)
                keys += sample.keys
            end += run.num_blocks
        num_asked = max(num_asked, num_hits)
        self._judge(keys[:num_asked], num_hits)
        return keys[num_hits:]

    @staticmethod
    def _continue(run: Run, now: float) -> None:
        """A request went on where a leaf ended."""
        turn, gap = (1, 0.0) if run.is_shared else (run.notes.turn + 1, now - run.notes.used_at)
        run.notes = run.notes.but(turn=turn, gap=gap)

    def _remember(self, path: Sequence[Run], lost: Sequence[int], now: float) -> Sequence[Run]:
        """A request made the last run of `path`: maybe again. Says of it what was known of its deepest lost block.

        Where a lost conversation goes on, its turns go on. Else what was lost had been shared, up to there.
        """
        run = path[-1]
        for key in reversed(lost):
            remembered = self.history.remembered(key)
            if remembered is None:
                continue
            used_at, note, ends_request = remembered
            if ends_request and not note.is_shared:
                run.notes = run.notes.but(turn=note.turn + 1, gap=now - used_at)
                return path
            sample = run.notes.sample
            at_end = sample is not None and key in sample.keys
            num_shared = sample.blocks[sample.keys.index(key)] + 1 if sample is not None and at_end else 0
            upper = run
            if 0 < num_shared < run.num_blocks:
                upper = self._split(run, num_shared)
                path = [*path[:-1], upper, run]
                run.is_shared = False
            if num_shared:
                upper.is_shared, upper.num_uses = True, note.num_uses
            return path
        return path

    # -- the guard

    def _judge(self, keys: Sequence[int], num_hits: int) -> None:
        """`keys`: what the match asked for, of which the first `num_hits` were there."""
        self._num_requests += 1
        keep = max(0.0, 1 - len(keys) / self._window)
        self._regret = self._regret * keep + self.history.num_lru_hits(keys) - num_hits
        self._num_references = self._num_references * keep + len(keys)

    def _by_lru(self) -> bool:
        if self.history.table is None:
            return True
        too_bad = self._regret > _MAX_REGRET * self._num_references + _REGRET_SLACK_BLOCKS
        return self._guard and (too_bad or self._num_requests < _NUM_FIRST_REQUESTS)

    # -- choosing

    def push(self, run: Run, tier: Tier) -> None:
        super().push(run, tier)
        self._leaves[tier].push(run)

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        chosen = self._chosen[tier]
        if chosen is None or not self._is_leaf(chosen, tier):
            chosen = self._chosen[tier] = self._leaves[tier].lowest()
        return chosen, num_blocks

    def _time(self) -> float:
        return self._clock() * _TICKS_PER_SECOND + self._num_referenced_tokens / _TOKENS_PER_TICK

    def _score(self, run: Run) -> Score:
        table, notes = self.history.table, run.notes
        if table is None or self._is_lru:
            return 0.0, run.last_used
        return score_at(table[notes.reuse_class], self._now - notes.used_at), run.last_used

    def coldest(self, tier: Tier) -> Generator[Run]:
        leaves = self._leaves[tier]
        if self._is_lru:
            yield from leaves.by_last_use()
        else:
            yield from sorted(leaves.some(_NUM_COLDEST), key=self._score)

    def is_colder(self, run: Run, than: Run) -> bool:
        return self._score(run) < self._score(than)

    def alike(self, upper: Run, lower: Run) -> bool:
        a, b = upper.notes, lower.notes
        are_shared = a.sample is not None and b.sample is not None and upper.is_shared and lower.is_shared
        return are_shared and a.reuse_class == b.reuse_class
