"""One cache that there might be, at the scale of the sample: the real manager over blocks of one token."""

from __future__ import annotations

import numpy as np

from fastdeploy_cache.books.leaves.policy import NO_SESSION
from fastdeploy_cache.books.references import HAS_KEEP_SECONDS, HAS_PRIORITY, SESSION_ENDED, TOOL_CALL_PENDING
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import PromptTooLongError
from fastdeploy_cache.insight.what_if.setup import Plan, WhatIfSetup
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.policies import new_policy
from fastdeploy_cache.request import Request
from fastdeploy_cache.what_if.records import Reference
from fastdeploy_cache.what_if.sampling import Tokens

_BEHIND = np.zeros(1, np.int32)  # stands for the last token of a prompt, which is always computed


class MiniCache:
    """Serves each request whole and at once: cached blocks of requests that run are not counted apart.

    That a cache of a share of the blocks and of the size does as well as the whole one is the idea of miniature
    simulation (Waldspurger et al., ATC'17).
    """

    def __init__(self, plan: Plan, setup: WhatIfSetup) -> None:
        ratio = setup.sample_ratio
        gpu, cpu = max(1, round(plan.num_gpu_blocks * ratio)), round(plan.num_cpu_blocks * ratio)
        self._now = 0.0
        config = CacheConfig(
            block_size=1,
            num_gpu_blocks=gpu,
            num_cpu_blocks=cpu,
            cpu_write_policy=setup.cpu_write_policy,  # type: ignore[arg-type]
            cpu_write_high_water=setup.cpu_write_high_water,
            cpu_write_min_uses=setup.cpu_write_min_uses,
            transfer_client="inline",
            lost_blocks_bytes=0,
            num_explained_requests=0,
            insight=InsightConfig(what_if=False, flight_recorder_bytes=0),
        )
        tokens = max(1, round(setup.block_size / ratio))  # that a block here stands for
        policy = new_policy(
            plan.policy, lambda: self._now, num_blocks=max(gpu, cpu), block_tokens=tokens, tree_tokens=1
        )
        self._cache = PrefixCacheManager(config, clock=lambda: self._now, policy=policy)
        self._num_served = 0

    def serve(self, reference: Reference, tokens: Tokens, num_asked: int) -> int:
        """How many of the first `num_asked` blocks were found; all of them are cached then."""
        self._now = reference.seconds
        self._num_served += 1
        flags = reference.flags
        request = Request(
            request_id=str(self._num_served),
            prompt_token_ids=np.append(tokens, _BEHIND),
            priority=reference.priority if flags & HAS_PRIORITY else None,
            keep_seconds=reference.keep_seconds if flags & HAS_KEEP_SECONDS else None,
        )
        request.session_ended = bool(flags & SESSION_ENDED)
        request.tool_call_pending = bool(flags & TOOL_CALL_PENDING)
        if reference.hint != NO_SESSION:
            request.take_session_hint(reference.hint)
        try:
            match = self._cache.match(request)
        except PromptTooLongError:
            return 0
        self._cache.allocate(request, len(tokens) + 1 - match.num_tokens)
        self._cache.commit(request, len(tokens))
        self._cache.release(request)
        return min(match.num_tokens, num_asked)

    def forget(self) -> None:
        """Nothing that is cached counts any more."""
        self._cache.reset()
