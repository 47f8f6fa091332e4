"""What one run of a real engine answers, which travels as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `num_cached_tokens` is the engine's count, its own hits and this cache's together."""

    tokens: tuple[int, ...]
    num_cached_tokens: int
    seconds: float = 0.0  # to the first token, where the engine is asked step by step; else of the whole; 0: unknown
    num_preemptions: int = 0
    logprobs: tuple[float, ...] = ()  # of each token, where they were asked for


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """One pass; aborted requests have no answer. `hit_tokens` by tier: gpu, cpu, storage; () without this cache."""

    served: tuple[Served, ...]
    hit_tokens: tuple[int, ...]
    cpu_seconds: float = 0.0  # of this process and its children; 0: not measured


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has found; `num_kills` are of the cache's processes, by the run itself.

    `refused`: why this cache would not serve the engine; there are no passes then.
    """

    version: str  # of the engine
    passes: tuple[Passed, ...]
    up_seconds: float
    num_kills: int = 0
    refused: str = ""
    is_prefill_chunked: bool = True  # by the engine's effective configuration
    cpu_bytes: int = 0  # of the CPU tier of one rank, in use at the end


def answers(passes: Sequence[Passed]) -> list[tuple[int, ...]]:
    """The tokens of every answer, in order."""
    return [served.tokens for each in passes for served in each.served]


def to_json(sent: msgspec.Struct) -> str:
    """What travels between a lane and a stage: a plan or a result."""
    return msgspec.json.encode(sent).decode()


def result_of(text: str | bytes) -> StageResult:
    """The reverse of `to_json`."""
    return msgspec.json.decode(text, type=StageResult)
