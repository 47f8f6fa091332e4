"""A dict in pieces against a plain one, and the tree where a run or the cache has very many children or namespaces."""

from __future__ import annotations

import random
from zlib import crc32

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books import prefix_tree
from fastdeploy_cache.books.large_dict import SMALL, LargeDict, piece_of, pieces, put

NUM_PROMPTS = 2 * SMALL


def filled(num_entries: int) -> dict[bytes, int] | LargeDict[bytes, int]:
    entries: dict[bytes, int] | LargeDict[bytes, int] = {}
    for number in range(num_entries):
        entries = put(entries, b"%d" % number, number, crc32)
    return entries


@pytest.mark.parametrize("seed", range(4))
def test_it_answers_as_a_plain_dict_does(seed: int) -> None:
    """Random entries come, are replaced and go, at last all: whatever is asked, a plain dict says the same."""
    choose, plain = random.Random(seed), dict[bytes, int]()
    large = LargeDict[bytes, int]({}, crc32)
    for number in range(20_000):
        key = b"%d" % choose.randrange(8000)
        if choose.random() < 0.3:
            assert large.pop(key) == plain.pop(key, None)
        else:
            large[key] = plain[key] = number
        other = b"%d" % choose.randrange(8000)
        assert large.get(other) == plain.get(other) and len(large) == len(plain)
    assert dict(large.items()) == plain and sorted(large.values()) == sorted(plain.values())
    while plain:
        key, value = large.popitem()
        assert plain.pop(key) == value and bool(large) == bool(plain)
        other = b"%d" % choose.randrange(8000)
        assert large.get(other) == plain.get(other)
    large[b"one"] = 1
    assert large[b"one"] == 1
    with pytest.raises(KeyError):
        large[b"none"]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_have_all_that_stays(seed: int) -> None:
    """While many entries come and go between two pieces: none that was there all the time is left out."""
    draw = random.Random(seed)
    entries = filled(draw.choice([10, 5 * SMALL]))
    steady, seen, number = set(range(0, len(entries), 7)), set[int](), len(entries)
    going = [each for each in range(len(entries)) if each not in steady]
    for piece in pieces(lambda: entries):  # noqa: B023 (it is asked for what is there now)
        seen.update(piece)
        for _ in range(draw.randrange(900)):
            if going and draw.random() < 0.7:
                entries.pop(b"%d" % going.pop(), None)
            else:
                number += 1
                entries = put(entries, b"%d" % number, number, crc32)
    assert steady <= seen


def test_it_stays_a_plain_dict_while_it_is_small() -> None:
    """The usual one costs what it did; one more entry puts it in pieces."""
    assert type(filled(SMALL)) is dict
    assert type(filled(SMALL + 1)) is LargeDict


def test_no_piece_becomes_large() -> None:
    """However many come, what has to grow or to be split at once stays small, and numbers in a row name every entry."""
    large = filled(200_000)
    assert type(large) is LargeDict
    found, number = dict[bytes, int](), 0
    while len(found) < 200_000:
        piece = piece_of(large, number)
        assert len(piece) < 2 * SMALL and number < 2000
        found.update(piece)
        number += 1


def serve(cache: PrefixCacheManager, tokens: list[int], namespace: str = "") -> int:
    """A whole request; how many tokens it had hit."""
    request = Request(request_id="a", prompt_token_ids=tokens, namespace=namespace)
    match = cache.match(request)
    cache.allocate(request, len(tokens) - len(match.block_ids))
    cache.commit(request, len(tokens))
    cache.release(request)
    return match.num_tokens


def test_very_many_children_of_one_run_are_found_evicted_and_forgotten() -> None:
    """More children than a plain dict has: each is found again, the coldest go first, and a reset leaves none."""
    config = CacheConfig(block_size=1, num_gpu_blocks=NUM_PROMPTS + 1, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        for number in range(NUM_PROMPTS):
            serve(cache, [7, number])
        assert [serve(cache, [7, number]) for number in range(0, NUM_PROMPTS, 50)] == [1] * len(
            range(0, NUM_PROMPTS, 50)
        )
        for number in range(NUM_PROMPTS, 2 * NUM_PROMPTS):
            serve(cache, [7, number])
        assert serve(cache, [7, 1, 0]) == 1 and serve(cache, [7, 2 * NUM_PROMPTS - 1, 0]) == 2
        cache.check_invariants()
        cache.reset()
        while cache._books.tree.graves.open:
            cache.stats()
        assert cache.stats().gpu.num_cached == 0
        cache.check_invariants()


def test_very_many_namespaces_are_found_and_forgotten_in_pieces() -> None:
    """A reset does not look at every namespace, none of before is found, and what is held waits for its holder."""
    config = CacheConfig(block_size=1, num_gpu_blocks=NUM_PROMPTS + 2, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        held = Request(request_id="held", prompt_token_ids=[1, 2], namespace="held")
        cache.match(held)
        cache.allocate(held, 2)
        cache.commit(held, 2)
        for number in range(NUM_PROMPTS):
            serve(cache, [7], f"tenant {number}")
        assert len(cache._books.tree.roots) == NUM_PROMPTS + 1
        cache.reset()
        assert cache._books.tree.graves.open
        cache.check_invariants()
        assert serve(cache, [7, 8], "tenant 5") == 0 and serve(cache, [7, 8], "tenant 5") == 1
        while cache._books.tree.graves.open:
            cache.stats()
        cache.check_invariants()
        assert cache.stats().gpu.num_cached == 2 + 2
        cache.release(held)
        assert cache.stats().gpu.num_cached == 2 and not cache._books.tree.graves.roots
        cache.check_invariants()


def test_runs_are_not_joined_where_many_would_have_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has vanished above a run with many children: the border stays."""
    monkeypatch.setattr(prefix_tree, "_MAX_MOVED", 3)
    with PrefixCacheManager(CacheConfig(block_size=1, num_gpu_blocks=8, transfer_client="inline")) as cache:
        serve(cache, [1, 5, 5])
        for number in range(4):
            serve(cache, [1, 2, number])
        serve(cache, [9, 9])  # evicts the other branch of [1]
        assert [run.num_blocks for run in cache._books.tree.runs() if run.children] == [1, 1]
        assert serve(cache, [1, 2, 3]) == 2
        assert [run.num_blocks for run in cache._books.tree.runs() if run.children] == [1, 1]
        cache.check_invariants()
        monkeypatch.setattr(prefix_tree, "_MAX_MOVED", 4)
        assert serve(cache, [1, 2, 3]) == 2
        assert [run.num_blocks for run in cache._books.tree.runs() if run.children] == [2]
        cache.check_invariants()
