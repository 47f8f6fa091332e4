"""How requests come to the engine."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.errors import PeerRefusedError
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationError, GenerationRefusedError
from fastdeploy_cache.launch.reference_engine.open_transfers import OpenTransfers
from fastdeploy_cache.launch.reference_engine.sampling import Sampling
from fastdeploy_cache.launch.reference_engine.waiting_line import WaitingLine

logger = logging.getLogger(__name__)

_NAME = "request"


class Intake:
    """What callers of any thread use: `Engine.intake`."""

    def __init__(
        self, cache: PrefixCacheManager, context_length: int, line: WaitingLine, transfers: OpenTransfers
    ) -> None:
        """Requests join the `line` that the engine takes them from; what is borrowed for them, the `transfers`."""
        self._cache, self._context_length, self._line, self._transfers = cache, context_length, line, transfers
        self._numbers = itertools.count(1)

    def submit(
        self,
        prompt_token_ids: np.ndarray[Any, Any],
        max_new_tokens: int,
        offer: bytes | None = None,
        *,
        sampling: Sampling | None = None,
        namespace: str = "",
        name: str = _NAME,
        is_lent: bool = False,
        session_id: str = "",
        will_go_on: float | None = None,
    ) -> Generation:
        """Queue a prompt. With an `offer` (`Send.offer` of another instance) its blocks are received first;
        `is_lent`: of what that one has cached.

        Its blocks are found in its `namespace` alone. The cache knows it by its `name` and a number behind that.
        Without `sampling` each token is the likeliest. `session_id` and `will_go_on` are hints: see `Request`.

        Raises:
            RequestError: an empty prompt or an impossible token.
            GenerationRefusedError: prompt and answer exceed the context or the GPU pool, or the offer is none that this
                instance takes for this prompt: forged, altered, or another prompt's.
            GenerationError: the engine has stopped.
        """
        num_tokens, limit = len(prompt_token_ids) + max_new_tokens, self.max_tokens
        if max_new_tokens < 1 or num_tokens > limit:
            raise GenerationRefusedError(
                f"{len(prompt_token_ids)} prompt tokens and {max_new_tokens} new ones; together they must be at most "
                f"{limit}, and at least one new"
            )
        request = self._new_request(prompt_token_ids, namespace, name, session_id)
        request.will_go_on = will_go_on
        if offer is not None:
            try:
                self._cache.peers.check_offer(request, offer)
            except PeerRefusedError as error:
                if not is_lent:
                    raise GenerationRefusedError(f"kv_offer: {error}") from error
                logger.info("event=not_borrowed request=%s error=%r", request.request_id, str(error))
                offer = None
        sampling = sampling or Sampling()
        return self._enqueue(Generation(request, max_new_tokens, sampling, offer=offer, is_lent=is_lent))

    def submit_prefill(
        self, prompt_token_ids: np.ndarray[Any, Any], max_new_tokens: int = 0, *, namespace: str = "", name: str = _NAME
    ) -> Generation:
        """Queue a prompt whose full blocks are computed for another instance; see `Generation.wait_send`.

        `max_new_tokens` are what that one is to add: a prompt that it would refuse is not worth computing.

        Raises:
            RequestError: an impossible token.
            GenerationRefusedError: no full block, or with the answer more than the context or the GPU pool holds.
            GenerationError: the engine has stopped.
        """
        num_tokens, size = len(prompt_token_ids), self._cache.config.block_size
        limit = self.max_tokens - max_new_tokens
        if not size <= num_tokens <= limit:
            with_new = f" before {max_new_tokens} new ones" if max_new_tokens else ""
            raise GenerationRefusedError(f"{num_tokens} prompt tokens{with_new}; give {size} to {limit}")
        num_offered_tokens = num_tokens // size * size  # what is behind them is the other instance's
        request = self._new_request(prompt_token_ids, namespace, name)
        return self._enqueue(Generation(request, 0, num_offered_tokens=num_offered_tokens))

    def cancel(self, generation: Generation, reason: str = "cancelled") -> None:
        """Nobody wants more of it: it ends, and what is sent of it, with the next step, and finishes with this."""
        if not generation.cancelled:
            generation.cancel_reason, generation.cancelled = reason, True
        if generation.send is not None:
            self._cache.peers.cancel_send(generation.send)
        self._line.ring()

    @property
    def max_tokens(self) -> int:
        """The most that a prompt with its answer may have: what the context and the GPU pool hold."""
        config = self._cache.config
        return min(self._context_length, config.pool_sizes()[0] * config.block_size)

    @property
    def limit_reason(self) -> str:
        """What `max_tokens` comes of, for messages."""
        config = self._cache.config
        num_blocks = config.pool_sizes()[0]
        if num_blocks * config.block_size < self._context_length:
            return f"as the GPU pool has {num_blocks} blocks of {config.block_size} tokens"
        return "the model's context"

    def _new_request(
        self, prompt_token_ids: np.ndarray[Any, Any], namespace: str, name: str, session_id: str = ""
    ) -> Request:
        self._line.check_open()
        request_id = f"{name}-{next(self._numbers)}"  # a name that came from outside may come twice
        return Request(
            request_id=request_id, prompt_token_ids=prompt_token_ids, namespace=namespace, session_id=session_id
        )

    def _enqueue(self, generation: Generation) -> Generation:
        if generation.offer is None:  # else its blocks need not be anywhere here
            generation.prefetch = self._cache.prefetch(generation.request)  # before anybody can match it
            if generation.prefetch.is_borrowing:
                self._transfers.add(generation.prefetch.on_borrowed)
        try:
            self._line.add(generation)
        except GenerationError:
            self._cache.end_prefetch(generation.request)
            raise
        return generation
