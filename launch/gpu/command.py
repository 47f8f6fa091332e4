"""The command: runs each section in a process of its own, and makes one report of what they found.

Nothing but Python's own library is used here, so that there is a report whatever is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastdeploy_cache.launch.gpu.notes import SKIPPED, WRONG, Found, GpuOptions
from fastdeploy_cache.launch.gpu.packages import has_driver, install_packages, is_here, missing_packages
from fastdeploy_cache.launch.gpu.report import SectionReport, as_markdown
from fastdeploy_cache.launch.gpu.sections import DEVICE_NEEDS, SECTIONS, Section

_RUNNER = "fastdeploy_cache.launch.gpu.sections"
# The deadlines of the sections are there for those that hang, and add up to more than this: what is left when it is
# over is skipped.
_ALL_SECONDS, _LEAST_SECONDS = 460.0, 5.0
_END_SECONDS, _REAP_SECONDS = 3.0, 5.0
_TAIL_LINES = 25
NO_GPU = 3


@dataclass(frozen=True, kw_only=True)
class GpuRun:
    """What is asked for. `packages`: a folder for packages that are missing; None: nothing is installed."""

    json_file: Path | None
    markdown_file: Path | None = None
    names: tuple[str, ...] = ()  # of sections; none: all
    options: GpuOptions = field(default_factory=GpuOptions)
    packages: Path | None = None
    wheels: Path | None = None


def run_gpu(wanted: GpuRun) -> int:
    """Run it, print the report, write it. 0: all that could run was right; 1: not so; 3: there is no GPU to use.

    It ends in less than 8 minutes. Sections for which no time is left are named.
    """
    started = time.monotonic()
    is_worth_it = _provide(wanted)
    if not is_worth_it:
        return NO_GPU
    reports: list[SectionReport] = []
    for section in SECTIONS:
        if wanted.names and section.name not in wanted.names and section.name != "environment":
            continue
        left = _ALL_SECONDS - (time.monotonic() - started)
        reports.append(_run_section(section, wanted.options, left))
        _say(f"{section.name}: {reports[-1].outcome}, {reports[-1].seconds:.0f} s")
        _write(wanted.json_file, reports, started)
        if section.name == "environment" and _has_no_gpu(reports[0].facts):
            _say(f"no GPU to run on: {_why(reports[0])}")
            return NO_GPU
    text = as_markdown(reports)
    print(text)
    if late := [report.name for report in reports if report.is_late]:
        _say(f"no time was left for all of: {', '.join(late)}; --section NAME runs one alone")
    if wanted.markdown_file is not None:
        wanted.markdown_file.write_text(text + "\n")
    return 1 if any(report.is_fault for report in reports) else 0


def _provide(wanted: GpuRun) -> bool:
    """Install what is missing, where that is wanted, and let the sections find it. False: there is no driver."""
    if wanted.packages is None:
        return True
    paths = [str(wanted.packages)]
    if wanted.packages.is_dir():
        sys.path[:0] = paths
    missing = missing_packages()
    if missing and not has_driver():
        _say("no GPU to run on: there is neither libcuda.so.1 nor nvidia-smi; nothing was installed")
        return False
    if missing:
        _say(f"this Python has no {', '.join(missing)}; installing into {wanted.packages}")
        failure = install_packages(missing, wanted.packages, wanted.wheels)
        sys.path[:0] = [path for path in paths if path not in sys.path]
        still = missing_packages()
        if failure is not None or still:
            _say(f"still missing: {', '.join(still) or 'nothing'}; {failure or 'pip reported no error'}")
    if wanted.packages.is_dir():
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, *paths)))
    return True


def _run_section(section: Section, options: GpuOptions, seconds_left: float) -> SectionReport:
    if section.framework and not is_here(section.framework):
        return SectionReport.skipped(section, f"{section.framework} is not installed")
    lacking = [module for module in section.needs if not is_here(module)]
    if lacking:
        return SectionReport.skipped(section, f"this Python has no {', '.join(lacking)}", is_fault=True)
    over = f"the {_ALL_SECONDS:.0f} s of all sections are over"
    if seconds_left < _LEAST_SECONDS:
        return SectionReport.skipped(section, over, is_fault=True, is_late=True)
    deadline = min(section.deadline_seconds, seconds_left)
    is_short = deadline < section.deadline_seconds
    with tempfile.TemporaryDirectory(prefix="fastdeploy-gpu-") as name:
        notes, log = Path(name) / "notes", Path(name) / "log"
        started = time.monotonic()
        status = _run_process(section, options, notes, log, deadline)
        seconds = time.monotonic() - started
        found = Found.read(notes)
        tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    outcomes = {line["outcome"] for line in found.lines}
    if status is None:
        why = f" of its {section.deadline_seconds:.0f}, as {over}" if is_short else ""
        reason = f"it was killed after {deadline:.0f} s{why}; what it had found until then stands here"
    elif status:
        reason = f"it ended with status {status}; the end of its output: {tail[-1] if tail else 'nothing'}"
    else:
        reason = ""
    outcome = "failed" if reason or WRONG in outcomes else SKIPPED if outcomes == {SKIPPED} else "ok"
    return SectionReport(
        name=section.name,
        title=section.title,
        outcome=outcome,
        reason=reason,
        seconds=seconds,
        lines=found.lines,
        facts=found.facts,
        log_tail=tail if outcome == "failed" else [],
        is_fault=outcome == "failed",
        is_late=status is None and is_short,
    )


def _run_process(section: Section, options: GpuOptions, notes: Path, log: Path, seconds: float) -> int | None:
    """The exit status, negative for a signal; None where the time was over, and everything it had started is killed."""
    command = [sys.executable, "-P", "-m", _RUNNER, section.entry, str(notes), json.dumps(asdict(options))]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    status: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(seconds)
    finally:  # ranks have sessions of their own, and end with the process that started them
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            process.terminate()
            process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # inside a driver that hangs nothing can be killed
            process.wait(_REAP_SECONDS)
    return status


def _has_no_gpu(facts: dict[str, Any]) -> bool:
    """Where packages are missing beside a driver, each section has to say which; there may well be a GPU."""
    may_be_asked = all(is_here(module) for module in DEVICE_NEEDS)
    return not facts.get("num_gpus") and (may_be_asked or not facts.get("has_libcuda"))


def _why(environment: SectionReport) -> str:
    errors = [line["detail"] for line in environment.lines if line["outcome"] == WRONG]
    return errors[0] if errors else environment.reason or "the driver lists none"


def _write(file: Path | None, reports: Sequence[SectionReport], started: float) -> None:
    """After each section, so that a run that is cut off leaves what it had."""
    if file is not None:
        facts = reports[0].facts
        found: dict[str, Any] = {"is_simulated": facts.get("is_simulated", False), "environment": facts}
        found |= {"seconds": time.monotonic() - started, "sections": [asdict(report) for report in reports]}
        file.write_text(json.dumps(found, indent=2) + "\n")


def _say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)
