"""Real engines with real caches, whose processes are killed and stopped; every block is compared before it is used."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.launch.faults.drawing import CROWD
from fastdeploy_cache.launch.faults.soak_faults import SOAK_FAULTS, Stopped, Targets
from fastdeploy_cache.launch.faults.soak_lines import (
    EngineReport,
    EngineTask,
    FromEngine,
    Offered,
    ToEngine,
    VerbSeen,
    line_of,
    read_line,
)
from fastdeploy_cache.launch.faults.story import WRITE_POLICIES, Settings
from fastdeploy_cache.launch.interrupts import kept_from_children

NUM_ENGINES: Final = 2  # they hand blocks to each other
_PROGRAM: Final = "fastdeploy_cache.launch.faults.soak_engine"
_LOOK_SECONDS = 0.2
_WARM_SECONDS = 60.0
_MEAN_FAULT_SECONDS = 3.0
_CALM_SECONDS = 5.0  # at first, for engines to start
_KILLED_SECONDS = 30.0
_END_SECONDS = 800.0  # for engines to come to rest, once nothing is done to them any more
_LOG_CHARACTERS = 4000
_MARK: Final = "CACHE_SOAK_RUN"  # in the environment of all that a soak starts


@dataclass
class Life:
    """One process of an engine."""

    process: subprocess.Popen[bytes]
    lines: threading.Thread
    started_at: float
    first: EngineReport | None = None  # after its first minute
    last: EngineReport | None = None


@dataclass
class Soak:
    """What a soak has seen so far."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    verbs: dict[str, VerbSeen] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, str]] = field(default_factory=list)
    num_lives: int = 0
    longest_seconds: float = 0.0  # of one process of an engine, after its first minute; of that one are:
    growth_bytes: int = 0
    growth_descriptors: int = 0


