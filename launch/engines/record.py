"""What a lane of an engine finds: each stage is printed and written as it ends, the tables however the lane ends."""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.engines.report import CaseResult, Line, print_cases, print_lines
from fastdeploy_cache.launch.engines.results import Passed
from fastdeploy_cache.launch.findings import STANDARD_OUTPUT, console_beside, write_json


class LaneRecord:
    """What one lane has found; as a context its end prints the tables. Logs of the stages stay in `logs`."""

    def __init__(self, engine: str, json_file: Path | None, *, seconds: str) -> None:
        """`seconds` says what the table's seconds are of.

        Raises:
            LaunchError: the file, or the folder of logs beside it, cannot be written.
        """
        self._console = console_beside(json_file, 140)
        self.version = ""
        self.findings: list[str] = []
        self._engine, self._json_file, self._seconds = engine, json_file, seconds
        self._machine = describe_machine()
        self._stages: list[dict[str, Any]] = []
        self.lines: list[Line] = []
        self.cases: list[CaseResult] = []
        self.logs = _folder_of_logs(json_file)
        self._console.print(f"logs are kept in {self.logs}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Print and write what there is. What has ended the lane early is only written: who called prints it."""
        self._console.print(f"{self._engine} {self.version} on a CPU; seconds are {self._seconds}")
        if self.lines:
            print_lines(self._console, self.lines)
        if self.cases:
            print_cases(self._console, self.cases)
        for finding in self.findings:
            self._console.print(f"missed: {finding}", markup=False)
        if error is not None:
            self.findings.append(str(error) or type(error).__name__)
        self._write(is_over=True)

    def log_of(self, stage: str) -> Path:
        """Where a stage's output goes."""
        return self.logs / f"{re.sub(r'[^A-Za-z0-9]+', '-', stage)}.log"

    @contextmanager
    def stage(self, name: str) -> Iterator[list[Passed]]:
        """A stage, which puts what it has served into the list that is given to it.

        Raises:
            LaunchError: it has failed; the message names it.
        """
        passes: list[Passed] = []
        started = time.monotonic()
        stage: dict[str, Any] = {"name": name, "log": str(self.log_of(name))}
        self._stages.append(stage)
        try:
            yield passes
        except LaunchError as error:
            stage["failed"] = str(error)
            raise LaunchError(f"the stage '{name}' failed: {error}") from error
        else:
            stage["passes"] = [_summary_of(passed) for passed in passes]
        finally:
            stage["seconds"] = time.monotonic() - started
            end = "failed" if "passes" not in stage else _in_words(passes)
            self._console.print(f"{len(self._stages):3d}. {name}: {end}, {stage['seconds']:.0f} s", markup=False)
            self._write()

    def add(self, found: Iterable[Line | CaseResult]) -> None:
        """Take up lines of the table, and cases, one by one as they come."""
        for each in found:
            if isinstance(each, Line):
                self.lines.append(each)
            else:
                self.cases.append(each)
            self._write()

    def _write(self, *, is_over: bool = False) -> None:
        """Standard output takes one document, at the end."""
        if self._json_file == STANDARD_OUTPUT and not is_over:
            return
        found = {
            "machine": self._machine,
            self._engine.lower(): self.version,
            "logs": str(self.logs),
            "stages": self._stages,
            "lines": [asdict(line) for line in self.lines],
            "cases": [asdict(case) for case in self.cases],
            "failed": self.findings,
            "is_over": is_over,
        }
        write_json(self._json_file, found)


def _folder_of_logs(json_file: Path | None) -> Path:
    if json_file is None or json_file == STANDARD_OUTPUT:
        return Path(tempfile.mkdtemp(prefix="fastdeploy-engines-logs-"))
    folder = json_file.with_name(f"{json_file.stem}-logs")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot keep logs in {folder}: {error.strerror}") from error
    return folder


def _summary_of(passed: Passed) -> dict[str, Any]:
    seconds = [answer.seconds for answer in passed.served]
    return {
        "num_answers": len(passed.served),
        "num_cached_tokens": sum(answer.num_cached_tokens for answer in passed.served),
        "hit_tokens": passed.hit_tokens,
        "median_seconds": statistics.median(seconds) if seconds else None,
    }


def _in_words(passes: Sequence[Passed]) -> str:
    if not passes:
        return "done"
    answers = ", ".join(str(len(passed.served)) for passed in passes)
    hits = ", ".join(str(sum(passed.hit_tokens)) for passed in passes)
    return f"{answers} answers, {hits} tokens hit"
