"""The KV arrays of a rank, as the engine knows them: whoever has others attached has to go."""

from __future__ import annotations

import pytest

from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVMemory
from fastdeploy_cache.transfer_manager.kv.rank_kv import RankKV

NUM_BLOCKS = 4
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4).for_rank(1, 2)
GONE = "its KV arrays are gone"


def take_new(kv: RankKV) -> None:
    """A worker has made arrays."""
    made = KVMemory.create(LAYOUT, NUM_BLOCKS)
    kv.take(made.handle())
    made.close()


def new_kv() -> RankKV:
    """Of a rank whose worker has made its arrays, and which a process has been told of."""
    kv = RankKV(0, LAYOUT, NUM_BLOCKS, None)
    take_new(kv)
    assert kv.for_process()[0] is kv.handle and kv.follow() is None
    return kv


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_process_with_arrays_of_before_has_to_go(is_dropped: bool) -> None:
    """Also where others have come before anybody has looked, and where nobody has said that the first ones went."""
    kv = new_kv()
    if is_dropped:
        kv.drop()
    take_new(kv)
    assert kv.follow() == GONE
    assert kv.for_process()[0] is kv.handle and kv.follow() is None
    kv.drop()
    assert kv.follow() == GONE


def test_what_goes_while_somebody_looks_is_seen_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays go, and others come, in the midst of a look at those of before: whatever that look says, the process
    that has them does not stay."""
    kv = new_kv()

    def replace() -> None:
        monkeypatch.undo()
        kv.drop()
        take_new(kv)

    monkeypatch.setattr(kv, "sweep", replace)
    first, second = kv.follow(), kv.follow()
    assert GONE in (first, second)
