"""The world of a story: its engines on one simulated machine, the faults that come, and what is found wrong."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.launch.faults.computed import Computed
from fastdeploy_cache.launch.faults.engine import TASK_SECONDS, StoryEngine
from fastdeploy_cache.launch.faults.fault_kinds import FAULTS
from fastdeploy_cache.launch.faults.machine import SIGKILL_STATUS, SimulatedProcess
from fastdeploy_cache.launch.faults.scheduler import FOREVER
from fastdeploy_cache.launch.faults.simulated_host import SimulatedHost
from fastdeploy_cache.launch.faults.simulation import Simulation
from fastdeploy_cache.launch.faults.stage import Findable, Host, Watch, file_store
from fastdeploy_cache.launch.faults.story import Fault, Settings, Story
from fastdeploy_cache.peers.absent import NoRoad
from fastdeploy_cache.storage.tier import StorageTier

_VERB_SECONDS = 0.5  # beside what a verb was given to wait: a turn of others, and steps of everybody
_START_AGAIN_SECONDS = 3.0
_MOST_STEPS_LATE, _LOOK_EVERY = 2000, 4  # of a fault that waits for a phase
_MOST_STEPS = 1_000_000
_STARTED = {"transfer_manager": "rank"}


@dataclass(frozen=True)
class StoryFinding:
    """Something is wrong. `kind` is the same for the same defect; `text` is of this run."""

    kind: str
    text: str
    trace: str = ""


@dataclass
class Outcome:
    """What a run came to."""

    findings: list[StoryFinding]
    num_steps: int
    trace: int
    counts: Counter[str]
    met: Counter[tuple[str, str]]
    lines: list[str] = field(default_factory=list)


class World:
    """One run of a story."""

    def __init__(self, story: Story, watches: Sequence[Callable[[PrefixCacheManager], Watch]] = ()) -> None:
        self.story, self.watches = story, watches
        self.simulation = Simulation(story.seed)
        lines = self.simulation.failing_lines
        lines.memory_error_share = story.settings.memory_error_share
        lines.outside_error_share = story.settings.outside_error_share
        self.host: Host = SimulatedHost(self.simulation)
        self.findings: list[StoryFinding] = []
        self.counts = Counter[str]()
        self.met = Counter[tuple[str, str]]()  # which faults met which phases
        self.committed = self._computed(is_kept=True)  # of engines that hand blocks to each other
        self.engines = [StoryEngine(self, number, story.settings, users) for number, users in enumerate(story.users)]
        self.stalls: list[tuple[float, float]] = []  # when faults have held threads or processes of engines
        self._faults = sorted(story.faults, key=lambda fault: fault.at_step)
        self._lives: dict[int, SimulatedProcess] = {}  # of engines, by their number

    # -- what engines ask

    def store_of(self, number: int, num_bytes: int, slot_bytes: int) -> dict[str, Any]:
        """A folder for each."""
        return file_store(f"/store/engine{number}", num_bytes, slot_bytes)

    def committed_by(self, number: int, settings: Settings) -> Findable:
        """See `StoryStage`."""
        return self.committed if settings.has_peers else self._computed(is_kept=settings.has_store)

    def _computed(self, *, is_kept: bool) -> Computed:
        return Computed(lambda: self.simulation.scheduler.num_steps, is_kept=is_kept)

    # -- what engines tell

    def find(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Something is wrong: the run ends."""
        trace = "".join(traceback.format_exception(error)) if error is not None else ""
        self.findings.append(StoryFinding(kind, text, trace))
        self.simulation.scheduler.is_over = True

    @contextmanager
    def verb(self, number: int, name: str, limit_seconds: float = 0.0) -> Iterator[None]:
        """A verb is called: it has to come back in time."""
        scheduler = self.simulation.scheduler
        started = scheduler.now
        self.counts["verbs"] += 1
        actor = scheduler.current
        self.simulation.machine.lines.append(f"{started:.4f} {actor.name if actor else '-'}: {name}")
        try:
            yield
        except (CacheError, MemoryError, OSError, RuntimeError):  # a refusal has to come in time, too
            self._judge(number, name, started, limit_seconds)
            raise
        self._judge(number, name, started, limit_seconds)

    def _judge(self, number: int, name: str, started: float, limit_seconds: float) -> None:
        scheduler = self.simulation.scheduler
        held = [min(end, scheduler.now) - max(begin, started) for begin, end in self.stalls]
        took = scheduler.now - started - sum(seconds for seconds in held if seconds > 0)
        if took > limit_seconds + _VERB_SECONDS:
            self.find(f"late: {name}", f"engine {number}: {took:.3f} s, {limit_seconds:.3f} were given")

    # -- the run

    def run(self) -> Outcome:
        """All of it. The machine is left empty."""
        simulation = self.simulation
        scheduler = simulation.scheduler
        with simulation.installed():
            for engine in self.engines:
                simulation.machine.begin("init", self._keeper(engine))
            self._arm()
            try:
                scheduler.run(self._has_ended)
            finally:
                self._note_failures()
                self._bury()
        counts = self.counts + sum((engine.seen for engine in self.engines), Counter())
        counts += simulation.failing_lines.raised
        counts["file calls"] = simulation.files.num_calls
        counts["answers"] = simulation.messages.num_answers
        counts["messages"] = simulation.messages.num_messages
        counts["simulated seconds"] = int(scheduler.now - 1000.0)
        for kind, number in scheduler.kinds.items():
            counts[f"steps: {kind}"] = number
        return Outcome(
            self.findings, scheduler.num_steps, scheduler.trace, counts, self.met, list(simulation.machine.lines)
        )

    def _has_ended(self) -> bool:
        if self.simulation.scheduler.num_steps > _MOST_STEPS and not self.findings:
            self.find("no end", f"{_MOST_STEPS} steps")
        return bool(self.findings) or all(engine.is_done for engine in self.engines)

    def _keeper(self, engine: StoryEngine) -> Callable[[], int]:
        """Who starts an engine's process again when it has died."""

        def keep() -> int:
            machine = self.simulation.machine
            while not engine.is_done:
                process = machine.begin("engine", engine.main, parent=machine.process)
                self._lives[engine.number] = process
                ended = partial(getattr, process, "is_dead")
                self.simulation.scheduler.wait((process.ended,), ended, FOREVER, "wait")
                machine.reap(process)
                if not engine.is_done:
                    self.counts["engine deaths"] += process.exit_status == SIGKILL_STATUS
                    self.simulation.sleep(_START_AGAIN_SECONDS)
            return 0

        return keep

    def _note_failures(self) -> None:
        for name, error in self.simulation.scheduler.failures:
            trace = "".join(traceback.format_exception(error))
            self.findings.append(StoryFinding(f"thread failed: {type(error).__name__}", f"{name}: {error!r}", trace))
        for text in self.simulation.machine.wrong_closes:
            self.findings.append(StoryFinding("wrong close", text))

    def _bury(self) -> None:
        """Whatever still lives ends, so that no thread is left; and what it was made of, while nobody is running whose
        descriptors it could close."""
        machine = self.simulation.machine
        for process in list(machine.processes.values()):
            machine.kill(process)
        for engine in self.engines:
            engine.bury()
        self.simulation.scheduler.forget()
        self.simulation.threads.by_actor.clear()
        gc.collect()

    # -- faults

    def _arm(self) -> None:
        scheduler = self.simulation.scheduler
        scheduler.inject = self._inject
        scheduler.next_fault = max(self._faults[0].at_step, scheduler.num_steps + 1) if self._faults else -1

    def _inject(self) -> None:
        scheduler, fault = self.simulation.scheduler, self._faults[0]
        is_late = scheduler.num_steps > fault.at_step + _MOST_STEPS_LATE
        if fault.phase and not is_late and not any(phase.startswith(fault.phase) for phase in self.phases()):
            scheduler.next_fault = scheduler.num_steps + _LOOK_EVERY
            return
        del self._faults[0]
        self._arm()
        self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        if self.findings or all(engine.is_done for engine in self.engines):
            return
        self.counts[f"fault: {fault.name}"] += 1
        for phase in self.phases():
            self.met[fault.name, phase] += 1
        FAULTS[fault.name](self, fault)

    def phases(self) -> set[str]:
        """What is going on now: of requests, transfers, jobs of storage, and processes of engines that start."""
        found = set[str]()
        for engine in self.engines:
            found |= {f"request: {user.verb}" for user in engine.users}
            cache = engine.cache
            if cache is None:
                found |= {f"start: {_STARTED.get(p.program, p.program)}" for p in self._children_of(engine)}
                continue
            for what, client in _clients(cache):
                found.update(_task_phases(what, client))
        return found

    def _children_of(self, engine: StoryEngine) -> Iterator[SimulatedProcess]:
        """Living ones of its present life."""
        parent = self._lives.get(engine.number)
        for process in self.simulation.machine.processes.values():
            if process.parent is parent is not None and not process.is_dead:
                yield process

    @property
    def has_stalled(self) -> bool:
        """Whether a thread of an engine, or all of them, had no processor for a while."""
        return bool(self.stalls)

    def stall(self, seconds: float) -> None:
        """A thread of an engine, or all of them, have no processor for so long."""
        now = self.simulation.now()
        self.stalls.append((now, now + seconds))

    def waiting_tasks(self, cache: PrefixCacheManager) -> Iterator[tuple[str, float]]:
        """Tasks that were accepted and have not been sent, and how long that was ago."""
        now, tier = self.simulation.now(), cache.storage._tier
        boxes = [cache._movement.mover._outbox.queued]
        if isinstance(tier, StorageTier):
            boxes.append(tier.link.outbox.queued)
        for what, client in _clients(cache):
            if what != "peer" and client._processes.io is not None:  # those have deadlines of other lengths
                boxes.append(client._processes.io.tasks._queue)
        for task in [task for box in boxes for task in box]:
            yield task.kind.value, now - (task.deadline - TASK_SECONDS)


def _clients(cache: PrefixCacheManager) -> Iterator[tuple[str, Any]]:
    """Those that have processes, by what their tasks are about."""
    yield "transfer", cache._movement.client
    tier: Any = cache.storage._tier
    if cache.storage.is_attached:
        yield "storage", tier.link.client
    road: Any = cache.peers.road
    if not isinstance(road, NoRoad):
        yield "peer", road._client


def _task_phases(what: str, client: Any) -> Iterator[str]:
    """How far the tasks of a client's processes are."""
    io = client._processes.io
    if io is None:
        return
    for task in list(io.tasks._queue):
        yield f"{what}: {task.kind.value} queued"
    for flight in io.tasks.flights.all():
        is_whole = len(flight.waiting) == len(io.ranks)
        yield f"{what}: {flight.task.kind.value} {'under way' if is_whole else 'done by some ranks'}"
