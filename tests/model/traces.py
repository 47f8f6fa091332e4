"""What a story did to each block, as traces that the model of one block can repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fastdeploy_cache.books.block_pool import CALLER, FREE, TASK, Owner
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.model.recorder import Event, tiers_of

MODEL, STEPS = (Path(__file__).with_name(name) for name in ("block.pml", "trace.pml"))
MAX_TASKS: Final = 8  # at once on one block
_CLIENTS: Final = {"transfer": 0, "storage": 1, "peer": 1}
_UP, _DEAD, _DOWN = "up", "dead", "down"
_CODES: Final = {
    name: int(code) for name, code in re.findall(r"^#define ([A-Z_]+) (\d+)", STEPS.read_text(), re.MULTILINE)
}
_OF_RANKS: Final = {
    "sent": "SENT_TO", "begun": "BEGUN", "left out": "LEFT_OUT", "finished": "FINISHED", "failed": "FAILED",
    "heard ok": "HEARD_OK", "heard bad": "HEARD_BAD", "unreached": "UNREACHED",
}  # fmt: skip
_SHORT: Final = {"finished": "failed", "heard ok": "heard bad"}  # of a block that a store did not bring
_OF_TASKS: Final = {"refused": "REFUSED", "added": "ADDED", "ended": "ENDED"}
_OF_PROCESSES: Final = {"died": ("DIED", _DEAD), "reaped": ("REAPED", _DOWN), "started": ("STARTED", _UP)}

Place = tuple[str, int]  # a tier and an id in it
Task = tuple[str, int]  # the client's name, and its number there
Trace = tuple[int, ...]


def _number(client: str) -> int:
    return _CLIENTS[client.partition("#")[0]]


def code(name: str, first: int = 0, second: int = 0) -> int:
    """A step, as a number of the model's traces."""
    return _CODES[name] * 64 + first * 8 + second


@dataclass
class _Block:
    """One block, and what the model has been told of it."""

    steps: list[int] = field(default_factory=list)
    owner: int = FREE
    tasks: dict[Task, int] = field(default_factory=dict)  # that are under way, by place among the model's
    past: dict[Task, int] = field(default_factory=dict)  # those that are over
    writer: Task | None = None
    unwanted: set[Task] = field(default_factory=set)
    is_callers: bool = False  # or was: from there on it is not followed
    is_crowded: bool = False  # more tasks than the model has places for, or of two stores: it is not repeated
    processes: dict[tuple[int, int], str] = field(default_factory=dict)  # where not up

    def say(self, name: str, first: int = 0, second: int = 0) -> None:
        if not self.is_callers:
            self.steps.append(code(name, first, second))

    def begin(self, task: Task, name: str) -> None:
        number = min(set(range(MAX_TASKS)).difference(self.tasks.values()), default=None)
        others = {name for name, _ in self.tasks if _number(name) == _number(task[0])} - {task[0]}
        if number is None or others:
            self.is_crowded = True
        else:
            self.tasks[task] = number
            self.say(name, number, _number(task[0]))

    def end(self, task: Task) -> None:
        """It is over, as the books see it. What a rank does for it later is told all the same, and refused."""
        if (number := self.tasks.pop(task, None)) is not None:
            self.past[task] = number

    def is_about(self, client: str) -> bool:
        return any(name == client for name, _ in self.tasks)

    def forget_loads(self) -> None:
        """The GPU is forgotten: what reads this block of the CPU tier for it reads for nobody."""
        for task, number in self.tasks.items():
            if _number(task[0]) == 0 and task not in (self.writer, *self.unwanted):
                self.unwanted.add(task)
                self.say("UNWANTED", number)

    def see(self, client: str, rank: int, state: str) -> None:
        """Tell the model how a process is, if it believes something else."""
        process = (_number(client), rank)
        believed = self.processes.get(process, _UP)
        ways = {
            (_UP, _DEAD): ("DIED",), (_UP, _DOWN): ("DIED", "REAPED"), (_DEAD, _DOWN): ("REAPED",),
            (_DEAD, _UP): ("REAPED", "STARTED"), (_DOWN, _UP): ("STARTED",), (_DOWN, _DEAD): ("STARTED", "DIED"),
        }  # fmt: skip
        for name in ways.get((believed, state), ()):
            self.say(name, *process)
        self.processes[process] = state


