"""Peers of ranks whose KV arrays are not the engine's: they come late, are lost, and come again."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fastdeploy_cache import KVMemory, PrefixCacheManager
from fastdeploy_cache.errors import PeerError
from tests.rigs.instance import BLOCK_SIZE, LAYOUT, SECONDS, Instance, new_config
from tests.rigs.peer_instances import NONE_HELD, TOKENS, Rig

pytestmark = pytest.mark.processes


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as opened:
        yield Rig(opened)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _owned_by(owner: str, opened: ExitStack, num_cpu: int = 8) -> PrefixCacheManager:
    config = new_config(num_cpu=num_cpu, role="prefill")
    transfer = dataclasses.replace(config.transfer, kv_owner=owner)  # type: ignore[arg-type]
    return opened.enter_context(PrefixCacheManager(dataclasses.replace(config, transfer=transfer)))


def _new_arrays(opened: ExitStack) -> KVMemory:
    memory = KVMemory.create(LAYOUT.for_rank(1, BLOCK_SIZE), 64)
    opened.callback(memory.close)
    return memory


def _hand_over(prefill: Instance, decode: Instance, name: str) -> None:
    decode.receive(name, TOKENS, prefill.offer(name, TOKENS))
    prefill.compute(name, len(TOKENS))
    prefill.release(name)
    assert decode.wait_receive(name) == [True, None, None]
    decode.serve(name)


def test_a_workers_arrays_come_go_and_come_again(rig: Rig, opened: ExitStack) -> None:
    """Nothing is offered before they are there; with them open sends end; new ones serve the next."""
    cache, decode = _owned_by("worker", opened), rig.here("decode")
    assert not cache.peers.wait_ready(0)
    cache.ranks.attach_kv(0, _new_arrays(opened).handle())
    assert cache.peers.wait_ready(SECONDS)
    prefill = Instance(cache)
    _hand_over(prefill, decode, "a")
    decode.receive("b", [1, *TOKENS], prefill.offer("b", [1, *TOKENS]))
    prefill.compute("b", 12)
    cache.ranks.kv_lost(0)
    assert not prefill.wait_send("b")[0] and not decode.wait_receive("b")[0]
    prefill.release("b")
    assert decode.serve("b") == 0
    with pytest.raises(PeerError):
        prefill.offer("c", [2, *TOKENS])
    prefill.release("c")
    cache.ranks.attach_kv(0, _new_arrays(opened).handle())
    assert cache.peers.wait_ready(SECONDS)
    decode.cache.reset()
    _hand_over(prefill, decode, "d")
    assert prefill.check() == decode.check() == NONE_HELD


def test_a_rank_that_dies_with_its_arrays(rig: Rig, opened: ExitStack) -> None:
    """The rank made them: its death ends the sends; the peer process follows it to its new ones."""
    cache, decode = _owned_by("transfer", opened), rig.here("decode")
    assert cache.peers.wait_ready(SECONDS)
    prefill = Instance(cache)
    decode.receive("a", TOKENS, prefill.offer("a", TOKENS))
    prefill.compute("a", 12)
    pid = cache.stats().ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert not prefill.wait_send("a")[0] and not decode.wait_receive("a")[0]
    prefill.release("a")
    decode.serve("a")
    assert cache.ranks.wait_ready(SECONDS) and cache.peers.wait_ready(SECONDS)
    _hand_over(prefill, decode, "b")
    assert prefill.check() == decode.check() == NONE_HELD