class SoakRun:
    """The engines, while they run. One thread uses it."""

    def __init__(self, seed: int, num_ranks: int, faults: Sequence[str], folder: Path, valkey_url: str) -> None:
        """`valkey_url`: one store for all engines; empty: each has a folder of its own."""
        self._seed, self._num_ranks, self._faults, self._folder = seed, num_ranks, list(faults), folder
        self._valkey_url = valkey_url
        self._chance = random.Random(seed)  # noqa: S311 (nothing is kept secret)
        self._mark = f"{os.getpid()}-{seed}"
        self._lives: list[Life] = []
        self._num_lives = [0] * NUM_ENGINES
        self._heard: queue.SimpleQueue[tuple[int, Life, FromEngine | None]] = queue.SimpleQueue()
        self._stopped = Stopped({}, set())
        self._is_over = False
        self.seen = Soak()

    # -- engines

    def _settings(self, number: int) -> Settings:
        choose = random.Random(f"{self._seed} {number}")  # noqa: S311 (nothing is kept secret)
        return Settings(
            num_engines=NUM_ENGINES, tp_size=self._num_ranks, has_store=True, has_peers=True, **CROWD,
            cpu_write_policy=choose.choice(WRITE_POLICIES), storage_write_policy=choose.choice(WRITE_POLICIES),
            eviction_policy=choose.choice(("lru", "reuse", "lfu")),
            kv_owner="transfer" if number % 2 else choose.choice(("engine", "worker")),
        )  # fmt: skip

    def _start(self, number: int) -> Life:
        task = EngineTask(
            number=number, num_engines=NUM_ENGINES, seed=self._seed, num_lives=self._num_lives[number],
            settings=self._settings(number), store_folder=str(self._folder / "store" / f"engine{number}"),
            valkey_url=self._valkey_url,
        )  # fmt: skip
        self._num_lives[number] += 1
        self.seen.num_lives += 1
        # Who ends a whole service may signal each of its processes: an engine that ended so would be a finding.
        with open(self._folder / f"engine{number}.log", "ab") as log, kept_from_children():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                # what a killed one leaves in the temporary folder goes with this one
                env=os.environ | {_MARK: self._mark, "TMPDIR": str(self._folder)},
                start_new_session=True,
            )  # fmt: skip
        lines = threading.Thread(target=self._hear, args=(number, process), name=f"soak-{number}", daemon=True)
        life = Life(process, lines, SYSTEM_CLOCK.now())
        self._say(life, task)
        if number < len(self._lives):
            self._lives[number] = life
        else:
            self._lives.append(life)
        lines.start()
        return life

    def _hear(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """A thread: the lines of one process, and its end."""
        life = self._lives[number]
        assert process.stdout is not None
        for data in process.stdout:
            if (line := read_line(data, FromEngine)) is not None:
                self._heard.put((number, life, line))
        self._heard.put((number, life, None))

    @staticmethod
    def _say(life: Life, line: EngineTask | ToEngine) -> None:
        assert life.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it is gone, which its other end says; or all was ended
            life.process.stdin.write(line_of(line))
            life.process.stdin.flush()

    # -- the run

    def run(self, seconds: float) -> Iterator[Soak]:
        """Start all, hurt them for so long, end them; yields what has been seen up to then, now and again."""
        began = SYSTEM_CLOCK.now()
        next_fault = began + _CALM_SECONDS
        for number in range(NUM_ENGINES):
            self._start(number)
        while (now := SYSTEM_CLOCK.now()) < began + seconds and not self.seen.findings:
            if self._faults and now >= next_fault:
                self._hurt()
                next_fault = now + self._chance.expovariate(1 / _MEAN_FAULT_SECONDS)
            self._stopped.go_on(now)
            self._listen(_LOOK_SECONDS)
            self.seen.seconds = now - began
            yield self.seen
        yield from self._end()

    def _hurt(self) -> None:
        name = self._chance.choice(self._faults)
        engines = [life.process.pid for life in self._lives if life.process.poll() is None]
        if SOAK_FAULTS[name](Targets(engines, self._folder / "store"), self._stopped, self._chance):
            self.seen.faults[name] += 1

    def _listen(self, seconds: float) -> None:
        until = SYSTEM_CLOCK.now() + seconds
        while (left := until - SYSTEM_CLOCK.now()) > 0:
            try:
                number, life, line = self._heard.get(timeout=left)
            except queue.Empty:
                return
            if isinstance(line, EngineReport):
                self._note(life, line)
            elif isinstance(line, Offered):
                to_engine = ToEngine(offer=line.offer, tokens=line.tokens, namespace=line.namespace)
                to = self._lives[line.to]
                if to.process.pid not in self._stopped.until:  # it would not read, and this thread wakes it
                    self._say(to, to_engine)
            elif line is None:
                self._ended(number, life)

    def _note(self, life: Life, report: EngineReport) -> None:
        life.last = report
        if life.first is None and SYSTEM_CLOCK.now() - life.started_at > _WARM_SECONDS:
            life.first = report
        self.seen.findings += [found for found in report.findings if found not in self.seen.findings]

    def _ended(self, number: int, life: Life) -> None:
        status = life.process.wait(_KILLED_SECONDS)
        self._add(life)
        is_ours = status == 0 or (status == -signal.SIGKILL and life.process.pid in self._stopped.killed)
        if not is_ours and not self.seen.findings:
            self.seen.findings.append(("an engine's process failed", f"engine {number}: status {status}; see its log"))
        if not self._is_over and not self.seen.findings:
            self._start(number)

    def _add(self, life: Life) -> None:
        """What a process has seen counts from its end on."""
        seen, last = self.seen, life.last
        if last is None:
            return
        life.last = None
        seen.counts.update(last.counts)
        for name, verb in last.verbs.items():
            of_all = seen.verbs.setdefault(name, VerbSeen())
            of_all.num_calls += verb.num_calls
            of_all.longest_seconds = max(of_all.longest_seconds, verb.longest_seconds)
        seconds = SYSTEM_CLOCK.now() - life.started_at - _WARM_SECONDS
        if life.first is not None and seconds > seen.longest_seconds:
            seen.longest_seconds = seconds
            seen.growth_bytes = last.resident_bytes - life.first.resident_bytes
            seen.growth_descriptors = last.num_descriptors - life.first.num_descriptors

    # -- the end

    def _end(self) -> Iterator[Soak]:
        """Let all go on, and wait until each has come to rest and closed its cache."""
        self._is_over = True
        self._stopped.go_on(float("inf"))
        for life in self._lives:
            self._say(life, ToEngine(is_over=True))
        deadline = SYSTEM_CLOCK.now() + _END_SECONDS
        while any(life.process.poll() is None or life.lines.is_alive() for life in self._lives):
            if SYSTEM_CLOCK.now() > deadline or self.seen.findings:
                break
            self._listen(_LOOK_SECONDS)
            yield self.seen
        late = [str(number) for number, life in enumerate(self._lives) if life.process.poll() is None]
        if late and not self.seen.findings:
            self.seen.findings.append(("does not end", f"engines {', '.join(late)}"))
        self.end_now()
        yield self.seen

    def end_now(self) -> None:
        """End all, and count what those have told that have not ended in order; nothing is to be left of them."""
        self.stop()
        if left := self._left_behind():
            self.seen.findings.append(("processes left behind", ", ".join(left)))
        self._listen(_LOOK_SECONDS)
        for life in self._lives:
            self._add(life)

    def logs(self) -> Iterator[str]:
        """The ends of what the engines have logged."""
        for path in sorted(self._folder.glob("*.log")):
            if text := path.read_text(errors="replace")[-_LOG_CHARACTERS:]:
                yield f"{path.name}:\n{text}"

    def stop(self) -> None:
        """End all now, as far as they have not ended."""
        self._is_over = True
        self._stopped.go_on(float("inf"))
        for life in self._lives:
            self._stopped.killed.add(life.process.pid)
            life.process.kill()
        for life in self._lives:
            with contextlib.suppress(subprocess.TimeoutExpired):
                life.process.wait(_KILLED_SECONDS)
            life.lines.join(_KILLED_SECONDS)
            for pipe in (life.process.stdin, life.process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()

    def _left_behind(self) -> list[str]:
        """Processes that this soak has started, or that those have, and that still live a moment later."""
        deadline = SYSTEM_CLOCK.now() + _CALM_SECONDS
        while (left := _marked(self._mark)) and SYSTEM_CLOCK.now() < deadline:
            SYSTEM_CLOCK.sleep(_LOOK_SECONDS)
        return left


def _marked(mark: str) -> list[str]:
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(folder.name)
    return found


@contextlib.contextmanager
def soaking(seed: int, num_ranks: int, faults: Sequence[str], valkey_url: str = "") -> Iterator[SoakRun]:
    """A run in a folder of its own, which goes with it; nothing that it has started outlives it."""
    with tempfile.TemporaryDirectory(prefix="fastdeploy_cache_soak_", ignore_cleanup_errors=True) as folder:
        run = SoakRun(seed, num_ranks, faults, Path(folder), valkey_url)
        try:
            yield run
        finally:
            run.stop()
