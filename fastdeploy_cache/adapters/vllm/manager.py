"""The block-pool view: vLLM's KV cache manager over a `PrefixCacheManager`, for engines that are built on that shape.

It keeps no tree and no pool: each verb is one or two of the manager's, whose policies, tiers and metrics apply.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdeploy_cache.adapters.vllm.blocks import (
    BlockHashType,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    hash_block_tokens,
    hash_request_tokens,
)
from fastdeploy_cache.adapters.vllm.pool import BlockPool, KVCacheBlocks, PooledBlock
from fastdeploy_cache.adapters.vllm.requests import EngineRequest, append_new_tokens, namespace_of, native_request
from fastdeploy_cache.errors import OutOfBlocksError, RequestError
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.match import Prefetch

__all__ = [
    "BlockHashType", "BlockPool", "EngineRequest", "FreeKVCacheBlockQueue", "KVCacheBlock", "KVCacheBlocks",
    "KVCacheManager", "PooledBlock", "hash_block_tokens", "hash_request_tokens", "namespace_of",
]  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Served:
    """What is kept of a request until `free`. Of one that waits: its packed tokens and, at most, a match."""

    request: EngineRequest
    native: Request
    blocks: list[int] = field(default_factory=list)
    num_found_tokens: int = 0
    num_committed_tokens: int = 0
    is_matched: bool = False
    is_running: bool = False  # it has been given slots
    is_alone: bool = False  # what it computes is not cached


class KVCacheManager:
    """One thread at a time, as in vLLM's scheduler; other threads may use the `PrefixCacheManager` beneath meanwhile.

    `allocate_slots` and `free` take a running request's `num_computed_tokens` for computed, and publish them.
    """

    def __init__(
        self, manager: PrefixCacheManager, *, load_timeout_seconds: float = 1.0, schedules_ahead: bool = False
    ) -> None:
        """A view of `manager`, which stays the caller's to close.

        Args:
            load_timeout_seconds: how long `get_computed_blocks` may wait for the tiers below; 0: it takes what is on
                the GPU.
            schedules_ahead: `num_computed_tokens` counts steps that still run (asynchronous scheduling, pipelines);
                then `cache_blocks` alone publishes.
        """
        manager.config.check_uniform("the block pool for vLLM")
        self.manager = manager
        self.block_size = manager.config.block_size
        self.block_pool = BlockPool(manager)
        self.get_num_free_blocks = self.block_pool.get_num_free_blocks
        self._load_timeout_seconds = load_timeout_seconds
        self._schedules_ahead = schedules_ahead
        self._served: dict[str, _Served] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return self.block_pool.get_usage()

    def prefetch(self, request: EngineRequest) -> Prefetch:
        """Fetch from storage what is nowhere else (`PrefixCacheManager.prefetch`), as a request is queued."""
        return self.manager.prefetch(self._waiting(request).native)

    def get_computed_blocks(self, request: EngineRequest) -> tuple[KVCacheBlocks, int]:
        """The request's longest cached prefix, and how many tokens that is: at least one is left to compute.

        Waits for what has to be loaded. The blocks are held until `allocate_slots`, `free` or the next look; where a
        request with slots needs the room first, they are let go, and `allocate_slots` with them gives None.

        Raises:
            RequestError: it has slots already.
            PromptTooLongError: it can never fit.
        """
        served = self._waiting(request)
        if getattr(request, "skip_reading_prefix_cache", False):
            return KVCacheBlocks(), 0
        self._match(served)
        return self.block_pool.blocks_of(served.blocks), served.num_found_tokens

    def allocate_slots(
        self,
        request: EngineRequest,
        num_new_tokens: int,
        new_computed_blocks: Sequence[PooledBlock] | None = None,
        num_lookahead_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Slots for `num_new_tokens` tokens behind those that are computed: the blocks that are new, or None.

        None: they do not fit now. A request that has slots keeps them; of one that waits nothing is held any more, and
        it is looked up again before the next try.

        Args:
            new_computed_blocks: with a request's first slots, all that `get_computed_blocks` gave. Without them its
                cached prefix is computed again, into blocks of its own that nobody else finds.
            num_lookahead_tokens: slots for drafts, behind the new tokens.

        Raises:
            RequestError: other blocks than those.
            PromptTooLongError: it can never fit.
            CommitError: more computed tokens than its blocks hold.
        """
        served = self._for_slots(request, [block.block_id for block in new_computed_blocks or ()])
        if served is None:
            return None
        num_computed = served.num_found_tokens
        if served.is_running:
            num_computed = request.num_computed_tokens
            if not self._schedules_ahead:
                # before `allocate`, from where on the manager takes the time of the next step
                self._commit(served, num_computed)
        num_tokens = num_computed + num_new_tokens + num_lookahead_tokens
        try:
            ids = self._allocate(served, max(0, -(-num_tokens // self.block_size) - len(served.blocks)))
        except OutOfBlocksError:
            if not served.is_running:
                self._let_go(served)
            return None
        served.is_running = True
        served.blocks += ids
        return self.block_pool.hold(ids, 1)

    def cache_blocks(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """A step of a request with slots has ended: the full blocks of so many of its tokens can be found.

        Raises:
            CommitError: more tokens than its blocks hold.
        """
        served = self._served.get(request.request_id)
        if served is not None and served.is_running:
            self._commit(served, num_computed_tokens)

    def free(self, request: EngineRequest) -> None:
        """The request has ended, or is preempted, and no step uses its blocks; also of one that only waited.

        What is cached stays until its room is needed: then the end of a chain goes before its beginning.

        Raises:
            CommitError: more computed tokens than its blocks hold; it is freed all the same.
        """
        served = self._served.pop(request.request_id, None)
        if served is None:
            return
        try:
            if served.is_running and not self._schedules_ahead:
                self._commit(served, request.num_computed_tokens)
        finally:
            if served.is_matched:
                self._let_go(served)
            else:
                self.manager.end_prefetch(served.native)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks that a request holds, first to last."""
        served = self._served.get(request_id)
        return self.block_pool.blocks_of(served.blocks if served is not None else ())

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Their ids, by KV cache group: there is one."""
        return self.get_blocks(request_id).get_block_ids()

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix; False, and none is forgotten, while a request has slots or somebody has taken blocks.

        `PrefixCacheManager.reset` can be had at any time: requests go on with what they have.
        """
        for served in self._served.values():
            if not served.is_running:
                self._let_go(served)
        stats = self.manager.stats()
        if stats.num_requests or stats.gpu.num_callers:
            counts = (stats.num_requests, stats.gpu.num_callers)
            logger.warning("event=reset_refused num_requests=%d num_taken_blocks=%d", *counts)
            return False
        self.manager.reset()
        return True

    # -- steps

    def _waiting(self, request: EngineRequest) -> _Served:
        """A request without slots. It is packed once, however often it is tried."""
        served = self._served.get(request.request_id)
        if served is not None:
            if served.is_running:
                raise RequestError(f"request {request.request_id!r} has slots; free it before it is looked up again")
            self._let_go(served)
        if served is None or served.request is not request or served.is_alone:
            served = self._served[request.request_id] = _Served(request, native_request(request))
        return served

    def _match(self, served: _Served) -> None:
        match = self.manager.match(served.native)
        if not match.ready:
            match = match.wait(self._load_timeout_seconds)
        served.is_matched, served.blocks, served.num_found_tokens = True, match.block_ids, match.num_tokens
        self.block_pool.hold(served.blocks, 1)

    def _let_go(self, served: _Served) -> None:
        """Hold nothing for it any more."""
        if served.is_matched:
            self.manager.release(served.native)
            self.block_pool.hold(served.blocks, -1)
            served.is_matched, served.blocks, served.num_found_tokens = False, [], 0

    def _for_slots(self, request: EngineRequest, given: list[int]) -> _Served | None:
        """The request, matched with just the blocks that its engine has been given; None where they were let go."""
        served = self._served.get(request.request_id)
        if served is None or not served.is_matched:
            if given:
                return None
            served = self._waiting(request)
            self._match(served)
        if given and (served.is_running or given != served.blocks):
            raise RequestError(
                f"allocate_slots for {request.request_id!r} with {len(given)} computed blocks; give all "
                f"{len(served.blocks)} of get_computed_blocks or none, and that with its first slots alone"
            )
        if not served.is_running and served.blocks and not given:  # it computes what is cached
            self._let_go(served)
            served = _Served(request, native_request(request, served.native), is_alone=True)
            self._served[request.request_id] = served
            self._match(served)
        return served

    def _commit(self, served: _Served, num_computed_tokens: int) -> None:
        append_new_tokens(served.native, served.request)
        if not served.is_alone:  # drafts are computed, but no tokens of the request
            num_tokens = min(num_computed_tokens, served.native.num_tokens)
            if num_tokens >= served.num_committed_tokens:  # a scheduler may say less than before: nothing changes
                self.manager.commit(served.native, num_tokens)
                served.num_committed_tokens = num_tokens

    def _allocate(self, served: _Served, num_blocks: int) -> list[int]:
        """Where room is short, what waiting requests have found is let go: it is no claim."""
        if not num_blocks and served.is_running:
            return []
        try:
            return self.manager.allocate(served.native, num_blocks)
        except OutOfBlocksError:
            waiting = [other for other in self._served.values() if other.blocks and not other.is_running]
            if not (others := [other for other in waiting if other is not served]):
                raise
            for other in others:
                self._let_go(other)
            return self.manager.allocate(served.native, num_blocks)
