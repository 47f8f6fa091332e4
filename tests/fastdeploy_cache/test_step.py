"""`PrefixCacheManager.step`: one step of an engine for many requests."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.block_pool import BlockPool, Owner
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.errors import (
    ClosedError,
    CommitError,
    LifeCycleError,
    OutOfBlocksError,
    RequestError,
    UnknownRequestError,
)

SIZE = 4


def new_cache(num_gpu_blocks: int = 16) -> PrefixCacheManager:
    return PrefixCacheManager(CacheConfig(block_size=SIZE, num_gpu_blocks=num_gpu_blocks, transfer_client="inline"))


def running(cache: PrefixCacheManager, name: str, prompt: list[int]) -> Request:
    """A request whose prompt is computed."""
    request = Request(request_id=name, prompt_token_ids=prompt)
    match = cache.match(request)
    cache.allocate(request, -(-len(prompt) // SIZE) - len(match.block_ids))
    cache.commit(request, len(prompt))
    return request


def test_a_step_does_what_the_three_verbs_do() -> None:
    """Requests that decode by `step`, and others by the verbs, get the same blocks and leave the same tree."""
    with new_cache() as by_step, new_cache() as by_verbs:
        stepping = [running(by_step, name, [n] * 5) for n, name in enumerate("abc")]
        others = [running(by_verbs, name, [n] * 5) for n, name in enumerate("abc")]
        for step in range(8):
            done = by_step.step([(request, [step], 5 + step) for request in stepping])
            wanted = []
            for request in others:
                held = -(-request.num_tokens // SIZE)
                by_verbs.commit(request, 5 + step)
                request.append_output([step])
                wanted.append(by_verbs.allocate(request, -(-request.num_tokens // SIZE) - held))
            assert done == wanted
            by_step.check_invariants()
        for mine, other in zip(stepping, others, strict=True):
            by_step.release(mine)
            by_verbs.release(other)
        views = [
            [(view.token_ids.tolist(), view.block_ids, view.hashes) for view in cache.blocks.view.runs()]
            for cache in (by_step, by_verbs)
        ]
        assert views[0] == views[1] and views[0]


def test_what_a_step_commits_is_found() -> None:
    """Another request hits what a step has said to be computed, and no more."""
    with new_cache() as cache:
        first = running(cache, "first", [1, 2, 3, 4, 5])
        assert cache.step([(first, [6, 7, 8, 9], 8)]) == [[2]]
        assert cache.match(Request(request_id="next", prompt_token_ids=list(range(1, 12)))).num_tokens == 8


def test_who_finds_no_room_is_as_before_and_the_others_go_on() -> None:
    """The answer of one request is `OutOfBlocksError`, with its tokens, blocks and commits unchanged."""
    with new_cache(num_gpu_blocks=4) as cache:
        a, b, c = (running(cache, name, [n] * SIZE) for n, name in enumerate("abc"))
        first, refused, third = cache.step([(a, [7], SIZE), (b, [7], SIZE), (c, [], SIZE)])
        assert (first, third) == ([3], [])
        assert isinstance(refused, OutOfBlocksError) and refused.missing == 1
        assert (a.num_tokens, b.num_tokens, c.num_tokens) == (5, 4, 4)
        cache.release(a)
        assert cache.step([(b, [7], SIZE)]) == [[3]] and b.num_tokens == 5
        cache.check_invariants()


def test_each_bad_entry_is_refused_by_name() -> None:
    """Twice the same request, one unknown, bad tokens, too much computed: errors in their places, and no trace."""
    with new_cache() as cache:
        good, greedy, odd = (running(cache, name, [n] * 5) for n, name in enumerate(("good", "greedy", "odd")))
        stranger = Request(request_id="stranger", prompt_token_ids=[1])
        done = cache.step(
            [(good, [1], 5), (good, [1], 6), (stranger, [1], 1), (greedy, [1], 9), (odd, [-1], 5), (odd, [], -1)]
        )
        assert done[0] == [] and good.num_tokens == 6
        kinds = (RequestError, UnknownRequestError, CommitError, RequestError, CommitError)
        names = ("good", "stranger", "greedy", "odd", "odd")
        for answer, kind, name in zip(done[1:], kinds, names, strict=True):
            assert isinstance(answer, kind) and repr(name) in str(answer)
        assert (greedy.num_tokens, odd.num_tokens) == (5, 5)
        cache.check_invariants()


def test_computed_blocks_have_to_be_there_before_the_step() -> None:
    """Nothing can be computed in blocks that the step itself gives."""
    with new_cache() as cache:
        request = running(cache, "a", [1, 2, 3, 4])
        (refused,) = cache.step([(request, [5], 5)])
        assert isinstance(refused, CommitError) and request.num_tokens == 4
        assert cache.step([(request, [5], 4)]) == [[1]]
        assert cache.step([(request, [6], 5)]) == [[]]


def test_what_is_committed_is_not_taken_back() -> None:
    """Fewer computed tokens than before are refused by both, with both numbers, nothing changes; as many are fine."""
    with new_cache() as cache:
        request = running(cache, "a", list(range(9)))
        with pytest.raises(CommitError, match="commit of 8 tokens for request 'a', of which 9 are committed"):
            cache.commit(request, 8)
        (answer,) = cache.step([(request, [1], 8)])
        assert isinstance(answer, CommitError) and "give 9 to 10" in str(answer)
        assert request.num_tokens == 9
        cache.commit(request, 9)
        assert cache.step([(request, [1], 9)]) == [[]]
        cache.release(request)


def test_what_is_no_step_at_all_changes_nothing() -> None:
    """A malformed entry raises one of our errors before the first request is looked at: it shows what was given, and
    what a step looks like."""
    with new_cache() as cache:
        request = running(cache, "a", [1, 2, 3, 4])
        bad: list[tuple[Any, str]] = [
            ((request, [5]), "a step has 2 entries: (Request('a', 4 tokens)"),
            ((request,), "a step has 1 entry: (Request('a', 4 tokens)"),
            ((request, [5], 4, 4), "a step has 4 entries: (Request('a', 4 tokens)"),
            ((request, [5], "four"), "a step has 3 entries: (Request('a', 4 tokens)"),
            (("a", [5], 4), "a step has 3 entries: ('a', [5], 4)"),
            (None, "a step is of type NoneType: None"),
        ]
        for step, said in bad:
            with pytest.raises(RequestError) as refused:
                cache.step([(request, [5], 4), step])
            assert str(refused.value).startswith(said)
            assert str(refused.value).endswith("tokens computed so far), such as (request, [17], 130)")
            assert request.num_tokens == 4
        with pytest.raises(RequestError, match="a step is of type Request: "):
            cache.step((request, [5], 4))  # type: ignore[arg-type]


def test_a_closed_or_sleeping_cache_takes_no_step() -> None:
    """The whole step raises, and no request has changed."""
    cache = new_cache()
    request = running(cache, "a", [1, 2, 3, 4])
    cache.close()
    with pytest.raises(ClosedError):
        cache.step([(request, [5], 4)])
    assert request.num_tokens == 4
    with new_cache() as other:
        kept = running(other, "a", [1, 2, 3, 4])
        other.release(kept)
        other.life.sleep()
        with pytest.raises(LifeCycleError):
            other.step([])


def test_a_step_that_needs_a_block_tells_the_speed_of_computing() -> None:
    """What a prompt took is counted up to its step, whether or not the sampled token gets a block in it."""
    with new_cache() as cache:
        request = Request(request_id="a", prompt_token_ids=[1] * 40)
        cache.match(request)
        cache.allocate(request, 10)
        assert cache.step([(request, [2], 40)]) == [[10]]
        assert cache._movement.speeds.prefill.per_second is not None


@pytest.mark.parametrize(("part", "name"), [(BlockPool, "hand_over"), (Run, "add_ids"), (Run, "add_tokens")])
def test_where_memory_runs_out_a_request_is_as_it_was(monkeypatch: pytest.MonkeyPatch, part: type, name: str) -> None:
    """Its answer is `MemoryError`, its tokens and blocks are those of before, the others go on, and it works later."""
    real, to_fail = getattr(part, name), 0

    def fails(*args: Any) -> Any:
        nonlocal to_fail
        is_publishing = name != "hand_over" or args[-1] is Owner.RUN
        to_fail -= is_publishing
        if is_publishing and to_fail == 0:
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(part, name, fails)
    with new_cache(64) as cache:
        first, second = (running(cache, name, [number] * 8) for number, name in enumerate("ab"))
        cache.step([(request, [9] * 4, 8) for request in (first, second)])  # of which the next step publishes a block
        for step in range(3):
            before, num_private = (first.num_tokens, first.tokens), cache.stats().gpu.num_private
            steps = [(request, [9] * 4, request.num_tokens) for request in (first, second)]
            to_fail = 1
            failed, done = cache.step(steps)
            assert isinstance(failed, MemoryError) and isinstance(done, list) and len(done) == 1, step
            assert (first.num_tokens, first.tokens) == before
            assert cache.stats().gpu.num_private == num_private, "the second has one more, and one less, of its own"
            cache.check_invariants()
            again = cache.step(steps[:1])
            assert isinstance(again[0], list) and len(again[0]) == 1
            cache.check_invariants()
        cache.release(first)
        cache.release(second)
        cache.check_invariants()
        assert cache.stats().gpu.num_private == 0
