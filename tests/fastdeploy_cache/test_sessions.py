"""`cache.sessions`: what agents say of conversations, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.callers.remembered_sessions import RememberedSessions
from fastdeploy_cache.errors import ClosedError, ControlError, RequestError

SIZE = 4


def cache_of(num_gpu_blocks: int = 64, num_cpu_blocks: int = 64, **settings: Any) -> PrefixCacheManager:
    config = CacheConfig(
        block_size=SIZE,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        transfer_client="inline",
        **settings,
    )
    return PrefixCacheManager(config)


@pytest.fixture
def cache() -> Iterator[PrefixCacheManager]:
    with cache_of() as made:
        yield made
        made.check_invariants()


def tokens(number: int, num_blocks: int = 4, *, shared: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """So many blocks, of which the first `shared` are those of every other prompt."""
    found = np.arange(num_blocks * SIZE, dtype=np.int32) + 1000 * (number + 1)
    found[: shared * SIZE] = np.arange(shared * SIZE)
    return found


def serve(
    cache: PrefixCacheManager, prompt: np.ndarray[Any, Any], session: str = "", namespace: str = ""
) -> tuple[int, int]:
    """A request from its match to its release; how many tokens were on the GPU, and in the CPU tier."""
    name = f"{session} {cache.stats().num_requests} {prompt[:1]} {len(prompt)}"
    request = Request(request_id=name, prompt_token_ids=prompt, session_id=session, namespace=namespace)
    match = cache.match(request).wait(10)
    cache.allocate(request, cache.blocks_for(request.num_tokens) - len(match.block_ids))
    cache.commit(request, request.num_tokens)
    cache.release(request)
    return match.num_gpu_tokens, match.num_cpu_tokens


def found(cache: PrefixCacheManager, prompt: np.ndarray[Any, Any], namespace: str = "") -> tuple[int, int]:
    """What is cached of a prompt: tokens on the GPU, and in the CPU tier."""
    asks = cache.prefetch(
        Request(request_id="asks", prompt_token_ids=np.append(prompt, np.int32(0)), namespace=namespace)
    )
    return asks.num_gpu_tokens, asks.num_cpu_tokens


def test_what_only_a_session_had_is_free_when_it_is_released(cache: PrefixCacheManager) -> None:
    """Its own blocks go at once, in both tiers; what others share stays, and so do other sessions."""
    mine, other = tokens(1, 6, shared=2), tokens(2, 6, shared=2)
    serve(cache, mine, "a")
    serve(cache, other, "b")
    cache.wait_for_transfers(10)
    assert cache.sessions.release_session("a") == 4
    assert found(cache, mine) == (2 * SIZE, 0)
    assert found(cache, other) == (6 * SIZE, 0)
    with pytest.raises(RequestError, match="session 'a' is not known"):
        cache.sessions.release_session("a")


@pytest.mark.parametrize("order", [("short", "long"), ("long", "short")])
def test_what_another_session_has_stays(cache: PrefixCacheManager, order: tuple[str, str]) -> None:
    """One prompt is the beginning of the other's, or the same: what both have used is nobody's own, and plain requests
    count as others, too."""
    prompts = {"short": tokens(1, 3), "long": tokens(1, 6)}
    for name in order:
        serve(cache, prompts[name], name)
    assert cache.sessions.release_session("short") == 0
    cache.sessions.release_session("long")
    assert found(cache, prompts["long"])[0] >= 3 * SIZE
    for name in ("x", "y"):
        serve(cache, tokens(2), name)
    assert cache.sessions.demote("x") == 0 and cache.sessions.release_session("y") == 0
    assert found(cache, tokens(2)) == (4 * SIZE, 0)
    serve(cache, tokens(3), "z")
    serve(cache, tokens(3))
    assert cache.sessions.release_session("z") == 0
    serve(cache, tokens(4))
    serve(cache, tokens(4), "z")
    assert cache.sessions.release_session("z") == 0
    assert found(cache, tokens(4)) == (4 * SIZE, 0)


def test_the_part_behind_what_others_have_goes(cache: PrefixCacheManager) -> None:
    """Another session used only the beginning: the rest is the first one's own."""
    serve(cache, tokens(1, 6), "long")
    serve(cache, tokens(1, 2), "short")
    assert cache.sessions.release_session("long") == 4
    assert found(cache, tokens(1, 6)) == (2 * SIZE, 0)


