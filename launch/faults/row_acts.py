"""What a user of a hybrid model does: it computes by the verbs of rows, and takes snapshots of its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from fastdeploy_cache import Match, PrefixCacheManager, Request
from fastdeploy_cache.errors import LifeCycleError, OutOfBlocksError, PromptTooLongError
from fastdeploy_cache.launch.faults.row_bytes import HeldRows
from fastdeploy_cache.launch.faults.stage import GivenUpError, Home, StoryStage
from fastdeploy_cache.launch.faults.story import BLOCK_SIZE, Act

_THINK_SECONDS = 0.005
T = TypeVar("T")


class RowPrompt(Protocol):
    """A prompt, as far as these acts know one."""

    request: Request
    tokens: list[int]
    space: str
    generation: int
    table: list[int]
    num_computed: int
    rows: HeldRows | None


class RowUser(Protocol):
    """A user, as far as these acts know one."""

    engine: Home
    world: StoryStage
    cache: PrefixCacheManager
    running: list[Any]

    def call(self, verb: str, call: Callable[[], T], limit_seconds: float = 0.0, of: Request | None = None) -> T:
        """Call a verb, which has to come back in time."""
        ...

    def draw_prompt(self, act: Act) -> tuple[Any, float] | None:
        """One that nobody has matched, and how long it waits for what is coming."""
        ...

    def draw_step(self, act: Act) -> tuple[Any, int] | None:
        """Which prompt goes on, and up to which token."""
        ...

    def check_found(self, prompt: Any, num_tokens: int, table: list[int]) -> bool:
        """Bytes, and that somebody has committed them; False where the arrays have been lost meanwhile."""
        ...

    def compare(self, prompt: Any, num_tokens: int, table: list[int]) -> bool:
        """Bytes alone."""
        ...

    def check_new(self, new: list[int], num_blocks: int, but: Any = None) -> None:
        """They are nobody else's."""
        ...

    def note_hits(self, match: Match) -> None:
        """Count what a match has found."""
        ...

    def follow_layers(self, match: Match, patience: float) -> bool:
        """Whether all layers of what is coming have come, on every rank."""
        ...

    def leave(self, prompt: Any) -> None:
        """Its request is over."""
        ...


