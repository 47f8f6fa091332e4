"""A machine of simulated processes: who is alive, and which descriptor of whom is of what."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable

from fastdeploy_cache.launch.faults.disk import SimulatedDisk
from fastdeploy_cache.launch.faults.open_files import LogFile, OpenFile, ProcessWatch
from fastdeploy_cache.launch.faults.scheduler import Actor, ProcessDiedError, Scheduler, Waiters
from fastdeploy_cache.launch.faults.threads import Threads
from fastdeploy_cache.launch.faults.trouble import Trouble

SIGKILL_STATUS = -9
_FIRST_PID, _NUM_STANDARD = 100, 3
_MAX_LINES = 400
_DEATH_SECONDS = (0.001, 0.5, 3.0)
_FIRST_DESCRIPTOR = 10**6  # no real one: what outlives a simulation by mistake closes nothing of ours


class SimulatedProcess:
    """One of them: its threads, its descriptors, and how it has ended."""

    def __init__(
        self, pid: int, parent: SimulatedProcess | None, program: str, started_ticks: int, trouble: Trouble
    ) -> None:
        self.pid, self.parent, self.program, self.started_ticks = pid, parent, program, started_ticks
        self.trouble = trouble
        self.name = f"{program}-{pid}"
        self.arguments: list[str] = []
        self.descriptors: dict[int, OpenFile] = {}
        self.actors: list[Actor] = []
        self.exit_status: int | None = None
        self.is_dead = self.is_stopped = False
        self.dies_with: Actor | None = None  # the thread that has started it, once it has asked for that
        self.started_by: Actor | None = None
        self.output: LogFile | None = None
        self.ended = Waiters()
        self.max_descriptors = 1024

    def install(self, file: OpenFile, at: int | None = None) -> int:
        """A descriptor of it: the lowest number that is free, as POSIX says.

        Raises:
            OSError: there are too many already.
        """
        number = _FIRST_DESCRIPTOR if at is None else at
        if at is None:
            while number in self.descriptors:
                number += 1
            if number >= _FIRST_DESCRIPTOR + self.max_descriptors or self.trouble.has_no_descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        file.num_holders += 1
        self.descriptors[number] = file
        return number

    def file(self, fd: int) -> OpenFile:
        """What a descriptor is of. Raises `OSError` where it is closed."""
        file = self.descriptors.get(fd)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return file

    def close(self, fd: int) -> None:
        """Give one back. Raises `OSError` where that was done before."""
        file = self.file(fd)
        del self.descriptors[fd]
        file.num_holders -= 1
        if not file.num_holders:
            file.end()

    def close_all(self) -> None:
        """Give all back, as the kernel does at its end."""
        for fd in list(self.descriptors):
            self.close(fd)


class Machine:
    """All processes and their disk."""

    def __init__(self, scheduler: Scheduler, threads: Threads, disk: SimulatedDisk, trouble: Trouble) -> None:
        self.scheduler, self.threads, self.disk, self.trouble = scheduler, threads, disk, trouble
        self.processes: dict[int, SimulatedProcess] = {}
        self.lines: deque[str] = deque(maxlen=_MAX_LINES)  # of all logs, for who looks for a cause
        self.wrong_closes: list[str] = []
        self._next_pid, self._next_inode = _FIRST_PID, 1
        threads.check_room = self._check_threads
        threads.on_start = self._adopt

    @property
    def process(self) -> SimulatedProcess | None:
        """Whose thread is running now."""
        actor = self.scheduler.current
        return actor.process if actor is not None else None  # type: ignore[return-value]

    @property
    def caller(self) -> SimulatedProcess:
        """Whose thread calls the system now. Raises `ProcessDiedError` where it is dead."""
        self.scheduler.check_alive()
        process = self.process
        assert process is not None, "a call of the system outside the simulation"
        return process

    def new_inode(self) -> int:
        """A number for a new file."""
        self._next_inode += 1
        return self._next_inode

    # -- processes

    def begin(
        self, program: str, main: Callable[[], int], *, parent: SimulatedProcess | None = None
    ) -> SimulatedProcess:
        """A new process, with no descriptors; `main` begins when its turn comes. Where it returns, the process ends."""
        self._next_pid += 1
        ticks = int(self.scheduler.now * 100)
        process = self.processes[self._next_pid] = SimulatedProcess(
            self._next_pid, parent, program, ticks, self.trouble
        )
        process.started_by = self.scheduler.current
        for fd in range(_NUM_STANDARD):
            process.install(LogFile(), fd)

        def run() -> None:
            status = main()
            self.end(process, status)
            raise ProcessDiedError

        self._adopt(self.scheduler.start(process, run, f"{process.name}/main"))
        return process

    def _adopt(self, actor: Actor) -> None:
        process: SimulatedProcess = actor.process  # type: ignore[assignment]
        process.actors.append(actor)
        actor.on_end.append(lambda: self._thread_ended(process, actor))

    def _thread_ended(self, process: SimulatedProcess, actor: Actor) -> None:
        process.actors.remove(actor)
        self._kill_orphans(actor)

    def _check_threads(self) -> None:
        if self.trouble.has_no_threads:
            raise RuntimeError("can't start new thread")

    def end(self, process: SimulatedProcess, status: int) -> None:
        """It is gone: no line of it runs any more, and what it had goes back.

        Called by one of its own threads, the caller raises `ProcessDiedError` then.
        """
        if process.is_dead:
            return
        process.is_dead, process.is_stopped, process.exit_status = True, False, status
        process.close_all()
        actors, process.actors = process.actors, []
        self.scheduler.unwind(actors)
        process.ended.wake()
        for actor in actors:
            self._kill_orphans(actor)

    def kill(self, process: SimulatedProcess) -> None:
        """SIGKILL."""
        self.end(process, SIGKILL_STATUS)

    def signal_death(self, process: SimulatedProcess) -> None:
        """SIGKILL as another process sends it: it dies a moment later, and its threads may run up to then; longer where
        one is in the midst of a call that cannot be interrupted."""
        scheduler = self.scheduler
        longest = scheduler.chance.choice(_DEATH_SECONDS)
        scheduler.call_at(scheduler.now + longest * scheduler.chance.random(), lambda: self.kill(process))

    def _kill_orphans(self, actor: Actor) -> None:
        for child in list(self.processes.values()):
            if child.dies_with is actor:
                self.kill(child)

    def stop(self, process: SimulatedProcess, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        process.is_stopped = not process.is_dead

        def go_on() -> None:
            process.is_stopped = False

        self.scheduler.call_at(self.scheduler.now + seconds, go_on)

    def reap(self, process: SimulatedProcess) -> None:
        """Its parent has heard of its end."""
        self.processes.pop(process.pid, None)

    def watch(self, pid: int) -> ProcessWatch:
        """A pidfd. Raises `ProcessLookupError`."""
        process = self.processes.get(pid)
        if process is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return ProcessWatch(lambda: process.is_dead, process.ended, process)
