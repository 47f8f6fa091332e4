"""Our linker for SGLang over storage: what a new process finds, and what is left alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.linked_engine import (
    KINDS,
    PAGE,
    PAGES,
    SETTINGS,
    NewLinked,
    has_come,
    store_node,
)
from tests.rigs.stand_in_linker import keys_of

pytestmark = pytest.mark.processes


def stored(tmp_path: Path) -> dict[str, Any]:
    return {"storage": {"capacity_bytes": "16MiB", "slab_bytes": "1MiB", "folder": str(tmp_path / "store")}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_finds_it_on_disk(new_linked: NewLinked, tmp_path: Path, kind: str) -> None:
    """All nodes of a prompt, with the window and the state behind them."""
    first, keys = new_linked(kind, **stored(tmp_path)), keys_of(5)
    others = {name: ([key], [page]) for name, key, page in (("swa", keys[2], 3), ("mamba", keys[2], 5))}
    assert first.store(keys[:3], [1, 2, 3], **{name: each for name, each in others.items() if name in first.pools})
    behind = {"swa": (keys[3:], [1, 2]), "mamba": (keys[4:], [3])}
    assert first.store(keys[3:], [1, 2], **{name: each for name, each in behind.items() if name in first.pools})
    for cache in first.linker._caches.values():
        assert cache.cache.storage.flush(10.0)
    first.linker.close()
    linked = new_linked(kind, **stored(tmp_path))
    assert linked.lookup(keys)[-1] == 5
    assert linked.load(keys, PAGES) and linked.run()
    has_come(linked, keys)


@pytest.mark.parametrize("other", [{"weights_id": "v"}, {"kv_cache_dtype": "fp8"}])
def test_pages_of_other_weights_are_not_found(
    new_linked: NewLinked, tmp_path: Path, other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those that SGLang has computed in another format."""
    first, keys = new_linked(**stored(tmp_path)), keys_of(3)
    store_node(first, keys)
    assert first.linker._caches["kv"].cache.storage.flush(10.0)
    first.linker.close()
    for name, value in other.items() if "weights_id" not in other else ():
        monkeypatch.setattr(SETTINGS.get_model(), name, value)
    options = {name: value for name, value in other.items() if name == "weights_id"}
    assert new_linked(**stored(tmp_path), **options).lookup(keys) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_more_than_the_tier_is_in_storage(
    new_linked: NewLinked, tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fetched of a prompt does not push out what was found of it before: the rest is computed."""
    monkeypatch.setattr(SETTINGS, "_place_in", lambda _: (0, num_ranks))
    linked, keys = new_linked(num_pages=64, cpu_memory_bytes=8 * 4 * 2 * PAGE * 64, **stored(tmp_path)), keys_of(20)
    for first in range(0, 20, 4):
        assert linked.store(keys[first : first + 4], range(1, 5))
        assert linked.linker._caches["kv"].cache.storage.flush(10.0)
    found = linked.lookup(keys, "r")
    assert found == list(range(1, 9))
    assert linked.load(keys[:8], {"kv": list(range(20, 28))}) and linked.run()
    assert linked.content("kv", range(20, 28)) == linked.expected("kv", keys[:8], range(40, 48))


def test_a_reset_forgets(new_linked: NewLinked, tmp_path: Path) -> None:
    """What is in the CPU tier; and storage is left alone, as the weights may be others. The next process finds it."""
    linked, keys = new_linked(**stored(tmp_path)), keys_of(3)
    store_node(linked, keys)
    assert linked.load(keys, PAGES | {"kv": PAGES["kv"][:3]})
    linked.linker.reset()
    assert linked.lookup(keys) == [] and linked.linker.start_layer_wise_loading() == -1
    assert store_node(linked, keys) and linked.lookup(keys) == [1, 2, 3]
    linked.linker.close()
    assert new_linked(**stored(tmp_path)).lookup(keys) == [1, 2, 3]


def test_a_store_that_hangs_costs_its_time_alone(new_linked: NewLinked, tmp_path: Path) -> None:
    """A look-up waits for `prefetch_seconds` at most, once for a request, and goes on without."""
    first, keys = new_linked(**stored(tmp_path)), keys_of(3)
    store_node(first, keys)
    assert first.linker._caches["kv"].cache.storage.flush(10.0)
    first.linker.close()
    linked = new_linked(**stored(tmp_path), prefetch_seconds=0.2)
    pids = [status.pid for status in linked.linker._caches["kv"].cache.storage.statuses()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert linked.lookup(keys, rid="r") == [] == linked.lookup(keys, rid="r")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert linked.lookup(keys)[-1:] == [3]


def test_a_window_in_the_middle_of_a_stored_node(new_linked: NewLinked, tmp_path: Path) -> None:
    """Prompts that part there find it in a new process, where the node has the windows of all its pages; one that has
    windows behind its last pages alone is found at its end."""
    first, keys, other = new_linked("windows", **stored(tmp_path)), keys_of(6), keys_of(5, "another")
    assert first.store(keys[:5], [1, 2, 3, 4, 5], swa=(keys[:5], [1, 2, 3, 4, 5]))
    assert first.store(keys[5:], [6], swa=(keys[5:], [6]))
    assert first.store(other, [1, 2, 3, 4, 5], swa=(other[3:], [4, 5]))
    for cache in first.linker._caches.values():
        assert cache.cache.storage.flush(10.0)
    first.linker.close()
    linked = new_linked("windows", **stored(tmp_path))
    assert linked.lookup([*keys[:3], *keys_of(2, "a branch")]) == [1, 2, 3]
    assert linked.lookup(keys) == [1, 2, 3, 4, 5, 6]
    assert linked.lookup(other) == [5]
    assert linked.load(keys[:3], PAGES | {"kv": PAGES["kv"][:3]}) and linked.run()
    assert linked.content("swa", PAGES["swa"]) == linked.expected("swa", keys[1:3], [4, 5])
