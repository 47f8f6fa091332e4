"""The scheduler's half of the vLLM connector: what is found, loaded and stored. Knows vLLM by duck typing only.

vLLM's block i is the manager's GPU block i: all of them are the adapter's own, and what is cached is cached below.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_cache.adapters.vllm.step import LayerwiseLoad, StepPlan, WorkerKV
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import ConfigError, RequestError
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.match import Prefetch
from fastdeploy_cache.request import Request
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle

logger = logging.getLogger(__name__)

_MARGIN_SECONDS = 5.0  # behind a task's deadline its rank is killed and reaped; that answers every wait


@dataclass(eq=False)
class _Sequence:
    """One of vLLM's requests."""

    request: Any
    tokens: Request  # grows behind vLLM's
    generation: int  # of the cache, when it came: after a reset nothing that it computed before is stored
    pinned: PinnedPrefix | None = None  # from the match to the start of its load
    first_block: int = 0  # of the load
    prefetch: Prefetch | None = None
    load_failed: bool = False  # not tried again: vLLM would ask for ever
    num_offered: int = 0  # blocks that were to be stored
    store: _Store | None = None
    rest: list[Any] | None = None  # vLLM's blocks, kept until `store` has ended: all that was computed, at its end


@dataclass(eq=False)
class _Load:
    request_id: str
    transfer: CallerTransfer
    block_ids: list[int]
    missing_ids: list[int]  # promised, and not even begun
    number: int | None = None  # of the step that computes on it, or that tells of its failure

    @property
    def failed_ids(self) -> list[int]:
        """Blocks that do not hold what they should, as far as it has ended."""
        has_failed = self.transfer.done and not self.transfer.succeeded
        return self.missing_ids + self.block_ids if has_failed else self.missing_ids


@dataclass(eq=False)
class _Store:
    sequence: _Sequence
    transfer: CallerTransfer
    blocks: list[Any]  # vLLM's, kept by a reference while they are read


@dataclass(eq=False)
class _Names:
    """What prefixes of other meaning are told apart by."""

    kv_format: str
    orders: set[str] = field(default_factory=set)

    def namespace(self, request: Any) -> str:
        lora = request.lora_request
        adapter = [lora.lora_name, lora.lora_path] if lora else None
        return json.dumps([self.kv_format, *sorted(self.orders), request.cache_salt, adapter])


