"""The scheduler's half of the vLLM connector: what is found, loaded and stored. Knows vLLM by duck typing only.

vLLM's block i is the manager's GPU block i: all of them are the adapter's own, and what is cached is cached below.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from typing import Any, Protocol

from fastdeploy_cache.adapters.vllm.checkpoint_storing import CheckpointStoring
from fastdeploy_cache.adapters.vllm.counters import Counters
from fastdeploy_cache.adapters.vllm.groups import GroupMap, Tables
from fastdeploy_cache.adapters.vllm.kept_blocks import KeptBlocks
from fastdeploy_cache.adapters.vllm.kv_hints import take_hints
from fastdeploy_cache.adapters.vllm.loads import PromisedLoad, PromisedLoads
from fastdeploy_cache.adapters.vllm.metrics_address import MetricsAddress
from fastdeploy_cache.adapters.vllm.sequences import ExternalHit, Namer, Sequence, StepWork
from fastdeploy_cache.adapters.vllm.step import StepPlan, WorkerKV
from fastdeploy_cache.adapters.vllm.storing import Storing
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.task import LEFT_OUT

logger = logging.getLogger(__name__)

Offers = ListOf[tuple[int, int, int]]  # of states: group, block, tokens
ONE_GROUP = GroupMap(0, (), frozenset())
_MARGIN_SECONDS = 5.0  # behind a task's deadline its rank is killed and reaped; that answers every wait


class Stores(Protocol):
    """What copies computed blocks down, and keeps vLLM's blocks for that."""

    def is_due(self, sequence: Sequence, num_computed_tokens: int, work: StepWork) -> bool:
        """Whether `store` has something to do: so many tokens are computed, and the step goes on from there."""
        ...

    def store(self, sequence: Sequence, tables: Tables, num_computed_tokens: int, work: StepWork) -> None:
        """Start copying, or note what the step is going to leave."""
        ...

    def finish(self, sequence: Sequence, tables: Tables, num_computed_tokens: int) -> None:
        """vLLM is done with the request and frees its blocks after this call."""
        ...

    def end_done(self) -> None:
        """Give back the blocks of copies that have ended."""
        ...


