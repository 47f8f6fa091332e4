"""The oracle of listeners: it finds what is planted in the tap, the publisher and the follower, and nothing in today's
code."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import CodecError, OutOfBlocksError
from fastdeploy_cache.events.feed.tap import EventTap
from fastdeploy_cache.events.follower import Follower
from fastdeploy_cache.events.journal import StoreTold
from fastdeploy_cache.events.publisher.images import ToldImages
from fastdeploy_cache.events.publisher.node import Node
from fastdeploy_cache.events.publisher.store import ToldStore
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.launch.faults.listeners import Listeners
from fastdeploy_cache.transfer_manager.storage.news import NewsLog
from tests.rigs.row_walk import RowWalk

_SIZE, _NUM_STEPS = 4, 4000


def live(seed: int, num_steps: int) -> Listeners:
    """Random requests over a small cache, with resets and lost arrays, and what listeners know of it at each step."""
    draw = random.Random(seed)
    config = CacheConfig(block_size=_SIZE, num_gpu_blocks=24, num_cpu_blocks=20, transfer_client="inline")
    running = list[Request]()
    with PrefixCacheManager(config) as cache:
        listeners = Listeners(cache._books.tree, seed=seed)
        for number in range(num_steps):
            tokens = [draw.randrange(2) for _ in range(_SIZE * draw.randrange(1, 7) + 1)]
            request = Request(request_id=f"{number}", prompt_token_ids=tokens, namespace=draw.choice(["", "a"]))
            try:
                match = cache.match(request)
                cache.allocate(request, cache.blocks_for(len(tokens)) - len(match.wait(1.0).block_ids))
                cache.commit(request, len(tokens))
            except OutOfBlocksError:
                cache.release(request)
            else:
                running.append(request)
            while len(running) > draw.randrange(4):
                cache.release(running.pop(draw.randrange(len(running))))
            if draw.random() < 0.01:
                cache.ranks.kv_lost(0) if draw.random() < 0.5 else cache.life.clear()
                running.clear()
            with cache._books:
                listeners.check()
    return listeners


def test_nothing_is_found_today() -> None:
    """Messages were lost, publishers died, and there were quiet moments."""
    listeners = live(1, _NUM_STEPS)
    assert listeners.stores.num_told > 50 and listeners.stores.num_lasting > 20
    assert listeners.num_lost > 50 and listeners.num_restarts > 20 and listeners.num_quiet > 50


def _applies_whatever_comes(follower: Follower, sequence: int, payload: bytes) -> None:
    if follower.is_current:
        follower._apply(sequence, payload)


def _is_deaf(*_: object) -> None:
    return None


def _tells_gpu_alone(tree: ToldTree) -> list[Any]:
    return [part for part in _FREEZE(tree) if part[1] == "GPU"]


def _tells_of_parents_only(tap: EventTap, run: object) -> Iterator[None]:
    return iter(())


def _is_sure(*_: object) -> bool:
    return True


def _is_deaf_to_names(*_: object, is_there: bool) -> None:
    return None


def _takes_in_what_comes(store: ToldStore, told: StoreTold) -> None:
    rank = store._ranks.get(told.rank)
    if rank is not None and rank.opened_ns == told.opened_ns:
        rank.number = told.number
    _TAKE_IN(store, told)


_FREEZE = ToldTree.freeze
_TAKE_IN = ToldStore.take_in


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (Follower, "on_message", _applies_whatever_comes),
        (Follower, "on_disconnected", _is_deaf),
        (EventTap, "left", _is_deaf),
        (EventTap, "parted", _is_deaf),
        (EventTap, "note_forgotten", _is_deaf),
        (EventTap, "ended", _is_deaf),
        (EventTap, "joined", _is_deaf),
        (EventTap, "_untold_below", _tells_of_parents_only),
        (Node, "cut", _is_deaf),
        (ToldTree, "freeze", _tells_gpu_alone),
        (ToldStore, "learn", _is_deaf),
        (ToldStore, "leave", _is_deaf),
        (ToldStore, "_is_known", _is_sure),
        (ToldStore, "take_in", _takes_in_what_comes),
        (NewsLog, "note", _is_deaf_to_names),
        (ToldImages, "change", _is_deaf),
        (ToldImages, "anchor", _is_deaf),
    ],
    ids=lambda part: part if isinstance(part, str) else None,
)
def test_what_is_planted_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Callable[..., Any]
) -> None:
    """Within a few thousand steps, whatever it is: the walk fails."""
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, CodecError, BufferError)):
        for seed in range(4):
            live(seed, _NUM_STEPS)
            walk = RowWalk(seed, "window and state", "lru")
            for _ in range(_NUM_STEPS // 4):
                walk.step()