class RowActs:
    """These stand in place of those acts of a user that compute."""

    def __init__(self, user: RowUser) -> None:
        self._user, self._cache, self._engine = user, user.cache, user.engine
        self.acts: Mapping[str, Callable[[Act], None]] = {"admit": self._admit, "advance": self._advance}

    def _admit(self, act: Act) -> None:
        """See `StoryUser.admit`."""
        user = self._user
        drawn = user.draw_prompt(act)
        if drawn is None:
            return
        prompt, patience = drawn
        prompt.rows = HeldRows()
        try:
            match = user.call("match", lambda: self._cache.match(prompt.request), of=prompt.request)
        except PromptTooLongError:
            if self._cache.blocks_for(len(prompt.tokens)) <= self._engine.settings.num_gpu_blocks:
                raise
            return
        user.running.append(prompt)
        if act.third % 5 == 4 and self._engine.kv and not self._engine.settings.state_copy:
            self._run_ahead(prompt, prompt.rows, match, patience)
        else:
            self._take(prompt, prompt.rows, match, patience)
        if prompt.table and prompt in user.running and act.second % 4:
            self._compute(prompt, prompt.rows, len(prompt.tokens))

    def _see(self, prompt: RowPrompt, rows: HeldRows, match: Match) -> None:
        """What a match shows of rows."""
        rows.take(match.tables)
        rows.read_slot, rows.stops = rows.slot, match.checkpoint_tokens
        if not self._engine.settings.state_copy:  # it is read, and never written
            rows.slot = None
        self._engine.seen["hits of rows"] += bool(match.num_tokens)
        self._user.note_hits(match)
        prompt.num_computed = 0

    def _take(self, prompt: RowPrompt, rows: HeldRows, match: Match, patience: float) -> None:
        user = self._user
        if patience:
            match = user.call("wait", lambda: match.wait(patience), patience)
        else:
            match = user.call("poll", match.poll)
            user.world.host.sleep(_THINK_SECONDS * user.world.host.chance.random())
        self._see(prompt, rows, match)
        is_void = prompt.generation < self._cache._books.tree.generations.last_gpu_loss
        if is_void or not user.check_found(prompt, match.num_tokens, match.block_ids):
            return
        if self._allocate(prompt, rows, self._cache.blocks_for(len(prompt.tokens)), match.block_ids):
            prompt.num_computed = match.num_tokens

    def _run_ahead(self, prompt: RowPrompt, rows: HeldRows, match: Match, patience: float) -> None:
        """Take a slot and units at once, and read what is coming when each rank has seen its last layer."""
        user, num_found = self._user, len(match.block_ids) + len(match.coming_block_ids)
        num_blocks = self._cache.blocks_for(len(prompt.tokens))
        allocate = partial(self._cache.rows.allocate, prompt.request, num_blocks - num_found, ahead_of_loads=True)
        try:
            new = user.call("allocate", allocate, of=prompt.request)
        except (OutOfBlocksError, LifeCycleError, GivenUpError):
            user.leave(prompt)
            return
        match = user.call("poll", match.poll)
        self._see(prompt, rows, match)
        rows.slot = None
        rows.take(new.tables)
        known = [*match.block_ids, *match.coming_block_ids, *new.block_ids]
        num_tokens = match.num_tokens + match.num_coming_tokens
        prompt.table = known
        arrived = user.follow_layers(match, patience) and user.compare(prompt, num_tokens, known)
        if not user.call("confirm", lambda: self._cache.confirm(prompt.request, 5.0, arrived=arrived), 5.0):
            user.leave(prompt)
        elif self._allocate(prompt, rows, num_blocks, known):
            prompt.num_computed = num_tokens
            self._engine.seen["ran ahead"] += bool(match.load_ids)

    def _allocate(self, prompt: RowPrompt, rows: HeldRows, num_blocks: int, table: list[int]) -> bool:
        """Take as many more as are missing of so many; without room the prompt goes."""
        user, num_new = self._user, max(0, num_blocks - len(table))
        try:
            new = user.call("allocate", lambda: self._cache.rows.allocate(prompt.request, num_new), of=prompt.request)
        except (OutOfBlocksError, LifeCycleError, GivenUpError):
            user.leave(prompt)
            return False
        user.check_new(new.block_ids, num_new, prompt)
        self._check_new(prompt, [set(table.block_ids) for table in new.tables])
        rows.take(new.tables)
        prompt.table = [*table, *new.block_ids]
        return True

    def _check_new(self, prompt: RowPrompt, new: list[set[int]]) -> None:
        """They are nobody's else."""
        loss = self._cache._books.tree.generations.last_gpu_loss
        for each in [each for user in self._engine.users for each in user.running if each is not prompt]:
            if each.rows is not None and each.generation >= loss:
                for number, (taken, given) in enumerate(zip(each.rows.all_ids(), new, strict=True)):
                    if taken & given:
                        text = f"row {number}: {sorted(taken & given)}"
                        self._user.world.find("a unit of two requests", f"engine {self._engine.number}, {text}")

    def _advance(self, act: Act) -> None:
        """See `StoryUser.advance`."""
        drawn = self._user.draw_step(act)
        if drawn is None:
            return
        prompt, end = drawn
        if self._allocate(prompt, prompt.rows, self._cache.blocks_for(end), prompt.table):
            self._compute(prompt, prompt.rows, end)

    def _compute(self, prompt: RowPrompt, rows: HeldRows, end: int) -> None:
        """Piece by piece: each ends where the match has said that a checkpoint would pay, or a block of output ends."""
        num_prompt = prompt.request.num_prompt_tokens
        ends = {stop for stop in rows.stops if prompt.num_computed < stop < end} | {end}
        ends.update(range(-(-max(num_prompt, prompt.num_computed + 1) // BLOCK_SIZE) * BLOCK_SIZE, end, BLOCK_SIZE))
        for stop in sorted(ends):
            if prompt in self._user.running:
                with self._engine.stepping:
                    self._step(prompt, rows, stop)

    def _step(self, prompt: RowPrompt, rows: HeldRows, end: int) -> None:
        engine, request, user = self._engine, prompt.request, self._user
        if rows.slot is None:
            user.world.find("no slot", f"engine {engine.number}, {request.request_id}: none to write {end} tokens to")
            return
        tokens = prompt.tokens[:end]
        for rank, (kv, row_kv) in enumerate(zip(engine.kv, engine.row_kv, strict=True)):
            content = engine.content.rows(prompt.space, rank, tokens)
            state = engine.content.rows(f"{prompt.space}|state", rank, tokens)
            for _ in kv.write(content, prompt.table, prompt.num_computed):
                pass
            row_kv.write(content, state, prompt.num_computed, rows.units, rows.slot)
        rows.read_slot = slot = rows.slot
        if not end % BLOCK_SIZE and (end in rows.stops or end > request.num_prompt_tokens):
            self._snapshot(prompt, rows, end, slot)
        for num_blocks in range(1, end // BLOCK_SIZE + 1):  # before the call, as another thread may find them
            engine.committed.add((prompt.space, tuple(prompt.tokens[: num_blocks * BLOCK_SIZE])))
        rows.forget(end)  # likewise: others may get what it gives back
        # It is not given up for want of memory: the state in front of this step is gone.
        user.call("commit rows", lambda: self._cache.commit(request, end), of=request)
        prompt.num_computed = end

    def _snapshot(self, prompt: RowPrompt, rows: HeldRows, end: int, slot: int) -> None:
        """There may be no slot for it; and another user may have put the cache to sleep."""
        snapshot = partial(self._cache.rows.snapshot, prompt.request, end, [slot])
        try:
            fresh = self._user.call("snapshot", snapshot)
        except LifeCycleError:
            return
        if fresh is not None:
            self._check_new(prompt, [set(fresh), set()])
            (rows.slot,) = fresh
            self._engine.seen["snapshots"] += 1
