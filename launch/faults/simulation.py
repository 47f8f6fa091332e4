"""One simulated machine, and the product as it is on top of it: each module finds simulated threads, files, sockets,
processes and time where it looks for those of the system."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import importlib
import logging
import os
import pathlib
import pkgutil
import queue
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

from fastdeploy_cache.ipc import log_lines, memory_limit
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.launch.faults.disk import SimulatedDisk
from fastdeploy_cache.launch.faults.failing_lines import FailingLines
from fastdeploy_cache.launch.faults.file_calls import FileCalls
from fastdeploy_cache.launch.faults.machine import Machine
from fastdeploy_cache.launch.faults.message_calls import MessageCalls
from fastdeploy_cache.launch.faults.namespaces import substituted
from fastdeploy_cache.launch.faults.paths import paths_of
from fastdeploy_cache.launch.faults.peer_calls import Network
from fastdeploy_cache.launch.faults.process_calls import ProcessCalls
from fastdeploy_cache.launch.faults.scheduler import Pace, Scheduler
from fastdeploy_cache.launch.faults.threads import Threads
from fastdeploy_cache.launch.faults.trouble import Trouble
from fastdeploy_cache.transfer_manager.device import pieces
from fastdeploy_cache.transfer_manager.peer import link_shm
from fastdeploy_cache.transfer_manager.peer.link import Pieces

_COPY_PIECES, _CUT = pieces.copy_pieces, link_shm._cut
_PACKAGE, _OURS = "fastdeploy_cache.", "fastdeploy_cache.launch."
_ELSEWHERE = ("adapters", "launch", "__main__")  # that no process of a story is made of


class Simulation:
    """A machine, made from a seed."""

    def __init__(self, seed: int, *, disk_bytes: int = 2**24) -> None:
        choose = random.Random(seed)  # noqa: S311 (nothing is kept secret)
        self.pace = Pace(
            stay=choose.choice((0.0, 0.3, 0.6, 0.9)),
            put_aside=choose.choice((0.0, 0.02, 0.1)),
            step_seconds=choose.choice((2e-6, 2e-5, 2e-4)),
        )
        choose.choice(range(4))  # of an earlier version: without it, the stories that are kept would be others
        # Where all is well: what each piece of a copy takes, and how many messages between instances are lost; drawn
        # together, as some orders need both.
        self._copy_seconds, self._lost_share = choose.choice(((0.0, 0.0), (0.002, 0.0), (0.02, 0.4)))
        capacity_bytes = choose.choice((4096, 65536, 212992))
        self.scheduler = scheduler = Scheduler(seed, self.pace)
        self.trouble = trouble = Trouble()
        self.threads = Threads(scheduler)
        self.failing_lines = lines = FailingLines(scheduler, trouble)
        scheduler.resumed = lambda actor: lines.follow(actor.may_fail)
        inodes = iter(range(10**9, 2 * 10**9))
        self.disk = SimulatedDisk(lambda: next(inodes), self.unix, disk_bytes)
        self.machine = Machine(scheduler, self.threads, self.disk, trouble)
        self.files = FileCalls(self.machine, trouble)
        self.messages = MessageCalls(self.machine, self.files, trouble, capacity_bytes)
        self.processes = ProcessCalls(self.machine, self.files, trouble)

    def now(self) -> float:
        """Seconds of the simulated clock."""
        return self.scheduler.now

    def unix(self) -> float:
        """Seconds since 1970, on the simulated machine."""
        return 1.8e9 + self.scheduler.now + self.trouble.wall_clock_shift

    def sleep(self, seconds: float) -> None:
        """Wait for nothing but time."""
        self.scheduler.wait((), lambda: False, self.scheduler.now + seconds, "wait")

    def random_bytes(self, num_bytes: int) -> bytes:
        """So many bytes, which follow from the seed."""
        return self.scheduler.chance.randbytes(num_bytes)

    def _copy_pieces(self, pairs: pieces.Pairs, route: pieces.Route) -> None:
        """A step in the midst of it: a copy may be torn by a death, or fail, and others may see a half of it."""
        for part in route.parts(2):
            self._copy_step()
            if self.trouble.fails(self.trouble.copy_error_share, self.scheduler.chance):
                raise RuntimeError("the device has not copied this")
            _COPY_PIECES(pairs, part)

    def _cut(self, read: Pieces) -> Iterator[tuple[int, int, int, int, int]]:
        """Likewise, of a read from another instance."""
        for piece in _CUT(read):
            self._copy_step()
            yield piece

    def _copy_step(self) -> None:
        self.scheduler.step("copy")
        longest = max(self.trouble.copy_seconds, self._copy_seconds)
        if longest:
            self.sleep(longest * self.scheduler.chance.random())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The product's modules are on the simulated machine."""
        _import_all()
        modules = _modules()
        with ExitStack() as undo:
            undo.enter_context(substituted(modules, self._places()))
            undo.enter_context(_clock_of(self))
            undo.enter_context(_logs_of(self.machine))
            undo.enter_context(_no_garbage())
            yield
        if late := _modules().keys() - modules.keys():
            raise AssertionError(f"imported in a simulation, and so on the real system: {', '.join(sorted(late))}")

    def _places(self) -> dict[int, Any]:
        spaces = {**self.threads.namespaces(), **self.files.namespaces(), **self.processes.namespaces()}
        spaces |= self.messages.namespaces()
        spaces |= Network(self.messages, self.trouble, self._lost_share).namespaces()
        places = {id(importlib.import_module(name)): space for name, space in spaces.items()}
        own_threads, pools = spaces["threading"], spaces["concurrent.futures"]
        places |= {
            id(threading.Lock): own_threads.Lock,
            id(threading.RLock): own_threads.RLock,
            id(concurrent.futures.ThreadPoolExecutor): pools.ThreadPoolExecutor,
            id(concurrent.futures.wait): pools.wait,
            id(queue.SimpleQueue): spaces["queue"].SimpleQueue,
            id(pathlib.Path): paths_of(self.files, self.disk),
            id(memory_limit.check_available): self.processes.check_available,
            id(log_lines.set_up_log): lambda *_: None,
            id(pieces.copy_pieces): self._copy_pieces,
            id(link_shm._cut): self._cut,
        }
        return places


