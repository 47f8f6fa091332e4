"""Ranks die, hang and never start: tasks end, bytes stay, the client comes back or says why not."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fastdeploy_cache.errors import RankStartError
from fastdeploy_cache.ipc import codec
from fastdeploy_cache.ipc.codec import encode
from fastdeploy_cache.transfer_manager.client import ProcessHealth
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.process import callbacks, io_thread
from fastdeploy_cache.transfer_manager.process.child import ChildProcess
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult
from tests.rigs.answers import Answers, task
from tests.rigs.big_client import ALL, big_client
from tests.rigs.process_ends import SECONDS, is_gone, pids, wait_exit, watched
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes

NewClient = Callable[..., tuple[RankClient, Answers]]
OUT, IN = TaskKind.SWAP_OUT, TaskKind.SWAP_IN


def arrays(client: RankClient, rank: int) -> list[np.ndarray]:
    return [array for layer in client.kv_views(rank) for array in layer.values()]


def fill(client: RankClient, tp_size: int) -> list[list[np.ndarray]]:
    """Distinct bytes on every rank; returns copies."""
    for rank in range(tp_size):
        noise = np.random.default_rng(rank)
        for array in arrays(client, rank):
            array[:] = noise.integers(0, 1000, array.shape)
    return [[array.copy() for array in arrays(client, rank)] for rank in range(tp_size)]


def kill_rank(client: RankClient, rank: int) -> None:
    """Kill it and return when it has ended; the client may not have noticed yet."""
    with watched(pids(client)[rank]) as pidfd:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert wait_exit(pidfd)


def test_a_killed_rank_fails_its_tasks_and_comes_back(new_client: NewClient, eventually: Callable[..., None]) -> None:
    """Tasks in flight fail without waiting for their deadline, and the next incarnation takes new ones."""
    client, answers = new_client(tp_size=3, task_timeout_seconds=1000.0)
    before = pids(client)
    stopped(before[1])
    for number in range(5):
        client.submit(task(number, OUT, [number], [number], timeout_seconds=1000.0))
    eventually(lambda: [flight.waiting for flight in client._processes.io.tasks.flights.all()] == [{1}] * 5)
    os.kill(before[1], signal.SIGKILL)
    for result in answers.wait(5):
        assert "rank 1 exited with code -9" in str(result.error)
        assert {r.rank for r in result.ranks} == {0, 1, 2}
        assert all((r.error is None) == (r.rank != 1) for r in result.ranks)
    assert client.wait_ready(SECONDS)
    after = pids(client)
    assert [after[0], after[2]] == [before[0], before[2]] and after[1] != before[1]
    assert [status.num_restarts for status in client.statuses()] == [0, 1, 0]
    client.submit(task(9, OUT, [0], [0]))
    assert answers.wait(6)[-1].error is None and len(answers.now()) == 6


def test_cpu_blocks_survive_a_ranks_death(new_client: NewClient, eventually: Callable[..., None]) -> None:
    """What was swapped out before is swapped in by the next incarnation, byte for byte; GPU blocks stay as well."""
    client, answers = new_client(tp_size=2)
    wanted = fill(client, 2)
    gpu, cpu = [1, 5, 6, 7, 2], [9, 20, 21, 0, 4]
    client.submit(task(1, OUT, gpu, cpu))
    assert answers.wait(1)[0].error is None
    for rank in range(2):
        for array in arrays(client, rank):
            array[gpu] = -1
    for rank, num_restarts in ((0, 1), (1, 1), (0, 2)):
        kill_rank(client, rank)
        eventually(lambda r=rank, n=num_restarts: client.statuses()[r].num_restarts == n)
        assert client.wait_ready(SECONDS)
    client.submit(task(2, IN, gpu, cpu, timeout_seconds=SECONDS))
    assert answers.wait(2)[1].error is None
    for rank in range(2):
        assert all(np.array_equal(array, w) for array, w in zip(arrays(client, rank), wanted[rank], strict=True))


def test_a_stopped_rank_is_reaped_before_its_task_is_answered(new_client: NewClient) -> None:
    """Past its deadline a rank is killed; the answer, which frees the ids, comes only when no late write can."""
    gone: list[bool] = []
    client, answers = new_client(tp_size=2)
    before = pids(client)
    with watched(before[0]) as pidfd:
        listen = client._processes.io.callbacks.on_result

        def note(result: TransferResult) -> None:
            gone.append(is_gone(pidfd))
            listen(result)

        client._processes.io.callbacks.on_result = note
        stopped(before[0])
        client.submit(task(1, OUT, [0], [0], timeout_seconds=1.0))
        client.submit(task(2, OUT, [1], [1], timeout_seconds=1.0))
        results = answers.wait(2)
        client._on_result = listen
    assert gone == [True, True]
    assert all("passed its deadline" in str(result.error) for result in results)
    assert client.wait_ready(SECONDS) and pids(client)[0] != before[0] and pids(client)[1] == before[1]


def test_an_idle_stopped_rank_is_replaced(new_client: NewClient, eventually: Callable[..., None]) -> None:
    """No task needs to be lost to find out: the heartbeat stops, the rank is killed and replaced."""
    client, answers = new_client(tp_size=2, heartbeat_seconds=0.25, heartbeat_timeout_seconds=1.0)
    before = pids(client)
    stopped(before[1])
    with watched(before[1]) as pidfd:
        assert wait_exit(pidfd)
    eventually(lambda: client.statuses()[1].num_restarts == 1 and client.available)
    assert "no sign of life" in client._processes.io.ranks[1].last_failure
    client.submit(task(1, OUT, [0], [0]))
    assert answers.wait(1)[0].error is None


def test_a_dead_rank_is_no_zombie(new_client: NewClient, eventually: Callable[..., None]) -> None:
    """Each dead incarnation is reaped at once, its queue and descriptors go (the leak fixture counts them)."""
    client, _ = new_client(tp_size=1, max_restarts=10)
    num_handles = len(list(Path("/proc/self/fd").iterdir()))
    for death in range(1, 4):
        with watched(pids(client)[0]) as pidfd:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            eventually(lambda fd=pidfd: is_gone(fd))
        eventually(lambda n=death: client.available and client.statuses()[0].num_restarts == n)
    eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= num_handles)


def test_a_task_while_a_rank_is_down_is_refused_at_once(new_client: NewClient, eventually: Callable[..., None]) -> None:
    """Between death and return nothing is queued for later: the caller hears `not now`."""
    client, answers = new_client(tp_size=2, restart_backoff_seconds=1000.0)
    kill_rank(client, 0)
    eventually(lambda: not client.available)
    client.submit(task(1, OUT, [0], [0], timeout_seconds=1000.0))
    assert [result.error for result in answers.now()] == ["rank 0: the ranks cannot take a task now"]
    eventually(lambda: [status.up for status in client.statuses()] == [False, True])


def test_too_many_deaths_switch_the_client_off(new_client: NewClient, eventually: Callable[..., None]) -> None:
    """After `max_restarts` deaths in the window no more ranks start; tasks are still answered."""
    client, answers = new_client(tp_size=2, max_restarts=2)
    for num_restarts in (0, 1, 2):
        eventually(lambda n=num_restarts: client.available and client.statuses()[1].num_restarts == n)
        kill_rank(client, 1)
    eventually(lambda: client._processes.io.ranks[1].phase.value == "off")
    assert [status.state for status in client.statuses()] == [ProcessHealth.READY, ProcessHealth.OFF]
    client.submit(task(1, OUT, [0], [0]))
    assert answers.wait(1)[0].error is not None
    assert not client.available and client.statuses()[1].pid is None


def test_a_rank_that_cannot_be_spawned_fails_the_start(new_client: NewClient, tmp_path: Path) -> None:
    """A log folder that is a file: the start says which rank and why, and no process is left."""
    (tmp_path / "log").write_text("a file")
    with pytest.raises(RankStartError, match=r"start of 2 ranks failed: rank \d cannot be spawned.*File exists"):
        new_client(tp_size=2, log_dir=str(tmp_path / "log"))


@pytest.mark.parametrize("max_restarts", [5, 0])
def test_a_rank_that_dies_at_start_fails_it_with_its_log(
    new_client: NewClient, rank_code: Callable[[str], None], max_restarts: int
) -> None:
    """Rank, exit code and the end of its log are in the message, well before the deadline."""
    rank_code("raise SystemExit('this installation is broken')")
    with pytest.raises(RankStartError) as failure:
        new_client(tp_size=2, start_timeout_seconds=1000.0, max_restarts=max_restarts)
    for part in ("rank ", "exited with code 1", "this installation is broken"):
        assert part in str(failure.value)


def test_a_log_level_that_is_none_fails_the_start(new_client: NewClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has it from the engine's environment: the start says which variable, and what it may be."""
    monkeypatch.setenv("FASTDEPLOY_CACHE_LOG_LEVEL", "loud")
    with pytest.raises(RankStartError, match="'loud' by FASTDEPLOY_CACHE_LOG_LEVEL; use debug, info, warning or error"):
        new_client(tp_size=1)


