"""What a user does with blocks of its own, as callers do that keep their requests themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.run import CPU, GPU
from fastdeploy_cache.errors import LifeCycleError, OutOfBlocksError, RequestError
from fastdeploy_cache.launch.faults.stage import GivenUpError, Home, StoryStage
from fastdeploy_cache.launch.faults.story import BLOCK_SIZE, Act

_PATIENCE = (0.0, 0.05, 5.0)
_HOLD_SECONDS = 0.0005
_MOST_EVICTED = 4
_FORGOTTEN = 3  # one copy out of so many

T = TypeVar("T")


class Asker(Protocol):
    """A prompt, as far as these acts know one."""

    request: Request
    tokens: list[int]
    space: str


class BlockUser(Protocol):
    """A user, as far as these acts know one."""

    engine: Home
    world: StoryStage
    cache: PrefixCacheManager
    own: set[int]

    def call(self, verb: str, call: Callable[[], T], limit_seconds: float = 0.0) -> T:
        """Call a verb, which has to come back in time."""
        ...

    def prompt_of(self, act: Act) -> Any:
        """One that nobody has matched."""
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


class CallerActs:
    """What one user may do so. Each act gives back what it takes."""

    def __init__(self, user: BlockUser) -> None:
        self._user, self._blocks = user, user.cache.blocks
        self.acts: Mapping[str, Callable[[Act], None]] = {
            "find": self._find, "insert": self._insert, "load": self._load, "swap_in": self._swap_in,
            "swap_out": self._swap_out, "copy": self._copy, "evict": self._evict,
        }  # fmt: skip

    # -- blocks

    def _take(self, num_blocks: int) -> list[int]:
        """None of them where there is no room, or no GPU."""
        try:
            new = self._user.call("own allocate", lambda: self._blocks.allocate(num_blocks))
        except (OutOfBlocksError, LifeCycleError):
            return []
        self._user.check_new(new, num_blocks)
        self._user.own.update(new)
        return new

    def _give(self, ids: Sequence[int]) -> None:
        if ids:
            self._user.own.difference_update(ids)  # before the call: another one may take them before it comes back
            self._user.call("own free", lambda: self._blocks.free(ids))

    def _fill(self, prompt: Asker, first_block: int, ids: list[int]) -> None:
        """A step of the model, into blocks of its own."""
        engine, size = self._user.engine, BLOCK_SIZE
        end = first_block + len(ids)
        with engine.stepping:
            for rank, kv in enumerate(engine.kv):
                rows = engine.content.rows(prompt.space, rank, prompt.tokens[: end * size])
                for _ in kv.write(rows, [0] * first_block + ids, first_block * size):
                    pass

    def _publish(self, prompt: Asker) -> None:
        """Others may find it from here on: before the call, as another thread may be the first to."""
        for num_blocks in range(1, len(prompt.tokens) // BLOCK_SIZE + 1):
            self._user.engine.committed.add((prompt.space, tuple(prompt.tokens[: num_blocks * BLOCK_SIZE])))

    def _begin(self, ids: list[int], verb: str, call: Callable[[], T]) -> T:
        """A verb for which they were taken: where it is given up they are given back."""
        try:
            return self._user.call(verb, call)
        except GivenUpError:
            self._give(ids)
            raise

    def _note(self, what: str, num_blocks: int) -> None:
        self._user.engine.seen[f"callers' blocks: {what}"] += num_blocks

    # -- acts

    def _find(self, act: Act) -> None:
        """What is pinned stays as it is until it is let go."""
        user, prompt = self._user, self._user.prompt_of(act)
        user.call("lookup", lambda: self._blocks.lookup(prompt.request, split=bool(act.second % 2)))
        pinned = user.call("pin", lambda: self._blocks.pin(prompt.request))
        for _ in range(2):
            user.check_found(prompt, len(pinned.block_ids) * BLOCK_SIZE, pinned.block_ids)
            user.world.host.sleep(_HOLD_SECONDS * act.third)
        user.call("unpin", lambda: self._blocks.unpin(pinned))

    def _insert(self, act: Act) -> None:
        """Compute what is not on the GPU, or more, and have it cached."""
        user, prompt = self._user, self._user.prompt_of(act)
        found = user.call("lookup", lambda: self._blocks.lookup(prompt.request, touch=False))
        first = act.second % (len(found.block_ids) + 1)
        generation = self._blocks.generation
        ids = self._take(len(prompt.tokens) // BLOCK_SIZE - first)
        if not ids:
            return
        self._fill(prompt, first, ids)
        self._publish(prompt)

        def insert() -> Any:
            return self._blocks.insert(
                prompt.request, ids, first_block=first, pin=bool(act.third % 2), generation=generation
            )

        user.own.difference_update(ids)
        try:
            done = user.call("insert", insert)
        except (RequestError, GivenUpError):  # what was before it has been evicted meanwhile; no memory
            self._give(ids)
            return
        self._note("inserted", len(ids) - len(done.duplicate_ids))
        self._give(done.duplicate_ids)
        pinned = done.pinned
        if pinned is not None:
            user.check_found(prompt, len(pinned.block_ids) * BLOCK_SIZE, pinned.block_ids)
            user.call("unpin", lambda: self._blocks.unpin(pinned))

    def _load(self, act: Act) -> None:
        """Bring it to the GPU, and hold it there; in some cases its blocks are held before they have come."""
        user, prompt = self._user, self._user.prompt_of(act)
        copies, patience, generation = self._blocks.copies, _PATIENCE[act.third % 3], self._blocks.generation
        pinned = user.call("pin", lambda: self._blocks.pin(prompt.request))
        num_failed = user.cache.stats().num_failed_steps.get("landing", 0)
        load = user.call("load", lambda: copies.load(prompt.request, pinned.num_blocks, ahead=bool(act.second % 2)))
        if load is not None:
            if act.second % 2:
                user.call("end_load", lambda: copies.end_load(load, patience), patience)
            else:
                user.call("load wait", lambda: load.wait(patience), patience)
            came = load.succeeded and self._blocks.generation == generation
            found = user.call("lookup", lambda: self._blocks.lookup(prompt.request, touch=False))
            held = found.block_ids[: pinned.num_blocks]
            is_there = (
                len(held) == pinned.num_blocks or user.cache.stats().num_failed_steps.get("landing", 0) > num_failed
            )
            if came and not is_there and self._blocks.generation == generation:
                user.world.find("a load that has come is not there", f"{len(held)} of {pinned.num_blocks} blocks")
            self._note("loaded", load.num_blocks * came)
            user.check_found(prompt, len(held) * BLOCK_SIZE, held)
        user.call("unpin", lambda: self._blocks.unpin(pinned))

    def _swap_in(self, act: Act) -> None:
        """Fill blocks of its own from the CPU tier."""
        user, prompt, patience = self._user, self._user.prompt_of(act), _PATIENCE[act.third % 3]
        ids = self._take(len(prompt.tokens) // BLOCK_SIZE)
        if not ids:
            return
        copy = self._begin(ids, "swap_in", lambda: self._blocks.copies.swap_in(prompt.request, ids))
        if user.call("swap_in wait", lambda: copy.wait(patience), patience):
            user.check_found(prompt, copy.num_blocks * BLOCK_SIZE, ids)
            self._note("swapped in", copy.num_blocks)
        self._give(ids)

    def _swap_out(self, act: Act) -> None:
        """Compute, and have it cached in the CPU tier; the blocks may be given back while they are read."""
        user, prompt, patience = self._user, self._user.prompt_of(act), _PATIENCE[act.third % 3]
        generation = self._blocks.generation
        ids = self._take(len(prompt.tokens) // BLOCK_SIZE)
        if not ids:
            return
        self._fill(prompt, 0, ids)
        self._publish(prompt)
        swap_out = self._blocks.copies.swap_out
        copy = self._begin(ids, "swap_out", lambda: swap_out(prompt.request, ids, generation=generation))
        if act.third % _FORGOTTEN == 0:  # what comes of it now is of the past
            first_step = user.world.host.num_steps
            user.call("reset", user.cache.reset)
            user.engine.committed.forget(first_step)
        if user.call("swap_out wait", lambda: copy.wait(patience), patience):
            self._note("swapped out", copy.num_blocks)
        self._give(ids)

    def _copy(self, act: Act) -> None:
        """Copy blocks of its own within the GPU."""
        user, prompt, patience = self._user, self._user.prompt_of(act), _PATIENCE[act.third % 3]
        size = len(prompt.tokens) // BLOCK_SIZE // 2
        ids = self._take(2 * size)
        if not ids:
            return
        self._fill(prompt, 0, ids[:size])
        copy = self._blocks.copies.copy
        if user.call("copy", lambda: copy(ids[:size], ids[size:], timeout_seconds=patience), patience):
            user.compare(prompt, size * BLOCK_SIZE, ids[size:])
            self._note("copied", size)
        self._give(ids)

    def _evict(self, act: Act) -> None:
        """Whole runs, whose blocks are its own for a moment; or of one tier."""
        num_blocks = 1 + act.first % _MOST_EVICTED
        if act.second % 3:
            tier = GPU if act.second % 3 == 1 else CPU
            self._user.call("evict", lambda: self._blocks.evict(num_blocks, tier))
        else:
            self._give(self._user.call("evict_runs", lambda: self._blocks.evict_runs(num_blocks)))
