"""Our linker below SGLang's tree: what is looked up, comes back as it was, layer by layer; whatever dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rigs.call_counts import counted
from tests.rigs.linked_engine import (
    KINDS,
    PAGE,
    PAGES,
    NewLinked,
    store_node,
)
from tests.rigs.linked_walk import LinkedWalk
from tests.rigs.stand_in_linker import keys_of, transfer

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_there_when_it_has_been_waited_for(new_linked: NewLinked, kind: str) -> None:
    """Whatever becomes of those behind it."""
    linked, keys = new_linked(kind), keys_of(5)
    store_node(linked, keys)
    expected = {number: linked.content("kv", range(1, 6), number) for number in range(len(linked.pools["kv"].layers))}
    assert linked.load(keys, PAGES)
    index = linked.linker.start_layer_wise_loading()
    counter = linked.linker.layer_done_counter
    counter.set_consumer(index)
    for layer in range(7):
        counter.wait_until(layer)
        if layer in linked.pools["kv"].layers:
            number = linked.pools["kv"].layers.index(layer)
            assert linked.content("kv", PAGES["kv"], number) == expected[number]
    assert linked.linker.finish_layer_wise_loading(index)


def test_what_can_be_restored(new_linked: NewLinked) -> None:
    """Each number of leading pages of a uniform model; of one with windows and states where a node ended."""
    uniform, keys = new_linked(), keys_of(6)
    store_node(uniform, keys[:4])
    assert uniform.lookup(keys) == [1, 2, 3, 4]
    assert uniform.lookup(keys[2:]) == [1, 2], "what is in front of it is on the device"
    assert uniform.lookup(keys[4:]) == []
    hybrid = new_linked("states")
    store_node(hybrid, keys[:3])
    hybrid.store(keys[3:], [1, 2, 3], swa=(keys[4:], [1, 2]), mamba=(keys[5:], [3]))
    assert hybrid.lookup(keys) == [3, 6]
    assert hybrid.lookup(keys[:5]) == [3]


def test_nodes_side_by_side_and_one_behind_the_other(new_linked: NewLinked) -> None:
    """A prompt goes on in a node of its own, also where two part; a tail that begins within a node is found."""
    linked, trunk = new_linked(), keys_of(4)
    one, other = keys_of(3, "one"), keys_of(3, "other")
    assert store_node(linked, trunk) and store_node(linked, one) and store_node(linked, other)
    for branch in (one, other):
        assert linked.lookup([*trunk, *branch])[-1] == 7
        assert linked.lookup([*trunk[3:], *branch])[-1] == 4
        assert linked.lookup([*branch[1:], *keys_of(1, "new")]) == [1, 2]


def test_what_was_split_is_stored_again(new_linked: NewLinked) -> None:
    """SGLang splits a node, and offloads the rest of it: nothing is copied twice, and all of it is found."""
    linked, keys = new_linked(), keys_of(5)
    assert store_node(linked, keys)
    cache = linked.linker._caches["kv"].cache
    before = cache.stats().cpu.num_free
    assert linked.store(keys[3:], [1, 2])
    assert cache.stats().cpu.num_free == before and linked.lookup(keys)[-1] == 5


def test_what_has_no_room_is_not_stored(new_linked: NewLinked) -> None:
    """Of a node larger than the CPU tier: it fails, and what is there of it is right."""
    linked, keys = new_linked(cpu_memory_bytes=3 * 4 * 2 * PAGE * 64), keys_of(5)
    assert not store_node(linked, keys)
    assert linked.lookup(keys) == [1, 2, 3]
    pages = PAGES | {"kv": PAGES["kv"][:3]}
    assert linked.load(keys[:3], pages) and linked.run()
    assert linked.content("kv", pages["kv"]) == linked.expected("kv", keys[:3], range(17, 20))


def test_what_was_promised_stays(new_linked: NewLinked) -> None:
    """Between look-up and load others cannot push it out; what is not promised any more is refused, and computed."""
    linked, keys = new_linked(cpu_memory_bytes=24 * 4 * 2 * PAGE * 64), keys_of(4)
    store_node(linked, keys)
    assert linked.lookup(keys, rid="r")[-1] == 4
    for number in range(6):
        store_node(linked, keys_of(5, f"other {number}"))
    assert linked.load(keys, PAGES | {"kv": PAGES["kv"][:4]})
    assert linked.linker.cancel_queued_load("r") and not linked.linker.cancel_queued_load("r")
    for number in range(6):
        store_node(linked, keys_of(5, f"more {number}"))
    assert not linked.load(keys, PAGES | {"kv": PAGES["kv"][:4]}), "it has gone"
    assert linked.linker.start_layer_wise_loading() == -1 and linked.linker.finish_layer_wise_loading(-1)


@pytest.mark.parametrize("is_newest", [True, False])
def test_a_promise_of_most_of_the_tier(new_linked: NewLinked, is_newest: bool) -> None:
    """It is kept as the newest; behind another one it ends, and its request is computed."""
    linked, keys = new_linked(cpu_memory_bytes=8 * 4 * 2 * PAGE * 64), keys_of(5)
    assert store_node(linked, keys) and store_node(linked, keys_of(2, "other"))
    assert linked.lookup(keys, "long")[-1] == 5
    if not is_newest:
        assert linked.lookup(keys_of(2, "other"), "short") == [1, 2]
    assert store_node(linked, keys_of(4, "more")) == (not is_newest)
    assert linked.load(keys, PAGES, "long") == is_newest


def test_promises_leave_room_in_each_pool(new_linked: NewLinked) -> None:
    """Requests that wait hold half of a pool's tier at most, also of the smallest pool."""
    linked = new_linked("states", num_pages=64, pool_shares={"kv": 97, "swa": 2, "mamba": 1})
    nodes = [keys_of(1, f"node {number}") for number in range(40)]
    for node in nodes[:20]:
        assert store_node(linked, node) and linked.lookup(node) == [1]
    assert all(store_node(linked, node) for node in nodes[20:])