def test_turns_of_a_session_are_its_own(cache: PrefixCacheManager) -> None:
    """A conversation that grows, turn by turn, goes whole; a shorter request beside it does not hide its length."""
    for num_blocks in (2, 4, 7):
        serve(cache, tokens(1, num_blocks), "a")
    serve(cache, tokens(1, 2), "a")
    assert cache.sessions.release_session("a") == 7


def test_images_belong_to_the_prefix(cache: PrefixCacheManager) -> None:
    """What is retained of a session with an image is that prompt, and not the same tokens without it."""
    for name, images in (("picture", [(4, 4, "cat")]), ("text", [])):
        request = Request(request_id=name, prompt_token_ids=tokens(1), session_id=name, images=images)
        match = cache.match(request)
        cache.allocate(request, 4 - len(match.block_ids))
        cache.commit(request, request.num_tokens)
        cache.release(request)
    assert cache.sessions.retain("picture", 60).num_blocks == 4
    assert cache.sessions.release_session("text") == 3  # the first block is the picture's, too
    assert cache.sessions.release_session("picture") == 0


def test_a_session_that_fills_the_pool_comes_back() -> None:
    """All but its last block, which a match leaves to compute."""
    with cache_of(num_gpu_blocks=8) as cache:
        serve(cache, tokens(1, 8), "a")
        cache.sessions.demote("a")
        cache.wait_for_transfers(10)
        assert found(cache, tokens(1, 8)[: 7 * SIZE]) == (0, 7 * SIZE)
        cache.sessions.prefetch("a")
        cache.wait_for_transfers(10)
        assert found(cache, tokens(1, 8)[: 7 * SIZE]) == (7 * SIZE, 0)


def test_an_old_branch_goes_up_to_where_it_is_of_use(cache: PrefixCacheManager) -> None:
    """Behind the tokens that are still wanted, rounded up to whole blocks; by tokens or by session."""
    prompt = tokens(1, 6)
    serve(cache, prompt, "a")
    assert cache.sessions.supersede(prompt, 2 * SIZE + 1) == 3
    assert found(cache, prompt) == (3 * SIZE, 0)
    assert cache.sessions.supersede("a", 100) == 0
    assert cache.sessions.supersede("a", 0) == 3
    assert found(cache, prompt) == (0, 0)


def test_what_a_request_holds_stays(cache: PrefixCacheManager) -> None:
    """A running request reads its blocks to the end, whatever is said of its session."""
    prompt = tokens(1, 6)
    serve(cache, prompt, "a")
    running = Request(request_id="running", prompt_token_ids=prompt[: 3 * SIZE + 1], session_id="a")
    ids = cache.match(running).block_ids
    assert cache.sessions.release_session("a") == 3
    cache.check_invariants()
    assert found(cache, prompt) == (3 * SIZE, 0)
    assert len(ids) == 3
    cache.release(running)


def test_a_session_leaves_the_gpu_and_comes_back(cache: PrefixCacheManager) -> None:
    """Demoted it is in the CPU tier alone; prefetched it is on the GPU again, before anybody asks; neither is counted
    as a request, and the hit rates do not move."""
    prompt = tokens(1, 6)
    serve(cache, prompt, "a")
    before = cache.stats()
    cache.sessions.demote("a")
    cache.wait_for_transfers(10)
    assert found(cache, prompt) == (0, 6 * SIZE)
    assert cache.stats().gpu.num_free == before.gpu.num_blocks
    brought = cache.sessions.prefetch("a")
    assert brought == (0, 6 * SIZE, 0)
    cache.wait_for_transfers(10)
    assert found(cache, prompt) == (6 * SIZE, 0)
    assert cache.stats().hit_rates == before.hit_rates
    assert cache.stats().num_requests == before.num_requests
    assert serve(cache, np.append(prompt, np.int32(5)), "a") == (6 * SIZE, 0)


def test_without_a_cpu_tier_nothing_is_demoted() -> None:
    """What has no other place stays where it is."""
    with cache_of(num_cpu_blocks=0) as cache:
        prompt = tokens(1, 6)
        serve(cache, prompt, "a")
        assert cache.sessions.demote("a") == 0
        assert found(cache, prompt) == (6 * SIZE, 0)


