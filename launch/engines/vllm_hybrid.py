"""Models with several KV cache groups in a real vLLM: what must be equal, and what it takes in the CPU tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_cache.launch.engines.hybrid_models import HYBRID_MODELS, VOCABULARY, write_hybrid_model
from fastdeploy_cache.launch.engines.report import CaseResult
from fastdeploy_cache.launch.engines.results import Passed, StageResult
from fastdeploy_cache.launch.engines.vllm_cases import Runs
from fastdeploy_cache.launch.engines.vllm_plan import pass_over

_WINDOWS = (300, 140, 500, 257, 400, 640, 97, 480)  # tokens of each prompt
_STATES = (1_300, 600, 1_900, 1_100, 2_300)  # a block is as long as a state is large
_OTHERS: dict[str, Any] = {"lengths": _WINDOWS, "num_gpu_blocks": 110, "max_num_batched_tokens": 256}
_MODELS: dict[str, dict[str, Any]] = {
    "Gemma 3": {**_OTHERS, "num_gpu_blocks": 84},
    "gpt-oss": {**_OTHERS, "num_gpu_blocks": 56},
    "Llama 4": _OTHERS,
    "Qwen3-Next": {
        "lengths": _STATES,
        "num_gpu_blocks": 24,
        "max_num_batched_tokens": 1_024,
        "dtype": "bfloat16",
        "mamba_cache_mode": "align",
    },
}
_CACHE: dict[str, Any] = {"num_cpu_blocks": 600, "min_prefetch_tokens": 32}
_LEAST_HITS = 0.6  # of the tokens of all prompts, where they were served before
_KILL_EVERY = 5  # requests


def hybrid_cases(lane: Runs, *, only_answers: bool) -> Iterator[CaseResult]:
    """All families, each with ranks killed, from disk after SIGKILL, with steps ahead, and with bytes turned over.

    `only_answers`: the last two of one family alone, and nothing of the memory that each takes. Raises `LaunchError`.
    """
    for family in HYBRID_MODELS:
        folder = lane.folder / family.replace(" ", "-")
        write_hybrid_model(folder, family)
        one = _Family(lane, family, folder)
        yield from one.equal_answers()
        if not only_answers or family == "gpt-oss":
            yield one.ahead()
            yield one.poisoned()
        if not only_answers and family != "Qwen3-Next":
            yield one.without_hybrid_manager()


class _Family:
    """One model, and what vLLM alone says of its prompts."""

    def __init__(self, lane: Runs, name: str, folder: Path) -> None:
        self._lane, self._name = lane, name
        self._lengths: Sequence[int] = _MODELS[name]["lengths"]
        self._whole = pass_over(len(self._lengths))
        self._plan: dict[str, Any] = {
            "model": str(folder), "vocabulary": VOCABULARY, "num_logprobs": 1, "min_groups": 2, **_MODELS[name],
        }  # fmt: skip
        self._alone = self._run("alone", passes=(self._whole,) * 3).passes

    def _run(self, name: str, **plan: Any) -> StageResult:
        return self._lane.run(f"{self._name} {name}", **{**self._plan, **plan})

    def _ours(self, name: str, cache: dict[str, Any] | None = None, **plan: Any) -> StageResult:
        return self._run(name, connector="fastdeploy", cache={**_CACHE, **(cache or {})}, **plan)

    def _case(self, name: str, ours: Sequence[Passed], failed: str = "", note: str = "") -> CaseResult:
        """Tokens and the best logprobs of each answer, as vLLM alone gave them."""
        expected = [each for passed in self._alone for each in passed.served]
        got = [each for passed in ours for each in passed.served]
        wanted = [expected[number % len(self._lengths)] for number in range(len(got))]
        num_equal = sum((a.tokens, a.logprobs) == (b.tokens, b.logprobs) for a, b in zip(got, wanted, strict=True))
        hits = tuple(sum(tier) for tier in zip(*(passed.hit_tokens for passed in ours), strict=True)) or (0, 0, 0)
        if num_equal < len(got) and not failed:
            failed = f"{len(got) - num_equal} answers differ from those of vLLM alone"
        if len({each.tokens for each in expected}) < len(self._lengths):
            failed = "prompts have the same answer: this shows nothing"
        name = f"{self._name}: {name}"
        return CaseResult(
            name=name, num_answers=len(got), num_equal=num_equal, hit_tokens=hits, failed=failed, note=note
        )

    def equal_answers(self) -> Iterator[CaseResult]:
        """Three passes, then kills, then a sudden end; and a new process that finds all of it on disk."""
        storage = {
            "folder": str(self._lane.folder / f"disk {self._name}"), "weights_id": "lane", "admission": "all",
        }  # fmt: skip
        killed = pass_over(len(self._lengths), kill_every=_KILL_EVERY)
        passes = (self._whole, self._whole, self._whole, killed, self._whole)
        ours = self._ours("with this cache", {"storage": storage}, passes=passes, is_killed=True)
        yield self._case("three passes", ours.passes[:3], self._hits(ours.passes[1]) or self._hits(ours.passes[2]))
        no_kill = "" if ours.num_kills else "nothing was killed"
        yield self._case("ranks killed, then one pass more", ours.passes[3:], no_kill)
        after = self._ours("from disk", {"storage": storage}, passes=(self._whole,))
        yield self._case("a new process after SIGKILL, from disk", after.passes, self._hits(after.passes[0], tier=2))

    def ahead(self) -> CaseResult:
        """The scheduler is a step ahead of what is computed; one request at a time, so that sums are the same."""
        ours = self._ours("ahead", schedules_ahead=True, passes=(self._whole, self._whole))
        return self._case("steps scheduled ahead", ours.passes, self._hits(ours.passes[1]))

    def poisoned(self) -> CaseResult:
        """Not a promise of the cache: that a comparison of answers sees wrong KV, and wrong states, at all."""
        ours = self._ours("poisoned", is_poisoned=True, passes=(self._whole, self._whole)).passes[1:]
        case = self._case("bytes of the CPU tier turned over", ours)
        is_blind = case.num_equal > len(self._lengths) // 4
        failed = self._hits(ours[0]) or ("wrong KV gives the same answers: this lane shows nothing" if is_blind else "")
        return dataclasses.replace(case, failed=failed, note="must differ")

    def without_hybrid_manager(self) -> CaseResult:
        """What the same hits take in the CPU tier where vLLM keeps all layers as if they kept everything."""
        passes, blocks = (self._whole, self._whole), 240
        ours = self._ours("memory", passes=passes)
        off = self._ours(
            "hybrid manager off", passes=passes, has_hybrid_manager=False, min_groups=1, num_gpu_blocks=blocks // 2
        )
        told = [
            f"{run.cpu_bytes / 2**20:.1f} MiB for {sum(run.passes[1].hit_tokens):,} hit tokens" for run in (ours, off)
        ]
        return self._case(
            "two passes", ours.passes, self._hits(ours.passes[1]), note=f"{told[0]}; manager off: {told[1]}"
        )

    def _hits(self, passed: Passed, tier: int | None = None) -> str:
        num_tokens = sum(passed.hit_tokens) if tier is None else passed.hit_tokens[tier]
        wanted = sum(self._lengths) * _LEAST_HITS
        return "" if num_tokens > wanted else f"only {num_tokens} tokens were hit"
