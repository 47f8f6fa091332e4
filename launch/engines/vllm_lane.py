"""The lane of vLLM: alone, with this cache, with its ranks killed, restarted, beside LMCache; answers are compared."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_cache import StorageConfig
from fastdeploy_cache.launch.engines.hf_folder import write_hf_folder
from fastdeploy_cache.launch.engines.lmcache import lmcache_server
from fastdeploy_cache.launch.engines.record import LaneRecord
from fastdeploy_cache.launch.engines.report import Line, line_of
from fastdeploy_cache.launch.engines.results import Passed, StageResult, answers, result_of, to_json
from fastdeploy_cache.launch.engines.stages import run_stage
from fastdeploy_cache.launch.engines.vllm_cases import http_cases, run_cases
from fastdeploy_cache.launch.engines.vllm_hybrid import hybrid_cases
from fastdeploy_cache.launch.engines.vllm_plan import StagePlan, pass_over
from fastdeploy_cache.launch.engines.vllm_server import serve_passes
from fastdeploy_cache.transfer_manager.storage.admin import open_admin

_STAGE = "fastdeploy_cache.launch.engines.vllm_stage"
_SHORT = (96, 192, 200, 384, 400, 480, 64, 127, 320, 352, 500, 33)  # with 32 tokens a block: full ones and cut ones
_LONG = (256, 512, 1_024, 2_048, 300, 700, 1_500, 2_000)
_BLOCK_TOKENS = 32
_CACHE: dict[str, Any] = {"num_cpu_blocks": 400, "min_prefetch_tokens": 32}
_KILL_EVERY = 5  # requests; four kills in a minute, of the five that the restart policy allows
_SECOND, _KILLED, _BACK, _RESTARTED, _SUDDEN = (
    "with this cache, pass 2",
    "ranks killed",
    "ranks back again",
    "after a restart, from disk",
    "after a sudden end, from disk",
)


class VLLMLane:
    """A folder, and runs of vLLM in it, each in a process of its own."""

    def __init__(self, folder: Path, lmcache: Path | None, record: LaneRecord) -> None:
        self.folder, self.lmcache, self.record = folder, lmcache, record

    def run(self, name: str, **plan: Any) -> StageResult:
        """One run. Raises `LaunchError`."""
        with self.record.stage(name) as passes:
            done = self._run(name, plan) if plan.get("connector") != "lmcache" else self._run_beside_lmcache(name, plan)
            passes.extend(done.passes)
        self.record.version = done.version
        return done

    def serve(self, name: str, num_passes: int, **plan: Any) -> list[Passed]:
        """The same over HTTP. Raises `LaunchError`."""
        with self.record.stage(name) as passes:
            wanted = StagePlan(result="", passes=(), **plan)
            passes.extend(serve_passes(wanted, self.record.log_of(name), num_passes))
        return passes

    def _run_beside_lmcache(self, name: str, plan: Mapping[str, Any]) -> StageResult:
        assert self.lmcache is not None, "it is run only where it is installed"
        log = self.record.log_of(f"{name} server")
        with lmcache_server(self.lmcache, log, chunk_tokens=_BLOCK_TOKENS) as (beside, environment):
            return self._run(name, {**plan, **beside}, environment)

    def _run(self, name: str, plan: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> StageResult:
        log = self.record.log_of(name)
        result = self.folder / f"{log.stem}.json"
        wanted = to_json(StagePlan(result=str(result), **plan))
        is_killed = bool(plan.get("is_killed"))
        found = run_stage(_STAGE, wanted, result, log=log, environment=environment, may_kill_itself=is_killed)
        return result_of(found)


def run_vllm_lane(json_file: Path | None = None, *, only_answers: bool = False, lmcache: Path | None = None) -> bool:
    """Run everything, print and write it; whether all answers were equal and the cache was hit.

    Each stage is printed and written as it ends. `only_answers`: short prompts, each engine once. `lmcache`: a folder
    where LMCache is installed, to run it beside.

    Raises:
        LaunchError: a run of vLLM has failed, or the file cannot be written.
        ModelLoadError: the model is not installed.
    """
    record = LaneRecord("vLLM", json_file, seconds="to the first token, processor seconds of a pass")
    with record, tempfile.TemporaryDirectory(prefix="fastdeploy-engines-") as name:
        lane = VLLMLane(Path(name), lmcache, record)
        model = lane.folder / "model"
        write_hf_folder(model)
        record.add(_served(lane, _SHORT if only_answers else _LONG, num_rounds=1 if only_answers else 2))
        record.findings += _findings(record.lines)
        record.add(run_cases(lane))
        record.add(hybrid_cases(lane, only_answers=only_answers))
        record.add(http_cases(lane, str(model)))
        record.findings += [f"{case.name}: {case.failed}" for case in record.cases if case.failed]
    return not record.findings


def _served(lane: VLLMLane, lengths: tuple[int, ...], num_rounds: int) -> Iterator[Line]:
    """Engines take turns, so that a slow minute of the machine meets all of them."""
    whole = pass_over(len(lengths))
    fits, is_short = sum(lengths) // _BLOCK_TOKENS + 40, num_rounds == 1
    base: dict[str, Any] = {
        "model": str(lane.folder / "model"), "lengths": lengths, "passes": (whole, whole),
        "num_gpu_blocks": 28 if is_short else 100, "block_size": _BLOCK_TOKENS,
    }  # fmt: skip
    ours = {**base, "connector": "fastdeploy", "cache": _CACHE}
    engines = {"vLLM alone": base, "with this cache": ours}
    if not is_short:
        engines["vLLM alone, all fits its own pool"] = {**base, "num_gpu_blocks": fits}
    if lane.lmcache is not None:
        engines["with LMCache"] = {**base, "connector": "lmcache"}
    found: dict[str, list[Passed]] = {}
    for number in range(num_rounds):
        for name, plan in engines.items():
            result = lane.run(f"{name}-{number}", **plan)
            for index, passed in enumerate(result.passes, 1):
                found.setdefault(f"{name}, pass {index}", []).append(passed)
    expected = answers(found["vLLM alone, pass 1"][:1])
    for name, passes in found.items():
        yield line_of(name, passes, expected, lengths)
    yield from _killed(lane, ours, expected)
    yield from _restarted(lane, ours, expected)


def _killed(lane: VLLMLane, ours: dict[str, Any], expected: Sequence[tuple[int, ...]]) -> list[Line]:
    """Two passes with kills, and two without. Nothing can be asked of the hits of the first two, nor of the third: on
    a busy machine the ranks may be down all the time while others are killed. The third stores what is missing."""
    whole, lengths = pass_over(len(expected)), ours["lengths"]
    killed = pass_over(len(expected), kill_every=_KILL_EVERY)
    found = lane.run("ranks killed", **{**ours, "passes": (killed, killed, whole, whole)})
    names = (f"{_KILLED}, pass 1", f"{_KILLED}, pass 2", f"{_BACK}, pass 1", f"{_BACK}, pass 2")
    return [
        line_of(name, [each], expected, lengths, num_kills=found.num_kills)
        for name, each in zip(names, found.passes, strict=True)
    ]


def _restarted(lane: VLLMLane, ours: dict[str, Any], expected: Sequence[tuple[int, ...]]) -> Iterator[Line]:
    """New processes that find their KV on disk, the first behind an orderly end, the second behind SIGKILL."""
    for run, is_killed in ((_RESTARTED, False), (_SUDDEN, True)):
        folder = str(lane.folder / f"disk-{is_killed}")
        storage = {"folder": folder, "weights_id": "lane", "admission": "all"}
        once = {**ours, "cache": {**_CACHE, "storage": storage}, "passes": (pass_over(len(expected)),)}
        lane.run(f"before: {run}", **once, is_killed=is_killed)
        stored = _num_blocks_on_disk(folder) * _BLOCK_TOKENS
        passes = lane.run(run, **once).passes
        yield line_of(run, passes, expected, ours["lengths"], num_stored_tokens=stored)


def _num_blocks_on_disk(folder: str) -> int:
    config = StorageConfig(kind="file", folder=folder, weights_id="lane")
    return sum(space.num_objects for space in open_admin("file", config.store_options(tp_size=1)).spaces())


def _findings(lines: Sequence[Line]) -> list[str]:
    by_run = {line.run: line for line in lines}
    wrong = [(line.run, line.num_requests - line.num_equal) for line in lines if "LMCache" not in line.run]
    findings = [f"{run}: {num_wrong} answers differ" for run, num_wrong in wrong if num_wrong]
    for name, share in ((_SECOND, 0.8), (_RESTARTED, 0.8), (f"{_BACK}, pass 2", 0.5)):
        hits = sum(by_run[name].hit_tokens)
        if hits < by_run[name].num_prompt_tokens * share:
            findings.append(f"{name}: only {hits} tokens came from the cache")
    for name in (_SECOND, _RESTARTED):
        line = by_run[name]
        if sum(line.hit_tokens) != line.num_cached_tokens:
            findings.append(f"{name}: vLLM counts {line.num_cached_tokens} cached tokens, we {line.hit_tokens}")
    if not by_run[f"{_KILLED}, pass 2"].num_kills:
        findings.append(f"{_KILLED}: no rank was")
    return findings + _findings_of_storage(by_run[_SUDDEN])


def _findings_of_storage(sudden: Line) -> list[str]:
    """Writes that were not durable yet are lost. Of the rest a load that is late is computed, so half is asked for."""
    stored, hits = sudden.num_stored_tokens or 0, sudden.hit_tokens[-1]
    if not stored:
        return [f"{_SUDDEN}: nothing was on disk, so that this shows nothing"]
    return [f"{_SUDDEN}: only {hits} tokens came from disk, of {stored} that were there"] if hits < stored / 2 else []
