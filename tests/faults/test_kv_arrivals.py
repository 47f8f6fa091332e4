"""The moment at which a worker's KV arrays have come: what may be asked of the ranks then."""

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
    layout = LAYOUT.for_rank(1, BLOCK_SIZE)
    with PrefixCacheManager(new_config(1, 8, 60, kv_owner="worker")) as cache, kv_worker(layout, 8) as worker:
        cache.ranks.attach_kv(0, worker.make_kv())
    assert seen == [True]
