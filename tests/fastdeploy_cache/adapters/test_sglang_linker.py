"""Our linker below SGLang's tree: what is looked up, comes back as it was, layer by layer; whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.errors import ConfigError
from tests.rigs.linked_engine import LINKER, OPTIONS, PAGE, SETTINGS, Linked
from tests.rigs.linked_walk import LinkedWalk
from tests.rigs.stand_in_linker import Component, Tensor, attention_pool, keys_of, params_of, transfer, windows_pool

pytestmark = pytest.mark.processes
NewLinked = Callable[..., Linked]
KINDS = ["uniform", "windows", "states"]
PAGES = {"kv": [10, 11, 12, 13, 14], "swa": [7, 8], "mamba": [9]}


@pytest.fixture
def new() -> Iterator[NewLinked]:
    """Makes linkers that do not outlive the test."""
    made: list[Linked] = []

    def make(*arguments: Any, **options: Any) -> Linked:
        made.append(Linked(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.check()
        each.linker.close()
    made.clear()


def store(linked: Linked, keys: list[str]) -> bool:
    """A node of these keys, with the window and the state behind it."""
    behind = {"swa": (keys[-2:], [1, 2][: len(keys)]), "mamba": (keys[-1:], [3])}
    others = {name: given for name, given in behind.items() if name in linked.pools}
    return linked.store(keys, range(1, 1 + len(keys)), **others)


def has_come(linked: Linked, keys: list[str]) -> None:
    """The device pages of `PAGES` hold what these keys stand for."""
    wanted = {"kv": keys, "swa": keys[-2:], "mamba": keys[-1:]}
    spare = {"kv": range(17, 22), "swa": [4, 5], "mamba": [6]}
    for name in linked.pools:
        found = linked.content(name, PAGES[name])
        assert found == linked.expected(name, wanted[name], spare[name])


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_there_when_it_has_been_waited_for(new: NewLinked, kind: str) -> None:
    """Whatever becomes of those behind it."""
    linked, keys = new(kind), keys_of(5)
    store(linked, keys)
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


def test_what_can_be_restored(new: NewLinked) -> None:
    """Each number of leading pages of a uniform model; of one with windows and states where a node ended."""
    uniform, keys = new(), keys_of(6)
    store(uniform, keys[:4])
    assert uniform.lookup(keys) == [1, 2, 3, 4]
    assert uniform.lookup(keys[2:]) == [1, 2], "what is in front of it is on the device"
    assert uniform.lookup(keys[4:]) == []
    hybrid = new("states")
    store(hybrid, keys[:3])
    hybrid.store(keys[3:], [1, 2, 3], swa=(keys[4:], [1, 2]), mamba=(keys[5:], [3]))
    assert hybrid.lookup(keys) == [3, 6]
    assert hybrid.lookup(keys[:5]) == [3]


def test_nodes_side_by_side_and_one_behind_the_other(new: NewLinked) -> None:
    """A prompt goes on in a node of its own, also where two part; a tail that begins within a node is found."""
    linked, trunk = new(), keys_of(4)
    one, other = keys_of(3, "one"), keys_of(3, "other")
    assert store(linked, trunk) and store(linked, one) and store(linked, other)
    for branch in (one, other):
        assert linked.lookup([*trunk, *branch])[-1] == 7
        assert linked.lookup([*trunk[3:], *branch])[-1] == 4
        assert linked.lookup([*branch[1:], *keys_of(1, "new")]) == [1, 2]


def test_what_was_split_is_stored_again(new: NewLinked) -> None:
    """SGLang splits a node, and offloads the rest of it: nothing is copied twice, and all of it is found."""
    linked, keys = new(), keys_of(5)
    assert store(linked, keys)
    cache = linked.linker._caches["kv"].cache
    before = cache.stats().cpu.num_free
    assert linked.store(keys[3:], [1, 2])
    assert cache.stats().cpu.num_free == before and linked.lookup(keys)[-1] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_death_of_a_rank_costs_time_alone(new: NewLinked, kind: str) -> None:
    """In the middle of a load, which is begun again; and right before one."""
    linked, keys = new(kind), keys_of(5)
    store(linked, keys)
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


def test_a_load_that_cannot_come_says_so(new: NewLinked) -> None:
    """A rank that is not started again: no layer is waited for beyond the time, and SGLang hears that it failed."""
    linked, keys = new(transfer={"max_restarts": 0, "task_timeout_seconds": 0.3}, load_seconds=0.5), keys_of(5)
    store(linked, keys)
    assert linked.load(keys, PAGES)
    linked.kill()
    assert not linked.run() and linked.linker.layer_done_counter.num_failed == 1
    assert linked.lookup(keys) == [], "it is computed from now on"


def test_offloads_end_in_order_also_without_a_rank(new: NewLinked) -> None:
    """Those that fail, too; SGLang counts them. What failed is offered again."""
    linked, keys = new(), keys_of(4)
    linked.kill()
    sent = [transfer("kv", keys, linked.slots("kv", [1, 2, 3, 4]))]
    linked.write("kv", [1, 2, 3, 4], keys)
    for _ in range(3):
        assert linked.linker.offload(sent)
    ends = [linked.wait_stored() for _ in range(3)]
    assert linked.linker.num_completed_offloads() == 0
    linked.wait_ready()
    assert store(linked, keys) and linked.lookup(keys) == [1, 2, 3, 4], ends


def test_what_has_no_room_is_not_stored(new: NewLinked) -> None:
    """Of a node larger than the CPU tier: it fails, and what is there of it is right."""
    linked, keys = new(cpu_memory_bytes=3 * 4 * 2 * PAGE * 64), keys_of(5)
    assert not store(linked, keys)
    found = linked.lookup(keys)
    if found:
        some = keys[: found[-1]]
        pages = PAGES | {"kv": PAGES["kv"][: len(some)]}
        assert linked.load(some, pages) and linked.run()
        assert linked.content("kv", pages["kv"]) == linked.expected("kv", some, range(17, 17 + len(some)))


def test_what_was_promised_stays(new: NewLinked) -> None:
    """Between look-up and load others cannot push it out; what is not promised any more is refused, and computed."""
    linked, keys = new(cpu_memory_bytes=24 * 4 * 2 * PAGE * 64), keys_of(4)
    store(linked, keys)
    assert linked.lookup(keys, rid="r")[-1] == 4
    for number in range(6):
        store(linked, keys_of(5, f"other {number}"))
    assert linked.load(keys, PAGES | {"kv": PAGES["kv"][:4]})
    assert linked.linker.cancel_queued_load("r") and not linked.linker.cancel_queued_load("r")
    for number in range(6):
        store(linked, keys_of(5, f"more {number}"))
    assert not linked.load(keys, PAGES | {"kv": PAGES["kv"][:4]}), "it has gone"
    assert linked.linker.start_layer_wise_loading() == -1 and linked.linker.finish_layer_wise_loading(-1)


def test_several_ranks_queue_alike(new: NewLinked, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them lacks cannot be refused by it alone: the batch fails on all, and SGLang aborts its requests."""
    monkeypatch.setattr(SETTINGS, "_place_in", lambda _: (1, 2))
    linked, keys = new(), keys_of(5)
    store(linked, keys[:4])
    assert linked.load(keys, PAGES)
    assert not linked.run()
    assert linked.load(keys[:4], PAGES | {"kv": PAGES["kv"][:4]}, "r2") and linked.run()


