"""Between the loss of a rank's KV arrays and the moment at which the engine has been told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from tests.rigs.faulty_engine import BLOCK_SIZE, new_config
from tests.rigs.process_ends import SECONDS, pids

pytestmark = pytest.mark.processes
NUM_GPU, NUM_CPU = 8, 60


def test_what_is_computed_before_the_engine_is_told_is_nowhere(eventually: Callable[..., None]) -> None:
    """A request that is matched after the loss, and computed on the old arrays until the engine hears of the new ones:
    it is found nowhere, neither on the GPU nor as a copy of the new arrays' zeros."""
    served: list[str] = []

    def serve(_: int) -> None:
        request = Request(request_id=f"late {len(served)}", prompt_token_ids=[len(served)] * (4 * BLOCK_SIZE))
        assert cache.match(request).num_tokens == 0
        cache.allocate(request, 4)
        cache.commit(request, request.num_tokens)
        assert cache.stats().gpu.num_cached > 0, "found by others until the engine has been told"
        cache.release(request)
        served.append(request.request_id)

    config = new_config(2, NUM_GPU, NUM_CPU, kv_owner="transfer")
    with PrefixCacheManager(config, on_kv_lost=serve) as cache:
        os.kill(pids(cache._movement.client)[1], signal.SIGKILL)
        eventually(lambda: len(served) == 2 and cache.stats().ranks[1].num_restarts == 1)
        assert cache.ranks.wait_ready(SECONDS)
        assert served == ["late 0", "late 1"]
        eventually(lambda: not cache.stats().num_transfers_in_flight)
        assert (cache.stats().gpu.num_cached, cache.stats().cpu.num_cached) == (0, 0)
        cache.check_invariants()
