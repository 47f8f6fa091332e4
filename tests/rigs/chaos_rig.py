"""Random stories over real ranks that are killed and stopped, for engines of any habit. Each byte read is compared.

A `Story` chooses what the engine does next. A `Driver` does it, by the calls of one adapter. `KVBytes` is the memory of
all ranks, and knows what each token must have left there. A `Plan` says which fault comes when: it follows from the
seed alone, not from how fast the machine is.
"""

from __future__ import annotations

import hashlib
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.books.run import CPU, GPU
from fastdeploy_cache.errors import LayoutError
from tests.rigs.storage_engine import drained

SECONDS = 30.0
MAX_RUNNING = 3
NUM_STEPS = 300
# Prompts are cut from a few texts that part at different places, and sometimes go their own way.
TEXTS = [[(7 * i * i + text * (i // 9)) % 97 for i in range(60)] for text in range(5)]
LONGEST = 36

Fault = Callable[[int], Iterator[None]]


class WrongBytesError(AssertionError):
    """A block that the cache calls readable does not hold the prefix that it stands for."""


class ArraysLostError(Exception):
    """KV arrays have gone while a request was looked at: it is void, and nothing is wrong."""


@dataclass(eq=False)
class Prompt:
    """A request as the engine sees it. `engine` is what the driver keeps of it."""

    name: str
    tokens: list[int]
    num_output: int
    space: str = ""  # what parts its prefixes from the same tokens of others
    num_computed: int = 0
    table: list[int] = field(default_factory=list)
    engine: Any = None


class KVBytes:
    """The KV arrays of all ranks. What a token leaves there follows from the tokens up to it, its space, the rank."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self.cache, self.size = cache, cache.config.block_size
        layout = cache.config.layout
        assert layout is not None
        self._heads_first = layout.heads_first
        self.num_checked = 0
        self.refresh()

    def refresh(self) -> None:
        """Map the arrays as they are now; none of any rank where one has none."""
        self._generation = self.cache.blocks.generation
        try:
            self.views = [self.cache.ranks.kv_views(rank) for rank in range(self.cache.config.transfer.tp_size)]
        except LayoutError:
            self.views = []

    @property
    def are_lost(self) -> bool:
        """Whether arrays have come or gone since the last `refresh`: all that is on the GPU is void."""
        return self.cache._books.tree.generations.last_gpu_loss > self._generation

    def write(self, prompt: Prompt, end: int) -> None:
        """The model computes up to a token."""
        positions = range(prompt.num_computed, end)
        for rank in range(len(self.views)):
            rows = _rows(prompt, rank, end, self._row_bytes(rank))[prompt.num_computed :]
            start = 0
            for pieces, at in self._pieces(rank, prompt.table, positions):
                num_bytes = pieces[at][0].nbytes if positions else 0
                piece = np.ascontiguousarray(rows[:, start : start + num_bytes]).view(pieces.dtype)
                pieces[at] = piece.reshape(pieces[at].shape)
                start += num_bytes

    def check(self, prompt: Prompt, end: int, table: Sequence[int] | None = None) -> None:
        """The first tokens of a prompt lie in a block table on every rank, to the byte."""
        table = prompt.table if table is None else table
        assert len(table) * self.size >= end, f"{len(table)} blocks for {end} tokens"
        for rank in range(len(self.views) if end else 0):
            found = [pieces[at].reshape(end, -1).view(np.uint8) for pieces, at in self._pieces(rank, table, range(end))]
            wanted = _rows(prompt, rank, end, self._row_bytes(rank))
            wrong = np.flatnonzero((np.concatenate(found, axis=1) != wanted).any(axis=1))
            if wrong.size and self.are_lost:
                raise ArraysLostError
            if wrong.size:
                blocks = sorted({table[i // self.size] for i in wrong.tolist()})
                raise WrongBytesError(
                    f"wrong bytes on rank {rank} for {prompt.name}: tokens {wrong.tolist()}, blocks {blocks}"
                )
            self.num_checked += end

    def _row_bytes(self, rank: int) -> int:
        return sum(array[0].nbytes // self.size for parts in self.views[rank] for array in parts.values())

    def _pieces(self, rank: int, table: Sequence[int], positions: range) -> Iterator[tuple[np.ndarray, Any]]:
        """Each array of a rank, and what picks these tokens out of it."""
        blocks = np.array([table[i // self.size] for i in positions], np.intp)
        offsets = np.array([i % self.size for i in positions], np.intp)
        at = (blocks, slice(None), offsets) if self._heads_first else (blocks, offsets)
        for parts in self.views[rank]:
            for array in parts.values():
                yield array, at


def _rows(prompt: Prompt, rank: int, end: int, row_bytes: int) -> np.ndarray:
    """What each of the first tokens leaves on a rank: uint8 [tokens, bytes]."""
    chain, rows = hashlib.sha256(f"{prompt.space}|{rank}|".encode()), bytearray()
    for token in prompt.tokens[:end]:
        chain.update(token.to_bytes(4, "little"))
        rows += hashlib.shake_128(chain.digest()).digest(row_bytes)
    return np.frombuffer(bytes(rows), np.uint8).reshape(end, row_bytes)


class Driver(ABC):
    """An engine of some habit over a cache. What is refused is not held any more, and nothing else has changed."""

    num_kept_blocks = 0  # blocks of the GPU that it has taken for good

    def __init__(self, cache: PrefixCacheManager) -> None:
        self.cache, self.kv = cache, KVBytes(cache)
        self.patience = SECONDS  # seconds for which it waits for loads, where its engine can say so

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-num_tokens // self.kv.size)

    @abstractmethod
    def admit(self, prompt: Prompt) -> bool:
        """Look it up and take room for all of its tokens: its table, and how much need not be computed, which is
        compared after this. False: no room now."""

    @abstractmethod
    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        """Compute its next tokens and publish them; False: no room for them."""

    @abstractmethod
    def end(self, prompt: Prompt) -> None:
        """It is finished, preempted, or void: it holds nothing any more."""

    def rest(self) -> None:  # noqa: B027 (most have nothing to do)
        """No copy is under way: take in what has ended since."""

    def reset(self) -> None:
        """Forget every prefix."""
        self.cache.reset()


class Plan:
    """Which fault begins at which step, on which rank, and how many steps later each of its parts follows."""

    def __init__(self, seed: int, faults: Mapping[str, Fault], num_ranks: int, num_steps: int) -> None:
        self._choose, self._faults = random.Random(f"faults of {seed}"), faults
        self._starts: dict[int, tuple[str, int]] = {}
        deck, step = list[str](), self._choose.randint(8, 16)
        while step < num_steps - 20:
            deck = deck or self._choose.sample(sorted(faults), len(faults))
            self._starts[step] = deck.pop(), self._choose.randrange(num_ranks)
            step += self._choose.randint(8, 24)
        self._gaps = [self._choose.randint(1, 10) for _ in range(num_steps)]
        self._going: list[tuple[int, Iterator[None]]] = []

    def follow(self, step: int) -> str:
        """Do what is due; returns the fault that begins."""
        due = [going for at, going in self._going if at <= step]
        self._going = [(at, going) for at, going in self._going if at > step]
        name, rank = self._starts.get(step, ("", 0))
        if name:
            due.append(self._faults[name](rank))
        for going in due:
            for _ in going:
                self._going.append((step + self._gaps[step], going))
                break
        return f"{name} {rank}" if name else ""

    def end(self) -> None:
        """Make good what is still under way."""
        while self._going:
            for _ in self._going.pop(0)[1]:
                pass


class Story:
    """A random schedule: branching prompts, chunks, answers, preemption; faults between its steps."""

    def __init__(self, driver: Driver, seed: int, faults: Mapping[str, Fault], *, num_steps: int = NUM_STEPS) -> None:
        self.driver, self.choose, self._num_steps = driver, random.Random(seed), num_steps
        self.plan = Plan(seed, {**faults, "reset": self._reset}, driver.cache.config.transfer.tp_size, num_steps)
        self.running: list[Prompt] = []
        self.waiting: list[Prompt] = []
        self.seen: Counter[str] = Counter()
        self._log: list[str] = []
        self._seed = seed

    def run(self) -> None:
        """The whole story, and a look at all that is left in the end."""
        try:
            for step in range(self._num_steps):
                if begun := self.plan.follow(step):
                    self._note(f"{step}: {begun}")
                    self.seen["fault"] += 1
                self.step(step)
            self.plan.end()
            self._come_to_rest()
            self._read_everything()
        except BaseException as error:
            error.add_note(f"seed {self._seed}, last: {'; '.join(self._log[-25:])}")
            raise

    def go_on(self, is_seen: Callable[[], int]) -> None:
        """Go on without faults until something has been seen: those of a busy machine may have ended every copy."""
        for step in range(self._num_steps, 3 * self._num_steps):
            if is_seen():
                return
            self.step(step)
            if step % 20 == 0:
                assert self.driver.cache.wait_for_transfers(SECONDS)

    def step(self, step: int) -> None:
        """One of the engine's, and a look at the books."""
        self.driver.patience = self.choose.choice([0.0, 0.02, SECONDS])
        self._drop_what_is_void()
        try:
            self._act(step)
        except ArraysLostError:
            self._note(f"{step}: arrays lost")
        self.driver.cache.check_invariants()

    def _act(self, step: int) -> None:
        if len(self.running) < MAX_RUNNING and (not self.running or self.choose.random() < 0.3):
            self._admit(self._next(), step)
            return
        prompt = self.choose.choice(self.running)
        missing = len(prompt.tokens) - prompt.num_computed
        self.driver.kv.check(prompt, prompt.num_computed)
        if not missing and (not prompt.num_output or self.choose.random() < 0.1):
            self._leave(prompt, f"{step}: end")
        elif not missing:
            prompt.tokens.append(self.choose.choice([prompt.tokens[0], self.choose.randint(0, 4)]))
            prompt.num_output -= 1
            self._advance(prompt, 1, step)
        elif self.choose.random() < 0.06:
            self._leave(prompt, f"{step}: preempt")
            self.waiting.append(prompt)
        else:
            self._advance(prompt, min(missing, self.choose.randint(1, 16)), step)

    def _next(self) -> Prompt:
        if self.waiting and self.choose.random() < 0.5:
            return self.waiting.pop(0)
        self.seen["asked"] += 1
        choose = self.choose
        tokens = choose.choice(TEXTS)[: choose.randint(2, LONGEST)] + [choose.randint(0, 3)] * choose.choice([0, 0, 3])
        space = choose.choice(["", "", "", "tenant"])
        return Prompt(f"r{self.seen['asked']}", tokens, choose.randint(0, 8), space)

    def _admit(self, prompt: Prompt, step: int) -> None:
        prompt.num_computed, prompt.table = 0, []
        if self.driver.admit(prompt):
            self.running.append(prompt)
            self.seen["reused"] += prompt.num_computed
            self._note(f"{step}: admit {prompt.name} {prompt.num_computed}/{len(prompt.tokens)}")
            self.driver.kv.check(prompt, prompt.num_computed)
        else:
            self.waiting.append(prompt)
            self._note(f"{step}: refused {prompt.name}")

    def _advance(self, prompt: Prompt, num_tokens: int, step: int) -> None:
        if not self.driver.advance(prompt, num_tokens):
            self._leave(self.running[-1], f"{step}: no room, preempt")  # perhaps itself
            self.seen["no room"] += 1

    def _leave(self, prompt: Prompt, why: str) -> None:
        self._note(f"{why} {prompt.name}")
        self.driver.end(prompt)
        self.running.remove(prompt)

    def _drop_what_is_void(self) -> None:
        if self.driver.kv.are_lost:
            self.driver.kv.refresh()
            self.seen["loss"] += 1
            while self.running:
                self.waiting.append(self.running[-1])
                self._leave(self.running[-1], "void")

    def _reset(self, rank: int) -> Iterator[None]:
        self.driver.reset()
        yield

    def _note(self, what: str) -> None:
        self._log.append(what)

    # -- the end

    def _come_to_rest(self) -> None:
        """All ranks are back, nothing runs, nothing moves: every block is free or cached."""
        cache = self.driver.cache
        assert cache.ranks.wait_ready(SECONDS), "the ranks do not come back"
        self._drop_what_is_void()
        while self.running:
            self._leave(self.running[-1], "over")
        if cache.config.storage is not None:
            _wait_for_storage(cache)
            drained(cache)
        _wait_for_copies(cache)
        self.driver.rest()
        _wait_for_copies(cache)  # what is let go there may be copied down
        cache.check_invariants()
        assert not cache.stats().num_requests
        for tier in (GPU, CPU):
            stats = cache.blocks.view.tier_stats(tier)
            num_kept = self.driver.num_kept_blocks if tier is GPU else 0
            held = (stats.num_private, stats.num_callers - num_kept, stats.num_in_flight, stats.num_protected)
            assert not any(held), f"{tier}: blocks left behind: {stats}"
            assert stats.num_free + stats.num_cached + num_kept == stats.num_blocks

    def _admit_alone(self, prompt: Prompt) -> None:
        """There is room for it, once what the last one has left is copied down. New arrays of a rank may be noted only
        now, and void it: once more. On old ones nobody computes who has heard of their loss."""
        self._drop_what_is_void()
        generation = -1
        while not self.driver.admit(prompt):
            assert self.driver.cache.blocks.generation != generation, "no room, although nothing runs or moves"
            generation = self.driver.cache.blocks.generation
            _wait_for_copies(self.driver.cache)
            self._drop_what_is_void()

    def _read_everything(self) -> None:
        """Two rounds over all texts, which do not fit in the GPU pool: what the first leaves the second finds."""
        self.driver.patience = SECONDS
        for number, text in enumerate([*TEXTS, *TEXTS]):
            prompt = Prompt(f"last{number}", [*text[:LONGEST], 1], 0)
            self._admit_alone(prompt)
            try:
                self.driver.kv.check(prompt, prompt.num_computed)
                self.seen["read at the end"] += prompt.num_computed
                assert self.driver.advance(prompt, len(prompt.tokens) - prompt.num_computed)
                self.driver.kv.check(prompt, len(prompt.tokens))
            except ArraysLostError:  # a late rank was killed while this was read: as in a step, it is void
                self.driver.kv.refresh()
                self.seen["loss"] += 1
            self.driver.end(prompt)
            assert self.driver.cache.wait_for_transfers(SECONDS)
        self._come_to_rest()


def _wait_for_storage(cache: PrefixCacheManager) -> None:
    """Its processes, which come back ever later, are all there."""
    tier, deadline = cache.storage._tier, time.monotonic() + SECONDS
    assert tier is not None
    while not tier.link.client.available:
        assert time.monotonic() < deadline, "a storage process does not come back"
        time.sleep(0.01)


def _wait_for_copies(cache: PrefixCacheManager) -> None:
    """None is under way: one that ends may begin the next."""
    deadline = time.monotonic() + SECONDS
    while cache.stats().num_transfers_in_flight:
        assert cache.wait_for_transfers(SECONDS) and time.monotonic() < deadline, "copies do not end"


def moved(num: int) -> None:
    """A story is about bytes that move: where a busy machine moved none in time, it shows nothing, and says so."""
    if not num:
        pytest.skip("in this story nothing was loaded in time: the machine is too busy for it to show anything")
