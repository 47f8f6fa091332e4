"""`lru` over runs that keep their borders, for adapters whose originals evict whole nodes."""

from __future__ import annotations

from fastdeploy_cache.policies.eviction import LeastRecentlyUsed
from fastdeploy_cache.run import Run


class WholeRunsLRU(LeastRecentlyUsed):
    """A run ends where an insert has ended: it is never extended in place, nor joined with the run behind it.

    Else what one call inserted would be several calls' run, and whole runs could not be evicted one by one, oldest
    first. Only `PrefixCacheManager.evict_runs` takes whole runs; what `take` and `allocate` evict is still exact. A
    request that commits block by block gets a run for each commit.
    """

    def grow(self, run: Run, first_block: int) -> None:  # noqa: ARG002
        run.usage.is_shared = True  # what comes next becomes a run of its own

    def alike(self, upper: Run, lower: Run) -> bool:  # noqa: ARG002
        return False
