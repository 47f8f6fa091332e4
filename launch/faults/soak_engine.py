"""An engine of the command `soak`: a real process with a real cache, whose users compare each block.

`python -m fastdeploy_cache.launch.faults.soak_engine`, with lines of `soak_lines` at its standard input and output.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final, overload

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.launch.faults.drawing import acts_for
from fastdeploy_cache.launch.faults.engine import StoryEngine
from fastdeploy_cache.launch.faults.real_host import RealHost, descriptors, die_with_parent, resident_bytes
from fastdeploy_cache.launch.faults.soak_lines import (
    EngineReport,
    EngineTask,
    Offered,
    ToEngine,
    VerbSeen,
    line_of,
    read_line,
)
from fastdeploy_cache.launch.faults.stage import Host, Mail, Prefix, Watch, file_store
from fastdeploy_cache.launch.faults.story import Act, Settings

_SLACK_SECONDS = 10.0  # beside what a verb was given to wait: others' processes start on the same processors
_TICK_SECONDS, _STALL_SECONDS, _REPORT_SECONDS = 0.1, 0.5, 1.0
_AGAIN_SECONDS = 0.5
_ENDLESS: Final = 2**31
_BATCH = 1000  # acts that are drawn at a time
_CLOSES: Final = 6  # of 64 acts that close the cache


class EndlessActs(Sequence[Act]):
    """What a user does, until the time is over."""

    def __init__(self, seed: str, settings: Settings, is_over: Callable[[], bool]) -> None:
        self._seed, self._settings, self._is_over = seed, settings, is_over
        self._number, self._batch = -1, list[Act]()

    def __len__(self) -> int:
        return 0 if self._is_over() else _ENDLESS

    @overload
    def __getitem__(self, at: int) -> Act: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Act]: ...
    def __getitem__(self, at: int | slice) -> Act | Sequence[Act]:
        assert isinstance(at, int)
        number, place = divmod(at, _BATCH)
        if number != self._number:
            choose = random.Random(f"{self._seed} {number}")  # noqa: S311 (nothing is kept secret)
            acts = acts_for(choose, self._settings, _BATCH)
            # A real start takes seconds: without this the users would wait for most of the time.
            self._number, self._batch = number, [act for act in acts if act.verb != "close" or act.first < _CLOSES]
        return self._batch[place % len(self._batch)]


class AnyPrefix:
    """An engine may find what others have computed, or an earlier life of it: its bytes say whether it is right."""

    def add(self, prefix: Prefix) -> None:
        """See `Findable`."""

    def forget(self, first_step: int) -> None:
        """See `Findable`."""

    def may_find(self, prefix: Prefix, *, is_old: bool) -> bool:
        """See `Findable`."""
        return True


class SoakStage:
    """See `StoryStage`: one engine of several, each of which is a process of its own."""

    watches: Sequence[Callable[[PrefixCacheManager], Watch]] = ()

    def __init__(self, task: EngineTask) -> None:
        self._task, self._lock = task, threading.Lock()
        self.machine = RealHost(task.seed)
        self.host: Host = self.machine
        self.findings: list[tuple[str, str]] = []
        self.counts = Counter[str]()
        self.verbs: dict[str, VerbSeen] = {}
        self.stalls: list[tuple[float, float]] = []
        self.looked_at = math.inf  # when `watch` had a processor for the last time
        self._calls: set[tuple[int, float, str, float]] = set()  # under way: thread, start, verb, limit
        self.is_over = False
        acts = [
            EndlessActs(f"{task.seed} {task.number} {task.num_lives} {user}", task.settings, lambda: self.is_over)
            for user in range(task.settings.num_users)
        ]
        self.engine = StoryEngine(self, task.number, task.settings, acts)
        self.engines: list[Any] = [
            SimpleNamespace(mail=_Letterbox(number, self.write), users=()) if number != task.number else self.engine
            for number in range(task.num_engines)
        ]

    def store_of(self, number: int, num_bytes: int, slot_bytes: int) -> dict[str, Any]:
        """A server for all engines, or a folder for each."""
        if self._task.valkey_url:
            return {"kind": "valkey", "server_url": self._task.valkey_url}
        return file_store(self._task.store_folder, num_bytes, slot_bytes)

    def committed_by(self, number: int, settings: Settings) -> AnyPrefix:
        """See `StoryStage`."""
        return AnyPrefix()

    @property
    def has_stalled(self) -> bool:
        """See `StoryStage`."""
        return bool(self.stalls)

    def find(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """See `StoryStage`."""
        trace = "".join(traceback.format_exception(error)) if error is not None else ""
        with self._lock:
            self.findings.append((kind, f"{text}\n{trace}".strip()))

    @contextmanager
    def verb(self, number: int, name: str, limit_seconds: float = 0.0) -> Iterator[None]:
        """See `StoryStage`."""
        call = (threading.get_ident(), self.host.now(), name, limit_seconds)
        with self._lock:
            self._calls.add(call)
        try:
            yield
        finally:
            took = self._seconds_of(call[1])
            with self._lock:
                self._calls.discard(call)
                seen = self.verbs.setdefault(name, VerbSeen())
                seen.num_calls += 1
                seen.longest_seconds = max(seen.longest_seconds, took)
            self._judge(number, name, took, limit_seconds)

    def _seconds_of(self, started: float) -> float:
        """Since then, without what this process was held up for."""
        ended, stalls = self.host.now(), self.stalls
        # After a stop a verb may come back before `watch` has had its turn, and so has not noted the stop yet.
        if ended - self.looked_at > _STALL_SECONDS:
            stalls = [*stalls, (self.looked_at, ended)]
        held_up = [min(end, ended) - max(begin, started) for begin, end in stalls]
        return ended - started - sum(seconds for seconds in held_up if seconds > 0)

    def _judge(self, number: int, name: str, took: float, limit_seconds: float) -> None:
        if took > limit_seconds + _SLACK_SECONDS:
            self.find(f"late: {name}", f"engine {number}: {took:.1f} s, {limit_seconds:.1f} were given")

    def waiting_tasks(self, cache: PrefixCacheManager) -> Iterator[tuple[str, float]]:
        """Nobody knows here for how long a thread has had no processor."""
        return iter(())

    # -- lines

    def write(self, line: Offered | EngineReport) -> None:
        """Tell the command."""
        data = line_of(line)
        with self._lock:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def read(self) -> None:
        """A thread: what the command says, until it ends."""
        for data in sys.stdin.buffer:
            line: ToEngine | None = read_line(data, ToEngine)
            if line is None or line.is_over:
                break
            self.engine.mail.append((line.offer, line.tokens, line.namespace))
        self.is_over = True

    def watch(self) -> None:
        """A thread: tells of all once a second, and notes when this process had no processor."""
        self.looked_at = reported = self.host.now()
        while True:
            self.host.sleep(_TICK_SECONDS)
            now = self.host.now()
            if now - self.looked_at > _STALL_SECONDS:
                with self._lock:
                    self.stalls = [*self.stalls[-20:], (self.looked_at, now)]
            self.looked_at = now
            if now - reported >= _REPORT_SECONDS:
                reported = now
                with self._lock:
                    calls = list(self._calls)
                for _, started, name, limit_seconds in calls:  # those that do not come back at all
                    self._judge(self._task.number, name, self._seconds_of(started), limit_seconds)
                self.report(is_done=False)

    def report(self, *, is_done: bool) -> None:
        """What was seen up to now."""
        with self._lock:
            counts = dict(Counter(dict(self.counts)) + Counter(dict(self.engine.seen)))
            verbs = {name: replace(seen) for name, seen in self.verbs.items()}
            findings = list(self.findings)
        self.write(
            EngineReport(
                counts=counts, verbs=verbs, findings=findings, num_descriptors=len(descriptors()),
                resident_bytes=resident_bytes(), is_done=is_done,
            )
        )  # fmt: skip


class _Letterbox:
    """That of another engine."""

    def __init__(self, number: int, write: Callable[[Offered], None]) -> None:
        self._number, self._write = number, write

    def append(self, mail: Mail) -> None:
        offer, tokens, namespace = mail
        self._write(Offered(to=self._number, offer=offer, tokens=tokens, namespace=namespace))


def main() -> int:
    """The process: lives of the engine, one after the other, until the command says that it is over."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    task = read_line(sys.stdin.buffer.readline(), EngineTask)
    assert task is not None, "the first line says what this engine is"
    stage = SoakStage(task)
    threading.excepthook = lambda failed: stage.find("thread failed", str(failed.thread), failed.exc_value)
    die_with_parent()
    for run in (stage.read, stage.watch):
        threading.Thread(target=run, name=run.__name__, daemon=True).start()
    stage.machine.note_own()
    while not (stage.engine.is_done or stage.findings):
        if stage.engine.main() and not stage.findings:
            stage.host.sleep(_AGAIN_SECONDS)  # what was refused is not asked for again at once
        stage.engine.bury()
        gc.collect()  # a closed cache is a heap of cycles: left to the collector's own time, it would look like a leak
        if left := stage.machine.shared_memory():  # only now: it is there as long as the model looks through it
            stage.find("shared memory left behind", ", ".join(left))
    stage.report(is_done=stage.engine.is_done)
    return 0 if stage.engine.is_done else 1


if __name__ == "__main__":
    raise SystemExit(main())
