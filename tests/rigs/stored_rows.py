"""Caches of a small hybrid model over a store in memory that outlives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.requests.match import Match
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.storage.keys import ObjectKey, is_page
from fastdeploy_cache.transfer_manager.task import TransferTask
from tests.rigs.held_store import stored_in
from tests.rigs.hybrid_requests import BOTH, TEXT, computed, manager

LONG = [*TEXT, *range(50, 64)]  # goes on behind TEXT: eight blocks
FIELDS: dict[str, Any] = {
    "num_cpu_blocks": 60, "cpu_write_policy": "write_through", "num_gpu_units": (6, 12), "max_load_share": 1.0,
    "max_prefetch_share": 0.9, "min_prefetch_tokens": 1, "load_policy": "always", "prefetch_policy": "wait_complete",
}  # fmt: skip


def new_cache(layout: KVLayout = BOTH, **fields: Any) -> PrefixCacheManager:
    units = {"num_gpu_units": (12,)} if len(layout.groups) == 2 else {}
    return manager(layout, **{**FIELDS, **units, **fields})


def pages_of(objects: Iterable[str]) -> list[str]:
    """The keys that are of pages."""
    parsed = {key: ObjectKey.parse(key) for key in objects}
    return [key for key, each in parsed.items() if each is not None and is_page(each.block_hash)]


def names_of(task: TransferTask) -> list[bytes]:
    return [task.hashes[i : i + 32] for i in range(0, len(task.hashes), 32)]


def ask(cache: PrefixCacheManager, tokens: list[int], name: str = "again") -> tuple[Request, Match]:
    """Prefetch and match a prompt."""
    request = Request(request_id=name, prompt_token_ids=tokens)
    cache.prefetch(request)
    return request, cache.match(request)


def written_objects() -> dict[str, bytes]:
    """What a cache has written that served TEXT and LONG."""
    kept: dict[str, bytes] = {}
    cache = new_cache()
    with stored_in(cache, kept):
        for name, tokens in (("text", TEXT), ("long", LONG)):
            cache.release(computed(cache, name, tokens))
        assert cache.storage.flush(5.0)
    return kept


def no_memory(*_: object) -> Any:
    raise MemoryError