def test_a_rank_that_never_gets_ready_is_killed_at_the_deadline(
    new_client: NewClient, rank_code: Callable[[str], None]
) -> None:
    """A start that hangs ends at its deadline with what the rank had said until then; no process is left."""
    rank_code("import signal\nprint('importing for ever', flush=True)\nsignal.pause()\n")
    with pytest.raises(RankStartError) as failure:
        new_client(tp_size=2, start_timeout_seconds=1.0)
    for part in ("exited with code -9", "not ready within 1.0 s", "importing for ever"):
        assert part in str(failure.value)


def test_stop_ends_a_stopped_rank_and_answers_what_it_held(new_client: NewClient) -> None:
    """A rank that cannot hear the request to stop is killed; its task is answered before `stop` returns."""
    client, answers = new_client(tp_size=2, stop_timeout_seconds=0.2, task_timeout_seconds=1000.0)
    before = pids(client)
    with watched(before[0]) as first, watched(before[1]) as second:
        stopped(before[0])
        client.submit(task(1, OUT, [0], [0], timeout_seconds=1000.0))
        client.stop()
        assert is_gone(first) and is_gone(second)
    assert len(answers.of(1)) == 1 and answers.of(1)[0].error is not None


def test_a_callback_that_raises_costs_one_task(new_client: NewClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that all tasks need goes on: the ranks are the same ones, and every later task is answered."""
    said: list[str] = []
    monkeypatch.setattr(callbacks.logger, "exception", lambda text, *values: said.append(text % values))
    client, answers = new_client(tp_size=2)
    before = pids(client)
    told = client._processes.io.callbacks.on_result

    def broken(result: TransferResult) -> None:
        told(result)
        if result.task.task_id == 0:
            raise RuntimeError("the caller's books are broken")

    client._processes.io.callbacks.on_result = broken
    for number in range(4):
        client.submit(task(number, OUT, [number], [number]))
    answers.wait(4)
    assert [result.error for result in answers.now()] == [None] * 4
    assert client.available and pids(client) == before and client._processes.io.callbacks.num_failed == 1
    assert said == ["event=callback_failed num_failures=1"]


def test_a_close_cancels_what_no_rank_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of queued copies would stand before the stop: ranks end by themselves, and every task is answered."""
    killed: list[int] = []
    kill = ChildProcess.kill
    monkeypatch.setattr(ChildProcess, "kill", lambda process: (killed.append(process.pid), kill(process)))
    with big_client(max_tasks_in_flight=256) as (client, answers):
        for number in range(250):
            client.submit(task(number, OUT, list(ALL), list(ALL), timeout_seconds=1000.0))
        client.stop()
        errors = [result.error for result in answers.now()]
    assert len(errors) == 250 and not killed
    assert any(error is not None and "cancelled" in error for error in errors)


def test_a_setpriv_that_does_not_know_the_option_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    """An old one would end every rank with its own usage message."""
    (tmp_path / "setpriv").write_text("#!/bin/sh\necho usage; exit 1\n")
    (tmp_path / "setpriv").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    client, _ = new_client(tp_size=1)
    assert client.available


def test_a_setup_larger_than_a_pipe_holds_nobody() -> None:
    """It is handed over in memory: the thread that all ranks need does not wait until a process reads."""
    layout = KVLayout(num_layers=4000, num_kv_heads=1, head_dim=2, dtype="float16").for_rank(1, 4)
    client, answers = RankClient(TransferConfig(), layout, 2, 2), Answers()
    client.start(answers)
    try:
        assert len(encode(client.kv_handle(0))) > 2**16, "it would fit into a pipe"
        client.submit(task(1, OUT, [0], [0]))
        answers.wait(1)
        assert answers.now()[0].error is None
    finally:
        client.stop()


def test_a_rank_that_lingers_after_its_kill_makes_nobody_spin(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a killed rank is still ending (in the kernel, say), the I/O thread sleeps until its descriptor tells."""
    client, answers = new_client(tp_size=2)
    killed, kill = threading.Event(), ChildProcess.kill
    monkeypatch.setattr(ChildProcess, "kill", lambda process: killed.set())
    old = pids(client)[0]
    stopped(old)
    client.submit(task(1, OUT, [0], [0], timeout_seconds=0.01))
    assert killed.wait(SECONDS)
    assert client._processes.io._next_timeout() > 0.1
    monkeypatch.setattr(ChildProcess, "kill", kill)
    os.kill(old, signal.SIGKILL)
    assert answers.wait(1)[0].error is not None


def test_a_rank_that_answers_as_another_is_replaced(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """An answer counts for the rank that gives it only; one in another's name costs a process, and the task."""
    client, answers = new_client(tp_size=1)
    (before,) = pids(client)

    def decode_as_another_once(data: bytes, message_type: object) -> object:
        message = codec.decode(data, message_type)
        monkeypatch.setattr(io_thread, "decode", codec.decode)
        return msgspec.structs.replace(message, result=dataclasses.replace(message.result, rank=7))

    monkeypatch.setattr(io_thread, "decode", decode_as_another_once)
    client.submit(task(1, OUT, [0], [0]))
    (result,) = answers.wait(1)
    assert "answers as rank 7" in str(result.error)
    eventually(lambda: client.available)
    assert pids(client) != [before]


def test_a_rank_that_talks_nonsense_is_replaced(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """A message that cannot be read costs that rank its process, not the client its thread."""
    client, answers = new_client(tp_size=1)
    (before,) = pids(client)
    nonsense = [True]

    def decode_nonsense_once(data: bytes, message_type: object) -> object:
        return codec.decode(b"nonsense" if nonsense and nonsense.pop() else data, message_type)

    monkeypatch.setattr(io_thread, "decode", decode_nonsense_once)
    client.submit(task(1, OUT, [0], [0]))
    (result,) = answers.wait(1)
    assert "what is no message" in str(result.error)
    eventually(lambda: client.available)
    assert pids(client) != [before]


@pytest.mark.parametrize("reader", ["engine", "rank"])
def test_a_garbled_length_costs_a_process(new_client: NewClient, eventually: Callable[..., None], reader: str) -> None:
    """Neither end waits for a message of terabytes: the rank is replaced, the failure says what was seen, and tasks go
    on."""
    client, answers = new_client(tp_size=1, task_timeout_seconds=1000.0)
    (before,), (rank,) = pids(client), client._processes.io.ranks
    lane = rank.queue._lanes[IN.lane]
    if reader == "rank":
        lane.end.sendall(b"\xff" * 8)
    else:
        lane.inbox.data += b"\xff" * 8  # before the rank's answer
        client.submit(task(1, IN, [0], [0], timeout_seconds=1000.0))
    eventually(lambda: client.available and pids(client) != [before])
    assert "of 18446744073709551615 bytes is announced" in rank.last_failure
    client.submit(task(2, IN, [0], [0], timeout_seconds=SECONDS))
    eventually(lambda: answers.now() and answers.now()[-1].task.task_id == 2)
    assert answers.now()[-1].error is None
