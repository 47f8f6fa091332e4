"""vLLM's requests as the connector's scheduler half knows them. Knows vLLM by duck typing only."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.match import Prefetch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExternalHit:
    """Prompt tokens that vLLM was promised behind its own, by where they were when the request was matched."""

    num_cpu_tokens: int = 0
    num_storage_tokens: int = 0


@dataclass(eq=False)
class PendingCheckpoint:
    """A checkpoint behind `boundary` blocks that is to be copied. vLLM's `kept` blocks are its units, by row."""

    boundary: int
    units: list[list[int]]
    kept: list[Any]
    is_newest: bool  # of its request's output: it waits for the request's end, or for one that is newer


class StepWork(NamedTuple):
    """What a step computes of one request: from so many tokens up to so many, with those that still run. `offers`: the
    states that it leaves, by group, block and tokens."""

    num_before: int
    num_after: int
    offers: ListOf[tuple[int, int, int]] = ()


@dataclass(eq=False)
class Sequence:
    """One of vLLM's requests."""

    request: Any
    tokens: Request  # grows behind vLLM's
    generation: int  # of the cache, when it came: after a reset nothing that it computed before is stored
    pinned: PinnedPrefix | None = None  # from the match to the start of its load
    first_block: int = 0  # of the load
    num_vllm_tokens: int = 0  # that vLLM's own prefix cache had at the match
    num_admitted_tokens: int = 0  # these and the promised ones: what it has not computed itself
    hit: ExternalHit = ExternalHit()  # of the last match whose blocks vLLM has allocated
    prefetch: Prefetch | None = None
    load_failed: bool = False  # not tried again: vLLM would ask for ever
    is_counted: bool = False  # in the metrics: once for each request, not again after a preemption
    num_found_blocks: int = 0  # of its prompt, that it did not compute, as they were counted
    num_offered: int = 0  # blocks that were to be stored
    is_storing: bool = False
    is_over: bool = False  # vLLM is done with it
    rest: list[Any] | None = None  # vLLM's blocks, kept until its store has ended: all that was computed, at its end
    num_checkpoint_blocks: int = 0  # of a model with several groups: up to the checkpoint that was found
    branch: int = 0  # of such a model: blocks of full KV that were found, where no checkpoint lay
    pending: list[PendingCheckpoint] = field(default_factory=list)  # of such a model

    def follow(self) -> None:
        """Take up the output that vLLM has appended since."""
        num_new = self.request.num_tokens - self.tokens.num_tokens
        if num_new > 0:
            self.tokens.append_output(self.request.all_token_ids[-num_new:])

    def split(self, num_tokens: int, block_size: int) -> ExternalHit:
        """Where `num_tokens` promised tokens are from. What storage has sent lies behind what the CPU tier had then."""
        found = self.prefetch
        if found is None:
            return ExternalHit(num_cpu_tokens=num_tokens)
        first = found.num_gpu_tokens + found.num_cpu_tokens
        end = min(first + found.num_fetched_blocks * block_size, self.num_vllm_tokens + num_tokens)
        num_storage = max(0, end - max(first, self.num_vllm_tokens))
        return ExternalHit(num_tokens - num_storage, num_storage)


def kv_format_of(vllm_config: Any, spec: Any, states: Iterable[Any] = ()) -> str:
    """What gives a block its bytes beside tokens and weights; a setting that is not used adds nothing to the name.

    `spec` is of vLLM's KV cache group that keeps everything, and `states` are of those that keep states. Functions
    among the overrides have another name in every process.
    """
    model = vllm_config.model_config
    given = {"hf_overrides": model.hf_overrides, "quantization": model.quantization}
    given["states"] = [[list(map(list, each.shapes)), list(map(str, each.dtypes))] for each in states]
    used = {name: value for name, value in given.items() if value}
    named = f" {json.dumps(used, sort_keys=True, default=repr)}" if used else ""
    return f"vllm {vllm_config.cache_config.cache_dtype} {spec.dtype} {spec.kv_quant_mode.name}{named}"


class Namer:
    """Names prefixes of other meaning apart."""

    def __init__(self, kv_format: str) -> None:
        self._kv_format = kv_format
        self._orders: list[str] = []

    def follow_orders(self, orders: Iterable[str]) -> None:
        """The orders of dimensions inside a block, known once the workers have made their KV arrays."""
        self._orders = sorted(set(orders))

    def tokens_of(self, request: Any) -> Request | None:
        """The request's tokens under its name; None where what its blocks hold does not follow from tokens alone."""
        if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
            return None
        images = [(f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features]
        try:
            return Request(
                request_id=request.request_id,
                prompt_token_ids=request.all_token_ids[:],
                namespace=self._namespace(request),
                images=images,
                match_inside_images=True,
            )
        except RequestError as error:
            logger.warning("event=request_not_cached error=%r", str(error))
            return None

    def _namespace(self, request: Any) -> str:
        lora = request.lora_request
        adapter = [lora.lora_name, lora.lora_path] if lora else None
        return json.dumps([self._kv_format, *self._orders, request.cache_salt, adapter])
