"""Why did this hybrid prompt miss? Six planted reasons, each told by `explain` with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.transfer_manager.task import RankResult, TaskKind, TransferResult, TransferTask
from tests.rigs.hybrid_requests import TEXT, computed, manager, started

SMALL = {"num_gpu_units": (6, 12), "num_cpu_blocks": 60, "cpu_write_policy": "write_through", "max_load_share": 1.0}
NUM_MISSED_TOKENS = 16  # the whole blocks of TEXT


def no_checkpoint(cache: PrefixCacheManager) -> list[Request]:
    """The engine has given no snapshot."""
    request, _ = started(cache, "without")
    cache.commit(request, request.num_tokens)
    cache.release(request)
    return []


def other_path(cache: PrefixCacheManager) -> list[Request]:
    """Its only checkpoint lies in what another prompt goes on with."""
    cache.release(computed(cache, "longer", [*TEXT, *range(50, 58)]))
    return []


def pushed_out(cache: PrefixCacheManager) -> list[Request]:
    """It was computed, and then other prompts took the whole GPU, or all states of it."""
    cache.release(computed(cache, "first"))
    for number in range(6):
        cache.release(computed(cache, f"other {number}", [100 + number] * 18))
    return []


def load_fails(cache: PrefixCacheManager) -> list[Request]:
    """It is in the CPU tier, and a rank does not bring it."""
    pushed_out(cache)
    client: Any = cache._movement.client
    submit: Callable[[TransferTask], None] = client.submit

    def fail(task: TransferTask) -> None:
        if task.kind is not TaskKind.SWAP_IN:
            submit(task)
            return
        failed = RankResult(rank=0, error="the test says so")
        cache._movement.mover.on_result(TransferResult(task=task, ranks=(failed,)))

    client.submit = fail
    return []


def no_units(cache: PrefixCacheManager) -> list[Request]:
    """A running request holds the states."""
    pushed_out(cache)
    return [computed(cache, "running", [200] * 10)]


REASONS: dict[str, tuple[Callable[[PrefixCacheManager], list[Request]], dict[str, Any], str, str]] = {
    "no checkpoint": (no_checkpoint, {}, "unanchored", "could go on"),
    "on another path": (other_path, {"num_gpu_blocks": 64}, "unanchored", "none lies in front of it"),
    "row short": (
        pushed_out,  # there are blocks for all prompts, and states for few
        {"num_gpu_blocks": 200, "num_gpu_units": (3, 100)},
        "evicted",
        "units were short of the row 'state'",
    ),
    "load fails": (load_fails, SMALL, "rank", "its load failed"),
    "too large": (
        pushed_out,
        {**SMALL, "max_load_share": 0.3},
        "limit",
        "max_load_share allows 4 blocks, and it has 7",
    ),
    "no units": (no_units, {**SMALL, "num_gpu_units": (2, 12)}, "room", "lacks 1 units of the row 'state'"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_a_hybrid_prompt_missed(reason: str) -> None:
    """All of its whole blocks are missed for the planted cause, and the words give the evidence."""
    plant, fields, cause, words = REASONS[reason]
    with manager(**fields) as cache:
        running = plant(cache)
        request = Request(request_id="again", prompt_token_ids=TEXT)
        match = cache.match(request).poll()
        assert match.num_tokens == 0
        explanation = match.explain()
        (first, *_) = explanation.misses
        assert (first.cause.value, first.num_tokens) == (cause, NUM_MISSED_TOKENS), str(explanation)
        assert words in str(explanation), str(explanation)
        for each in (request, *running):
            cache.release(each)
        cache.check_invariants()
