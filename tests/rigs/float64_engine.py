"""An engine that serves the float64 model by the verbs of a hybrid model, several requests at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.transfer_manager.peer.client import PeerClient
from tests.rigs.float64_model import (
    BLOCK,
    DIM,
    FAR,
    FULL,
    LAYOUT,
    NEAR,
    REACHES,
    STATE,
    VOCABULARY,
    Array,
    Float64Model,
)

WAIT_SECONDS = 20.0
_ROW_OF = {NEAR: 1, FAR: 2}  # among the rows behind the full one, of which the state is the first


@dataclass(eq=False)
class Served:
    """A request on its way."""

    request: Request
    prompt: list[int]
    num_outputs: int
    tokens: list[int]
    logits: list[Array] = field(default_factory=list)  # from the first computed token on
    num_computed: int = 0
    num_hit: int = 0
    block_ids: list[int] = field(default_factory=list)
    windows: dict[int, dict[int, int]] = field(default_factory=dict)  # by layer: units by block
    read_slot: int | None = None  # where the state is
    write_slot: int | None = None  # where it goes
    stops: tuple[int, ...] = ()


class RankArrays:
    """The KV arrays of all ranks, which hold the same, as arrays of float64. What no request has written holds NaN."""

    def __init__(self, cache: PrefixCacheManager, tp_size: int) -> None:
        views = [cache.ranks.kv_views(rank) for rank in range(tp_size)]
        self._states = [layers[STATE]["state"].view(np.float64) for layers in views]
        self._layers = {
            layer: [
                [layers[layer][part].view(np.float64).reshape(-1, BLOCK, DIM) for part in ("key", "value")]
                for layers in views
            ]
            for layer in (NEAR, FULL, FAR)
        }
        for array in (*self._states, *(part for ranks in self._layers.values() for parts in ranks for part in parts)):
            array[:] = np.nan

    def state(self, slot: int) -> Array:
        """That in a slot, the same bits on each rank."""
        found = [states[slot].copy() for states in self._states]
        assert all(np.array_equal(found[0], each, equal_nan=True) for each in found), "ranks have different states"
        return found[0]

    def put_state(self, slot: int, state: Array | float) -> None:
        for states in self._states:
            states[slot] = state

    def forget(self, layer: int, units: list[int]) -> None:
        """They are given out anew."""
        for parts in self._layers[layer]:
            for part in parts:
                part[units] = np.nan

    def token(self, layer: int, unit: int, place: int) -> Array:
        """Key and value of a token, the same bits on each rank."""
        found = [np.stack([part[unit, place] for part in parts]) for parts in self._layers[layer]]
        assert all(np.array_equal(found[0], each, equal_nan=True) for each in found), "ranks have different KV"
        return found[0]

    def put_token(self, layer: int, unit: int, place: int, key_value: Array) -> None:
        for parts in self._layers[layer]:
            for part, vector in zip(parts, key_value, strict=True):
                part[unit, place] = vector


class Float64Engine:
    """Its memory is that of the cache, on all ranks; what is given out anew holds NaN first."""

    def __init__(
        self,
        *,
        seed: int,
        num_gpu_blocks: int,
        num_gpu_units: Sequence[int],
        drafts: bool = False,
        peer_client: PeerClient | None = None,
        **fields: Any,
    ) -> None:
        """`fields`: further ones of the configuration."""
        self.random, self._drafts = random.Random(seed), drafts
        self.model = Float64Model()
        fields = {"transfer_client": "inline", **fields}
        config = CacheConfig(
            block_size=BLOCK,
            num_gpu_blocks=num_gpu_blocks,
            num_gpu_units=tuple(num_gpu_units),
            layout=LAYOUT,
            **fields,
        )
        self.cache = PrefixCacheManager(config, peer_client=peer_client)
        self._arrays = RankArrays(self.cache, config.transfer.tp_size)
        self.num_hits = self.num_preempted = self.num_snapshots = self.num_refused = self.num_rejected = 0
        self.num_requests = self.num_cpu_tokens = self.num_storage_tokens = self.num_ahead = 0
        self.is_patient = False  # it waits for all that comes from storage before it matches
        self.disturb: Callable[[], None] = lambda: None  # called before and after verbs that start copies

    # -- memory, as the model sees that of one request

    def memory_of(self, sequence: Served) -> _Paged:
        return _Paged(sequence, self._arrays)

    # -- a request

    def request_of(self, prompt: list[int]) -> Request:
        """One more."""
        self.num_requests += 1
        return Request(request_id=str(self.num_requests), prompt_token_ids=prompt)

    def begin(self, prompt: list[int], num_outputs: int, request: Request | None = None) -> Served:
        """Match it."""
        request = request if request is not None else self.request_of(prompt)
        sequence = Served(request, prompt, num_outputs, list(prompt))
        self._match(sequence)
        return sequence

    def _match(self, sequence: Served) -> None:
        self.disturb()
        if self.cache.storage.is_attached:
            prefetch = self.cache.prefetch(sequence.request)
            if self.is_patient:
                prefetch.wait(WAIT_SECONDS)
        match = self.cache.match(sequence.request)
        self.disturb()
        num_tokens, block_ids = match.num_tokens, list(match.block_ids)
        if match.num_coming_tokens and ((drawn := self.random.random()) < 0.9 or self.is_patient):  # else what is there
            if drawn < 0.3:
                self.cache.rows.allocate(sequence.request, 0, ahead_of_loads=True)
                match = match.poll()
                num_tokens, block_ids = match.num_tokens + match.num_coming_tokens, list(match.block_ids)
                block_ids += match.coming_block_ids
                self.disturb()
                if not self.cache.confirm(sequence.request, WAIT_SECONDS, arrived=True):
                    self.cache.release(sequence.request)
                    self._match(sequence)
                    return
                self.num_ahead += match.num_coming_tokens > 0
                self.num_cpu_tokens += match.num_coming_tokens
            else:
                match = match.wait(WAIT_SECONDS)
                num_tokens, block_ids = match.num_tokens, list(match.block_ids)
        self.num_cpu_tokens += match.num_cpu_tokens
        self.num_storage_tokens += match.num_storage_tokens
        sequence.block_ids, sequence.num_hit = block_ids, num_tokens
        sequence.num_computed, sequence.stops = num_tokens, match.checkpoint_tokens
        sequence.logits = []
        self.num_hits += match.num_tokens > 0
        sequence.windows = {}
        for layer, row in _ROW_OF.items():
            table = match.tables[row]
            sequence.windows[layer] = dict(enumerate(table.block_ids, table.first_block))
        sequence.read_slot = match.tables[0].block_ids[0] if match.tables[0].block_ids else None
        sequence.write_slot = sequence.read_slot if self.cache.config.state_copy else None

    def grow(self, sequence: Served, num_tokens: int) -> None:
        """Blocks for so many tokens, of all rows. Raises `OutOfBlocksError`."""
        number = -(-num_tokens // BLOCK) - len(sequence.block_ids)
        if number <= 0:
            return
        first = len(sequence.block_ids)
        new = self.cache.rows.allocate(sequence.request, number)
        sequence.block_ids += new.block_ids
        self._arrays.forget(FULL, new.block_ids)
        for layer, row in _ROW_OF.items():
            units = new.tables[row].block_ids
            self._arrays.forget(layer, units)
            sequence.windows[layer].update(enumerate(units, first))
        if new.tables[0].block_ids:
            (sequence.write_slot,) = new.tables[0].block_ids
            self._arrays.put_state(sequence.write_slot, np.nan)

    def step(self, sequence: Served) -> bool:
        """Compute a piece of the prompt, or a token; whether the request has ended. Raises `OutOfBlocksError`."""
        done, num_prompt = sequence.num_computed, len(sequence.tokens)
        if done == num_prompt:
            token = int(np.argmax(sequence.logits[-1]))
            sequence.request.append_output([token])
            sequence.tokens.append(token)
            end = num_prompt + 1
        else:
            stops = [stop for stop in (*sequence.stops, num_prompt) if stop > done]
            end = min(*stops, done + self.random.choice([3, 8, 20]))
        try:
            self.grow(sequence, end + 2 * self._drafts)
        except OutOfBlocksError:
            if done == num_prompt:
                sequence.tokens.pop()
                sequence.request.cut_output(num_prompt)
            raise
        self._compute(sequence, end)
        is_over = len(sequence.tokens) - len(sequence.prompt) == sequence.num_outputs and end == len(sequence.tokens)
        if end % BLOCK == 0 and (end in sequence.stops or end > len(sequence.prompt)):
            self._snapshot(sequence, end)
        self.cache.commit(sequence.request, end)
        for layer, reach in REACHES.items():  # what no token reads any more is not the request's
            table = sequence.windows[layer]
            for block in [block for block in table if (block + 1) * BLOCK <= end - reach - BLOCK]:
                del table[block]
        return is_over

    def _compute(self, sequence: Served, end: int) -> None:
        memory, state = self.memory_of(sequence), np.zeros((DIM, DIM))
        if sequence.read_slot is not None:
            state = self._arrays.state(sequence.read_slot)
        if self._drafts and self.random.random() < 0.4:
            self._reject_drafts(sequence, memory, state, end)
        for at in range(sequence.num_computed, end):
            logits, state = self.model.compute(sequence.tokens[at], at, memory, state)
            sequence.logits.append(logits)
        assert sequence.write_slot is not None
        self._arrays.put_state(sequence.write_slot, state)
        sequence.read_slot, sequence.num_computed = sequence.write_slot, end

    def _reject_drafts(self, sequence: Served, memory: _Paged, state: Array, end: int) -> None:
        """Tokens are guessed behind the end, computed, and not accepted: what they wrote is written over."""
        for at in range(sequence.num_computed, end + 2):
            token = sequence.tokens[at] if at < end else self.random.randrange(5)
            _, state = self.model.compute(token, at, memory, state)
        self.num_rejected += 1

    def _snapshot(self, sequence: Served, end: int) -> None:
        assert sequence.write_slot is not None
        fresh = self.cache.rows.snapshot(sequence.request, end, [sequence.write_slot])
        self.num_snapshots += fresh is not None
        self.num_refused += fresh is None
        if fresh is not None:
            (sequence.write_slot,) = fresh
            self._arrays.put_state(sequence.write_slot, np.nan)

    def check(self, sequence: Served) -> None:
        """Each logit is that from scratch, bit by bit."""
        expected = self.model.from_scratch(sequence.tokens[: sequence.num_computed])
        assert np.array_equal(np.stack(sequence.logits), expected[sequence.num_hit :]), (
            f"request {sequence.request.request_id}: other logits than from scratch, {sequence.num_hit} tokens hit"
        )

    def end(self, sequence: Served) -> None:
        """It is complete, or preempted."""
        self.disturb()
        self.cache.release(sequence.request)
        self.disturb()

    def preempt(self, sequence: Served) -> None:
        """Release it, and match it again over prompt and output."""
        self.num_preempted += 1
        self.check(sequence) if sequence.logits else None
        self.cache.release(sequence.request)
        self._match(sequence)


class _Paged:
    """A request's memory in blocks and units."""

    def __init__(self, sequence: Served, arrays: RankArrays) -> None:
        self._tables = {FULL: dict(enumerate(sequence.block_ids)), **sequence.windows}
        self._arrays = arrays

    def read(self, layer: int, first: int, end: int) -> Array:
        """See `KVMemoryOf`."""
        table, arrays = self._tables[layer], self._arrays
        return np.stack([arrays.token(layer, table[at // BLOCK], at % BLOCK) for at in range(first, end)])

    def write(self, layer: int, token: int, key_value: Array) -> None:
        """See `KVMemoryOf`."""
        self._arrays.put_token(layer, self._tables[layer][token // BLOCK], token % BLOCK, key_value)


def serve(engine: Float64Engine, num_requests: int, *, preempts: float = 0.0) -> int:
    """Serve conversations that go on and prompts that share beginnings, some at a time; all books are checked at each
    end, and each logit. Returns how many requests were served whole."""
    draw, live, num_served, num_waits = engine.random, list[Served](), 0, 0
    ended: list[list[int]] = []
    systems = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (13, 22)]
    while num_served < num_requests:
        if len(live) < 3 and draw.random() < 0.5:
            before = draw.choice(ended[-6:]) if ended and draw.random() < 0.6 else draw.choice(systems)
            prompt = [*before, *(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 12)))]
            if len(prompt) < 70:
                live.append(engine.begin(prompt, draw.randint(0, 9)))
        if not live:
            continue
        served = draw.choice(live)
        try:
            is_over = engine.step(served)
        except OutOfBlocksError as short:
            others = [each for each in live if each is not served]
            if others and short.coming < short.missing:
                engine.preempt(others[0])
            else:
                num_waits += 1  # copies in flight hold what it lacks
                assert num_waits < 20, "one request alone does not fit"
                engine.cache.wait_for_transfers(WAIT_SECONDS)
            continue
        num_waits = 0
        if is_over:
            engine.check(served)
            engine.end(served)
            live.remove(served)
            ended.append(served.tokens)
            num_served += 1
            engine.cache.check_invariants()
        elif draw.random() < preempts:
            engine.preempt(served)
    for served in live:
        engine.end(served)
    engine.cache.check_invariants()
    return num_served
