"""A supervisor's world: fake processes and queues around real signal words, and how they die."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.supervisor import Phase, RankSupervisor
from fastdeploy_cache.transfer_manager.process.words import RankSignal
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
        self.words = f"the last words of {pid}"

    def kill(self) -> None:
        self.num_kills += 1

    def reap(self) -> int | None:
        return self.code

    def log_tail(self) -> str:
        return self.words

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


@contextmanager
def new_world() -> Iterator[World]:
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


def dead_supervisor(world: World) -> RankSupervisor:
    """One that is off since 3.0."""
    supervisor = world.supervisor()
    for now in (0.0, 1.0, 2.0, 3.0):
        supervisor.tick(now)
        die(supervisor, now)
    assert supervisor.phase is Phase.OFF and supervisor.is_off
    return supervisor
