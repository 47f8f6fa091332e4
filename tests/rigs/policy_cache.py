"""A cache of one-token blocks for the tests of policies."""

from __future__ import annotations

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request


class Cache:
    """A cache of one-token blocks with a clock that the test moves; prompts are named by a letter."""

    def __init__(self, policy: str, num_blocks: int = 12) -> None:
        self.now = 0.0
        config = CacheConfig(block_size=1, num_gpu_blocks=num_blocks, transfer_client="inline", eviction_policy=policy)
        self.manager = PrefixCacheManager(config, clock=lambda: self.now)
        self.num_served = 0

    def serve(self, name: str, length: int = 4, **hints: object) -> int:
        """Serve a prompt of `length` tokens of its own; returns how many tokens hit."""
        self.num_served += 1
        tokens = [100 * ord(name) + i for i in range(length)] + [1]
        request = Request(request_id=str(self.num_served), prompt_token_ids=tokens, **hints)  # type: ignore[arg-type]
        match = self.manager.match(request)
        self.manager.allocate(request, len(tokens) - match.num_tokens)
        self.manager.commit(request, length)
        self.manager.release(request)
        return match.num_tokens

    def cached(self, names: str, length: int = 4) -> dict[str, int]:
        """How many tokens of each prompt are cached. A match that is released at once is no use."""
        found = {}
        for name in names:
            request = Request(request_id="look", prompt_token_ids=[100 * ord(name) + i for i in range(length)] + [1])
            found[name] = self.manager.match(request).num_tokens
            self.manager.release(request)
        return found
