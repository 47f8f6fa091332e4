"""A rank's life, with a fake process, queue and clock: nothing waits, nothing sleeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.supervisor import Phase, RestartPolicy
from fastdeploy_cache.transfer_manager.process.words import RankState
from tests.rigs.supervisor_world import CONFIG, World, dead_supervisor, die, new_world, ready


@pytest.fixture
def world() -> Iterator[World]:
    """Fakes around real signal words."""
    with new_world() as made:
        yield made


def test_delays_double_inside_the_window_and_start_over_outside() -> None:
    """Each death in the window doubles the pause; one that is long past is forgotten."""
    policy = RestartPolicy(CONFIG)
    assert [policy.delay_seconds(now) for now in (0.0, 1.0, 2.0)] == pytest.approx([0.1, 0.2, 0.4])
    assert policy.delay_seconds(61.5) == pytest.approx(0.2)


def test_too_many_deaths_in_a_window_end_it() -> None:
    """`max_restarts` deaths are tolerated, one more is not; deaths far apart are tolerated for ever."""
    policy = RestartPolicy(CONFIG)
    assert [policy.delay_seconds(0.0) is None for _ in range(4)] == [False, False, False, True]
    patient = RestartPolicy(CONFIG)
    assert all(patient.delay_seconds(61.0 * death) == 0.1 for death in range(1000))


def test_no_restart_allowed_gives_up_at_once() -> None:
    """`max_restarts` 0 means that the first death is the last."""
    assert RestartPolicy(TransferConfig(max_restarts=0)).delay_seconds(0.0) is None


def test_thousands_of_deaths_do_not_overflow() -> None:
    """Any number of restarts that the configuration allows can be counted."""
    policy = RestartPolicy(TransferConfig(max_restarts=5000, restart_backoff_seconds=0.0))
    assert {policy.delay_seconds(0.0) for _ in range(5000)} == {0.0}


def test_first_tick_starts_the_first_incarnation(world: World) -> None:
    """The process gets its rank, its incarnation and its ends of the queue; it is not ready before it says so."""
    supervisor = world.supervisor()
    world.signal.state = RankState.STOPPING  # words of a life before
    supervisor.tick(0.0)
    assert world.spawned == [(4, 1, (0, -1))]
    assert (supervisor.phase, world.signal.state) == (Phase.STARTING, RankState.STARTING)
    assert world.queues[0].is_handed_over
    ready(supervisor, 0.0)
    assert supervisor.phase is Phase.READY and supervisor.num_restarts == 0


def test_a_late_start_is_killed_once(world: World) -> None:
    """At the deadline, not before it, the process is killed; it is reaped before anything else happens."""
    supervisor = world.supervisor()
    supervisor.tick(10.0)
    supervisor.tick(14.9)
    assert world.processes[0].num_kills == 0
    supervisor.tick(15.0)
    supervisor.tick(16.0)
    assert world.processes[0].num_kills == 1 and supervisor.phase is Phase.STARTING
    assert not supervisor.reap(16.0), "not gone yet"
    die(supervisor, 16.0)
    assert supervisor.phase is Phase.DOWN and world.processes[0].closed and world.queues[0].closed
    for part in ("rank 4", "code -9", "not ready within 5.0 s", "the last words of 1001"):
        assert part in supervisor.last_failure


def test_a_rank_that_beats_lives(world: World) -> None:
    """Any movement of the counter, however slow the supervisor looks, is life."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    ready(supervisor, 0.0)
    for now in (0.9, 1.8, 2.7, 50.0, 99.0):
        world.signal.beat()
        supervisor.tick(now)
    assert world.processes[0].num_kills == 0


def test_a_rank_that_stops_beating_is_killed(world: World) -> None:
    """Silence for longer than the time-out, counted from the last movement seen."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    ready(supervisor, 0.0)
    world.signal.beat()
    supervisor.tick(0.5)
    supervisor.tick(1.4)
    assert world.processes[0].num_kills == 0
    supervisor.tick(1.6)
    assert world.processes[0].num_kills == 1
    die(supervisor, 1.7)
    assert "no sign of life for 1.1 s" in supervisor.last_failure


def test_a_slow_start_is_no_missing_heartbeat(world: World) -> None:
    """The time between start and ready does not count as silence for long after it."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    ready(supervisor, 50.0)
    supervisor.tick(50.2)
    assert world.processes[0].num_kills == 0


def test_restarts_wait_and_count_up(world: World) -> None:
    """Each incarnation has the next number and a queue of its own; the pause between them doubles."""
    supervisor = world.supervisor()
    now = 100.0
    supervisor.tick(now)
    for death, pause in enumerate((0.1, 0.2, 0.4), start=1):
        ready(supervisor, now)
        die(supervisor, now, code=1)
        assert supervisor.next_tick(now) == pytest.approx(pause)
        supervisor.tick(now + pause * 0.9)
        assert supervisor.phase is Phase.DOWN and supervisor.process is None
        now += pause + 1e-6
        supervisor.tick(now)
        assert supervisor.phase is Phase.STARTING and supervisor.num_restarts == death
    assert world.spawned == [(4, n, (n - 1, -1)) for n in (1, 2, 3, 4)]
    assert [queue.closed for queue in world.queues] == [True, True, True, False]


