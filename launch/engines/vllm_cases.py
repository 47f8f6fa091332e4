"""What must hold in a real vLLM beside hits: salts, LoRA, aborts, preemption, reset, bf16, two ranks, loads that a step
waits for layer by layer, steps that are scheduled ahead, and a model that has to be refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastdeploy_cache.launch.engines.made_up_model import SMALL, write_adapter, write_made_up_model, write_mla_model
from fastdeploy_cache.launch.engines.report import CaseResult
from fastdeploy_cache.launch.engines.results import Passed, StageResult, answers
from fastdeploy_cache.launch.engines.vllm_plan import Pass, Visit, pass_over

_LENGTHS = (96, 192, 200, 384, 64, 127, 320, 352)
_NUM = len(_LENGTHS)
_MLA_LENGTHS = (97, 193, 200, 385, 65, 127, 321, 353)  # behind full blocks vLLM computes a block again, ours one token
_MLA: Mapping[str, Mapping[str, Any]] = {  # by vLLM's kernels; AMX's takes bfloat16 only, and prefills in chunks
    "MLA": {"attention_backend": "CPU_MLA", "block_size": 16, "num_gpu_blocks": 56},
    "MLA, by AMX where there is one": {"dtype": "bfloat16"},
}
_LEAST_HITS = 0.6  # of the tokens of all prompts, where they were served before
_CACHE: dict[str, Any] = {"num_cpu_blocks": 600, "min_prefetch_tokens": 32}


class Runs(Protocol):
    """A lane."""

    folder: Path

    def run(self, name: str, **plan: Any) -> StageResult: ...

    def serve(self, name: str, num_passes: int, **plan: Any) -> list[Passed]: ...


def run_cases(lane: Runs) -> Iterator[CaseResult]:
    """Run all cases on a small model with made-up weights. Raises `LaunchError`."""
    model = lane.folder / "small"
    write_made_up_model(model)
    base: dict[str, Any] = {"model": str(model), "lengths": _LENGTHS, "vocabulary": SMALL.vocab_size}
    twice = (pass_over(_NUM), pass_over(_NUM))
    yield from _one_engine(lane, base)
    for name, options in (("bf16", {"dtype": "bfloat16"}), ("two ranks", {"tp_size": 2})):
        plan = {**base, **options, "passes": twice}
        alone, ours = lane.run(f"{name}-alone", **plan), lane.run(name, **_with_cache(plan))
        yield _case(name, ours.passes, alone.passes, _is_hit(ours.passes[1]))
    plan = {**base, "passes": twice}
    passes = lane.run("twice-alone", **plan).passes
    crowded = Pass(visits=twice[0].visits, num_concurrent=3)
    ahead: dict[str, Any] = {"schedules_ahead": True, "passes": (crowded, crowded)}
    by_layer: dict[str, Any] = {"layerwise_load": True}
    for name, options, cache in (
        ("layer by layer", {}, by_layer),
        ("steps scheduled ahead", ahead, {}),
        ("ahead and layer by layer", ahead, by_layer),
    ):
        ours = lane.run(name, **_with_cache({**plan, **options}, **cache))
        yield _case(name, ours.passes, passes, _is_hit(ours.passes[1]))
    yield _poisoned(lane, plan, passes)
    write_mla_model(lane.folder / "mla")
    latent = {**base, "model": str(lane.folder / "mla"), "lengths": _MLA_LENGTHS, "passes": twice}
    for name, kernel in _MLA.items():
        yield _mla(lane, name, {**latent, **kernel})


def http_cases(lane: Runs, model: str) -> Iterator[CaseResult]:
    """The same over HTTP: vLLM's engine in other processes, several clients, SIGTERM and a new server."""
    alone = lane.run("http-alone", model=model, lengths=_LENGTHS, passes=(pass_over(_NUM),)).passes
    storage = {"folder": str(lane.folder / "disk-http"), "weights_id": "lane", "admission": "all"}
    plan: dict[str, Any] = {"model": model, "lengths": _LENGTHS, "cache": {**_CACHE, "storage": storage}}
    first, second = lane.serve("vllm serve", 2, **plan)
    yield _case("over HTTP, first pass", [first], alone, "")
    yield _case("over HTTP, second pass", [second], alone, _is_hit(second))
    [after] = lane.serve("vllm serve again", 1, **plan)
    yield _case("over HTTP, restarted", [after], alone, _is_hit(after))


def _with_cache(plan: dict[str, Any], **cache: Any) -> dict[str, Any]:
    return {**plan, "connector": "fastdeploy", "cache": {**_CACHE, **cache}}


@dataclasses.dataclass(frozen=True)
class _Step:
    """One pass of the engine that sees everything, and what must be true of its hits; "": it is."""

    name: str
    wanted: Pass
    judge: Callable[[Passed], str]


