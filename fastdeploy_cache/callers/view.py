"""The tree and the pools, as callers may look at them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fastdeploy_cache.books.block_pool import FREE
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import GPU, Run, Tier
from fastdeploy_cache.books.run_view import RunView, path_views, views_of
from fastdeploy_cache.callers.finder import Finder
from fastdeploy_cache.request import Request

if TYPE_CHECKING:
    from fastdeploy_cache.stats import TierStats

_BLOCKS_A_TURN = 1024  # that are hashed: about a millisecond


class BlockView:
    """What is in the books at one moment: `cache.blocks.view`. Any thread; each call is a turn of its own."""

    def __init__(self, books: Books, finder: Finder) -> None:
        from fastdeploy_cache.stats import TierStats  # here: an import of the manager is quick

        self._books, self._finder, self._stats_of = books, finder, TierStats.of

    def tier_stats(self, tier: Tier = GPU) -> TierStats:
        """What `stats` says of one tier, cheaper."""
        with self._books:
            return self._stats_of(self._books.pools[tier], self._books.tree.residency, tier)

    def runs(self) -> list[RunView]:
        """Every run of the tree, parents first, siblings as they came, as it is now. Walks the whole tree."""
        self.name_all()
        with self._books:
            return list(views_of(self._books.tree))

    def runs_of(self, request: Request, num_blocks: int | None = None) -> list[RunView]:
        """The runs that the tokens' cached prefix, at most `num_blocks` of it, lies on, first to last, as they are now.
        The last one may go on behind it."""
        with self._books:
            path, _ = self._finder.find(request, num_blocks)
            return list(path_views(path, request.namespace, self._books.tree.names))

    def free_block_ids(self, tier: Tier = GPU) -> list[int]:
        """The blocks of a tier that nobody owns, lowest first. Walks the pool."""
        with self._books:
            return self._books.pools[tier].ids_of(FREE)

    def eviction_order(self, tier: Tier = GPU) -> list[bytes]:
        """The hashes of the last blocks of the runs whose ends can be evicted, about in the order of eviction."""
        self.name_all()
        with self._books, contextlib.closing(self._books.tree.policy.coldest(tier)) as runs:
            return [self._books.tree.names.of_last(run) for run in runs]

    def names_much(self, path: list[Run]) -> bool:
        """Whether the hashes of a path take so long that they need turns of their own. Under the lock."""
        return self._books.tree.names.num_missing(path) > _BLOCKS_A_TURN

    def name_prefix(self, request: Request) -> None:
        """Hash what is cached of the tokens, as `name_all` does."""
        with self._books:
            path, _ = self._finder.find(request)
            unnamed = [run for run in path if not self._books.tree.names.has_all(run)]
        self._name(unnamed)

    def name_all(self) -> None:
        """Hash what nobody has asked for yet, in turns of their own: all at once would hold the lock for long."""
        tree = self._books.tree
        with self._books:
            unnamed = [run for run in tree.runs() if not tree.names.has_all(run)]
        self._name(unnamed)

    def _name(self, unnamed: list[Run]) -> None:
        """Hash these, of which parents come first."""
        names = self._books.tree.names
        unnamed.reverse()  # they are taken from the end
        while unnamed:
            with self._books:
                num_left = _BLOCKS_A_TURN
                while unnamed and num_left > 0:
                    num_left -= names.add(unnamed[-1], num_left)
                    if names.has_all(unnamed[-1]):
                        unnamed.pop()
