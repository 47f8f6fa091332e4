"""What goes wrong around FastDeploy's transfer processes, and does not here; numbers as in the other file of faults."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.errors import RankStartError
from fastdeploy_cache.transfer_manager.device import presence
from tests.rigs.fastdeploy_engine import (
    PROMPT,
    SUFFIX,
    Kernel,
    Task,
    launch,
    new_config,
    push_out,
    serve_v1,
    with_cpu,
)

pytestmark = pytest.mark.processes


def test_10_11_a_hung_rank_stops_nobody_else_and_no_wait_is_endless() -> None:
    """One request waits for a load of a stopped rank: meanwhile another is served, and the first ends as a miss."""
    manager = with_cpu(16, 16)
    serve_v1(manager, Task("a", PROMPT), [1], Kernel(manager))
    push_out(manager)
    serve_v1(manager, Task("b", list(range(9))), [1], Kernel(manager))
    assert manager.cache.wait_for_transfers(10)
    pid = manager.cache.stats().ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    late, answers = Task("late", PROMPT), []
    waiting = threading.Thread(target=lambda: answers.append(manager.request_match_blocks(late, 4)))
    waiting.start()
    assert serve_v1(manager, Task("c", list(range(9))), [1]) == 8, "served while the other waits"
    waiting.join(10)
    assert not waiting.is_alive() and answers[0][:2] == ([], 0)
    manager.release_block_ids(late)
    os.kill(pid, signal.SIGKILL)
    manager.close()


def test_12_a_failing_start_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without a GPU: its own message is in the error, in time; strange paths are no shell code."""
    folder = tmp_path / "logs; touch oops"
    folder.mkdir()
    made = PrefixCacheManager(new_config(8, 8, transfer={"device": "cuda", "log_dir": str(folder)}), 1)
    if (Path("/dev/nvidiactl")).exists():
        pytest.skip("a GPU is here: the rank would start")
    made.parts.current.their_config.cache_config.fastdeploy_cache["transfer"]["kv_owner"] = "transfer"
    monkeypatch.setattr(presence, "check_presence", lambda device: None)  # else no rank is tried
    with pytest.raises(RankStartError, match="rank 0"):
        launch(made, SUFFIX)
    assert not list(tmp_path.glob("**/oops")) and not list(Path("/dev/shm").glob(f"*.{SUFFIX}"))
    made.close()


def test_16_a_torn_store_is_a_miss_and_every_read_is_answered(tmp_path: Path) -> None:
    """Bytes of the store are overwritten: the next engine computes, and nobody waits."""
    store = {"kind": "file", "folder": str(tmp_path), "weights_id": "w", "admission": "all", "capacity_bytes": 10**7}
    manager = with_cpu(16, 16, storage=store)
    serve_v1(manager, Task("a", PROMPT), [1], Kernel(manager))
    assert manager.cache.storage.flush(10)
    manager.close()
    for slab in tmp_path.rglob("*slab*"):
        if slab.is_file():
            with slab.open("r+b") as file:
                file.write(b"\x5a" * 4096)
    reader = with_cpu(16, 16, storage=store)
    task = Task("b", PROMPT)
    ids, num_tokens, _ = reader.request_match_blocks(task, 4)
    assert num_tokens < 20
    Kernel(reader).check(PROMPT, ids, len(ids))
    reader.release_block_ids(task)
    reader.close()


def test_17_18_a_dying_rank_answers_every_request() -> None:
    """Eight threads load from two ranks, one of which is killed: each gets an answer, right bytes or a miss."""
    manager = with_cpu(64, 64, tp_size=2)
    prompts = [[number, *range(100, 120)] for number in range(8)]
    kernel = Kernel(manager)
    for number, prompt in enumerate(prompts):
        serve_v1(manager, Task(f"r{number}", prompt), [1], kernel)
    push_out(manager)
    pid = manager.cache.stats().ranks[1].pid
    assert pid is not None
    answers: list[int] = []

    def ask(number: int) -> None:
        task = Task(f"again{number}", prompts[number])
        if number == 3:
            os.kill(pid, signal.SIGKILL)
        ids, num_tokens, _ = manager.request_match_blocks(task, 4)
        kernel.check(prompts[number], ids, len(ids))
        answers.append(num_tokens)
        manager.release_block_ids(task)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 8 and set(answers) <= {0, 20}
    assert manager.cache.ranks.wait_ready(10)
    manager.cache.check_invariants()
    manager.close()


def test_19_pausing_among_traffic_always_comes_to_rest() -> None:
    """Twenty pauses among swaps from another thread: each returns, with nothing in flight, and drops no task."""
    manager = with_cpu(8, 32)
    going, served = threading.Event(), []
    going.set()
    kernel = Kernel(manager)

    def traffic() -> None:
        number = 0
        while going.is_set():
            number += 1
            try:
                served.append(serve_v1(manager, Task(f"t{number}", [number % 5, *range(20)]), [1], kernel))
            except AssertionError as error:
                if "no room" not in str(error):
                    raise
                manager.cache.wait_for_transfers(5)

    thread = threading.Thread(target=traffic)
    thread.start()
    for _ in range(20):
        assert manager.control("pause") == (200, "paused")
        assert manager.cache.stats().num_transfers_in_flight == 0
        assert manager.control("resume") == (200, "running")
    going.clear()
    thread.join(20)
    assert served
    manager.cache.check_invariants()
    manager.close()


_ENGINE = """
import sys, time
from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from tests.rigs.fastdeploy_engine import launch, new_config
manager = PrefixCacheManager(new_config(8, 8), 2)
print(*[p.pid for p in launch(manager, sys.argv[1], 2)], flush=True)
sys.stdin.read()
"""


def test_23_no_rank_outlives_its_engine() -> None:
    """The engine is killed: its ranks end at once, and the next engine takes its signals' names over."""
    suffix = f"{SUFFIX}orphans"
    command = [sys.executable, "-c", _ENGINE, suffix]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert engine.stdout is not None and engine.stdin is not None
    descriptors = [os.pidfd_open(int(pid)) for pid in engine.stdout.readline().split()]
    engine.kill()
    engine.wait(10)
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(10_000), "a rank is still there"
        os.close(descriptor)
    engine.stdout.close()
    engine.stdin.close()
    manager = PrefixCacheManager(new_config(8, 8), 1)
    launch(manager, suffix)
    manager.close()
    assert not list(Path("/dev/shm").glob(f"*.{suffix}"))


def test_24_a_worker_clears_one_engine_and_not_its_neighbour() -> None:
    """CLEARING is answered with CLEARED, UPDATING with NORMAL, by the engine of that suffix alone."""
    managers = [PrefixCacheManager(new_config(8, 8, transfer_client="inline"), 1, "mixed", dp) for dp in range(2)]
    for number, manager in enumerate(managers):
        launch(manager, f"{SUFFIX}dp{number}")
        serve_v1(manager, Task("a", PROMPT), [1], Kernel(manager))
    words = managers[0].prefix_tree_status_signal.value
    for asked, answer in ((-1, -2), (1, 0)):
        words[0] = asked
        signals = managers[0].parts.launcher._words
        assert signals is not None
        assert signals._words["prefix_tree_status"].wait_change(0, asked, 5) == answer
        assert managers[0].node_map == {} and len(managers[1].node_map) == 5
        serve_v1(managers[0], Task("b", PROMPT), [1], Kernel(managers[0]))
    assert [int(w) for w in managers[0].parts.launcher._words.signal("cache_ready_signal").value] == [1]  # type: ignore[union-attr]
    for manager in managers:
        manager.close()
