"""What a worker's KV arrays are good for once `attach_kv` has returned."""

from __future__ import annotations

import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.transfer_manager.rank.owner import RankOwner
from tests.rigs.faulty_engine import BLOCK_SIZE, LAYOUT, new_config
from tests.rigs.kv_worker import kv_worker

pytestmark = pytest.mark.processes


def test_who_hears_that_arrays_are_attached_can_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attach_kv` returns when the rank's tasks are taken. A moment before, the first copies would be refused."""
    seen, note_up = list[bool](), RankOwner.note_up

    def look(owner: RankOwner, rank: int) -> None:
        seen.append(cache.ranks.wait_ready(0))
        note_up(owner, rank)

    monkeypatch.setattr(RankOwner, "note_up", look)
    config = new_config(1, num_gpu=8, num_cpu=60, kv_owner="worker")
    with PrefixCacheManager(config) as cache, kv_worker(LAYOUT.for_rank(1, BLOCK_SIZE), 8) as worker:
        cache.ranks.attach_kv(0, worker.make_kv())
    assert seen == [True]