def test_a_request_that_is_queued_twice(new_linked: NewLinked) -> None:
    """The newer load is started; the older holds nothing."""
    linked, keys = new_linked(), keys_of(4)
    store_node(linked, keys)
    for _ in range(2):
        assert linked.load(keys, PAGES | {"kv": PAGES["kv"][:4]})
    assert linked.run() and not list(linked.linker._caches["kv"].cache._books.pinned)


@pytest.mark.parametrize("num_pages", [300, 600])
def test_a_window_of_many_pages(new_linked: NewLinked, num_pages: int) -> None:
    """More than tasks that may wait: a node is stored whole, and a window of all of it comes back."""
    linked = new_linked("windows", num_pages=2 * num_pages + 2, cpu_memory_bytes="8MiB")
    keys, pages = keys_of(num_pages), range(1, num_pages + 1)
    assert linked.store(keys, pages, swa=(keys, pages))
    before = linked.content("swa", pages)
    linked.wipe("swa", pages)
    at = {"kv": range(num_pages + 1, 2 * num_pages + 1), "swa": pages}
    sent = [transfer(name, keys, linked.slots(name, at[name])) for name in ("kv", "swa")]
    assert linked.linker.lookup("r", sent)[-1] == num_pages
    assert linked.linker.load("r", sent) and linked.run()
    assert linked.content("swa", pages) == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_page_costs_in_the_scheduler(new_linked: NewLinked, kind: str) -> None:
    """Calls for a page of a prompt of 256, by verb; they may fall."""
    num, linked = 256, new_linked(kind, num_pages=600, cpu_memory_bytes="16MiB")
    keys, pages = keys_of(num), list(range(1, num + 1))
    others = {"swa": (keys, pages), "mamba": (keys[-1:], [3])}
    assert linked.store(keys, pages, **{name: given for name, given in others.items() if name in linked.pools})
    sent = linked.transfers(keys, {"kv": pages, "swa": pages[:2], "mamba": [3]})
    target = linked.transfers(keys, {"kv": list(range(300, 300 + num)), "swa": [257, 258], "mamba": [5]})
    found, num_looked = counted(lambda: linked.linker.lookup("r", linked.transfers(keys)))
    assert found[-1] == num
    is_queued, num_loading = counted(lambda: linked.linker.load("r", target))
    index, num_starting = counted(linked.linker.start_layer_wise_loading)
    assert is_queued and linked.linker.finish_layer_wise_loading(index)
    is_sent, num_storing = counted(lambda: linked.linker.offload(sent))
    assert is_sent and linked.wait_stored()
    most = {"uniform": (6, 8, 2, 6), "windows": (14, 9, 3, 7), "states": (20, 9, 3, 8)}[kind]
    for found, limit in zip((num_looked, num_loading, num_starting, num_storing), most, strict=True):
        assert found <= limit * num


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_loaded_is_right(kind: str, is_stored: bool, tmp_path: Path) -> None:
    """Random nodes, branches and boundaries on a tier that is too small for them, with ranks killed and resets; over
    storage, with new processes, too. What was just promised can be loaded."""
    walk = LinkedWalk(kind, seed=len(kind), folder=tmp_path if is_stored else None)
    walk.run(int(os.environ.get("LINKER_WALK_STEPS", "250")))
    assert walk.num_loaded > 20 and walk.num_pages > walk.num_loaded and not walk.num_failed
