"""A rank's life, with a fake process, queue and clock: nothing waits, nothing sleeps."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.supervisor import Phase, RankSupervisor, RestartPolicy
from fastdeploy_cache.transfer_manager.process.words import RankSignal, RankState
from fastdeploy_cache.transfer_manager.task import Lane

CONFIG = TransferConfig(
    start_timeout_seconds=5.0,
    heartbeat_seconds=0.25,
    heartbeat_timeout_seconds=1.0,
    max_restarts=3,
    restart_window_seconds=60.0,
    restart_backoff_seconds=0.1,
)


class FakeProcess:
    """Dies when the test says so; a kill is only noted."""

    pidfd = -1

    def __init__(self, pid: int) -> None:
        self.pid, self.code, self.num_kills, self.closed = pid, None, 0, False

    def kill(self) -> None:
        self.num_kills += 1

    def reap(self) -> int | None:
        return self.code

    def log_tail(self) -> str:
        return f"the last words of {self.pid}"

    def close(self) -> None:
        assert self.code is not None and not self.closed
        self.closed = True


class FakeQueue:
    """Remembers what became of it."""

    def __init__(self, number: int) -> None:
        self.rank_fds, self.is_handed_over, self.closed = (number, -1), False, False

    def hand_over(self) -> None:
        self.is_handed_over = True

    def close(self) -> None:
        self.closed = True


def ready(supervisor: RankSupervisor, now: float) -> None:
    """Every lane says so."""
    for lane in Lane:
        supervisor.note_ready(lane, now)


@dataclass
class World:
    """What a supervisor made."""

    signal: RankSignal
    queues: list[FakeQueue] = field(default_factory=list)
    processes: list[FakeProcess] = field(default_factory=list)
    spawned: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    failure: Exception | None = None

    def new_queue(self) -> FakeQueue:
        self.queues.append(FakeQueue(len(self.queues)))
        return self.queues[-1]

    def spawn(self, rank: int, incarnation: int, queue_fds: tuple[int, ...]) -> FakeProcess:
        self.spawned.append((rank, incarnation, queue_fds))
        if self.failure is not None:
            raise self.failure
        self.processes.append(FakeProcess(1000 + incarnation))
        return self.processes[-1]

    def supervisor(self, config: TransferConfig = CONFIG) -> RankSupervisor:
        return RankSupervisor(4, config, self.signal, self.new_queue, self.spawn)  # type: ignore[arg-type]


@pytest.fixture
def world() -> Iterator[World]:
    """Fakes around real signal words."""
    array = SharedArray.create("signal", RankSignal.NUM_BYTES)
    made = World(RankSignal(array))
    yield made
    made.failure = None  # its traceback holds the frames that it was raised in
    del made.signal  # pytest still holds the world when the leak fixture looks
    array.close()


def die(supervisor: RankSupervisor, now: float, code: int = -9) -> None:
    assert isinstance(supervisor.process, FakeProcess)
    supervisor.process.code = code
    assert supervisor.reap(now)


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
    supervisor.tick(15.0)
    assert world.processes[0].num_kills == 0
    supervisor.tick(15.1)
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
    supervisor.tick(1.5)
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


def dead_supervisor(world: World) -> RankSupervisor:
    """One that is off since 3.0."""
    supervisor = world.supervisor()
    for now in (0.0, 1.0, 2.0, 3.0):
        supervisor.tick(now)
        die(supervisor, now)
    assert supervisor.phase is Phase.OFF and supervisor.is_off
    return supervisor


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
