"""A user of an engine: admits prompts, computes them, lets them go, and compares each block before it uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from fastdeploy_cache import Match, PrefixCacheManager, Request
from fastdeploy_cache.errors import ClosedError, CommitError, LifeCycleError, OutOfBlocksError, PromptTooLongError
from fastdeploy_cache.launch.faults.agent import Agent
from fastdeploy_cache.launch.faults.caller_acts import CallerActs
from fastdeploy_cache.launch.faults.hand_over_acts import HandOverActs
from fastdeploy_cache.launch.faults.kept import kept_of
from fastdeploy_cache.launch.faults.row_acts import RowActs
from fastdeploy_cache.launch.faults.row_bytes import HeldRows
from fastdeploy_cache.launch.faults.stage import GivenUpError, Home
from fastdeploy_cache.launch.faults.story import BLOCK_SIZE, LONGEST, MAX_RUNNING, NUM_TEXTS, Act
from fastdeploy_cache.launch.faults.whole_acts import WholeActs

if TYPE_CHECKING:
    from fastdeploy_cache.peers.transfers import Send

# prompts are cut from a few texts that part at different places
TEXTS: Final = tuple(tuple((7 * i * i + text * (i // 9)) % 97 for i in range(LONGEST)) for text in range(NUM_TEXTS))
_PATIENCE = ((0.0, 0.05, 5.0), (0.0, 0.05, 1.0))  # tasks end sooner than after 5 s
_MOST_TOKENS = 16  # of a step
_TELL_SECONDS = 60.0  # from the call back about new arrays to its end: its thread may be held up, for 40 s
_THINK_SECONDS = 0.005  # of an engine, between two calls
_GIVEN_UP_SHARE = 0.3
# Whoever holds something for the others has to call them again.
_MAY_BE_GIVEN_UP: Final = frozenset(
    ["match", "prefetch", "allocate", "commit", "offer", "receive", "own allocate", "insert", "swap_in", "swap_out"]
)
T = TypeVar("T")


class Prompt:
    """A request as its user sees it."""

    def __init__(self, request: Request, tokens: list[int], namespace: str, space: str, generation: int) -> None:
        self.request, self.tokens, self.namespace, self.space = request, tokens, namespace, space
        self.generation = generation  # of the cache: what was lost since, its blocks have lost
        self.table: list[int] = []
        self.num_computed = 0
        self.send: Send | None = None
        self.rows: HeldRows | None = None  # of a hybrid model


class StoryUser:
    """One thread of the engine. Its requests are its own; blocks are everybody's."""

    def __init__(self, engine: Home, number: int, cache: PrefixCacheManager) -> None:
        self.engine, self.number, self.cache = engine, number, cache
        self.world = engine.world
        self.running: list[Prompt] = []
        self.own: set[int] = set()  # blocks that are no request's
        self.verb = "idle"
        self._num_asked = 0
        self._agent = Agent(self, TEXTS) if engine.settings.agents else None
        self._acts: Mapping[str, Callable[[Act], None]] = {
            "admit": self.admit, "advance": self.advance, "look": self._commit_too_much, "end": self.end,
            "drop": self._drop, **WholeActs(self).acts, **CallerActs(self).acts, **HandOverActs(self).acts,
            **(RowActs(self).acts if engine.settings.has_rows else {}),
        }  # fmt: skip

    # -- the thread

    def run(self, acts: Sequence[Act]) -> None:
        """Go on where an earlier life has come to."""
        engine = self.engine
        while engine.positions[self.number] < len(acts) and not self.world.findings:
            act = acts[engine.positions[self.number]]
            engine.positions[self.number] += 1
            try:
                self._drop_what_is_void()
                self._acts[act.verb](act)
                if self._agent is not None:
                    self._agent.speak(act)
            except ClosedError:  # another user has closed it, or this one
                return
            except GivenUpError:
                engine.seen["given up for want of memory"] += 1
            except Exception as error:  # whatever it is, it is a finding
                self.world.find(f"unexpected {type(error).__name__}", f"engine {engine.number}, {act}: {error}", error)
            self.verb = "idle"
        if not self.world.findings and not self.cache._books.is_closed:
            self.leave_all()

    def leave_all(self) -> None:
        """Let everything go."""
        while self.running:
            self.leave(self.running[-1])
        if self._agent is not None:
            self._agent.let_go()

    def call(self, verb: str, call: Callable[[], T], limit_seconds: float = 0.0, of: Request | None = None) -> T:
        """Call a verb, which has to come back in time; one that is refused leaves the request that it is `of` as it
        was. Where it got no memory it is called again until it gets some, or is given up, by `GivenUpError`."""
        self.verb, host = verb, self.world.host
        while True:
            before = kept_of(self.cache, of) if of is not None else None
            try:
                with self.world.verb(self.engine.number, verb, limit_seconds), host.failing():
                    return call()
            except (MemoryError, OutOfBlocksError, CommitError, PromptTooLongError) as error:
                if of is not None and before is not None and kept_of(self.cache, of).is_touched(before):
                    who = f"engine {self.engine.number}, {of.request_id}"
                    self.world.find("a refused verb has left a trace", f"{who}: {verb}: {error!r}", error)
                if not isinstance(error, MemoryError) or not host.is_planted(error):
                    raise
            self.engine.seen["refused for want of memory"] += 1
            if verb in _MAY_BE_GIVEN_UP and host.chance.random() < _GIVEN_UP_SHARE:
                raise GivenUpError(verb)
            host.sleep(_THINK_SECONDS)

    # -- void requests

    @property
    def _last_loss(self) -> int:
        return self.cache._books.tree.generations.last_gpu_loss

    def _drop_what_is_void(self) -> None:
        for prompt in list(self.running):
            if self._last_loss > prompt.generation:
                self.engine.seen["void"] += 1
                self.leave(prompt)

    # -- bytes

    def compare(self, prompt: Prompt, num_tokens: int, table: list[int]) -> bool:
        """On every rank, to the byte; False where the arrays have been lost meanwhile."""
        engine = self.engine
        if len(table) * BLOCK_SIZE < num_tokens:
            self.world.find("short table", f"{len(table)} blocks for {num_tokens} tokens")
            return False
        for rank, kv in enumerate(self.engine.kv if num_tokens else ()):
            tokens = prompt.tokens[:num_tokens]
            wrong: list[object] = [*kv.wrong(engine.content.rows(prompt.space, rank, tokens), table)]
            if prompt.rows is not None:
                row_kv = engine.row_kv[rank]
                wrong += prompt.rows.wrong(row_kv, engine.content, prompt.space, rank, tokens)
            deadline = self.world.host.now() + _TELL_SECONDS
            while wrong and engine.is_being_told(rank) and self.world.host.now() < deadline:
                if self.cache._books.is_closed:  # it will not be told any more
                    return False
                self.world.host.sleep(0.05)  # it is void as soon as the cache knows
            if self._last_loss > prompt.generation:
                return False
            if wrong:
                text = f"engine {engine.number}, rank {rank}, {prompt.request.request_id}: tokens {wrong} of "
                self.world.find("wrong bytes", f"{text}{num_tokens}, table {table}")
                return False
            engine.seen["blocks compared"] += -(-num_tokens // BLOCK_SIZE)
        return True

    def check_found(self, prompt: Prompt, num_tokens: int, table: list[int]) -> bool:
        """Bytes, and that somebody has committed them; False where the arrays have been lost meanwhile."""
        engine = self.engine
        if num_tokens and not self.compare(prompt, num_tokens, table):
            return False
        prefix = tuple(prompt.tokens[: -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE])
        is_old = prompt.generation < self.cache._books.tree.generations.last_reset
        if prefix and not engine.committed.may_find((prompt.space, prefix), is_old=is_old):
            self.world.find("hit on what nobody committed", f"engine {engine.number}, {prompt.request.request_id}")
            return False
        return True

    # -- acts

    def admit(self, act: Act) -> None:
        """Match a prompt, and compute it. `first`: the text, `second`: how much of it, `third`: in which way."""
        drawn = self.draw_prompt(act)
        if drawn is None:
            return
        prompt, patience = drawn
        self.match(prompt, patience, ahead=act.third % 5 == 4)
        is_whole = act.second % 4  # most are computed at once, the others bit by bit
        if prompt.table and prompt in self.running and is_whole:
            self._compute(prompt, len(prompt.tokens))

    def draw_prompt(self, act: Act) -> tuple[Prompt, float] | None:
        """One that nobody has matched, and how long it waits for what is coming; None where one ends instead."""
        if len(self.running) >= MAX_RUNNING:
            self.end(act)
            return None
        self.engine.seen["requests"] += 1
        prompt, patience = self.prompt_of(act), _PATIENCE[act.third // 12 % 2][act.third % 3]
        if self.engine.settings.has_store and act.third % 4:
            fetch = self.call("prefetch", lambda: self.cache.prefetch(prompt.request))
            longer = max(patience, 0.05)  # storage is worth a wait
            self.call("prefetch wait", lambda: fetch.wait(longer), longer)
        return prompt, patience

    def prompt_of(self, act: Act) -> Prompt:
        """See `admit`."""
        text = TEXTS[act.first % NUM_TEXTS][: LONGEST - act.second % LONGEST // 2]
        return self.new_prompt([*text, *[act.third % 3] * (act.first % 2)], "tenant" if act.third % 8 == 7 else "")

    def _drop(self, act: Act) -> None:
        """A request whose client goes away at once: what is coming for it alone need not come."""
        prompt = self.new_prompt(list(TEXTS[act.first % NUM_TEXTS]), "")
        self.call("match", lambda: self.cache.match(prompt.request), of=prompt.request)
        self.call("release", lambda: self.cache.release(prompt.request), of=prompt.request)

    def new_prompt(self, tokens: list[int], namespace: str) -> Prompt:
        engine = self.engine
        self._num_asked += 1
        name = f"e{engine.number}u{self.number}n{engine.num_lives}r{self._num_asked}"
        request = Request(request_id=name, prompt_token_ids=tokens, namespace=namespace)
        if self._agent is not None:
            self._agent.name(request, self._num_asked)
        space = f"{engine.weights_id}|{namespace}"
        return Prompt(request, tokens, namespace, space, self.cache.blocks.generation)

    def match(self, prompt: Prompt, patience: float, *, ahead: bool) -> None:
        """It runs, if there is room for it."""
        try:
            match = self.call("match", lambda: self.cache.match(prompt.request), of=prompt.request)
        except PromptTooLongError:
            if self.cache.blocks_for(len(prompt.tokens)) <= self.engine.settings.num_gpu_blocks:
                raise
            return
        self.running.append(prompt)
        if ahead and self.engine.kv and not self.engine.settings.recompute_last_token:
            self._run_ahead(prompt, match, patience)
        else:
            self._take(prompt, match, patience)

    def _take(self, prompt: Prompt, match: Match, patience: float) -> None:
        if patience:
            match = self.call("wait", lambda: match.wait(patience), patience)
        else:  # as an engine that takes what is there: what comes between this look and `allocate` is not its
            match = self.call("poll", match.poll)
            self.world.host.sleep(_THINK_SECONDS * self.world.host.chance.random())
        self.note_hits(match)
        if not self.check_found(prompt, match.num_tokens, match.block_ids):
            return
        if match.num_tokens >= len(prompt.tokens):
            self.world.find("nothing left to compute", f"engine {self.engine.number}, {prompt.request.request_id}")
            return
        new = self._allocate(prompt, self.cache.blocks_for(len(prompt.tokens)) - len(match.block_ids))
        if new is None:
            self.leave(prompt)
            return
        prompt.table, prompt.num_computed = [*match.block_ids, *new], match.num_tokens

    def _run_ahead(self, prompt: Prompt, match: Match, patience: float) -> None:
        """Take blocks behind those that are coming, and read these once each worker has seen the last layer."""
        num_blocks = self.cache.blocks_for(len(prompt.tokens))
        num_found = len(match.block_ids) + len(match.coming_block_ids)
        new = self._allocate(prompt, num_blocks - num_found, ahead=True)
        if new is None:
            self.leave(prompt)
            return
        match = self.call("poll", match.poll)
        self.note_hits(match)
        prompt.table = [*match.block_ids, *match.coming_block_ids, *new]
        more = self._allocate(prompt, num_blocks - len(prompt.table), ahead=True)
        if more is None:
            self.leave(prompt)
            return
        prompt.table += more
        num_tokens = match.num_tokens + match.num_coming_tokens
        arrived = self.follow_layers(match, patience) and self.compare(prompt, num_tokens, prompt.table)
        if self.call("confirm", lambda: self.cache.confirm(prompt.request, 5.0, arrived=arrived), 5.0):
            prompt.num_computed = num_tokens
            self.engine.seen["ran ahead"] += bool(match.load_ids)
        else:
            self.leave(prompt)

    def follow_layers(self, match: Match, patience: float) -> bool:
        """Whether all layers of what is coming have come, on every rank."""
        for rank in range(len(self.engine.kv)):
            progress = self.cache.ranks.layer_progress(rank)
            assert progress is not None
            for layer in range(2):
                wait = partial(progress.wait_layer, match.load_ids, layer, patience)
                if not self.call("wait_layer", wait, patience):
                    return False
        return True

    def note_hits(self, match: Match) -> None:
        """Count what a match has found."""
        seen = self.engine.seen
        seen["GPU tokens"] += match.num_gpu_tokens
        seen["CPU tokens"] += match.num_cpu_tokens
        seen["storage tokens"] += match.num_storage_tokens

    def _allocate(self, prompt: Prompt, num_blocks: int, *, ahead: bool = False) -> list[int] | None:
        """None: there is no room, or no GPU."""
        num_blocks = max(0, num_blocks)
        allocate = partial(self.cache.allocate, prompt.request, num_blocks, ahead_of_loads=ahead)
        try:
            new = self.call("allocate", allocate, of=prompt.request)
        except (OutOfBlocksError, LifeCycleError, GivenUpError):
            return None
        self.check_new(new, num_blocks, prompt)
        return new

    def check_new(self, new: list[int], num_blocks: int, but: Prompt | None = None) -> None:
        """They are no other request's, and nobody's own."""
        taken, loss = set(new), self._last_loss
        others = [each for user in self.engine.users for each in user.running if each is not but]
        shared = [each for each in others if each.generation >= loss and not taken.isdisjoint(each.table)]
        is_own = any(not taken.isdisjoint(user.own) for user in self.engine.users)
        if len(taken) != num_blocks or shared or is_own:
            self.world.find("a block of two requests", f"engine {self.engine.number}: {new}")

    def advance(self, act: Act) -> None:
        """Compute some more. `first`: which of those that run, `second`: how many tokens more."""
        drawn = self.draw_step(act)
        if drawn is None:
            return
        prompt, end = drawn
        new = self._allocate(prompt, self.cache.blocks_for(end) - len(prompt.table))
        if new is None:
            self.leave(prompt)
            return
        prompt.table += new
        self._compute(prompt, end)

    def draw_step(self, act: Act) -> tuple[Prompt, int] | None:
        """Which prompt goes on, and up to which token; one that is computed whole gets a token of output.

        None: none runs, or its arrays have been lost meanwhile.
        """
        if not self.running:
            return None
        prompt = self.running[act.first % len(self.running)]
        if not self.compare(prompt, prompt.num_computed, prompt.table):
            return None
        missing = len(prompt.tokens) - prompt.num_computed
        if not missing:
            token, missing = act.third % 3, 1
            prompt.tokens.append(token)
            prompt.request.append_output([token])
        return prompt, prompt.num_computed + min(missing, 1 + act.second % _MOST_TOKENS)

    def _compute(self, prompt: Prompt, end: int) -> None:
        with self.engine.stepping:
            self._step(prompt, end)

    def _step(self, prompt: Prompt, end: int) -> None:
        engine, request, step = self.engine, prompt.request, 0
        if prompt.send is not None:
            step = engine.num_steps = engine.num_steps + 1
            self.call("begin_step", lambda: self.cache.peers.begin_step(request, end, step))
        for rank, kv in enumerate(self.engine.kv):
            rows = engine.content.rows(prompt.space, rank, prompt.tokens[:end])
            for num_layers in kv.write(rows, prompt.table, prompt.num_computed):
                if step:
                    self.cache.peers.step_progress(rank).mark(step, num_layers)
        # before the call: another thread may find them before this one hears that they are committed
        for num_blocks in range(1, end // BLOCK_SIZE + 1):
            engine.committed.add((prompt.space, tuple(prompt.tokens[: num_blocks * BLOCK_SIZE])))
        self.call("commit", lambda: self.cache.commit(request, end), of=request)
        prompt.num_computed = end

    def _commit_too_much(self, act: Act) -> None:
        """It is refused, and leaves no trace."""
        if not self.running:
            return
        prompt = self.running[act.first % len(self.running)]
        too_many = len(prompt.tokens) + len(prompt.table) * BLOCK_SIZE + 1
        try:
            self.call("commit", lambda: self.cache.commit(prompt.request, too_many), of=prompt.request)
        except CommitError:
            return
        self.world.find("not refused", f"a commit of {too_many} tokens")

    def end(self, act: Act) -> None:
        """A prompt is over. `first`: which of those that run."""
        if self.running:
            self.leave(self.running[act.first % len(self.running)])

    def leave(self, prompt: Prompt) -> None:
        """Its request is over."""
        self.running.remove(prompt)
        self.call("release", lambda: self.cache.release(prompt.request), of=prompt.request)
        self.engine.look_at_free_blocks()
