"""The scheduler's half of the vLLM connector: what is found, loaded and stored. Knows vLLM by duck typing only.

vLLM's block i is the manager's GPU block i: all of them are the adapter's own, and what is cached is cached below.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastdeploy_cache.adapters.vllm.checkpoint_storing import CheckpointStoring, Offers
from fastdeploy_cache.adapters.vllm.counters import Counters
from fastdeploy_cache.adapters.vllm.groups import GroupMap, Tables
from fastdeploy_cache.adapters.vllm.kept_blocks import KeptBlocks
from fastdeploy_cache.adapters.vllm.metrics_address import MetricsAddress
from fastdeploy_cache.adapters.vllm.sequences import ExternalHit, Namer, Sequence
from fastdeploy_cache.adapters.vllm.step import LayerwiseLoad, StepPlan, WorkerKV
from fastdeploy_cache.adapters.vllm.storing import Storing
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.task import LEFT_OUT

logger = logging.getLogger(__name__)

NOTHING: Mapping[str, Any] = MappingProxyType({})
ONE_GROUP = GroupMap(0, (), frozenset())
_MARGIN_SECONDS = 5.0  # behind a task's deadline its rank is killed and reaped; that answers every wait


@dataclass(eq=False)
class _Load:
    sequence: Sequence
    transfer: CallerTransfer
    block_ids: list[int]
    missing_ids: list[int]  # promised, and not even begun; of a model with several groups, all or none
    hit: ExternalHit
    number: int | None = None  # of the step that computes on it, or that tells of its failure
    is_judged: bool = False  # counted, and logged where it failed

    @property
    def failed_ids(self) -> list[int]:
        """Blocks that do not hold what they should, as far as it has ended."""
        has_failed = self.transfer.done and not self.transfer.succeeded
        return self.missing_ids + self.block_ids if has_failed else self.missing_ids


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
        self._config, self._is_layerwise = config, is_layerwise
        self._fewest, self._most = config.load_limits()
        self._names, self._groups = Namer(kv_format), groups
        self.kept = KeptBlocks()
        self._storing = Storing(blocks, self.kept)
        self._checkpoints = CheckpointStoring(blocks, self.kept, groups, config.block_size)
        self._end_done = self._checkpoints.end_done if groups.rows else self._storing.end_done
        self._sequences: dict[str, Sequence] = {}
        self._loads: list[_Load] = []
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
            self.kept.wait(self._longest_seconds, self._end_done)
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
        if len(self._loads) >= self._config.transfer.max_tasks_in_flight or not self._is_fetched(sequence):
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
        """As many blocks of a prompt may be promised. With several groups not the last of one that is whole: its last
        token is computed anew, and a state or a window behind it would be of no use."""
        return (num_tokens - bool(self._groups.rows)) // self._config.block_size

    def _usable(self, sequence: Sequence, pinned: PinnedPrefix) -> int:
        """Of blocks that are pinned, those that a request can go on behind."""
        if not self._groups.rows:
            return pinned.num_blocks
        boundary = pinned.num_checkpoint_blocks or 0
        sequence.branch = pinned.num_blocks if pinned.num_blocks > boundary else 0
        return boundary

    def _is_fetched(self, sequence: Sequence) -> bool:
        """Whether storage has had its say, once for a request."""
        if self._config.storage is None:
            return True
        if sequence.prefetch is None:
            sequence.prefetch = self.cache.prefetch(sequence.tokens, with_last_token=True)
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
            self._loads.append(_Load(sequence, transfer, wanted[:num_begun], wanted[num_begun:], sequence.hit))
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

    def step(
        self,
        tables: Mapping[str, Tables],
        num_scheduled_tokens: Mapping[str, int] = NOTHING,
        offers: Mapping[str, Offers] = NOTHING,
    ) -> StepPlan:
        """The next step. `tables`: the GPU blocks of `storable` requests, by group. `offers`: states that it leaves."""
        self._number += 1
        self._end_done()
        for request_id, by_group in tables.items():
            sequence = self._sequences[request_id]
            if self._groups.rows:
                self._store_checkpoints(
                    sequence, by_group, num_scheduled_tokens[request_id], offers.get(request_id, ())
                )
            else:
                ids = self._computed(sequence, by_group[self._groups.full])
                self._storing.store(sequence, ids, sequence.num_offered)
        return self._plan_layerwise() if self._is_layerwise else self._plan()

    def _plan(self) -> StepPlan:
        ended = [load for load in self._loads if load.number is None and load.transfer.done]
        for load in ended:
            load.number = self._number
            self._judge(load, has_failed=bool(load.failed_ids))
        # a failed one stays until vLLM knows: it takes these blocks for computed, and the request may end before
        self._loads = [load for load in self._loads if load.number is None or load.failed_ids]
        has_rows = bool(self._groups.rows)
        failed = [] if has_rows else ended
        return StepPlan(
            self._number,
            received=frozenset(load.sequence.request.request_id for load in ended),
            failed_block_ids=frozenset(block_id for load in failed for block_id in load.failed_ids),
            failed=frozenset(load.sequence.request.request_id for load in ended if load.failed_ids and has_rows),
        )

    def _plan_layerwise(self) -> StepPlan:
        fresh = [load for load in self._loads if load.number is None]
        for load in fresh:
            load.number = self._number
            if load.missing_ids:
                self._judge(load, has_failed=True)
        if not fresh:
            return StepPlan(self._number)
        return StepPlan(
            self._number,
            loads=tuple(LayerwiseLoad(load.transfer.task_ids, tuple(load.block_ids)) for load in fresh),
            progress=tuple(self._progress_handle(rank) for rank in range(self._config.transfer.tp_size)),
            timeout_seconds=self._longest_seconds,
            failed_block_ids=frozenset(block_id for load in fresh for block_id in load.missing_ids),
        )

    def _progress_handle(self, rank: int) -> bytes:
        progress = self.cache.ranks.layer_progress(rank)
        assert progress is not None, "ranks are processes"
        return progress.handle()

    def processed(self, number: int) -> None:
        """vLLM has taken in the results of this step, and made again good what failed to load."""
        for load in self._loads:
            if load.number is not None and load.number <= number:
                # workers see the last layer before the manager hears of the task's end; until then its blocks are busy
                load.transfer.wait(self._longest_seconds)
                self._judge(load, has_failed=not load.transfer.succeeded)
        self._loads = [load for load in self._loads if load.number is None or load.number > number]

    def _judge(self, load: _Load, *, has_failed: bool) -> None:
        """Once for each load: count what came, or say what did not."""
        if load.is_judged:
            return
        load.is_judged = True
        sequence = load.sequence
        self._count(sequence, ExternalHit() if has_failed else load.hit)
        if has_failed:
            sequence.load_failed = True
            num_blocks = len(load.block_ids) + len(load.missing_ids)
            logger.warning("event=load_failed request_id=%s num_blocks=%d", sequence.request.request_id, num_blocks)

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

    def storable(self, num_scheduled_tokens: Mapping[str, int], offers: Mapping[str, Offers] = NOTHING) -> list[str]:
        """Those of the requests of a step that have full blocks which were computed and not offered yet; of a model
        with several groups, that have or make checkpoints to store."""
        size = self._config.block_size
        sequences = [self._sequences[each] for each in num_scheduled_tokens if each in self._sequences]
        if self._groups.rows:
            return [
                sequence.request.request_id
                for sequence in sequences
                if self._has_checkpoints(sequence, num_scheduled_tokens, offers)
            ]
        return [
            sequence.request.request_id
            for sequence in sequences
            if not sequence.is_storing and self._num_computed(sequence) // size > sequence.num_offered
        ]

    def _has_checkpoints(
        self, sequence: Sequence, num_scheduled_tokens: Mapping[str, int], offers: Mapping[str, Offers]
    ) -> bool:
        request = sequence.request
        num_tokens, of = request.num_computed_tokens, offers.get(request.request_id, ())
        is_due = bool(sequence.claims) and self._checkpoints.due(sequence, self._num_computed(sequence), num_tokens)
        return is_due or bool(self._boundaries(sequence, num_scheduled_tokens[request.request_id], of))

    def _boundaries(self, sequence: Sequence, num_tokens: int, offers: Offers) -> list[int]:
        """Those that a step of so many tokens reaches, as far as what it computes is to be cached."""
        before, most = sequence.request.num_computed_tokens, sequence.request.num_prompt_tokens
        found = self._checkpoints.boundaries(sequence, before, before + num_tokens, offers)
        caches_all = self._config.cache_outputs
        return [each for each in found if caches_all or each * self._config.block_size <= most]

    def _store_checkpoints(self, sequence: Sequence, tables: Tables, num_tokens: int, offers: Offers) -> None:
        """Copy what is due, and keep what this step is going to leave."""
        self._checkpoints.start(sequence, tables[self._groups.full], self._num_computed(sequence))
        for boundary in self._boundaries(sequence, num_tokens, offers):
            self._checkpoints.claim(sequence, boundary, tables, offers)

    def finish(self, request: Any, tables: Tables) -> None:
        """vLLM is done with the request and frees its blocks after this call."""
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return
        self._unpin(sequence)
        if self._config.storage is not None:
            self.cache.end_prefetch(sequence.tokens)
        table = tables[self._groups.full] if tables else ()
        if self._groups.rows:
            self._checkpoints.finish(sequence, table, self._num_computed(sequence))
        else:
            self._storing.store_last(sequence, self._computed(sequence, table))

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

    def _computed(self, sequence: Sequence, block_ids: ListOf[int]) -> list[int]:
        """The full blocks of these that are computed, up to the first that a load may still be writing.

        vLLM lets a request share, within a step, blocks that another one loads in it. Should that load fail, they would
        be stored as they are.
        """
        uncertain = {block_id for load in self._loads for block_id in (*load.block_ids, *load.missing_ids)}
        ids = list(block_ids[: self._num_computed(sequence) // self._config.block_size])
        bad = next((i for i, block_id in enumerate(ids) if block_id in uncertain), len(ids))
        return ids[:bad]

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
        sequence = self._sequences[request.request_id] = Sequence(request, tokens, self.cache.blocks.generation)
        return sequence

    def _unpin(self, sequence: Sequence) -> None:
        pinned, sequence.pinned = sequence.pinned, None
        if pinned is not None:
            self.cache.blocks.unpin(pinned)