class SchedulerHalf:
    """One in vLLM's scheduler process. One thread at a time, as vLLM calls it; only `attach` and `close` wait."""

    def __init__(
        self,
        config: CacheConfig,
        kv_format: str,
        *,
        is_layerwise: bool,
        groups: GroupMap = ONE_GROUP,
        metrics: MetricsAddress | None = None,
    ) -> None:
        """Makes the manager; its ranks start when the workers have made their KV arrays. Raises as the manager does.

        `groups`: of vLLM's block tables. `metrics`: where to serve the manager's metrics; None: nowhere.
        """
        self.cache = PrefixCacheManager(config)  # may be looked into (`stats`, `serve_metrics`)
        if metrics is not None:
            self._serve(metrics)
        num_blocks, blocks = config.pool_sizes()[0], self.cache.blocks
        blocks.allocate(num_blocks)
        for row in range(len(groups.rows)):
            blocks.units.allocate(row, num_blocks)
        self._config = config
        self._fewest, self._most = config.load_limits()
        self._names, self._groups = Namer(kv_format), groups
        self.kept, has_rows = KeptBlocks(), bool(groups.rows)
        self._loads = PromisedLoads(
            self._progress_handles,
            self._longest_seconds,
            self._count,
            is_layerwise=is_layerwise,
            has_rows=has_rows,
        )
        self._is_layerwise, size = is_layerwise, config.block_size
        self._stores: Stores = Storing(blocks, self.kept, size, self._loads.uncertain_ids)
        if has_rows:
            self._stores = CheckpointStoring(blocks, self.kept, groups, size, caches_outputs=config.cache_outputs)
        self._sequences: dict[str, Sequence] = {}
        self.take_counts = Counters(self.cache.metrics).take
        self.close, self.reset = self.cache.close, self.cache.reset
        self._number = 0

    def _serve(self, metrics: MetricsAddress) -> None:
        try:
            url = self.cache.serve_metrics(metrics.host, metrics.port)
        except BaseException:
            self.cache.close()
            raise
        logger.info("event=metrics url=%s", url)

    def attach(self, kv: Mapping[int, WorkerKV]) -> None:
        """The workers' KV arrays, by rank. Waits until the ranks have them.

        Raises:
            ConfigError: a rank's are missing, or ranks keep them in different orders.
            LayoutError, RankStartError, ClosedError: see `PrefixCacheManager.attach_kv`.
        """
        if set(kv) != set(range(self._config.transfer.tp_size)):
            raise ConfigError(f"KV arrays of ranks {sorted(kv)}; there are {self._config.transfer.tp_size} ranks")
        orders = sorted({each.order for each in kv.values()})
        if len(orders) != 1:
            raise ConfigError(f"ranks keep blocks in different orders: {orders}; make them alike")
        self._names.follow_orders(orders)
        for rank, each in sorted(kv.items()):
            self.cache.ranks.attach_kv(rank, KVHandle.from_bytes(each.handle))

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's `BlockPool`. It can be reset only while nobody holds a block, and vLLM asks no connector to let go. So
        its `reset_prefix_cache` waits for the copies first, which end by their own deadline."""
        reset = block_pool.reset_prefix_cache

        def reset_when_stored() -> bool:
            self._stores.end_done()  # first: what is kept of requests that were preempted goes
            self.kept.wait(self._longest_seconds, self._stores.end_done)
            return bool(reset())

        block_pool.reset_prefix_cache = reset_when_stored
        self.kept.bind(block_pool)

    # -- finding and loading

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind these can be loaded, and whether between steps; None: ask again at the next step."""
        sequence = self._sequence(request)
        if sequence is None:
            return 0, False
        sequence.num_vllm_tokens = sequence.num_admitted_tokens = num_computed_tokens
        self._unpin(sequence)
        if request.skip_reading_prefix_cache or sequence.load_failed or not self.cache.ranks.wait_ready(0):
            return 0, False
        num_tasks = (len(self._loads) + 1) * (2 if self._groups.rows else 1)  # a checkpoint comes by one of its own
        if num_tasks > self._config.transfer.max_tasks_in_flight or not self._is_fetched(sequence):
            return None, False
        size, first = self._config.block_size, num_computed_tokens // self._config.block_size
        # pinned: what is promised here may not be evicted before the load begins, or vLLM would take it for a failure
        sequence.pinned = self.cache.blocks.pin(sequence.tokens, self._most_blocks(request.num_tokens))
        num_blocks = self._usable(sequence, sequence.pinned) - first
        # the last token is computed always, as the next one follows from it; its block is loaded all the same
        num_tokens = min(num_blocks * size, request.num_tokens - 1 - num_computed_tokens)
        if not self._fewest <= num_blocks <= self._most or num_tokens <= 0:
            self._unpin(sequence)
            return 0, False
        sequence.first_block = first
        return num_tokens, not self._is_layerwise

    def _most_blocks(self, num_tokens: int) -> int:
        """How many blocks of a prompt may be promised. With several groups it is not the last of one that is whole: its
        last token is computed anew, and a state or a window behind it would be of no use."""
        return (num_tokens - bool(self._groups.rows)) // self._config.block_size

    def _usable(self, sequence: Sequence, pinned: PinnedPrefix) -> int:
        """How many of the blocks that are pinned a request can go on behind."""
        if not self._groups.rows:
            return pinned.num_blocks
        boundary = sequence.num_checkpoint_blocks = pinned.num_checkpoint_blocks or 0
        sequence.branch = pinned.num_blocks if pinned.num_blocks > boundary else 0
        return boundary

    def _is_fetched(self, sequence: Sequence) -> bool:
        """Whether storage has had its say, once for a request."""
        if self._config.storage is None:
            return True
        if sequence.prefetch is None:
            sequence.prefetch = self.cache.prefetch(sequence.tokens, with_last_token=not self._groups.rows)
        is_ready = sequence.prefetch.ready
        if is_ready:
            self.cache.end_prefetch(sequence.tokens)
        return is_ready

    def allocated(self, request: Any, tables: Tables, num_external_tokens: int) -> None:
        """vLLM has made room for the whole request, in blocks by group: load the promised tokens."""
        sequence = self._sequence(request)
        if sequence is None:
            return
        size = self._config.block_size
        sequence.hit = sequence.split(num_external_tokens, size)
        if num_external_tokens:
            sequence.num_admitted_tokens = sequence.num_vllm_tokens + num_external_tokens
            first = sequence.first_block
            end = first - (-num_external_tokens // size)
            wanted = list(tables[self._groups.full][first:end])
            transfer, num_begun = self._load(sequence, tables, wanted, first)
            self._loads.begin(PromisedLoad(sequence, transfer, wanted[:num_begun], wanted[num_begun:], sequence.hit))
        else:
            self._count(sequence, sequence.hit)
        self._unpin(sequence)

    def _load(self, sequence: Sequence, tables: Tables, wanted: list[int], first: int) -> tuple[CallerTransfer, int]:
        """Start the load; also how many of the blocks have begun."""
        copies, end = self.cache.blocks.copies, first + len(wanted)
        if not self._groups.rows:
            transfer = copies.swap_in(sequence.tokens, wanted, first_block=first)
            return transfer, transfer.num_blocks
        rows = zip(self._groups.rows, self.cache.blocks.units.positions(end), strict=True)
        # what lies in front is vLLM's own already, and may be others', too
        units = [
            [tables[group][each] if each >= first else LEFT_OUT for each in positions] for group, positions in rows
        ]
        transfer = copies.swap_in(sequence.tokens, wanted, first_block=first, units=units)
        return transfer, 0 if transfer.num_checkpoint_blocks is None else len(wanted)

    def hit_of(self, request: Any) -> ExternalHit:
        """Where the promised tokens of the request come from. Ask it behind `allocated`."""
        sequence = self._sequences.get(request.request_id)
        return sequence.hit if sequence is not None else ExternalHit()

    def works(self, num_scheduled_tokens: Mapping[str, int], offers: Mapping[str, Offers]) -> dict[str, StepWork]:
        """What the step that is being scheduled computes of the requests whose blocks `step` asks for. `offers`: of
        states that it leaves."""
        found: dict[str, StepWork] = {}
        for request_id, num_tokens in num_scheduled_tokens.items():
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                before = sequence.request.num_computed_tokens
                work = StepWork(before, before + num_tokens, offers.get(request_id, ()))
                if self._stores.is_due(sequence, self._num_computed(sequence), work):
                    found[request_id] = work
        return found

    def step(self, works: Mapping[str, tuple[StepWork, Tables]]) -> StepPlan:
        """The next step: what of `works` is to be copied is begun. With each are the request's GPU blocks, by group."""
        self._number += 1
        self._stores.end_done()
        for request_id, (work, tables) in works.items():
            sequence = self._sequences[request_id]
            self._stores.store(sequence, tables, self._num_computed(sequence), work)
        return self._loads.plan(self._number)

    def _progress_handles(self) -> tuple[bytes, ...]:
        found = [self.cache.ranks.layer_progress(rank) for rank in range(self._config.transfer.tp_size)]
        assert all(found), "ranks are processes"
        return tuple([progress.handle() for progress in found if progress is not None])

    def processed(self, number: int) -> None:
        """vLLM has taken in the results of this step, and made again good what failed to load."""
        self._loads.processed(number)

    def _count(self, sequence: Sequence, hit: ExternalHit) -> None:
        if sequence.is_counted:
            return
        sequence.is_counted = True
        hits = (sequence.num_vllm_tokens, hit.num_cpu_tokens, hit.num_storage_tokens)
        sequence.num_found_blocks = sum(hits) // self._config.block_size
        self.cache.blocks.count_request(sequence.tokens, hits)

    @property
    def _longest_seconds(self) -> float:
        """How long a task can take: one that is late is answered by the death of its rank."""
        return self._config.transfer.task_timeout_seconds + _MARGIN_SECONDS

    # -- storing

    def finish(self, request: Any, tables: Tables) -> None:
        """vLLM is done with the request and frees its blocks after this call."""
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return
        self._unpin(sequence)
        if self._config.storage is not None:
            self.cache.end_prefetch(sequence.tokens)
        self._stores.finish(sequence, tables, self._num_computed(sequence))
        if sequence.tokens.session_id:
            self.cache.sessions.ended(sequence.tokens)

    def _num_computed(self, sequence: Sequence) -> int:
        """Tokens whose KV is complete: steps that still run do not count.

        None is, before a step of this request has been taken in. What vLLM's own prefix cache gave it may be blocks
        that another request computes in the very step that is being scheduled, or in one that still runs: stored then,
        they would be read while they are written, and found as that prefix by everybody.
        """
        request = sequence.request
        num_tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        if num_tokens <= sequence.num_admitted_tokens:
            return 0
        return int(num_tokens if self._config.cache_outputs else min(num_tokens, request.num_prompt_tokens))

    # -- requests

    def _sequence(self, request: Any) -> Sequence | None:
        """None: what its blocks hold does not follow from its tokens alone."""
        found = self._sequences.get(request.request_id)
        if found is not None and found.request is request:
            found.follow()
            return found
        tokens = self._names.tokens_of(request)
        if tokens is None:
            return None
        if (hints := getattr(request, "kv_hints", None)) is not None:  # 0.31 and before know none
            take_hints(hints, tokens, self.cache.sessions)
        sequence = self._sequences[request.request_id] = Sequence(request, tokens, self.cache.blocks.generation)
        return sequence

    def _unpin(self, sequence: Sequence) -> None:
        pinned, sequence.pinned = sequence.pinned, None
        if pinned is not None:
            self.cache.blocks.unpin(pinned)