def _one_engine(lane: Runs, base: dict[str, Any]) -> list[CaseResult]:
    adapters = tuple(str(lane.folder / f"adapter-{number}") for number in (1, 2))
    for number, folder in enumerate(adapters, 1):
        write_adapter(Path(folder), seed=number)
    first, second = (pass_over(_NUM, adapter=folder) for folder in adapters)
    aborts = Pass(visits=tuple(Visit(prompt=i // 2, abort_after_steps=i % 2 * (i // 2 + 1)) for i in range(2 * _NUM)))
    # prompts that fill the pool to the last blocks, so that their answers find none
    crowd = Pass(visits=tuple(Visit(prompt=number) for number in (3, 7, 0, 1, 3, 7, 0)), num_concurrent=3)
    # the second of a pair gets blocks that the first is to compute in the same step
    pairs = Pass(visits=tuple(Visit(prompt=i // 2) for i in range(2 * _NUM)), num_concurrent=4, is_reset=True)
    steps = [
        _Step("first pass", pass_over(_NUM), _is_cold),
        _Step("second pass", pass_over(_NUM), _is_hit),
        _Step("a salt", pass_over(_NUM, salt="a"), _is_cold),
        _Step("the same salt", pass_over(_NUM, salt="a"), _is_hit),
        _Step("an adapter", first, _is_cold),
        _Step("another adapter", second, _is_cold),
        _Step("the first adapter", first, _is_hit),
        _Step("aborts between", aborts, _is_hit),
        _Step("preemption", crowd, _is_preempted),
        _Step("after a reset", Pass(visits=pass_over(_NUM).visits, is_reset=True), _is_cold),
        _Step("two of a kind at once, after a reset", pairs, _no_judge),
        _Step("what these have left", pass_over(_NUM), _is_hit),
    ]
    plan = {**base, "adapters": adapters, "passes": tuple(step.wanted for step in steps), "num_output_tokens": 40}
    alone = lane.run("cases-alone", **plan).passes
    ours = lane.run("cases", **_with_cache(plan)).passes
    cases = [_case(step.name, ours[i : i + 1], alone[i : i + 1], step.judge(ours[i])) for i, step in enumerate(steps)]
    kinds = {str(answers(ours[i : i + 1])) for i in (0, 4, 5)}
    if len(kinds) < 3:
        cases.append(_case("adapters", (), (), "answers with and without an adapter are alike: this shows nothing"))
    return cases


def _poisoned(lane: Runs, plan: dict[str, Any], alone: Sequence[Passed]) -> CaseResult:
    """Not a promise of the cache: that a comparison of answers sees wrong KV at all."""
    ours = lane.run("poisoned", **_with_cache(plan), is_poisoned=True).passes[1:]
    case = _case("bytes of the CPU tier turned over", ours, alone[1:], "")
    failed = _is_hit(ours[0]) or ("wrong KV gives the same answers: this lane shows nothing" if case.num_equal else "")
    return dataclasses.replace(case, failed=failed, note="must differ")


def _mla(lane: Runs, name: str, plan: dict[str, Any]) -> CaseResult:
    """Where vLLM's prefill of MLA cannot start behind a context, which a connector would give it, ours must refuse.

    Where it can, bfloat16 rounds otherwise behind a context than without one. So vLLM alone has a pool that keeps all
    prompts, and its second pass starts behind the same contexts as ours.
    """
    alone = lane.run(f"{name} alone", **{**plan, "num_gpu_blocks": 200})
    ours = lane.run(name, **_with_cache(plan), may_be_refused=True)
    if len(set(answers(alone.passes[:1]))) == 1:
        return _case(name, (), (), "all prompts have the same answer: this shows nothing")
    if ours.refused:
        is_right = not alone.is_prefill_chunked and "MLA" in ours.refused
        failed = "" if is_right else f"it was refused: {ours.refused}"
        return dataclasses.replace(_case(name, (), (), failed), note="refused by name: chunked prefill is off")
    case = _case(name, ours.passes, alone.passes, _is_hit(ours.passes[1]))
    missed = f"it was not refused, with chunked prefill off: {case.num_equal} of {case.num_answers} answers are equal"
    return case if alone.is_prefill_chunked else dataclasses.replace(case, failed=missed)


def _case(name: str, ours: Sequence[Passed], alone: Sequence[Passed], failed: str) -> CaseResult:
    got, expected = answers(ours), answers(alone)
    num_equal = sum(a == b for a, b in zip(got, expected, strict=True))
    hits = tuple(sum(tier) for tier in zip(*(passed.hit_tokens for passed in ours), strict=True)) or (0, 0, 0)
    if num_equal < len(expected) and not failed:
        failed = f"{len(expected) - num_equal} answers differ from those of vLLM alone"
    return CaseResult(name=name, num_answers=len(got), num_equal=num_equal, hit_tokens=hits, failed=failed)


def _is_hit(passed: Passed) -> str:
    num_tokens = sum(passed.hit_tokens)
    return "" if num_tokens > sum(_LENGTHS) * _LEAST_HITS else f"only {num_tokens} tokens were hit"


def _is_cold(passed: Passed) -> str:
    return f"{sum(passed.hit_tokens)} tokens were hit that are others'" if sum(passed.hit_tokens) else ""


def _no_judge(passed: Passed) -> str:  # noqa: ARG001 (how much is hit depends on who comes first)
    return ""


def _is_preempted(passed: Passed) -> str:
    return "" if any(served.num_preemptions for served in passed.served) else "nobody was preempted"