@functools.cache
def _import_all() -> None:
    """What is imported late would find the real system."""
    import fastdeploy_cache

    for found in pkgutil.walk_packages(fastdeploy_cache.__path__, _PACKAGE):
        if set(found.name.split(".")).isdisjoint(_ELSEWHERE):
            with suppress(ImportError):  # what belongs to an extra
                importlib.import_module(found.name)


def _modules() -> dict[str, ModuleType]:
    """The product's own."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.startswith(_PACKAGE) and not name.startswith(_OURS)
    }


@contextmanager
def _clock_of(simulation: Simulation) -> Iterator[None]:
    """The product's clock is the simulated one's."""
    clock: Any = SYSTEM_CLOCK
    saved = dict(vars(clock))
    event = simulation.threads.namespaces()["threading"].Event
    try:
        vars(clock).update(
            now=simulation.now,
            age=simulation.now,
            unix=simulation.unix,
            sleep=simulation.sleep,
            event=event,
            random_bytes=simulation.random_bytes,
        )
        yield
    finally:
        vars(clock).update(saved)


class _Lines(logging.Handler):
    """What is logged goes to the output of the process that logs it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(logging.WARNING)
        self._machine = machine
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        process = self._machine.process
        if process is not None and process.is_dead:  # the noise of threads that end
            return
        line = self.format(record)
        name = process.name if process is not None else "-"
        self._machine.lines.append(f"{self._machine.scheduler.now:.4f} {name}: {line}")
        if process is not None and process.output is not None:
            process.output.data += line.encode() + b"\n"


@contextmanager
def _logs_of(machine: Machine) -> Iterator[None]:
    logger, handler = logging.getLogger("fastdeploy_cache"), _Lines(machine)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Cycles are collected between runs only: when, in one, depends on all that the interpreter has done before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def on_one_core() -> Iterator[None]:
    """One actor runs at a time: handing over to another core would cost more than all else."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
