"""The doctor and hybrid models: a row that is short, an engine that makes no checkpoints, and a healthy one."""

from __future__ import annotations

from fastdeploy_cache import PrefixCacheManager
from tests.rigs.hybrid_requests import computed, manager, started

NUM_PROMPTS, NUM_ROUNDS = 8, 5


def prompt(number: int) -> list[int]:
    return [1000 * (number + 1) + i for i in range(42)]


def served(cache: PrefixCacheManager, *, with_snapshots: bool = True) -> list[str]:
    """A few prompts, in turn, again and again; what the doctor says of the cache."""
    for turn in range(NUM_ROUNDS):
        for number in range(NUM_PROMPTS):
            name = f"{turn} {number}"
            if with_snapshots:
                request = computed(cache, name, prompt(number)) if not turn else again(cache, name, prompt(number))
            else:
                request, _ = started(cache, name, prompt(number))
                cache.commit(request, request.num_tokens)
            cache.release(request)
    return [str(finding) for finding in cache.examine()]


def again(cache: PrefixCacheManager, name: str, tokens: list[int]) -> object:
    """As `computed`, also where the whole prompt is found."""
    request, new = started(cache, name, tokens)
    active = cache._requests.active(request)
    if active.num_matched_blocks < 10:
        cache.rows.snapshot(request, 40, new.tables[0].block_ids)
    cache.commit(request, 40)
    cache.commit(request, request.num_tokens)
    return request


def test_a_row_that_is_short_is_named() -> None:
    """There are blocks for all prompts, and states for two: the finding names that row and its setting."""
    with manager(num_gpu_blocks=200, num_gpu_units=(3, 100)) as cache:
        (finding,) = served(cache)
        assert finding.startswith("row_short") and "units were short of the row 'state'" in finding
        assert "num_gpu_units" in finding
        said = str(cache.explain(f"{NUM_ROUNDS - 1} {NUM_PROMPTS - 1}"))
        assert "evicted from the GPU" in said and "units were short of the row 'state'" in said


def test_an_engine_that_makes_no_checkpoints_is_told_so() -> None:
    """It never takes a snapshot, and never hits."""
    with manager(num_gpu_blocks=200) as cache:
        (finding,) = served(cache, with_snapshots=False)
        assert finding.startswith("no_checkpoints") and "Take snapshots at Match.checkpoint_tokens" in finding


def test_nothing_is_said_of_a_healthy_one() -> None:
    """All prompts fit, with their checkpoints."""
    with manager(num_gpu_blocks=200, num_gpu_units=(30, 100)) as cache:
        assert served(cache) == []
