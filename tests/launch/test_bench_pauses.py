"""The worst calls: what is noted of each, which pools are filled, and that all is found of a small one."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path

import pytest

from fastdeploy_cache.launch.bench import pause_tables
from fastdeploy_cache.launch.bench.pauses import (
    COLLECTION,
    LOCK,
    RESET,
    VERBS,
    Pool,
    PoolFigures,
    pauses_apart,
    pools_of,
)
from fastdeploy_cache.launch.bench.report import Report
from fastdeploy_cache.launch.bench.verb_times import STATISTICS, Collections, Stopwatch, TimedLock, Times


def test_mean_and_p99_are_of_kept_calls_and_the_worst_of_all() -> None:
    """Each block of a call excuses a microsecond of it."""
    times = Times()
    times.note(9_000_000, 8000, False)
    assert times.found() == {}
    for _ in range(199):
        times.note(1_000_000, 0, True)
    times.note(3_000_000, 0, True)
    assert times.found() == pytest.approx(dict(zip(STATISTICS, (1.01, 1.0, 9.0, 3.0), strict=True)))


def test_collections_are_told_apart() -> None:
    """A pass within a call counts as a pass, and its time is none of the call's."""
    with Collections() as collections:
        watch = Stopwatch(collections)
        watch.start()
        spent = collections.spent
        gc.collect()
        passed = collections.spent - spent
        took = watch.stop()
        assert passed > 0 and took >= 0
    gc.collect()
    assert collections.spent - spent == passed, "nobody listens any more"
    assert collections.times.found()["worst"] == pytest.approx(passed / 1e6)


def test_the_lock_tells_its_longest_hold_once() -> None:
    """It is a lock, and each answer is about the holds since the one before."""
    lock = TimedLock(Collections())
    assert lock.acquire()
    refused: list[bool] = []
    other = threading.Thread(target=lambda: refused.append(not lock.acquire(False)))
    other.start()
    other.join(10)
    assert refused == [True]
    lock.release()
    assert lock.take_longest() > 0
    assert lock.take_longest() == 0


def test_pools_of_too_many_runs_are_left_out() -> None:
    """By size and by length of the prompts; none is lost."""
    pools, left_out = pools_of([10_000, 1_000_000], 250_000)
    assert Pool(1_000_000, 4) in pools and left_out == [Pool(1_000_000, 1)]
    everything, nothing = pools_of([10_000, 1_000_000], 1_000_000)
    assert not nothing and set(everything) == {*pools, *left_out}
    assert len({(pool.name, pool.num_blocks) for pool in everything}) == len(everything)


def test_a_pool_that_misses_is_filled_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of both counts, name by name; a pool that misses nothing is filled once."""
    filled: list[Pool] = []
    noisy = Pool(640, 64)

    def fill(pool: Pool) -> PoolFigures:
        filled.append(pool)
        times = {verb: dict.fromkeys(STATISTICS, 1.0) for verb in (*VERBS, RESET, *((LOCK,) if pool.cpu_ratio else ()))}
        if pool == noisy:
            times["commit" if filled.count(pool) == 1 else "match"] = dict.fromkeys(STATISTICS, 30.0)
        return PoolFigures(times, 90.0)

    monkeypatch.setattr(pause_tables, "pauses_apart", fill)
    report = Report(tmp_path / "j")
    pause_tables.run_pauses(report, [640, 1280], 20)
    assert report.end()
    assert filled.count(noisy) == 2 and len(filled) == len(set(filled)) + 1
    found = json.loads((tmp_path / "j").read_text())
    reach = {entry["name"]: entry["value"] for entry in found["reach"]}
    assert reach["64 blocks, 640: any verb, ms"] == 1.0
    assert reach["64 blocks with a CPU tier, 1280: lock held, ms"] == 1.0


@pytest.mark.parametrize(("sizes", "judged"), [([640], None), ([640, 99_999], None), ([10_000, 100_000], 100_000)])
def test_bytes_are_judged_of_large_pools_alone(
    sizes: list[int], judged: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a small one what every process has counts for more than its blocks; the name of a promise has the size. One
    size alone will do."""
    times = {verb: dict.fromkeys(STATISTICS, 1.0) for verb in (*VERBS, RESET, LOCK)}
    monkeypatch.setattr(pause_tables, "pauses_apart", lambda _: PoolFigures(times, 1000.0))
    report = Report(tmp_path / "j")
    pause_tables.run_pauses(report, sizes, 250_000)
    assert report.end() is (judged is None)
    found = json.loads((tmp_path / "j").read_text())
    missed = [entry["name"] for entry in found["reach"] if not entry["ok"]]
    assert missed == [f"bytes per block, runs of {n}, pool of {judged}" for n in (64, 4, 1) if judged is not None]


@pytest.mark.processes
@pytest.mark.parametrize("pool", [Pool(640, 4), Pool(1280, 64, 2.0), Pool(1280, 64, policy="reuse")])
def test_all_is_found_of_a_small_pool(pool: Pool) -> None:
    """Every verb with every statistic; how long the lock is held where copies are made in the verbs."""
    times, bytes_per_block = pauses_apart(pool)
    assert set(times) == {*VERBS, RESET, COLLECTION, *((LOCK,) if pool.cpu_ratio else ())}
    for found in times.values():
        assert set(found) == set(STATISTICS)
        assert 0 < found["mean"] <= found["worst"] and 0 <= found["worst less 1 us a block"] <= found["worst"]
    assert bytes_per_block > 0
