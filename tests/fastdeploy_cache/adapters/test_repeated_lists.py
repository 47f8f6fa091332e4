"""Lists that come again and again are packed once, and never taken for others."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.adapters.repeated_lists import RepeatedLists
from fastdeploy_cache.adapters.sglang.radix_cache import HiRadixCache, RadixKey, new_config, new_manager
from fastdeploy_cache.books.tokens import pack
from fastdeploy_cache.errors import RequestError
from tests.rigs.fastdeploy_engine import Task, serve_v1
from tests.rigs.fastdeploy_engine import new_config as fastdeploy_config

LENGTH = 4800  # so that comparing is worth while; whole pages of 16
NUM_TIMES = 3  # until a list is kept


def tokens(seed: int, length: int = LENGTH) -> list[int]:
    """Numbers above 256: each place has an object of its own."""
    choose = random.Random(seed)
    return [choose.randint(300, 2**31 - 1) for _ in range(length)]


def kept(repeated: RepeatedLists, name: str, token_ids: list[int]) -> list[int]:
    """The list has come so often that it is kept."""
    for _ in range(NUM_TIMES):
        repeated.packed(name, token_ids)
    return token_ids


def test_a_list_is_packed_when_it_comes_for_the_third_time_and_then_no_more() -> None:
    """The same packed tokens are given for other lists of the same objects, too; lists that come once leave no copy."""
    repeated, given = RepeatedLists(), tokens(1)
    assert [repeated.packed("a", given) for _ in range(NUM_TIMES - 1)] == [None] * (NUM_TIMES - 1)
    assert repeated.num_tokens == 0
    packed = repeated.packed("a", given[:])
    assert packed is not None and packed.tokens == pack("a", given)
    assert repeated.packed("a", given[:]) is packed
    assert repeated.packed("b", given) is None and repeated.num_tokens == LENGTH
    assert repeated.packed("a", tokens(1)) is None, "to compare other objects takes longer than to pack them"


@pytest.mark.parametrize("place", [0, 1, 777, LENGTH // 2, LENGTH - 2, LENGTH - 1])
@pytest.mark.parametrize("token_id", [7, 70_000])
def test_an_edited_list_is_noticed_wherever_it_was_edited(place: int, token_id: int) -> None:
    """One token of the engine's own list has changed in place: what was packed is not given for it, nor ever again."""
    repeated, given = RepeatedLists(), tokens(2)
    kept(repeated, "a", given)
    given[place] = token_id
    assert repeated.packed("a", given) is None
    assert repeated.num_tokens == 0
    assert repeated.packed("a", tokens(2)) is None


@pytest.mark.parametrize(
    "edit",
    [
        lambda given: given.reverse(),
        lambda given: given.append(5),
        lambda given: given.pop(),
        lambda given: given.insert(9, given.pop()),
        lambda given: given.__setitem__(slice(5, 7), [given[6], given[5]]),
        lambda given: given.__setitem__(9, np.arange(3)),
        lambda given: given.__setitem__(9, None),
        lambda given: given.__setitem__(9, -1),
    ],
)
def test_other_edits_are_noticed(edit: Callable[[list[Any]], object]) -> None:
    """Another order, another length, or something that is no token."""
    repeated, given = RepeatedLists(), tokens(3)
    kept(repeated, "a", given)
    edit(given)
    assert repeated.packed("a", given) is None


@pytest.mark.parametrize("seed", range(4))
def test_what_is_given_is_always_what_the_list_holds_now(seed: int) -> None:
    """Random lists of a few names, edited in place, copied, cut and made anew between the calls."""
    repeated, choose, num_given = RepeatedLists(3 * LENGTH), random.Random(seed), 0
    lists = {name: tokens(seed * 10 + n) for n, name in enumerate("abcde")}
    for _ in range(400):
        name = choose.choice("abcde")
        given = lists[name]
        match choose.randint(0, 40):
            case 0:
                given[choose.randrange(len(given))] = choose.choice((5, 1000))
            case 1:
                lists[name] = given[:]
            case 2:
                del given[-1]
            case 3:
                lists[name] = tokens(choose.randint(0, 3))
        packed = repeated.packed(name, lists[name])
        if packed is not None:
            num_given += 1
            assert packed.tokens == pack(name, lists[name])
        assert repeated.num_tokens <= 3 * LENGTH
    assert num_given > 100