def test_a_prefetch_without_room_brings_what_fits_and_disturbs_nobody() -> None:
    """All blocks are held: nothing is loaded, nothing is kept, and the holder goes on."""
    with cache_of(num_gpu_blocks=8) as cache:
        prompt = tokens(1, 6)
        serve(cache, prompt, "a")
        cache.sessions.demote("a")
        cache.wait_for_transfers(10)
        holder = Request(request_id="holder", prompt_token_ids=tokens(2, 7))
        cache.match(holder)
        cache.allocate(holder, 7)
        cache.sessions.prefetch("a")
        cache.wait_for_transfers(10)
        assert found(cache, prompt)[1] > 0
        cache.release(holder)
        cache.check_invariants()
        all_of_it = Request(request_id="all", prompt_token_ids=tokens(4, 8))  # nothing is held any more
        cache.match(all_of_it)
        assert len(cache.allocate(all_of_it, 8)) == 8


def test_a_retained_session_outlives_others() -> None:
    """While it is kept, what comes does not push it out; then it goes as everything does. Too much is refused."""
    with cache_of(num_gpu_blocks=28, num_cpu_blocks=0) as cache:
        prompt = tokens(1, 6)
        serve(cache, prompt, "a")
        assert cache.sessions.retain("a", 60).num_blocks == 6
        for number in range(2, 9):
            serve(cache, tokens(number, 6))
        assert found(cache, prompt) == (6 * SIZE, 0)
        with pytest.raises(ControlError, match="together at most"):
            cache.sessions.retain(tokens(8, 6), 60)
        with pytest.raises(ControlError, match="none of these tokens"):
            cache.sessions.retain(tokens(99), 60)


def test_namespaces_do_not_meet(cache: PrefixCacheManager) -> None:
    """The same session id in two namespaces is two sessions."""
    prompt = tokens(1)
    serve(cache, prompt, "a", "one")
    serve(cache, prompt, "a", "two")
    assert cache.sessions.release_session("a", namespace="one") == 4
    assert found(cache, prompt, "one") == (0, 0)
    assert found(cache, prompt, "two") == (4 * SIZE, 0)
    with pytest.raises(RequestError, match="namespace ''"):
        cache.sessions.release_session("a")


def test_what_is_no_hint_is_refused(cache: PrefixCacheManager) -> None:
    """With the value seen; nothing changes."""
    serve(cache, tokens(1), "a")
    with pytest.raises(RequestError, match="prefetch to 'disk'"):
        cache.sessions.prefetch("a", tier="disk")  # type: ignore[arg-type]
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(RequestError, match="num_tokens is"):
            cache.sessions.supersede("a", wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="use supersede with token ids"):
        cache.sessions.release_session([1, 2])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="namespace of request"):
        cache.sessions.demote("a", namespace=[])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="session_id of request"):
        Request(request_id="r", prompt_token_ids=[1], session_id=3)  # type: ignore[arg-type]
    assert found(cache, tokens(1)) == (4 * SIZE, 0)


def test_a_closed_cache_knows_no_session() -> None:
    """Every hint says so."""
    with cache_of() as cache:
        serve(cache, tokens(1), "a")
    for hint in (
        lambda: cache.sessions.release_session("a"),
        lambda: cache.sessions.retain(tokens(1), 5),
        lambda: cache.sessions.supersede(tokens(1), 0),
        lambda: cache.sessions.demote("a"),
        lambda: cache.sessions.prefetch(tokens(1)),
    ):
        with pytest.raises(ClosedError):
            hint()


def test_many_sessions_take_bounded_room() -> None:
    """Those that asked last are remembered, by number and by bytes; a huge one is not, and pushes nobody out."""
    remembered = RememberedSessions(max_bytes=4040, max_sessions=100)
    for number in range(1000):
        remembered.note(Request(request_id="r", prompt_token_ids=[1] * 5, session_id=str(number)))
    assert len(remembered) == 100
    assert remembered.find("", "999") is not None and remembered.find("", "899") is None
    for number in range(50):
        remembered.note(Request(request_id="r", prompt_token_ids=[1] * 100, session_id=str(number)))
    assert len(remembered) == 10
    remembered.note(Request(request_id="r", prompt_token_ids=[1] * 1020, session_id="huge"))
    assert remembered.find("", "huge") is None and len(remembered) == 10
    growing = Request(request_id="r", prompt_token_ids=[1] * 100, session_id="growing")
    remembered.note(growing)
    growing.append_output([1] * 500)  # after a preemption it goes on
    remembered.note(growing)
    for number in range(50):
        remembered.forget("", str(number))
    remembered.forget("", "growing")
    assert len(remembered) == 0 and remembered._num_bytes == 0
