"""Our HiCache storage backend as one of SGLang's ranks has it, over a real storage process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.rigs import stand_in_sglang
from tests.rigs.stand_in_sglang import HiCacheStorageConfig, MHATokenToKVPoolHost

BACKEND = stand_in_sglang.load_backend()


def keys_of(num: int, prompt: str = "a prompt") -> list[str]:
    """Hashes of its first pages, as SGLang writes them."""
    return [hashlib.sha256(f"{prompt} {page}".encode()).hexdigest() for page in range(num)]


def starts_of(pages: Sequence[int], page_size: int = 4) -> list[int]:
    return [page * page_size for page in pages]


def indices_of(pages: Sequence[int], page_size: int = 4) -> np.ndarray:
    """The places of all tokens of these pages of a host pool."""
    return np.concatenate([np.arange(page_size) + page * page_size for page in pages] or [np.arange(0)])


class Rank:
    """A backend and the host pool that it serves. `config` are fields of SGLang's description of the rank."""

    def __init__(
        self, options: dict[str, Any], pool: Any = None, *, by_index: bool = True, config: dict[str, Any] | None = None
    ) -> None:
        self.pool = pool if pool is not None else MHATokenToKVPoolHost()
        extra = {"backend_name": "ours", "module_path": "m", "class_name": "c", "interface_v1": by_index, **options}
        self.backend = BACKEND.FastDeployCacheStorage(
            HiCacheStorageConfig(**{"extra_config": extra, **(config or {})}), {}
        )
        self.backend.register_mem_pool_host(self.pool)
        pages = self.pages
        assert pages._client.wait_ready(30.0), "the storage process did not come up"

    @property
    def pages(self) -> Any:
        """The pages of its KV pool in the store."""
        return self.backend._pools["kv"].pages

    @property
    def pid(self) -> int:
        """Its storage process."""
        [status] = self.pages._client.statuses()
        assert status.pid is not None
        return status.pid

    def put(self, keys: Sequence[str], first: int = 0, seed: int = 1) -> list[bytes]:
        """Noise in pages from `first` on, stored under the keys; what it is."""
        places = range(first, first + len(keys))
        noise = self.pool.fill(starts_of(places), seed)
        assert self.backend.batch_set_v1(keys, indices_of(places)) == [True] * len(keys)
        return noise

    def take(self, keys: Sequence[str], first: int = 32) -> list[bytes | None]:
        """What comes back into other pages; None for what does not, which must be as it was."""
        places = range(first, first + len(keys))
        before = self.pool.fill(starts_of(places), seed=99)
        filled = self.backend.batch_get_v1(keys, indices_of(places))
        after = [self.pool.page(start) for start in starts_of(places)]
        assert all(is_filled or old == new for is_filled, old, new in zip(filled, before, after, strict=True))
        return [page if is_filled else None for is_filled, page in zip(filled, after, strict=True)]
