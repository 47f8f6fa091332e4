"""The tree and the pools, as callers may look at them."""

from __future__ import annotations

import contextlib

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import GPU, Tier
from fastdeploy_cache.books.run_view import RunView, path_views, views_of
from fastdeploy_cache.callers.finder import Finder
from fastdeploy_cache.request import Request
from fastdeploy_cache.stats import TierStats


class BlockView:
    """What is in the books at one moment: `cache.blocks.view`. Any thread; each call is a turn of its own."""

    def __init__(self, books: Books, finder: Finder) -> None:
        self._books, self._finder = books, finder

    def tier_stats(self, tier: Tier = GPU) -> TierStats:
        """What `stats` says of one tier, cheaper."""
        with self._books:
            return TierStats.of(self._books.pools[tier], self._books.tree.residency, tier)

    def runs(self) -> list[RunView]:
        """Every run of the tree, parents first, as it is now. Walks the whole tree."""
        with self._books:
            return list(views_of(self._books.tree))

    def runs_of(self, request: Request, num_blocks: int | None = None) -> list[RunView]:
        """The runs that the tokens' cached prefix, at most `num_blocks` of it, lies on, first to last, as they are now.
        The last one may go on behind it."""
        with self._books:
            path, _ = self._finder.find(request, num_blocks)
            return list(path_views(path, request.namespace))

    def free_block_ids(self, tier: Tier = GPU) -> list[int]:
        """The blocks of a tier that nobody owns, lowest first. Walks the pool."""
        with self._books:
            return sorted(self._books.pools[tier].free_ids())

    def eviction_order(self, tier: Tier = GPU) -> list[bytes]:
        """The hashes of the last blocks of the runs whose ends can be evicted, about in the order of eviction."""
        with self._books, contextlib.closing(self._books.tree.policy.coldest(tier)) as runs:
            return [run.last_hash for run in runs]
