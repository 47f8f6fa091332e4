"""The release of a request that is offered, where there is no memory in its midst: it can be repeated."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.peers.transfers import Send
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import LiveRequest
from tests.rigs.simulated_pair import TEXT, SimulatedPair


class FailingListener:
    """Hears nothing of a release."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def released(self, active: object) -> None:
        raise MemoryError


def offered(pair: SimulatedPair, num_computed_tokens: int) -> tuple[LiveRequest, Send]:
    """A running request of the first instance and its send: others were told of 6 of its 11 blocks."""
    live = pair.a.must_match(TEXT)
    assert pair.a.allocate(live, 11)
    send = pair.a.cache.peers.offer(live.request)
    pair.a.cache.peers.begin_step(live.request, 24, 1)
    if num_computed_tokens:
        pair.a.compute(live, num_computed_tokens)
    return live, send


@pytest.mark.parametrize(
    ("place", "num_computed_tokens"),
    [("listener", 0), ("listener", 24), ("listener", 44), ("pin", 24), ("pin", 44)],  # of none there is no place
)
def test_a_release_without_memory_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, place: str, num_computed_tokens: int
) -> None:
    """Every block has its one owner after it, the same release succeeds later, and at the end all is free."""
    pair = SimulatedPair()
    live, send = offered(pair, num_computed_tokens)
    cache = pair.a.cache

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        if place == "listener":
            patched.setattr(cache._requests, "listener", FailingListener())
        else:
            patched.setattr(PrefixTree, "place", fail)
        with pytest.raises(MemoryError):
            cache.release(live.request)
        cache.check_invariants()
        assert live.request.request_id in cache.peers.road.sends
    pair.a.release(live)
    cache.check_invariants()
    cache.peers.cancel_send(send)  # else it waits for somebody to read it
    for _ in range(3):
        pair.go_on()
    pair.a.client.land_all()
    cache.reset()
    assert cache.stats().gpu.num_free == 30 and not len(cache.peers.road.sends)


@pytest.mark.parametrize("is_repeated", [True, False])
def test_who_could_not_be_told_is_told_later(monkeypatch: pytest.MonkeyPatch, is_repeated: bool) -> None:
    """A release of what is not computed fails its send. Where there is no memory to tell of that, the blocks stay the
    send's, and the next change of another send tells."""
    pair = SimulatedPair()
    live, _ = offered(pair, 0)
    other = pair.a.must_match([each + 100 for each in TEXT])
    assert pair.a.allocate(other, 11)
    sends = pair.a.cache.peers.road.sends
    told = list(live.table[:6])
    for task_id in list(sends._by_update):
        with pair.a.cache._books:
            sends.updated(task_id, is_lost=False)
    put = sends._put

    def fail(kind: TaskKind, *rest: Any) -> int:
        if kind is TaskKind.UPDATE_SEND:
            raise MemoryError
        return put(kind, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(sends, "_put", fail)
        pair.a.release(live)
        if is_repeated:
            pair.a.cache.peers.offer(other.request)
    pools = pair.a.cache._books.pools
    assert {pools[0].owner(block_id).name for block_id in told} == {"TASK"}
    pair.a.cache.check_invariants()
    if is_repeated:
        pair.a.cache.peers.begin_step(other.request, 4, 2)
    else:
        pair.a.cache.peers.offer(other.request)
    for _ in range(3):
        pair.go_on()
    assert {pools[0].owner(block_id).name for block_id in told} == {"FREE"}
    pair.a.cache.check_invariants()