class SchedulerHalf:
    """One in vLLM's scheduler process. One thread at a time, as vLLM calls it; only `attach` and `close` wait."""

    def __init__(self, config: CacheConfig, kv_format: str, *, is_layerwise: bool) -> None:
        """Makes the manager; its ranks start when the workers have made their KV arrays. Raises as the manager does."""
        self._cache = PrefixCacheManager(config)
        self._cache.blocks.allocate(config.pool_sizes()[0])
        self._config, self._is_layerwise = config, is_layerwise
        self._fewest, self._most = config.load_limits()
        self._names = _Names(kv_format)
        self._block_pool: Any = None
        self._sequences: dict[str, _Sequence] = {}
        self._loads: list[_Load] = []
        self._stores: list[_Store] = []
        self._number = 0

    @property
    def cache(self) -> PrefixCacheManager:
        """The manager, for a look inside (`stats`, `serve_metrics`)."""
        return self._cache

    def attach(self, kv: Mapping[int, WorkerKV]) -> None:
        """The workers' KV arrays, by rank. Waits until the ranks have them.

        Raises:
            ConfigError: a rank's are missing, or ranks keep them in different orders.
            LayoutError, RankStartError: see `PrefixCacheManager.attach_kv`.
        """
        if set(kv) != set(range(self._config.transfer.tp_size)):
            raise ConfigError(f"KV arrays of ranks {sorted(kv)}; there are {self._config.transfer.tp_size} ranks")
        self._names.orders = {each.order for each in kv.values()}
        if len(self._names.orders) != 1:
            raise ConfigError(f"ranks keep blocks in different orders: {sorted(self._names.orders)}; make them alike")
        for rank, each in sorted(kv.items()):
            self._cache.ranks.attach_kv(rank, KVHandle.from_bytes(each.handle))

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's `BlockPool`."""
        self._block_pool = block_pool

    def close(self) -> None:
        """End the ranks. Safe to call twice."""
        self._cache.close()

    def reset(self) -> None:
        """Forget what is cached."""
        self._cache.reset()

    # -- finding and loading

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind these can be loaded, and whether between steps; None: ask again at the next step."""
        sequence = self._sequence(request)
        if sequence is None or request.skip_reading_prefix_cache:
            return 0, False
        self._unpin(sequence)
        if sequence.load_failed or not self._cache.ranks.wait_ready(0):
            return 0, False
        if len(self._loads) >= self._config.transfer.max_tasks_in_flight or not self._is_fetched(sequence):
            return None, False
        size, first = self._config.block_size, num_computed_tokens // self._config.block_size
        # pinned: what is promised here may not be evicted before the load begins, or vLLM would take it for a failure
        sequence.pinned = self._cache.blocks.pin(sequence.tokens, request.num_tokens // size)
        num_blocks = sequence.pinned.num_blocks - first
        # the last token is computed always, as the next one follows from it; its block is loaded all the same
        num_tokens = min(num_blocks * size, request.num_tokens - 1 - num_computed_tokens)
        if not self._fewest <= num_blocks <= self._most or num_tokens <= 0:
            self._unpin(sequence)
            return 0, False
        sequence.first_block = first
        return num_tokens, not self._is_layerwise

    def _is_fetched(self, sequence: _Sequence) -> bool:
        """Whether storage has had its say, once for a request."""
        if self._config.storage is None:
            return True
        if sequence.prefetch is None:
            sequence.prefetch = self._cache.prefetch(sequence.tokens)
        is_ready = sequence.prefetch.ready
        if is_ready:
            self._cache.end_prefetch(sequence.tokens)
        return is_ready

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """vLLM has made room for the whole request: load the promised tokens."""
        sequence = self._sequence(request)
        if sequence is None:
            return
        if num_external_tokens:
            first = sequence.first_block
            wanted = list(block_ids[first : first - (-num_external_tokens // self._config.block_size)])
            transfer = self._cache.blocks.copies.swap_in(sequence.tokens, wanted, first_block=first)
            num_begun = transfer.num_blocks
            self._loads.append(_Load(request.request_id, transfer, wanted[:num_begun], wanted[num_begun:]))
        self._unpin(sequence)

    def step(self, tables: Mapping[str, list[int]]) -> StepPlan:
        """The next step. `tables`: the GPU blocks of `storable` requests."""
        self._number += 1
        self._end_stores()
        for request_id, block_ids in tables.items():
            sequence = self._sequences[request_id]
            self._store(sequence, self._computed(sequence, block_ids), sequence.num_offered)
        return self._plan_layerwise() if self._is_layerwise else self._plan()

    def _plan(self) -> StepPlan:
        ended = [load for load in self._loads if load.number is None and load.transfer.done]
        for load in ended:
            load.number = self._number
            if load.failed_ids:
                self._give_up(load)
        # a failed one stays until vLLM knows: it takes these blocks for computed, and the request may end before
        self._loads = [load for load in self._loads if load.number is None or load.failed_ids]
        return StepPlan(
            self._number,
            received=frozenset(load.request_id for load in ended),
            failed_block_ids=frozenset(block_id for load in ended for block_id in load.failed_ids),
        )

    def _plan_layerwise(self) -> StepPlan:
        fresh = [load for load in self._loads if load.number is None]
        for load in fresh:
            load.number = self._number
            if load.missing_ids:
                self._give_up(load)
        if not fresh:
            return StepPlan(self._number)
        return StepPlan(
            self._number,
            loads=tuple(LayerwiseLoad(load.transfer.task_ids, tuple(load.block_ids)) for load in fresh),
            progress=tuple(self._progress_handle(rank) for rank in range(self._config.transfer.tp_size)),
            timeout_seconds=self._config.transfer.task_timeout_seconds + _MARGIN_SECONDS,
            failed_block_ids=frozenset(block_id for load in fresh for block_id in load.missing_ids),
        )

    def _progress_handle(self, rank: int) -> bytes:
        progress = self._cache.ranks.layer_progress(rank)
        assert progress is not None, "ranks are processes"
        return progress.handle()

    def processed(self, number: int) -> None:
        """vLLM has taken in the results of this step, and made again good what failed to load."""
        for load in self._loads:
            if load.number is not None and load.number <= number:
                # workers see the last layer before the manager hears of the task's end; until then its blocks are busy
                load.transfer.wait(self._config.transfer.task_timeout_seconds + _MARGIN_SECONDS)
                if not load.transfer.succeeded:
                    self._give_up(load)
        self._loads = [load for load in self._loads if load.number is None or load.number > number]

    def _give_up(self, load: _Load) -> None:
        logger.warning("event=load_failed request_id=%s num_blocks=%d", load.request_id, len(load.block_ids))
        if (sequence := self._sequences.get(load.request_id)) is not None:
            sequence.load_failed = True

    # -- storing

    @property
    def is_storing(self) -> bool:
        """Blocks are kept until they are copied."""
        return bool(self._stores)

    def storable(self, request_ids: Iterable[str]) -> list[str]:
        """Those of the requests that have full blocks which were computed and not offered yet."""
        size = self._config.block_size
        sequences = [self._sequences[request_id] for request_id in request_ids if request_id in self._sequences]
        return [
            sequence.request.request_id
            for sequence in sequences
            if sequence.store is None and self._num_computed(sequence) // size > sequence.num_offered
        ]

    def finish(self, request: Any, block_ids: Sequence[int]) -> None:
        """vLLM is done with the request and frees its blocks after this call."""
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return
        self._unpin(sequence)
        if self._config.storage is not None:
            self._cache.end_prefetch(sequence.tokens)
        ids = self._computed(sequence, block_ids)
        if sequence.store is None:
            self._store(sequence, ids, 0)
        elif len(ids) > sequence.num_offered:  # one after the other: a store goes on behind what has arrived
            sequence.rest = self._keep(ids)

    def _num_computed(self, sequence: _Sequence) -> int:
        """Tokens whose KV is complete: steps that still run do not count."""
        request = sequence.request
        num_tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        return int(num_tokens if self._config.cache_outputs else min(num_tokens, request.num_prompt_tokens))

    def _computed(self, sequence: _Sequence, block_ids: Sequence[int]) -> list[int]:
        """The full blocks of these that are computed, up to the first that a load may still be writing.

        vLLM lets a request share, within a step, blocks that another one loads in it. Should that load fail, they would
        be stored as they are.
        """
        uncertain = {block_id for load in self._loads for block_id in (*load.block_ids, *load.missing_ids)}
        ids = list(block_ids[: self._num_computed(sequence) // self._config.block_size])
        bad = next((i for i, block_id in enumerate(ids) if block_id in uncertain), len(ids))
        return ids[:bad]

    def _store(self, sequence: _Sequence, ids: list[int], first: int) -> None:
        """Copy blocks [first, ...) of the request down, as far as they are not there."""
        if len(ids) <= first:
            return
        self._follow(sequence)
        transfer = self._cache.blocks.copies.swap_out(
            sequence.tokens, ids[first:], first_block=first, generation=sequence.generation
        )
        sequence.num_offered = len(ids)
        if transfer.num_blocks:
            sequence.store = _Store(sequence, transfer, self._keep(ids[first:]))
            self._stores.append(sequence.store)

    def _keep(self, block_ids: Sequence[int]) -> list[Any]:
        """vLLM must not give these to others, whatever becomes of their request (finished, aborted, preempted)."""
        blocks = [self._block_pool.blocks[block_id] for block_id in block_ids]
        self._block_pool.touch(blocks)
        return blocks

    def _end_stores(self) -> None:
        # asked once each: between two questions one may end, and would be in neither list
        stores, self._stores = self._stores, []
        for store in stores:
            if not store.transfer.done:
                self._stores.append(store)
                continue
            sequence = store.sequence
            sequence.store = None
            if sequence.rest is not None:
                rest, sequence.rest = sequence.rest, None
                self._store(sequence, [block.block_id for block in rest], 0)
                self._block_pool.free_blocks(reversed(rest))
            self._block_pool.free_blocks(reversed(store.blocks))

    # -- requests

    def _sequence(self, request: Any) -> _Sequence | None:
        """None: what its blocks hold does not follow from its tokens alone."""
        found = self._sequences.get(request.request_id)
        if found is not None and found.request is request:
            self._follow(found)
            return found
        if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
            return None
        images = [(f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features]
        try:
            tokens = Request(
                request_id=request.request_id,
                prompt_token_ids=request.all_token_ids[:],
                namespace=self._names.namespace(request),
                images=images,
                match_inside_images=True,
            )
        except RequestError as error:
            logger.warning("event=request_not_cached error=%r", str(error))
            return None
        sequence = self._sequences[request.request_id] = _Sequence(request, tokens, self._cache.blocks.generation)
        return sequence

    def _follow(self, sequence: _Sequence) -> None:
        """Output that vLLM has appended since."""
        num_new = sequence.request.num_tokens - sequence.tokens.num_tokens
        if num_new > 0:
            sequence.tokens.append_output(sequence.request.all_token_ids[-num_new:])

    def _unpin(self, sequence: _Sequence) -> None:
        pinned, sequence.pinned = sequence.pinned, None
        if pinned is not None:
            self._cache.blocks.unpin(pinned)
