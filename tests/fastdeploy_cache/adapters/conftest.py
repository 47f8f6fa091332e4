"""What the tests of FastDeploy's adapter share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from tests.rigs.fastdeploy_engine import new_config


@pytest.fixture
def manager() -> Iterator[PrefixCacheManager]:
    made = PrefixCacheManager(new_config(), 1, schedules_ahead=False)
    yield made
    made.cache.check_invariants()
    gpu = made.cache.stats().gpu
    assert gpu.num_private == gpu.num_callers == made.cache.stats().num_requests == 0, "something was left behind"
    made.close()
