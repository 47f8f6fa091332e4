"""A small hybrid model, and requests of it."""

from __future__ import annotations

from typing import Any

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.requests.tables import RowBlocks
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout

FULL = KVGroup(kind="full", layers=(0,))
STATE = KVGroup(kind="state", layers=(1,), parts=(StatePart(name="s", shape=(4,)),))
WINDOW = KVGroup(kind="window", reach_tokens=6, layers=(2,))
BOTH = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, groups=(FULL, STATE, WINDOW))
BEHIND = KVGroup(kind="window", reach_tokens=6, layers=(1,))
ONLY_WINDOW = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, groups=(FULL, BEHIND))
ONLY_STATE = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, groups=(FULL, STATE))
UNIFORM = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4)
TEXT = list(range(18))  # four blocks of four tokens, and two tokens


def manager(layout: KVLayout = BOTH, **fields: Any) -> PrefixCacheManager:
    base = {"block_size": 4, "num_gpu_blocks": 16, "transfer_client": "inline", "max_running": 3}
    return PrefixCacheManager(CacheConfig(**{**base, "layout": layout, **fields}))


def ask(cache: PrefixCacheManager, name: str, tokens: list[int] | None = None) -> Request:
    request = Request(request_id=name, prompt_token_ids=TEXT if tokens is None else tokens)
    cache.match(request)
    return request


def started(cache: PrefixCacheManager, name: str, tokens: list[int] | None = None) -> tuple[Request, RowBlocks]:
    """A prompt that has all its blocks, and of which nothing is computed."""
    request = ask(cache, name, tokens)
    num_matched = len(cache._requests.active(request).block_ids)
    return request, cache.rows.allocate(request, -(-request.num_tokens // 4) - num_matched)


def computed(cache: PrefixCacheManager, name: str, tokens: list[int] | None = None) -> Request:
    """A prompt that is computed whole, with a snapshot at its last block; not released."""
    request, new = started(cache, name, tokens)
    end = (request.num_tokens - 1) // 4 * 4
    cache.rows.snapshot(request, end, new.tables[0].block_ids)
    cache.commit(request, end)
    cache.commit(request, request.num_tokens)
    return request


def picture(cache: PrefixCacheManager) -> tuple[Any, ...]:
    """All that a refused verb might have changed."""
    books = cache._books
    assert books.rows is not None
    pools = [*books.pools, *(pool.pool for pool in books.rows.checkpoints.pools)]
    return tuple((pool.name, tuple(pool.count(owner) for owner in range(6))) for pool in pools)  # type: ignore[arg-type]


def decode(cache: PrefixCacheManager, request: Request, num_tokens: int, slot: int = -1) -> list[int]:
    """Let a request grow a token at a time, with a snapshot wherever a block ends, where a `slot` is given: before the
    commit that reaches it. Returns where there was one."""
    taken = []
    while request.num_tokens < num_tokens:
        request.append_output([request.num_tokens % 7])
        size = request.num_tokens
        if size > len(cache._requests.active(request).block_ids) * 4:
            cache.rows.allocate(request, 1)
        if slot >= 0 and not size % 4 and (fresh := cache.rows.snapshot(request, size, [slot])) is not None:
            taken.append(size)
            (slot,) = fresh
        cache.commit(request, size)
    return taken