def test_what_is_no_plain_list_of_tokens_is_left_to_the_caller() -> None:
    """Arrays, tuples, short lists, and lists that cannot be packed, which are refused as ever."""
    repeated, odd = RepeatedLists(), [*tokens(4), -1]
    for given in (np.array(tokens(4), np.int32), tuple(tokens(4)), [1, 2, 3], odd, [*tokens(4), True]):
        assert [repeated.packed("a", given) for _ in range(5)] == [None] * 5
    assert repeated.packed(None, tokens(4)) is None and repeated.num_tokens == 0
    with pytest.raises(RequestError):
        pack("a", odd)


def test_what_comes_no_more_is_forgotten() -> None:
    """After some thousand calls for others nothing is kept of a request that has gone."""
    repeated = RepeatedLists()
    kept(repeated, "gone", tokens(5))
    assert repeated.num_tokens == LENGTH
    other = tokens(6)
    for n in range(1100):
        repeated.packed(f"r{n}", other)
    assert repeated.num_tokens == 0
    assert repeated.packed("gone", tokens(5)) is None


def test_no_more_is_kept_than_there_is_room_for() -> None:
    """What came first stays: where all come in turn, that is better than keeping each in its turn."""
    repeated = RepeatedLists(2 * LENGTH)
    lists = {name: kept(repeated, name, tokens(n)) for n, name in enumerate("abc")}
    assert [repeated.packed(name, given) is not None for name, given in lists.items()] == [True, True, False]
    assert repeated.num_tokens == 2 * LENGTH


# -- in the adapters


def places(seed: int) -> list[int]:
    """Where lists are edited; a look at the ends and the middle alone would miss it."""
    return [place for place in random.Random(seed).sample(range(1, LENGTH - 1), 6) if place != LENGTH // 2]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_waiting_request_of_sglang_is_matched_by_what_its_list_holds(page_size: int) -> None:
    """Matched before each step under its `rid`, or as `req`; after an edit in place the hit ends where the edit is."""
    cached = tokens(7)
    config = new_config(num_tokens=2 * LENGTH, page_size=page_size, hicache_ratio=0, transfer_client="inline")
    with new_manager(config) as manager:
        cache = HiRadixCache(manager)
        slots = cache.token_to_kv_pool_allocator.alloc(LENGTH)
        cache.insert(cached, slots)
        for n, place in enumerate(places(page_size)):
            waiting = cached[:]
            for by in ({"rid": f"r{n}"}, {"req": SimpleNamespace(rid=f"r{n}")}, {"rid": f"r{n}"}, {"rid": f"r{n}"}):
                assert cache.match_prefix(waiting, **by).device_indices.tolist() == slots.tolist()
            assert len(cache.match_prefix(RadixKey(waiting, "tenant"), rid=f"r{n}").device_indices) == 0
            assert len(cache.match_prefix([*waiting, 5], rid=f"r{n}").device_indices) == LENGTH
            waiting[place] = 1
            num_tokens = place // page_size * page_size
            assert cache.match_prefix(waiting, rid=f"r{n}").device_indices.tolist() == slots[:num_tokens].tolist()


@pytest.mark.parametrize("verb", ["request_match_blocks", "request_block_ids"])
def test_a_task_of_fastdeploy_is_matched_by_what_its_list_holds(verb: str) -> None:
    """A task without room is matched and released in each step; after an edit in place the hit ends where that is."""
    cached, manager = tokens(8), PrefixCacheManager(fastdeploy_config(LENGTH), 1)
    serve_v1(manager, Task("first", cached), [1, 2, 3, 4])
    for n, place in enumerate(places(1)):
        task = Task(f"t{n}", [*cached, 9])
        for _ in range(5):
            assert len(getattr(manager, verb)(task, 4)[0]) == LENGTH // 4
            manager.release_block_ids(task)
        task.prompt_token_ids[place] = 1
        assert len(getattr(manager, verb)(task, 4)[0]) == place // 4
        manager.release_block_ids(task)
    manager.cache.check_invariants()
    manager.close()