class _Life:
    """All blocks of one life of an engine."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.blocks: dict[Place, _Block] = {}
        self._tasks: dict[Task, tuple[list[Place], list[Place]]] = {}  # sources, destinations
        self._processes: dict[tuple[str, int], str] = {}

    def add(self, event: Event) -> None:
        """The next event."""
        task: Task = (event.client, event.task)
        if event.name in ("taken", "moved"):
            self._move(event)
        elif event.name == "forgot":
            for place, block in self.blocks.items():
                if place[0] == event.tier and block.owner != FREE:
                    block.say("FORGOT")
                elif event.tier == "gpu" and place[0] == "cpu":
                    block.forget_loads()
        elif event.name == "put":
            self._put(event, task)
        elif event.name in _OF_PROCESSES:
            self._process(event)
        elif task in self._tasks:
            self._step(event, task)

    def _move(self, event: Event) -> None:
        giver, taker = event.owners
        for block_id in event.ids:
            block = self.blocks.setdefault((event.tier, block_id), _Block())
            block.owner = taker
            block.is_callers |= CALLER in (giver, taker)
            if giver == FREE:
                block.say("TAKE", taker)
            elif taker == FREE:
                block.say("FREED", giver)
            else:
                block.say("HANDED", giver, taker)
            if giver == TASK and block.writer is not None:
                block.end(block.writer)
                block.writer = None

    def _put(self, event: Event, task: Task) -> None:
        tiers = tiers_of(TaskKind(event.tier))
        sources, destinations = (
            [(tier, block_id) for block_id in ids] for tier, ids in zip(tiers, (event.sources, event.ids), strict=True)
        )
        self._tasks[task] = sources, destinations
        for place in (*sources, *destinations):
            block = self.blocks[place]
            for rank in range(self._num_ranks):
                block.see(event.client, rank, self._processes.get((event.client, rank), _UP))
        for place in sources:
            self.blocks[place].begin(task, "PUT_READ")
        for place in destinations:
            self.blocks[place].begin(task, "PUT_WRITE")
            self.blocks[place].writer = task

    def _process(self, event: Event) -> None:
        _, state = _OF_PROCESSES[event.name]
        before = self._processes.get((event.client, event.rank), _UP)
        if event.name == "reaped" and before == _DOWN:  # it was killed before it had begun
            return
        self._processes[event.client, event.rank] = state
        for block in self.blocks.values():
            if block.is_about(event.client) and event.name == "reaped" and before == _UP:
                block.say("REAPED", _number(event.client), event.rank)  # without a death: the model refuses it
            elif block.is_about(event.client):
                block.see(event.client, event.rank, state)

    def _step(self, event: Event, task: Task) -> None:
        sources, destinations = self._tasks[task]
        for place in sources:
            self._tell(self.blocks[place], event, task, event.name)
        for number, place in enumerate(destinations):
            name = _SHORT.get(event.name, event.name) if 0 <= event.num_good <= number else event.name
            self._tell(self.blocks[place], event, task, name)
        if event.name in ("refused", "ended"):
            for place in sources:
                self.blocks[place].end(task)

    def _tell(self, block: _Block, event: Event, task: Task, name: str) -> None:
        number = block.tasks.get(task, block.past.get(task))
        if number is None:
            return
        if name in _OF_TASKS:
            block.say(_OF_TASKS[name], number)
        else:
            block.say(_OF_RANKS[name], number, event.rank)


def traces_of(events: Iterable[Event], num_ranks: int) -> Iterator[tuple[Place, Trace]]:
    """One for each block that was used in a life of an engine, with where it is, up to where a caller took it; none
    where more tasks used it at once than the model has places for, or those of two stores."""
    life = _Life(num_ranks)
    for event in events:
        life.add(event)
    for place, block in life.blocks.items():
        if not block.is_crowded:
            yield place, tuple(block.steps)


def in_words(trace: Trace) -> list[str]:
    """Each step, for who looks for what was refused."""
    names = {value: name for name, value in _CODES.items() if name in _EVENTS}
    owners = {"TAKE", "FREED", "HANDED"}
    words = []
    for step in trace:
        name, first, second = names[step // 64], step // 8 % 8, step % 8
        words.append(
            f"{name} {Owner(first).name} {Owner(second).name}" if name in owners else f"{name} {first} {second}"
        )
    return words


_EVENTS: Final = (
    "TAKE", "FREED", "HANDED", "FORGOT", "UNWANTED", "PUT_WRITE", "PUT_READ", "DIED", "REAPED", "STARTED",
    *_OF_RANKS.values(), *_OF_TASKS.values(),
)  # fmt: skip
