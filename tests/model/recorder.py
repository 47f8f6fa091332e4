"""What the real code does to blocks while a story runs, event by event, for the model of one block to repeat."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from fastdeploy_cache.books.id_table import IdTable
from fastdeploy_cache.launch.faults.machine import Machine, SimulatedProcess
from fastdeploy_cache.launch.faults.scheduler import Actor
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask


class Event(NamedTuple):
    """One step of the real code. What a field means is the name's; those that it does not need are empty."""

    name: str
    client: str = ""
    rank: int = -1
    task: int = -1
    tier: str = ""
    ids: tuple[int, ...] = ()
    owners: tuple[int, int] = (-1, -1)
    sources: tuple[int, ...] = ()
    num_good: int = -1  # of the destinations, the leading ones that hold what they should


class Recorder:
    """Hears the real code, by the hooks of `tests.model.hooks`; knows what the last story did."""

    def __init__(self) -> None:
        self._machine: Machine | None = None
        self.lives: dict[int, list[Event]] = {}  # by the engine's process
        self.num_clients = 0  # numbers tell a client's processes and tasks from those of a store attached before
        self.spawners: dict[int, str] = {}  # by the thread that starts a client's processes
        self.begun: set[tuple[int, int]] = set()  # process, task: what lanes work on
        self.receives: dict[tuple[int, int], TransferTask] = {}  # by process and number
        self.unreached: set[tuple[int, int]] = set()  # flight, rank: it is being answered for
        self.keeping: list[Any] = []  # generations of trees that lose the GPU and keep their copies, by way of a reset

    def begin(self, machine: Machine) -> None:
        """A story begins on it."""
        self._machine, self.num_clients = machine, 0
        for known in (self.lives, self.spawners, self.begun, self.receives, self.unreached, self.keeping):
            known.clear()

    @property
    def actor(self) -> Actor | None:
        """Which thread is running now."""
        return self._machine.scheduler.current if self._machine is not None else None

    @property
    def process(self) -> SimulatedProcess | None:
        """Whose thread that is."""
        return self._machine.process if self._machine is not None else None

    def say(self, event: Event, process: SimulatedProcess | None = None) -> None:
        """Of whom it is follows from the process that runs now. What a dead process does has no effect."""
        process = process or self.process
        if process is None or process.is_dead:
            return
        engine = process if process.program == "engine" else process.parent
        if engine is not None and engine.program == "engine":
            self.lives.setdefault(engine.pid, []).append(event)


class HeardTable:
    """A pool's table of owners, which tells of every change."""

    def __init__(self, table: IdTable, tier: str, recorder: Recorder) -> None:
        self._table, self._tier, self._recorder = table, tier, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def take(self, num_blocks: int, owner: int) -> array[int]:
        """See `IdTable`."""
        ids = self._table.take(num_blocks, owner)
        self._recorder.say(Event("taken", tier=self._tier, ids=tuple(ids), owners=(0, int(owner))))
        return ids

    def move(self, ids: array[int], giver: int, taker: int) -> bool:
        """See `IdTable`."""
        is_done = self._table.move(ids, giver, taker)
        if is_done and giver != taker:
            self._recorder.say(Event("moved", tier=self._tier, ids=tuple(ids), owners=(int(giver), int(taker))))
        return is_done


def tiers_of(kind: TaskKind) -> tuple[str, str]:
    """Those of a task's sources and destinations."""
    if kind in (TaskKind.COPY, TaskKind.SEND, TaskKind.RECEIVE):
        return "gpu", "gpu"
    return ("gpu", "cpu") if kind is TaskKind.SWAP_OUT else ("cpu", "gpu" if kind is TaskKind.SWAP_IN else "cpu")