STORED = {"storage": {"capacity_bytes": "16MiB", "slab_bytes": "1MiB"}}


def stored(tmp_path: Path) -> dict[str, Any]:
    return {"storage": {**STORED["storage"], "folder": str(tmp_path / "store")}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_finds_it_on_disk(new: NewLinked, tmp_path: Path, kind: str) -> None:
    """All nodes of a prompt, with the window and the state behind them."""
    first, keys = new(kind, **stored(tmp_path)), keys_of(5)
    others = {name: ([key], [page]) for name, key, page in (("swa", keys[2], 3), ("mamba", keys[2], 5))}
    assert first.store(keys[:3], [1, 2, 3], **{name: each for name, each in others.items() if name in first.pools})
    behind = {"swa": (keys[3:], [1, 2]), "mamba": (keys[4:], [3])}
    assert first.store(keys[3:], [1, 2], **{name: each for name, each in behind.items() if name in first.pools})
    for cache in first.linker._caches.values():
        assert cache.cache.storage.flush(10.0)
    first.linker.close()
    linked = new(kind, **stored(tmp_path))
    assert linked.lookup(keys)[-1] == 5
    assert linked.load(keys, PAGES) and linked.run()
    has_come(linked, keys)


@pytest.mark.parametrize("other", [{"weights_id": "v"}, {"kv_cache_dtype": "fp8"}])
def test_pages_of_other_weights_are_not_found(
    new: NewLinked, tmp_path: Path, other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those that SGLang has computed in another format."""
    first, keys = new(**stored(tmp_path)), keys_of(3)
    store(first, keys)
    assert first.linker._caches["kv"].cache.storage.flush(10.0)
    first.linker.close()
    for name, value in other.items() if "weights_id" not in other else ():
        monkeypatch.setattr(SETTINGS.get_model(), name, value)
    options = {name: value for name, value in other.items() if name == "weights_id"}
    assert new(**stored(tmp_path), **options).lookup(keys) == []


def test_a_reset_forgets(new: NewLinked, tmp_path: Path) -> None:
    """What is in the CPU tier; and storage is left alone, as the weights may be others. The next process finds it."""
    linked, keys = new(**stored(tmp_path)), keys_of(3)
    store(linked, keys)
    assert linked.load(keys, PAGES | {"kv": PAGES["kv"][:3]})
    linked.linker.reset()
    assert linked.lookup(keys) == [] and linked.linker.start_layer_wise_loading() == -1
    assert store(linked, keys) and linked.lookup(keys) == [1, 2, 3]
    linked.linker.close()
    assert new(**stored(tmp_path)).lookup(keys) == [1, 2, 3]


def test_a_store_that_hangs_costs_its_time_alone(new: NewLinked, tmp_path: Path) -> None:
    """A look-up waits for `prefetch_seconds` at most, once for a request, and goes on without."""
    first, keys = new(**stored(tmp_path)), keys_of(3)
    store(first, keys)
    assert first.linker._caches["kv"].cache.storage.flush(10.0)
    first.linker.close()
    linked = new(**stored(tmp_path), prefetch_seconds=0.2)
    pids = [status.pid for status in linked.linker._caches["kv"].cache.storage.statuses()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert linked.lookup(keys, rid="r") == [] == linked.lookup(keys, rid="r")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert linked.lookup(keys)[-1:] == [3]


# what is refused


def refused(kvcache: Any, *components: Component, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Linked(params=params_of(kvcache, PAGE, **more))  # of a uniform model
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights_id": ""}, "weights_id is missing"),
        ({"cpu_memory_bytes": None}, "cpu_memory_bytes is None"),
        ({"cpu_memory_bytes": 1.5e9}, "cpu_memory_bytes is 1500000000.0"),
        ({"cpu_memory_bytes": 100}, "cpu_memory_bytes leaves 100 for the pool 'kv'"),
        ({"cpu_memory": 100}, "cpu_memory"),
        ({"load_seconds": 0}, "load_seconds is 0"),
        ({"load_seconds": 7200}, "less than 3,600"),
        ({"load_seconds": 4.0}, "a copy may take transfer.task_timeout_seconds, 5.0"),
        ({"transfer": {"tp_size": 4}}, "sets transfer.tp_size, which follows"),
        ({"storage": True}, "storage is True"),
        ({"prefetch_seconds": "soon"}, "prefetch_seconds is 'soon'"),
        ({"pool_shares": {"swa": 1}}, "give a number above 0 for each of kv"),
        ({"pool_shares": {"kv": float("inf")}}, "give a number above 0"),
        ({"block_size": 4}, "sets block_size, which follows from SGLang"),
        ({"peer": {}}, "sets peer"),
        ({"storage": {"kind": "tape"}}, "tape"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    """SGLang does not start, with one line."""
    with pytest.raises(ConfigError) as caught:
        Linked(**options)
    assert words in str(caught.value)


def test_pools_that_cannot_be_restored() -> None:
    """Scales beside keys, a kind without pages, a draft model: each by its name, before anything is started."""
    scaled = attention_pool(2, 16, 1)
    scaled.k_scale_buffer = [Tensor.new(16)]
    assert "has scales beside its keys (k_scale_buffer)" in refused(scaled)
    unknown = type("HiSparsePool", (), {"start_layer": 0})()
    assert "HiSparsePool has no pages in memory" in refused(unknown)
    drafts = attention_pool(2, 16, 1)
    assert "mtp_draft_device_pools" in refused(drafts, mtp_draft_device_pools=(drafts,))


def test_a_component_that_is_not_known() -> None:
    """By its name."""
    with pytest.raises(ConfigError, match="component 'c128' cannot be restored; known: full, mamba, swa"):
        LINKER.FastDeployCacheLinker(
            None, params_of(windows_pool(32), PAGE), components={Component.FULL, Component.C128}, extra_config=OPTIONS
        )


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older and newer ones: the door may have moved."""
    for version in ("0.5.22", "0.5.24"):
        monkeypatch.setattr(SETTINGS, "installed_version", lambda _, found=version: found)
        with pytest.raises(ConfigError, match=f"this is SGLang {version}; the linker needs 0.5.23"):
            Linked()


def test_slots_that_lie_apart_are_refused(new: NewLinked) -> None:
    """An error of SGLang's, or of a plug-in of it: nothing is moved."""
    linked, keys = new(), keys_of(2)
    for slots in ([4, 5, 6, 7, 8, 9, 11, 10], [5, 6, 7, 8, 12, 13, 14, 15], list(range(1000, 1008)), [4, 5, 6, 7]):
        with pytest.raises(ConfigError, match="lie apart or outside"):
            linked.linker.offload([transfer("kv", keys, slots)])
    assert not linked.linker.offload([]) and linked.lookup(keys) == []


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_loaded_is_right(kind: str) -> None:
    """Random nodes, branches and boundaries on a tier that is too small for them, with ranks killed and resets."""
    walk = LinkedWalk(kind, seed=len(kind))
    walk.run(int(os.environ.get("FASTDEPLOY_CACHE_LINKER_STEPS", "250")))
    assert walk.num_loaded > 20 and walk.num_pages > walk.num_loaded and not walk.num_failed
