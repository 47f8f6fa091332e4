"""What is written to storage, and when: the write policies. All under the manager's lock."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence

from fastdeploy_cache.prefix_tree import PrefixTree
from fastdeploy_cache.run import CPU, Run
from fastdeploy_cache.storage_tier import StorageTier

_RESERVE_SHARE = 8  # of the CPU pool, as a fraction: so much is kept written ahead of its eviction
_MAX_ASKED = 65536  # runs that are waited for; a copy that fails brings none


class WriteOut:
    """`write_through` writes what is copied to the CPU tier; `write_through_selective` what has been used often enough;
    `write_back` what the CPU tier would evict next, each with all that leads to it: a tail without its beginning is
    never found."""

    def __init__(self, tree: PrefixTree, storage: StorageTier, policy: str, min_uses: int) -> None:
        self._tree, self._storage = tree, storage
        self._back = policy == "write_back"
        self._min_uses = min_uses if policy == "write_through_selective" else 1
        self._num_reserve = max(1, tree.pools[CPU].num_blocks // _RESERVE_SHARE)
        self._num_copied = 0  # blocks since the cold end was looked at
        self._asked: OrderedDict[Run, None] = OrderedDict()  # to be written once they are copied, by any policy

    def copied(self, run: Run, num_blocks: int) -> None:
        """A run has more blocks in the CPU tier."""
        if run in self._asked:
            self._storage.queue(run)
            if run.num_in(CPU, run.num_gpu) == run.num_gpu:
                del self._asked[run]
        elif self._back:
            self._num_copied += num_blocks
            if 4 * self._num_copied >= self._num_reserve:
                self._look_ahead()
        elif run.usage.num_uses >= self._min_uses or self._min_uses == 1:
            self._storage.queue(run)
        self._storage.pump()

    def released(self, path: Sequence[Run]) -> None:
        """A path was used: what of it is copied and was not written, or was declined, is offered."""
        if not self._back:
            self.write([run for run in path if self._min_uses == 1 or run.usage.num_uses >= self._min_uses])

    def write(self, path: Sequence[Run]) -> None:
        """Offer what of a path has a copy."""
        for run in path:
            self._storage.queue(run)
        self._storage.pump()

    def ask(self, runs: Sequence[Run]) -> None:
        """Offer these, what has no copy yet as soon as it has one."""
        for run in runs:
            if run.num_in(CPU, run.num_gpu) < run.num_gpu:
                self._asked[run] = None
        while len(self._asked) > _MAX_ASKED:
            self._asked.popitem(last=False)
        self.write(runs)

    def _look_ahead(self) -> None:
        """Queue what the CPU tier would evict next."""
        self._num_copied = 0
        num_left = self._num_reserve - self._tree.pools[CPU].num_free
        with contextlib.closing(self._tree.policy.coldest(CPU)) as walk:
            for leaf in walk:
                if num_left <= 0:
                    return
                for run in leaf.path():
                    self._storage.queue(run)
                num_left -= len(leaf.ids[CPU])
