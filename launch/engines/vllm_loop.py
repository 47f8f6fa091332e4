"""Serves requests on a vLLM engine of this process, step by step, and times the first token of each."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_cache.launch.engines.progress import LIMITS
from fastdeploy_cache.launch.engines.results import Served
from fastdeploy_cache.launch.engines.vllm_plan import Pass, StagePlan, Visit

_PASS_SECONDS = LIMITS.hard_seconds  # who started this process ends it before, where it hangs
_IDLE_SECONDS = 0.005


@dataclass(eq=False)
class _Live:
    visit: Visit
    started: float
    num_steps: int = 0
    first_token_seconds: float = 0.0
    num_preemptions: int = 0
    output: Any = None


@dataclass(eq=False)
class VLLMLoop:
    """One for an engine (`vllm.LLM`). `kill_ranks` is called as often as a pass wants."""

    engine: Any
    plan: StagePlan
    kill_ranks: Callable[[], None]
    _num_requests: int = 0
    _live: dict[str, _Live] = field(default_factory=dict)

    def serve(self, wanted: Pass) -> tuple[Served, ...]:
        """All visits of a pass; the answers of those that were not aborted, in order."""
        prompts, waiting = self.plan.prompts(), deque(enumerate(wanted.visits))
        answers: dict[int, Served] = {}
        numbers: dict[str, int] = {}
        deadline = time.monotonic() + _PASS_SECONDS
        while time.monotonic() < deadline:  # steps are no measure: with workers of their own, some come back at once
            while waiting and len(self._live) < wanted.num_concurrent:
                number, visit = waiting.popleft()
                if wanted.kill_every and (number + 1) % wanted.kill_every == 0:
                    self.kill_ranks()
                numbers[self._add(visit, prompts[visit.prompt])] = number
            if not self._live:
                return tuple(answers[number] for number in sorted(answers))
            for name, served in self._step():
                answers[numbers[name]] = served
        raise RuntimeError(f"vLLM has not come to an end in {_PASS_SECONDS:.0f} s; {len(self._live)} requests are left")

    def _add(self, visit: Visit, prompt: Sequence[int]) -> str:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._num_requests += 1
        sampling = SamplingParams(
            temperature=0,
            max_tokens=self.plan.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=self.plan.num_logprobs or None,
        )
        inputs: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if visit.salt is not None:
            inputs["cache_salt"] = visit.salt
        adapter = None
        if visit.adapter is not None:
            adapter = LoRARequest(visit.adapter, self.plan.adapters.index(visit.adapter) + 1, visit.adapter)
        name, started = f"request-{self._num_requests}", time.monotonic()
        self.engine.llm_engine.add_request(name, inputs, sampling, lora_request=adapter)
        self._live[name] = _Live(visit, started)
        return name

    def _step(self) -> list[tuple[str, Served]]:
        """One step of the engine, with what has ended in it."""
        outputs = self.engine.llm_engine.step()
        if not outputs:
            # With workers of its own an engine that only waits for a load comes back at once. Asked again at once, it
            # and its workers keep two cores busy, and the processes that load were seen to wait for seconds.
            time.sleep(_IDLE_SECONDS)
        now, ended = time.monotonic(), []
        for output in outputs:
            live = self._live[output.request_id]
            live.output = output
            if output.outputs[0].token_ids and not live.first_token_seconds:
                live.first_token_seconds = now - live.started
            if output.finished:
                ended.append((output.request_id, self._end(output.request_id)))
        self._look_around()
        return ended

    def _look_around(self) -> None:
        """Note preemptions, and abort whom the plan wants aborted."""
        for name, live in list(self._live.items()):
            live.num_steps += 1
            for request in self._scheduled(name):
                live.num_preemptions = max(live.num_preemptions, request.num_preemptions)
            if live.num_steps == live.visit.abort_after_steps:
                self.engine.llm_engine.abort_request([name])
                del self._live[name]

    def _scheduled(self, name: str) -> list[Any]:
        """The scheduler's request. vLLM adds characters of its own to a name."""
        requests = scheduler_of(self.engine).requests
        return [request for key, request in requests.items() if key == name or key.startswith(f"{name}-")]

    def _end(self, name: str) -> Served:
        live = self._live.pop(name)
        return Served(
            tokens=tuple(live.output.outputs[0].token_ids),
            num_cached_tokens=live.output.num_cached_tokens or 0,
            seconds=live.first_token_seconds,
            num_preemptions=live.num_preemptions,
            logprobs=tuple(_best(of) for of in live.output.outputs[0].logprobs or ()),
        )


def _best(logprobs: Any) -> float:
    """The best of one token; a model that says nothing else gives no number, which no JSON has."""
    best = max(each.logprob for each in logprobs.values())
    return float(best) if math.isfinite(best) else 0.0


def scheduler_of(engine: Any) -> Any:
    """vLLM's scheduler, in this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler


def manager_of(engine: Any) -> Any:
    """Our manager, in vLLM's scheduler."""
    return scheduler_of(engine).connector.scheduler.cache
