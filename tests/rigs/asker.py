"""A manager over simulated memory, and requests that say what they have missed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy_cache import CacheConfig, Match, PrefixCacheManager, Request
from fastdeploy_cache.books.causes import Cause
from tests.rigs.simulated_client import SimulatedClient


class Asker:
    """Blocks have four tokens, where nothing else is said."""

    def __init__(self, num_gpu: int = 40, num_cpu: int = 0, size: int = 4, **config: Any) -> None:
        self.size = size
        self.client = SimulatedClient(num_gpu, num_cpu)
        self.config = CacheConfig(
            **{"load_policy": "always", **config},
            block_size=size,
            num_gpu_blocks=num_gpu,
            num_cpu_blocks=num_cpu,
            transfer_client="inline",
        )
        self.cache = PrefixCacheManager(self.config, client=self.client)
        self.num_requests = 0

    def match(self, tokens: Sequence[int], namespace: str = "", images: Sequence[Any] = ()) -> tuple[Request, Match]:
        self.num_requests += 1
        request = Request(
            request_id=f"r{self.num_requests}", prompt_token_ids=tokens, namespace=namespace, images=images
        )
        return request, self.cache.match(request)

    def admit(self, request: Request, match: Match) -> dict[Cause, int]:
        """Allocate the rest; what the request has missed."""
        match = match.poll()
        self.cache.allocate(request, -(-request.num_tokens // self.size) - len(match.block_ids))
        self.cache.check_invariants()
        explanation = self.cache.explain(request.request_id)
        assert explanation.is_final and explanation.num_hit_tokens == match.num_tokens
        assert (
            sum(hit.num_tokens for hit in explanation.hits) + sum(miss.num_tokens for miss in explanation.misses)
            == len(request.tokens) // 4
        ), "hits and misses do not add up"
        return explanation.missed_tokens()

    def serve(self, tokens: Sequence[int], namespace: str = "", images: Sequence[Any] = ()) -> dict[Cause, int]:
        """A whole request, which waits for its loads; what it has missed."""
        request, match = self.match(tokens, namespace, images)
        self.client.land_all()
        missed = self.admit(request, match)
        self.cache.commit(request, request.num_tokens)
        self.cache.release(request)
        self.client.land_all()
        self.cache.check_invariants()
        return missed

    def only_in_cpu(self, tokens: Sequence[int], *others: Sequence[int]) -> None:
        """A prompt that was evicted from the GPU, by others, and has its copy."""
        self.serve(tokens)
        for other in others:
            self.serve(other)
        request = Request(request_id="", prompt_token_ids=tokens)
        assert self.cache.blocks.lookup(request).num_blocks == len(tokens) // self.size, "no copy"
