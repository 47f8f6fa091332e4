"""The lane of SGLang: alone, with HiCache over our storage, with our linker below its tree, with faults, and restarted;
all answers must be equal."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastdeploy_cache.launch.engines.hf_folder import write_hf_folder
from fastdeploy_cache.launch.engines.hybrid_models import SGLANG_MODEL, VOCABULARY, write_hybrid_model
from fastdeploy_cache.launch.engines.record import LaneRecord
from fastdeploy_cache.launch.engines.report import Line, line_of
from fastdeploy_cache.launch.engines.results import StageResult, answers, result_of
from fastdeploy_cache.launch.engines.sglang_stage import EngineRun
from fastdeploy_cache.launch.engines.stages import python_path, run_stage

_STAGE = "fastdeploy_cache.launch.engines.sglang_stage"
_WITHOUT_CUDA = Path(__file__).parent / "without_cuda"
_LENGTHS = (96, 192, 200, 384, 400, 480, 64, 127, 320, 352, 500, 34)  # with 32 tokens a page: full ones and cut ones
_ENVIRONMENT: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}  # on two cores a token takes nine times as long without
_ALONE, _CACHE, _KILLED, _FAILING, _RESTARTED = (
    "SGLang alone",
    "with HiCache over our files",
    "storage process killed",
    "calls delayed and failed",
    "after a restart, from disk",
)
_LINKED, _LINKED_KILLED, _LINKED_RESTARTED = (
    "with our linker",
    "linker, ranks killed",
    "linker, after a restart, from disk",
)
_HYBRID = "hybrid: "
_NUM_LINKED_PASSES, _NUM_RESTARTED_PASSES = 3, 2
_AT_ONCE = {"transfer": {"restart_backoff_seconds": 0.0, "max_restarts": 1000}}  # else they are down most of the time


def run_sglang_lane(json_file: Path | None = None) -> bool:
    """Run everything, print and write it; whether all answers were equal and the cache was hit.

    Each stage is printed and written as it ends.

    Raises:
        LaunchError: a run of SGLang has failed, or the file cannot be written.
        ModelLoadError: the model is not installed.
    """
    record = LaneRecord("SGLang", json_file, seconds="of whole answers")
    with record, tempfile.TemporaryDirectory(prefix="fastdeploy-engines-") as name:
        folder = Path(name)
        write_hf_folder(folder / "model")
        record.add(_served(folder, record, _uniform_runs(folder), model="model"))
        write_hybrid_model(folder / "hybrid", SGLANG_MODEL)
        hybrid = {f"{_HYBRID}{run}": settings for run, settings in _hybrid_runs(folder).items()}
        record.add(_served(folder, record, hybrid, model="hybrid", vocabulary=VOCABULARY))
        record.findings += _findings(record.lines)
    return not record.findings


def _uniform_runs(folder: Path) -> dict[str, dict[str, Any]]:
    faults = {"random_delay_seconds": 0.05, "failure_probability": 0.2}
    return {
        _ALONE: {},
        _CACHE: {"storage": _files(folder / "disk")},
        _RESTARTED: {"storage": _files(folder / "disk"), "num_passes": 1},
        _KILLED: {"storage": _files(folder / "killed"), "kill_every": 3},
        _FAILING: {"storage": _files(folder / "failing"), **faults},
        **_linked_runs(folder / "linked", "400MiB", 3),
    }


def _hybrid_runs(folder: Path) -> dict[str, dict[str, Any]]:
    return {_ALONE: {}, **_linked_runs(folder / "linked-hybrid", "100MiB", 9)}  # an answer takes 0.1 s


def _linked_runs(folder: Path, cpu_memory_bytes: str, kill_every: int) -> dict[str, dict[str, Any]]:
    tier = {"weights_id": "lane", "cpu_memory_bytes": cpu_memory_bytes}
    stored = tier | {"storage": {"folder": str(folder), "capacity_bytes": 4 * 10**9}}
    return {
        _LINKED: {"linker": stored, "num_passes": _NUM_LINKED_PASSES},
        _LINKED_RESTARTED: {"linker": stored, "num_passes": _NUM_RESTARTED_PASSES},
        _LINKED_KILLED: {"linker": tier | _AT_ONCE, "num_passes": _NUM_LINKED_PASSES, "kill_every": kill_every},
    }


def _served(
    folder: Path, record: LaneRecord, runs: Mapping[str, dict[str, Any]], *, model: str, vocabulary: int | None = None
) -> Iterator[Line]:
    """Runs of one model, of which the first is SGLang alone."""
    alone: StageResult | None = None
    more = {} if vocabulary is None else {"vocabulary": vocabulary}
    for run, settings in runs.items():
        found = _stage(folder, record, run, model=str(folder / model), **more, **settings)
        alone = alone or found
        yield from _lines(run, found, alone)


def _files(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "weights_id": "lane", "capacity_bytes": 4 * 10**9}


def _stage(folder: Path, record: LaneRecord, name: str, **settings: Any) -> StageResult:
    """Run SGLang in a process of its own."""
    log = record.log_of(name)
    result = folder / f"{log.stem}.json"
    wanted = EngineRun(result=str(result), lengths=_LENGTHS, **settings)
    environment = {"PYTHONPATH": python_path(_WITHOUT_CUDA), **_ENVIRONMENT}
    with record.stage(name) as passes:
        found = result_of(run_stage(_STAGE, json.dumps(asdict(wanted)), result, log=log, environment=environment))
        passes.extend(found.passes)
    record.version = found.version
    return found


def _lines(run: str, found: StageResult, alone: StageResult) -> list[Line]:
    numbers = range(1, len(found.passes) + 1)
    names = [f"{run}, pass {number}" for number in numbers] if len(found.passes) > 1 else [run]
    return [
        line_of(name, [passed], answers(alone.passes[:1]), _LENGTHS, num_kills=found.num_kills)
        for name, passed in zip(names, found.passes, strict=True)
    ]


def _findings(lines: list[Line]) -> list[str]:
    by_run = {line.run: line for line in lines}
    wrong = [(line.run, line.num_requests - line.num_equal) for line in lines]
    findings = [f"{run}: {num_wrong} answers differ" for run, num_wrong in wrong if num_wrong]
    # nothing is asked of a process that is killed again and again: on a busy machine it is down all the time
    wanted = [(f"{_CACHE}, pass 2", 0.5, "storage"), (_RESTARTED, 0.8, "storage")]
    for of in ("", _HYBRID):
        wanted += [(f"{of}{_LINKED}, pass {number}", 0.8, "the CPU tier") for number in (2, 3)]
        wanted += [(f"{of}{_LINKED_RESTARTED}, pass 1", 0.8, "disk")]
    for run, share, source in wanted:
        hits = by_run[run].hit_tokens[1 if _LINKED in run or _LINKED_RESTARTED in run else -1]
        if hits < by_run[run].num_prompt_tokens * share:
            findings.append(f"{run}: only {hits} tokens came from {source}")
    killed = [f"{_KILLED}, pass 2", *(f"{of}{_LINKED_KILLED}, pass 2" for of in ("", _HYBRID))]
    return findings + [f"{run}: no process was killed" for run in killed if not by_run[run].num_kills]
