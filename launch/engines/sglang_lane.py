"""The lane of SGLang: alone, with HiCache over our storage, with faults, and restarted; all answers must be equal."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.engines.hf_folder import write_hf_folder
from fastdeploy_cache.launch.engines.sglang_stage import EngineFindings, EngineRun, Generated
from fastdeploy_cache.launch.engines.stages import python_path, run_stage
from fastdeploy_cache.launch.findings import table_of, write_json

_STAGE = "fastdeploy_cache.launch.engines.sglang_stage"
_WITHOUT_CUDA = Path(__file__).parent / "without_cuda"
_LENGTHS = (96, 192, 200, 384, 400, 480, 64, 127, 320, 352, 500, 34)  # with 32 tokens a page: full ones and cut ones
_TIMEOUT_SECONDS = 900.0
_ALONE, _CACHE, _KILLED, _FAILING, _RESTARTED = (
    "SGLang alone",
    "with HiCache over our files",
    "storage process killed",
    "calls delayed and failed",
    "after a restart, from disk",
)


@dataclass(frozen=True, kw_only=True)
class LaneLine:
    """One line of the table: a pass of a run."""

    run: str
    requests: int
    equal: int  # answers that are those of SGLang alone, token for token
    prompt_tokens: int
    cached_tokens: int  # from anywhere
    storage_tokens: int  # of these, from our storage
    median_seconds: float
    num_kills: int


def run_sglang_lane(json_file: Path | None = None) -> bool:
    """Run everything, print the table, write it; whether all answers were equal and the cache was hit.

    Raises:
        LaunchError: a run of SGLang has failed.
        ModelLoadError: the model is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="fastdeploy-engines-") as name:
        folder = Path(name)
        write_hf_folder(folder / "model")
        alone = _stage(folder, "alone")
        lines = _lines(_ALONE, alone, alone)
        lines += _lines(_CACHE, _stage(folder, "cache", storage=_files(folder / "disk")), alone)
        lines += _lines(_RESTARTED, _stage(folder, "after", storage=_files(folder / "disk"), num_passes=1), alone)
        killed = _stage(folder, "killed", storage=_files(folder / "killed"), kill_every=3)
        lines += _lines(_KILLED, killed, alone)
        failing = _stage(
            folder,
            "failing",
            storage=_files(folder / "failing"),
            random_delay_seconds=0.05,
            failure_probability=0.2,
        )
        lines += _lines(_FAILING, failing, alone)
    findings = _findings(lines)
    _print(alone.sglang, lines, findings)
    rows = [asdict(line) for line in lines]
    write_json(json_file, {"machine": describe_machine(), "sglang": alone.sglang, "lines": rows, "failed": findings})
    return not findings


def _files(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "weights_id": "lane", "capacity_bytes": 4 * 10**9}


def _stage(folder: Path, name: str, **settings: Any) -> EngineFindings:
    """Run SGLang in a process of its own."""
    result = folder / f"SGLang {name}.json"
    wanted = EngineRun(model=str(folder / "model"), result=str(result), lengths=_LENGTHS, **settings)
    environment = {"PYTHONPATH": python_path(_WITHOUT_CUDA)}
    text = json.dumps(asdict(wanted))
    found = json.loads(run_stage(_STAGE, text, result, environment=environment, timeout_seconds=_TIMEOUT_SECONDS))
    found["served"] = [[Generated(**each) for each in served] for served in found["served"]]
    return EngineFindings(**found)


def _lines(run: str, found: EngineFindings, alone: EngineFindings) -> list[LaneLine]:
    return [
        LaneLine(
            run=_name(run, number, found),
            requests=len(served),
            equal=sum(a.tokens == b.tokens for a, b in zip(served, alone.served[0], strict=True)),
            prompt_tokens=sum(_LENGTHS),
            cached_tokens=sum(each.num_cached_tokens for each in served),
            storage_tokens=sum(each.num_storage_tokens for each in served),
            median_seconds=statistics.median(each.seconds for each in served),
            num_kills=found.num_kills,
        )
        for number, served in enumerate(found.served, 1)
    ]


def _name(run: str, number: int, found: EngineFindings) -> str:
    return f"{run}, pass {number}" if len(found.served) > 1 else run


def _findings(lines: list[LaneLine]) -> list[str]:
    by_run = {line.run: line for line in lines}
    wrong = [(line.run, line.requests - line.equal) for line in lines]
    findings = [f"{run}: {num_wrong} answers differ" for run, num_wrong in wrong if num_wrong]
    # nothing is asked of a process that is killed again and again: on a busy machine it is down all the time
    for run, share in ((f"{_CACHE}, pass 2", 0.5), (_RESTARTED, 0.8)):
        line = by_run[run]
        if line.storage_tokens < line.prompt_tokens * share:
            findings.append(f"{run}: only {line.storage_tokens} tokens came from storage")
    if not by_run[f"{_KILLED}, pass 2"].num_kills:
        findings.append(f"{_KILLED}: none was")
    return findings


def _print(version: str, lines: list[LaneLine], findings: list[str]) -> None:
    console = Console()
    console.print(f"SGLang {version} on a CPU, {lines[0].requests} prompts; seconds are of whole answers")
    table = table_of(("run", "equal", "prompt", "cached", "of these stored", "median s", "kills"), words=("run",))
    for line in lines:
        figures = (line.equal, line.prompt_tokens, line.cached_tokens, line.storage_tokens)
        table.add_row(line.run, *map(str, figures), f"{line.median_seconds:.3f}", str(line.num_kills))
    console.print(table)
    for finding in findings:
        console.print(f"missed: {finding}")
