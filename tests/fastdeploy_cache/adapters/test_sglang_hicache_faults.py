"""SGLang's HiCache over stores that fail: every failure is a miss, in time, and never wrong bytes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rigs.sglang_storage import Rank, indices_of, keys_of, starts_of
from tests.rigs.stand_in_sglang import MHATokenToKVPoolHost
from tests.rigs.troubled_store import Orders

pytestmark = pytest.mark.processes

NewRank = Callable[..., Rank]
Eventually = Callable[..., None]
HANG = {"hanging": 1}


class Trouble:
    """A store that does as ordered, and the calls that it has had."""

    def __init__(self, folder: Path) -> None:
        self.orders, self.record, self._folder = Orders(folder / "orders"), folder / "record", folder

    @property
    def options(self) -> dict[str, Any]:
        paths = {name: str(self._folder / name) for name in ("folder", "orders", "record")}
        return {"kind": "tests.rigs.troubled_store:TroubledStore", "options": paths}

    def num_calls(self) -> int:
        return len(self.record.read_text().splitlines()) if self.record.exists() else 0


@pytest.fixture
def trouble(tmp_path: Path) -> Trouble:
    return Trouble(tmp_path)


@pytest.fixture
def new_rank() -> Iterator[NewRank]:
    """Makes ranks that do not outlive the test."""
    ranks: list[Rank] = []

    def new(options: dict[str, Any], pool: Any = None, **more: Any) -> Rank:
        given = {"weights_id": "w1", "staging_bytes": 2**14, "breaker_failures": 1, **options, **more}
        ranks.append(Rank(given, pool))
        return ranks[-1]

    yield new
    for rank in ranks:
        rank.backend.close()
    ranks.clear()  # the last to know their memory


def test_a_damaged_page_is_a_miss(new_rank: NewRank, tmp_path: Path) -> None:
    """A flipped bit on the disk costs that page; those before it come, and it can be written again."""
    options = {"folder": str(tmp_path / "store"), "capacity_bytes": 2**24, "slab_bytes": 2**20}
    first, keys = new_rank(options), keys_of(3)
    pages = first.put(keys)
    first.backend.close()
    [slab] = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and pages[1] in path.read_bytes()]
    data = bytearray(slab.read_bytes())
    data[data.index(pages[1]) + 100] ^= 1
    slab.write_bytes(data)
    second = new_rank(options)
    assert second.backend.batch_exists(keys) == 3
    assert second.take(keys) == [pages[0], None, None]
    assert second.backend.batch_exists(keys) == 1
    assert second.put(keys) == second.take(keys)


def test_a_store_that_hangs_costs_one_call(new_rank: NewRank, trouble: Trouble, eventually: Eventually) -> None:
    """The call ends at its deadline; then the store is left alone, and is asked nothing more."""
    rank = new_rank(trouble.options, task_timeout_seconds=0.3, breaker_seconds=600)
    trouble.orders.give(**HANG)
    assert rank.backend.batch_exists(keys_of(2)) == 0
    eventually(lambda: not rank.pages._read_breaker.is_closed)
    eventually(lambda: rank.pages._client.available)
    num_calls = trouble.num_calls()
    assert rank.backend.batch_exists(keys_of(2)) == 0 and rank.take(keys_of(2)) == [None] * 2
    assert trouble.num_calls() == num_calls


@pytest.mark.parametrize("is_read", [True, False])
def test_a_store_that_works_again_is_used_again(
    new_rank: NewRank, trouble: Trouble, eventually: Eventually, is_read: bool
) -> None:
    """A probe finds out, for which no call of SGLang's waits."""
    rank, keys = new_rank(trouble.options, breaker_seconds=0.05), keys_of(2)
    pages = rank.put(keys)
    trouble.orders.give(failures=10**6)
    places = indices_of([0, 1])
    assert (rank.backend.batch_get_v1 if is_read else rank.backend.batch_set_v1)(keys, places) == [False] * 2
    trouble.orders.give()
    if is_read:
        eventually(lambda: rank.take(keys) == pages)
    else:
        eventually(lambda: rank.backend.batch_set_v1(keys_of(2, "other"), places) == [True] * 2)


@pytest.mark.parametrize("call", ["batch_exists", "batch_get_v1", "batch_set_v1"])
def test_a_process_killed_in_a_call(new_rank: NewRank, trouble: Trouble, eventually: Eventually, call: str) -> None:
    """The call is a miss, at once; a new process serves the next."""
    rank, keys = new_rank(trouble.options, breaker_failures=9), keys_of(2)
    rank.put(keys)
    num_calls = trouble.num_calls()
    trouble.orders.give(**HANG)
    arguments = [keys] if call == "batch_exists" else [keys_of(2, "new") if "set" in call else keys, indices_of([8, 9])]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(getattr(rank.backend, call), *arguments)
        eventually(lambda: trouble.num_calls() > num_calls)
        os.kill(rank.pid, signal.SIGKILL)
        assert answer.result(timeout=4.0) == (0 if call == "batch_exists" else [False] * 2)
    trouble.orders.give()
    eventually(lambda: rank.backend.batch_set_v1(keys, indices_of([0, 1])) == [True] * 2)
    assert rank.take(keys) == [rank.pool.page(start) for start in starts_of([0, 1])]