def test_too_many_deaths_switch_it_off(world: World) -> None:
    """After the last tolerated death it is off for ten minutes: no process, no queue, however often one looks."""
    supervisor = dead_supervisor(world)
    assert supervisor.next_tick(3.0) == CONFIG.off_retry_seconds
    supervisor.tick(602.9)
    assert len(world.processes) == 4 and all(process.closed for process in world.processes)
    assert supervisor.process is None and supervisor.queue is None


def test_one_that_is_off_has_one_try_in_ten_minutes(world: World) -> None:
    """Where that dies before it is ready, the next is ten minutes later; where it is ready, all is as at the start."""
    supervisor = dead_supervisor(world)
    supervisor.tick(603.0)
    assert supervisor.phase is Phase.STARTING and supervisor.is_off
    die(supervisor, 700.0)
    assert supervisor.phase is Phase.OFF and supervisor.next_tick(700.0) == CONFIG.off_retry_seconds
    supervisor.tick(1300.0)
    ready(supervisor, 1301.0)
    assert supervisor.phase is Phase.READY and not supervisor.is_off
    die(supervisor, 1400.0)
    assert supervisor.phase is Phase.DOWN and supervisor.next_tick(1400.0) == pytest.approx(0.1)


def test_one_that_is_off_starts_when_asked(world: World) -> None:
    """At once, and its deaths are forgotten; a rank that runs is left alone, and so is one without its arrays."""
    supervisor = dead_supervisor(world)
    supervisor.restart(4.0)
    supervisor.tick(4.0)
    assert supervisor.phase is Phase.STARTING and not supervisor.is_off
    supervisor.restart(5.0)
    assert supervisor.phase is Phase.STARTING and len(world.processes) == 5
    die(supervisor, 6.0)
    assert supervisor.phase is Phase.DOWN and supervisor.next_tick(6.0) == pytest.approx(0.1)
    supervisor.parked = True
    supervisor.restart(7.0)
    supervisor.tick(8.0)
    assert len(world.processes) == 5


@pytest.mark.parametrize("kind", [OSError, IPCError])
def test_a_failed_spawn_is_a_death(world: World, kind: type[Exception]) -> None:
    """What cannot be spawned is tried again with the same patience, on a fresh queue, and named."""
    world.failure = kind("no more of these")
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    assert supervisor.phase is Phase.DOWN and world.queues[0].closed
    assert "rank 4 cannot be spawned" in supervisor.last_failure and "no more of these" in supervisor.last_failure
    world.failure = None
    supervisor.tick(0.2)
    assert supervisor.phase is Phase.STARTING and world.spawned[-1] == (4, 2, (1, -1))


def test_a_retired_rank_is_not_restarted(world: World) -> None:
    """Asked to stop, its exit is the end; without a process the end is at once."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    ready(supervisor, 0.0)
    supervisor.retire()
    assert supervisor.phase is Phase.STOPPING
    die(supervisor, 1.0, code=0)
    supervisor.tick(1e9)
    assert supervisor.phase is Phase.OFF and len(world.processes) == 1
    never_started = world.supervisor()
    never_started.retire()
    assert never_started.phase is Phase.OFF


def test_ready_after_retirement_changes_nothing(world: World) -> None:
    """A late ready message cannot bring a stopping rank back to work."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    supervisor.retire()
    ready(supervisor, 0.0)
    assert supervisor.phase is Phase.STOPPING


def test_a_killed_rank_that_lingers_is_not_looked_at_all_the_time(world: World) -> None:
    """SIGKILL may take a while (a copy in the kernel): the process's descriptor tells, nobody spins until then."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    supervisor.tick(6.0)
    assert world.processes[0].num_kills == 1
    assert supervisor.next_tick(6.1) > 0


def test_what_has_ended_by_itself_was_not_killed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It is to be killed, for whatever reason, when it is gone already: no line says that we did, and its failure says
    how it ended; and no task is given to it meanwhile."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    ready(supervisor, 0.0)
    world.processes[0].code = -11
    supervisor.kill("task 7 passed its deadline")
    assert not supervisor.is_usable and supervisor.dying and world.processes[0].num_kills == 0
    assert supervisor.reap(0.1)
    assert "rank_killed" not in caplog.text and "killed because" not in supervisor.last_failure
    assert "exited with code -11" in supervisor.last_failure


def test_one_whose_queue_is_disconnected_may_end_by_itself(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A process that dies closes its queue before anybody can be told of its death: it is not killed for that at once,
    and gets no task. One that lives on without a queue is killed a moment later, once, and nobody spins."""
    supervisor = world.supervisor()
    supervisor.tick(0.0)
    ready(supervisor, 0.0)
    supervisor.cut_off(0.0)
    assert not supervisor.is_usable and 0 < supervisor.next_tick(0.0) <= 1
    supervisor.tick(0.1)
    die(supervisor, 0.2)
    assert "rank_killed" not in caplog.text and "killed because" not in supervisor.last_failure
    supervisor.tick(1.0)
    ready(supervisor, 1.0)
    assert supervisor.is_usable
    supervisor.cut_off(1.0)
    supervisor.tick(1.5)
    assert world.processes[1].num_kills == 0
    for now in (2.1, 2.2):
        supervisor.cut_off(now)
        supervisor.tick(now)
        assert world.processes[1].num_kills == 1 and supervisor.next_tick(now) > 0
    die(supervisor, 2.3)
    assert "killed because its queue is disconnected" in supervisor.last_failure
