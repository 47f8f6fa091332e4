"""A rank's life while there are no descriptors, no threads or no memory for its process: no death, and no end."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Iterator

import pytest

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.shortage import EXIT_SHORT
from fastdeploy_cache.transfer_manager.process.supervisor import Phase
from tests.rigs.supervisor_world import World, dead_supervisor, die, new_world, ready


@pytest.fixture
def world() -> Iterator[World]:
    """Fakes around real signal words."""
    with new_world() as made:
        yield made


def short(number: int = errno.EMFILE, *, wrapped: bool = False) -> Exception:
    """What the system says when there is no more of something; `wrapped` in an error of ours."""
    error: Exception = OSError(number, os.strerror(number))
    if wrapped:
        error, error.__cause__ = IPCError("no luck"), error
    return error


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN])
def test_a_shortage_is_no_death(world: World, number: int, wrapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    """However long it lasts: tried again after pauses that grow to ten seconds, said once, and counted as nothing."""
    supervisor = world.supervisor()
    world.failure = short(number, wrapped=wrapped)
    now, pauses = 0.0, list[float]()
    for _ in range(100):
        supervisor.tick(now)
        assert supervisor.phase is Phase.DOWN and supervisor.shortage == supervisor.last_failure != ""
        pauses.append(supervisor.next_tick(now))
        now += pauses[-1]
    assert pauses[:3] == pytest.approx([0.1, 0.2, 0.4]) and [pauses[-1], max(pauses)] == pytest.approx([10.0, 10.0])
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert all(queue.closed for queue in world.queues)
    world.failure = None
    supervisor.tick(now)
    assert (supervisor.phase, supervisor.incarnation, supervisor.num_restarts) == (Phase.STARTING, 1, 0)
    assert not supervisor.shortage
    ready(supervisor, now)
    die(supervisor, now + 1)
    assert supervisor.next_tick(now + 1) == pytest.approx(0.1), "the first death"
    world.failure = short()
    supervisor.tick(now + 2)
    assert supervisor.next_tick(now + 2) == pytest.approx(0.1), "the first pause again"
    world.failure = None
    supervisor.tick(now + 3)
    assert (supervisor.incarnation, supervisor.num_restarts) == (2, 1)


@pytest.mark.parametrize("num_deaths", [0, 1])
def test_a_process_that_is_short_in_its_start_has_not_died(
    world: World, num_deaths: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so by its status: tried again after pauses that grow to ten seconds, said once, and counted as nothing,
    with the reason that it gave; after that all is as after any other start."""
    supervisor = world.supervisor()
    for now in range(num_deaths):
        supervisor.tick(now)
        ready(supervisor, now)
        die(supervisor, now)
    now, pauses, num_before = 10.0, list[float](), len(world.queues)
    caplog.clear()
    for _ in range(100):
        supervisor.tick(now)
        assert supervisor.phase is Phase.STARTING and not supervisor.shortage
        assert (supervisor.incarnation, supervisor.num_restarts) == (num_deaths + 1, num_deaths)
        world.processes[-1].words = "event=cannot_start rank=4 reason=no more files"
        die(supervisor, now, EXIT_SHORT)
        assert supervisor.phase is Phase.DOWN and supervisor.shortage == "rank 4: no more files"
        assert world.queues[-1].closed and world.processes[-1].closed
        pauses.append(supervisor.next_tick(now))
        now += pauses[-1]
    assert pauses[:3] == pytest.approx([0.1, 0.2, 0.4]) and [pauses[-1], max(pauses)] == pytest.approx([10.0, 10.0])
    assert [record.msg.split()[0] for record in caplog.records if record.levelno >= logging.WARNING] == [
        "event=rank_waits"
    ]
    supervisor.tick(now)
    ready(supervisor, now)
    assert supervisor.phase is Phase.READY and "rank_waits_no_more" in caplog.text
    assert (supervisor.num_restarts, len(world.queues) - num_before) == (num_deaths, 101)
    die(supervisor, now, EXIT_SHORT)
    assert not supervisor.shortage and supervisor.next_tick(now) == pytest.approx(0.1), "once ready it is a death"


@pytest.mark.parametrize(
    ("words", "is_short"),
    [
        ("Fatal Python error: no site\nOSError: [Errno 23] Too many open files in system: 'site.py'", True),
        ("Traceback\nMemoryError", True),
        ("python: error while loading shared libraries: libany.so: cannot open shared object file: Error 24", True),
        ("python: error while loading shared libraries: libany.so: cannot open shared object file: Error 2", False),
        ("OSError: [Errno 24] Too many open files\nbye", False),
        ("Traceback\nOSError: [Errno 2] No such file or directory", False),
    ],
)
def test_a_program_that_is_short_before_it_runs_a_line_of_ours(world: World, words: str, is_short: bool) -> None:
    """Its status says nothing, but the last line of its log does; any other death is one."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    world.processes[-1].words = words
    die(supervisor, 1.0, 127 if "loading" in words else 1)
    shown = words.rpartition("\n")[2] if is_short else words  # what waits is told in one line
    assert bool(supervisor.shortage) is is_short and shown in supervisor.last_failure
    assert "\n" not in supervisor.shortage


def test_one_that_is_off_and_short_in_its_start_stays_so(world: World) -> None:
    """It goes on trying, and is off until it has been ready."""
    supervisor = dead_supervisor(world)
    supervisor.tick(603.0)
    die(supervisor, 604.0, EXIT_SHORT)
    assert supervisor.phase is Phase.OFF and supervisor.is_off and supervisor.next_tick(604.0) == pytest.approx(0.1)
    supervisor.tick(605.0)
    ready(supervisor, 606.0)
    assert supervisor.phase is Phase.READY and not supervisor.is_off


def test_a_shortage_names_its_limit(world: World) -> None:
    """Of open files the value that counts for this process, and what to do."""
    supervisor = world.supervisor()
    world.failure = short()
    supervisor.tick(0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"may have {soft} open files" in supervisor.shortage and f"hard one is {hard}" in supervisor.shortage
    assert "ulimit -n" in supervisor.shortage


def test_one_that_is_off_stays_so_in_a_shortage(world: World) -> None:
    """Its slow try meets one: it goes on trying, and is off until it has been ready."""
    supervisor = dead_supervisor(world)
    world.failure = short()
    supervisor.tick(603.0)
    assert supervisor.phase is Phase.OFF and supervisor.is_off and supervisor.next_tick(603.0) == pytest.approx(0.1)
    world.failure = None
    supervisor.tick(604.0)
    assert supervisor.phase is Phase.STARTING and supervisor.is_off
