"""The lane of vLLM: alone, with this cache, with its ranks killed, and restarted; all answers must be equal."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.engines.hf_folder import write_hf_folder
from fastdeploy_cache.launch.engines.vllm_stage import Served, StageResult, StageSettings
from fastdeploy_cache.launch.findings import table_of, write_json

_STAGE = "fastdeploy_cache.launch.engines.vllm_stage"
_LENGTHS = (96, 192, 200, 384, 400, 480, 64, 127, 320, 352, 500, 33)  # with 32 tokens a block: full ones and cut ones
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: a pass of a run."""

    run: str
    requests: int
    equal: int  # answers that are those of vLLM alone, token for token
    prompt_tokens: int
    cached_tokens: int
    median_seconds: float
    cpu_seconds: float  # of the whole run, all passes
    num_restarts: int


def run_vllm_lane(json_file: Path | None = None) -> bool:
    """Run everything, print the table, write it; whether all answers were equal and the cache was hit.

    Raises:
        LaunchError: a run of vLLM has failed.
        ModelLoadError: the model is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="fastdeploy-engines-") as name:
        folder = Path(name)
        write_hf_folder(folder / "model")
        alone = _stage(folder, "alone")
        lines = _lines("vLLM alone", alone, alone)
        cache: dict[str, Any] = {"num_cpu_blocks": 200, "min_prefetch_tokens": 32}
        lines += _lines("with this cache", _stage(folder, "cache", cache=cache), alone)
        lines += _lines("ranks killed", _stage(folder, "killed", cache=cache, kill_every=4), alone)
        disk = {**cache, "storage": {"folder": str(folder / "disk"), "weights_id": "lane", "admission": "all"}}
        _stage(folder, "before", cache=disk, num_passes=1)
        lines += _lines("after a restart, from disk", _stage(folder, "after", cache=disk, num_passes=1), alone)
    findings = _findings(lines)
    _print(alone.vllm, lines, findings)
    rows = [asdict(line) for line in lines]
    found = {"machine": describe_machine(), "vllm": alone.vllm, "lines": rows, "failed": findings}
    write_json(json_file, found)
    return not findings


def _stage(folder: Path, name: str, **settings: Any) -> StageResult:
    """Run vLLM in a process of its own."""
    result = folder / f"{name}.json"
    log = folder / f"{name}.log"
    wanted = StageSettings(model=str(folder / "model"), result=str(result), lengths=_LENGTHS, **settings)
    with log.open("wb") as out:
        command = [sys.executable, "-m", _STAGE, json.dumps(asdict(wanted))]
        try:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=_TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"vLLM ({name}) took more than {_TIMEOUT_SECONDS:.0f} s:\n{_tail(log)}") from None
    if done.returncode != 0 or not result.exists():
        raise LaunchError(f"vLLM ({name}) ended with status {done.returncode}:\n{_tail(log)}")
    found = json.loads(result.read_text())
    found["served"] = [[Served(**each) for each in served] for served in found["served"]]
    return StageResult(**found)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _lines(run: str, found: StageResult, alone: StageResult) -> list[Line]:
    return [
        Line(
            run=f"{run}, pass {number}" if len(found.served) > 1 else run,
            requests=len(served),
            equal=sum(a.tokens == b.tokens for a, b in zip(served, alone.served[0], strict=True)),
            prompt_tokens=sum(_LENGTHS),
            cached_tokens=sum(each.num_cached_tokens for each in served),
            median_seconds=statistics.median(each.seconds for each in served),
            cpu_seconds=found.cpu_seconds,
            num_restarts=found.num_restarts,
        )
        for number, served in enumerate(found.served, 1)
    ]


def _findings(lines: list[Line]) -> list[str]:
    by_run = {line.run: line for line in lines}
    hit = [by_run["with this cache, pass 2"], by_run["after a restart, from disk"]]
    wrong = [(line.run, line.requests - line.equal) for line in lines]
    findings = [f"{run}: {num_wrong} answers differ" for run, num_wrong in wrong if num_wrong]
    findings += [
        f"{line.run}: only {line.cached_tokens} tokens came from the cache"
        for line in hit
        if line.cached_tokens < line.prompt_tokens * 0.8
    ]
    if not by_run["ranks killed, pass 2"].num_restarts:
        findings.append("ranks killed: no rank was restarted")
    return findings


def _print(version: str, lines: list[Line], findings: list[str]) -> None:
    console = Console()
    console.print(f"vLLM {version} on a CPU, {lines[0].requests} prompts; seconds are of whole answers")
    table = table_of(("run", "equal", "prompt", "cached", "median s", "cpu s", "restarts"), words=("run",))
    for line in lines:
        figures = (line.equal, line.prompt_tokens, line.cached_tokens)
        seconds = (f"{line.median_seconds:.3f}", f"{line.cpu_seconds:.0f}")
        table.add_row(line.run, *map(str, figures), *seconds, str(line.num_restarts))
    console.print(table)
    for finding in findings:
        console.print(f"missed: {finding}")
