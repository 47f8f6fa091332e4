"""Hit rates of caches that there might be, over a sliding window."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from fastdeploy_cache.insight.what_if.setup import WhatIfResult, WhatIfSetup
from fastdeploy_cache.what_if.mini_cache import MiniCache
from fastdeploy_cache.what_if.records import Reference
from fastdeploy_cache.what_if.sampling import BlockSubset
from fastdeploy_cache.what_if.seen_blocks import SeenBlocks

_NUM_BUCKETS = 60  # that a window is made of


@dataclass(slots=True)
class _Bucket:
    """A sixtieth of the window."""

    number: int
    num_requests: int = 0
    num_tokens: int = 0
    num_asked: int = 0  # blocks
    num_seen: int = 0  # of these, used before: no cache hits more
    num_sampled: int = 0  # of those asked for
    num_hits: list[int] = field(default_factory=list)  # of these, by plan


class Estimator:
    """Serves what it is fed to a small cache for each plan. One thread.

    The sample has by chance more or fewer references than its share of all: mostly of the few blocks that nearly every
    request uses, which every cache hits. So the difference is taken for hits (SHARDS-adj of the paper on SHARDS).

    What a request asks for and nobody has used before, no cache hits: that is counted of all blocks, and bounds every
    estimate.
    """

    def __init__(self, setup: WhatIfSetup) -> None:
        self._setup, self._sampling, self._seen = setup, BlockSubset(setup.sample_ratio), SeenBlocks()
        # plans that are alike in all but what they are compared with share a cache
        self._keys = [(plan.policy, plan.num_gpu_blocks, plan.num_cpu_blocks) for plan in setup.plans]
        plans = dict(zip(self._keys, setup.plans, strict=True))
        self._caches = {key: MiniCache(plan, setup) for key, plan in plans.items()}
        self._buckets: deque[_Bucket] = deque()
        self._bucket_seconds = setup.window_seconds / _NUM_BUCKETS
        self._num_requests = 0

    def feed(self, reference: Reference) -> None:
        """A request has used something, or nothing that was used counts any more."""
        if reference.is_reset:
            self._seen.forget()
            for cache in self._caches.values():
                cache.forget()
            return
        hashes = self._sampling.hashes(reference.marks, reference.namespace)
        num_seen = self._seen.count_and_add(hashes)
        tokens, places = self._sampling.sample(hashes)
        num_asked = int(np.searchsorted(places, np.uint64(reference.num_asked_blocks)))
        bucket = self._bucket_at(reference.seconds)
        self._num_requests += 1
        bucket.num_requests += 1
        bucket.num_tokens += reference.num_prompt_tokens
        bucket.num_asked += reference.num_asked_blocks
        bucket.num_seen += min(num_seen, reference.num_asked_blocks)
        bucket.num_sampled += num_asked
        if not len(tokens):
            return
        hits = {key: cache.serve(reference, tokens, num_asked) for key, cache in self._caches.items()}
        for number, key in enumerate(self._keys):
            bucket.num_hits[number] += hits[key]

    def _bucket_at(self, seconds: float) -> _Bucket:
        number = int(seconds / self._bucket_seconds)
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(_Bucket(number, num_hits=[0] * len(self._keys)))
        while self._buckets[0].number <= number - _NUM_BUCKETS:
            self._buckets.popleft()
        return self._buckets[-1]

    def result(self) -> WhatIfResult:
        """What is known of the window that ends with the last request."""
        buckets, size, ratio = self._buckets, self._setup.block_size, self._setup.sample_ratio
        names = ("num_asked", "num_seen", "num_sampled")
        num_asked, num_seen, num_sampled = (sum([getattr(b, name) for b in buckets]) for name in names)
        missing = num_asked * ratio - num_sampled
        hits = [sum([bucket.num_hits[i] for bucket in buckets]) + missing for i in range(len(self._keys))]
        return WhatIfResult(
            num_requests=self._num_requests,
            num_window_requests=sum([bucket.num_requests for bucket in buckets]),
            num_window_tokens=sum([bucket.num_tokens for bucket in buckets]),
            seen_tokens=num_seen * size,
            hit_tokens=tuple([min(max(0.0, num / ratio), num_seen) * size for num in hits]),
        )
