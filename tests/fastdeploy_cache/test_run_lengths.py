"""Runs stay long: neither eviction nor reloading nor forking grinds them down to single blocks."""

from __future__ import annotations

import pytest

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.launch.bench.serving import Server
from fastdeploy_cache.launch.bench.workloads import chat


@pytest.mark.parametrize("policy", ["lru", "lfu", "reuse"])
def test_runs_stay_long_under_eviction_and_reload(policy: str) -> None:
    """Six hundred turns in pools that hold a tenth of them, block size 16: runs of 32 blocks and more on average."""
    workload = chat(16)
    config = CacheConfig(
        block_size=16, num_gpu_blocks=4096, num_cpu_blocks=8192, eviction_policy=policy, transfer_client="inline"
    )
    server = Server(config, 2)
    server.serve(workload.works)
    server.cache.check_invariants()
    stats = server.cache.stats()
    assert stats.gpu.num_evicted > 4 * 4096
    assert stats.num_swapped_in_blocks > 4096
    runs = list(server.cache._books.tree.runs())
    assert sum(run.num_blocks for run in runs) / len(runs) > 32
    assert max(len(run.path()) for run in runs) < 30
