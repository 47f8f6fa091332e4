"""Our linker for SGLang where ranks die and memory is short: nothing wrong is loaded, and nothing stays held."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.rigs.linked_engine import (
    KINDS,
    PAGES,
    SETTINGS,
    NewLinked,
    has_come,
    store_node,
)
from tests.rigs.stand_in_linker import keys_of, transfer

pytestmark = pytest.mark.processes

MEMORY = ["offload", "look-up", "load", "start"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_death_of_a_rank_costs_time_alone(new_linked: NewLinked, kind: str) -> None:
    """In the middle of a load, which is begun again; and right before one."""
    linked, keys = new_linked(kind), keys_of(5)
    store_node(linked, keys)
    assert linked.load(keys, PAGES)
    linked.kill()
    assert linked.run()
    has_come(linked, keys)
    linked.wait_ready()
    assert linked.load(keys, PAGES, "r2")
    index = linked.linker.start_layer_wise_loading()
    linked.kill()
    assert linked.linker.finish_layer_wise_loading(index)
    has_come(linked, keys)


def test_a_load_that_cannot_come_says_so(new_linked: NewLinked) -> None:
    """A rank that is not started again: no layer is waited for beyond the time, and SGLang hears that it failed."""
    linked, keys = new_linked(transfer={"max_restarts": 0, "task_timeout_seconds": 0.3}, load_seconds=0.5), keys_of(5)
    store_node(linked, keys)
    assert linked.load(keys, PAGES)
    linked.kill()
    assert not linked.run() and linked.linker.layer_done_counter.num_failed == 1
    assert linked.lookup(keys) == [], "it is computed from now on"


def test_offloads_end_also_without_a_rank(new_linked: NewLinked) -> None:
    """They fail, and what failed is offered again."""
    linked, keys = new_linked(), keys_of(4)
    linked.kill()
    sent = [transfer("kv", keys, linked.slots("kv", [1, 2, 3, 4]))]
    linked.write("kv", [1, 2, 3, 4], keys)
    for _ in range(3):
        assert linked.linker.offload(sent)
    for _ in range(3):
        linked.wait_stored()
    assert linked.linker.num_completed_offloads() == 0
    linked.wait_ready()
    assert store_node(linked, keys) and linked.lookup(keys) == [1, 2, 3, 4]


def test_several_ranks_queue_alike(new_linked: NewLinked, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them lacks cannot be refused by it alone: the batch fails on all, and SGLang aborts its requests."""
    monkeypatch.setattr(SETTINGS, "_place_in", lambda _: (1, 2))
    linked, keys = new_linked(), keys_of(5)
    store_node(linked, keys[:4])
    assert linked.load(keys, PAGES)
    assert not linked.run()
    assert linked.load(keys[:4], PAGES | {"kv": PAGES["kv"][:4]}, "r2") and linked.run()


def test_what_the_model_writes_over_a_state_stays(new_linked: NewLinked) -> None:
    """Its rank dies when all layers have been waited for, and the model has updated the state: no copy that is begun
    again brings the old one back."""
    linked, keys = new_linked("states", transfer={"restart_backoff_seconds": 0.0, "max_restarts": 100}), keys_of(5)
    store_node(linked, keys)
    counter, (state,) = linked.linker.layer_done_counter, PAGES["mamba"]
    for number in range(6):
        linked.wait_ready()
        assert linked.load(keys, PAGES, f"r{number}")
        index = linked.linker.start_layer_wise_loading()
        counter.set_consumer(index)
        for layer in range(7):
            counter.wait_until(layer)
        linked.kill()
        tensors = [tensor for parts in linked.pools["mamba"].arrays for tensor in parts]
        for tensor in tensors:
            tensor.array[state] = 7.0
        assert linked.linker.finish_layer_wise_loading(index)
        assert all((tensor.array[state] == 7.0).all() for tensor in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_for_the_last_layer_is_one_for_all(new_linked: NewLinked, kind: str) -> None:
    """As SGLang waits in front of a CUDA graph. The rank of the full layers, which are not last, has died."""
    linked, keys = new_linked(kind), keys_of(5)
    store_node(linked, keys)
    assert linked.load(keys, PAGES)
    os.kill(linked.pids()[0], signal.SIGKILL)
    index, counter = linked.linker.start_layer_wise_loading(), linked.linker.layer_done_counter
    counter.set_consumer(index)
    assert counter.consumer_index == index
    counter.wait_until(counter.num_layers - 1)
    has_come(linked, keys)
    assert linked.linker.finish_layer_wise_loading(index)


@pytest.mark.parametrize("verb", MEMORY)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_without_memory(new_linked: NewLinked, verb: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the call of that number: an offload fails, a load is computed or begun again; nothing stays held."""
    linked, keys = new_linked("states"), keys_of(5)
    cache = linked.linker._caches[list(linked.pools)[number]].cache
    where, name = {
        "offload": (cache.blocks.copies, "swap_out"),
        "look-up": (cache.blocks, "pin"),
        "load": (cache.blocks, "pin"),
        "start": (cache.blocks.copies, "swap_in"),
    }[verb]
    real, num_left = getattr(where, name), 1

    def short(*arguments: Any, **fields: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            return real(*arguments, **fields)
        raise MemoryError

    if verb != "offload":
        assert store_node(linked, keys)
    if verb == "start":
        assert linked.load(keys, PAGES)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, short)
        if verb == "offload":
            assert not store_node(linked, keys)
        elif verb == "look-up":
            with pytest.raises(MemoryError):
                linked.lookup(keys)
        elif verb == "load":
            assert not linked.load(keys, PAGES)
        else:
            assert linked.run()
            has_come(linked, keys)
    assert num_left <= 0
    assert not any(list(each.cache._books.pinned) for each in linked.linker._caches.values())
    assert store_node(linked, keys) and linked.load(keys, PAGES, "r2") and linked.run()
    has_come(linked, keys)