def test_a_late_answer_touches_no_page(new_rank: NewRank, trouble: Trouble, eventually: Eventually) -> None:
    """What comes after its call has gone is thrown away; the next call gets its own pages."""
    rank, keys = new_rank(trouble.options, task_timeout_seconds=0.6), keys_of(4)
    pages = rank.put(keys)
    trouble.orders.give(read_seconds=0.35)
    assert rank.take(keys[:2]) == [None] * 2
    trouble.orders.give()
    eventually(lambda: rank.take(keys[2:]) == pages[2:])


def test_a_call_ends_with_the_backend(new_rank: NewRank, trouble: Trouble, eventually: Eventually) -> None:
    """Closing it while a call waits makes that call a miss, and later ones, too."""
    rank, keys = new_rank(trouble.options), keys_of(2)
    rank.put(keys)
    num_calls = trouble.num_calls()
    trouble.orders.give(**HANG)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(rank.take, keys)
        eventually(lambda: trouble.num_calls() > num_calls)
        rank.backend.close()
        assert answer.result(timeout=4.0) == [None] * 2
    assert rank.take(keys) == [None] * 2 and rank.backend.batch_exists(keys) == 0
    assert rank.backend.batch_set_v1(keys, indices_of([0, 1])) == [False] * 2 and not rank.backend.clear()


def test_several_threads_get_their_own_pages(new_rank: NewRank, tmp_path: Path) -> None:
    """Four threads write, look up and read at the same time, in pieces, and no page is another's."""
    options = {"folder": str(tmp_path), "capacity_bytes": 2**24, "slab_bytes": 2**20}
    rank = new_rank(options, MHATokenToKVPoolHost(num_pages=256), staging_bytes=7 * 576)
    together = threading.Barrier(4)

    def use(thread: int) -> None:
        first, keys = 64 * thread, keys_of(16, f"prompt {thread}")
        together.wait(20.0)
        for turn in range(4):
            part = keys[4 * turn : 4 * turn + 4]
            pages = rank.put(part, first=first, seed=100 * thread + turn)
            assert rank.backend.batch_exists(keys) == 4 * turn + 4
            assert rank.take(part, first=first + 32) == pages

    with ThreadPoolExecutor(4) as threads:
        assert [each.result(timeout=60.0) for each in [threads.submit(use, thread) for thread in range(4)]]


def test_what_is_no_page_is_a_miss(new_rank: NewRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few places, none at all, or a host pool that raises: no exception comes out, and nothing is moved."""
    rank, keys = new_rank({"folder": str(tmp_path), "capacity_bytes": 2**24}), keys_of(2)
    rank.put(keys)
    before = rank.pool.fill(starts_of([0, 1]), seed=7)
    for places in (None, indices_of([0]), indices_of([0, 1])[:-1], indices_of([0, 1, 2])):
        assert rank.backend.batch_get_v1(keys, places) == rank.backend.batch_set_v1(keys, places) == [False] * 2
    monkeypatch.setattr(rank.pool, "get_page_buffer_meta", lambda _: 1 / 0)
    assert rank.backend.batch_get_v1(keys, indices_of([0, 1])) == [False] * 2
    assert [rank.pool.page(start) for start in starts_of([0, 1])] == before
    assert rank.backend.batch_exists([]) == 0 and rank.backend.batch_get_v1([], indices_of([])) == []
    assert rank.backend.batch_exists([1]) == 0  # type: ignore[list-item]


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("start", [4 * 64, 4 * 64 - 3, -4, -1, 10**9, -(10**9)])
def test_a_place_outside_the_pool_is_a_miss(
    new_rank: NewRank, tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str, start: int
) -> None:
    """SGLang computes addresses of any place: what is not in its pool is neither read nor written, and is said."""
    rank = new_rank({"folder": str(tmp_path), "capacity_bytes": 2**24}, MHATokenToKVPoolHost(layout=layout))
    rank.put(keys_of(2), first=62)  # the last pages are in it
    places = np.concatenate([indices_of([1]), np.arange(start, start + 4)])
    before = rank.pool.memory.copy()
    assert rank.backend.batch_get_v1(keys_of(2), places) == [False] * 2
    assert rank.backend.batch_set_v1(keys_of(2, "other"), places) == [False] * 2
    assert rank.backend.batch_exists(keys_of(2, "other")) == 0
    assert (rank.pool.memory == before).all()
    assert f"begins at place {start} of a host pool of 256" in caplog.text


def test_a_store_that_wants_tokens_is_not_used(new_rank: NewRank, trouble: Trouble) -> None:
    """SGLang names pages by hashes alone: such a store is asked nothing."""
    options = trouble.options
    rank = new_rank({**options, "options": {**options["options"], "needs_token_ids": "1"}})
    assert rank.backend.batch_exists(keys_of(2)) == 0
    assert rank.backend.batch_set_v1(keys_of(2), indices_of([0, 1])) == [False] * 2
    assert not trouble.num_calls()
