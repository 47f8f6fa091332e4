"""Nodes of SGLang's cache: what they tell of the tree, and that a walk from the root meets every place of a request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.adapters.sglang.nodes import Node, new_request, request_from
from fastdeploy_cache.adapters.sglang.radix_cache import HiRadixCache, RadixKey
from fastdeploy_cache.books.block_hash import BlockHasher, root_hash
from tests.rigs.sglang_engine import Scheduler


def walk(node: Node) -> Iterator[Node]:
    """A node and all beneath it, as SGLang's `dfs-weight` goes."""
    yield node
    for child in node.children.values():
        yield from walk(child)


@pytest.fixture(params=[1, 4], ids=["page of 1", "page of 4"])
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    made = Scheduler(256, request.param, 512)
    yield made
    made.close()


def test_children_are_the_tree(scheduler: Scheduler) -> None:
    """By first token or page, with the extra key; each knows its tokens, its parent and its height."""
    size = scheduler.page_size
    stem, ends = [*range(8)], ([*range(20, 28)], [*range(30, 42)])
    for extra_key in (None, "lora"):
        for end in ends:
            scheduler.serve([*stem, *end], [1], extra_key=extra_key)
    scheduler.client.land_all()
    root = scheduler.cache.root_node
    first = 0 if size == 1 else (0, 1, 2, 3)
    tops = root.children
    assert set(tops) == {first, ("lora", first)}
    for extra_key, top in ((None, tops[first]), ("lora", tops["lora", first])):
        found = scheduler.cache.match_prefix(RadixKey(stem, extra_key)).last_device_node
        assert top == found and hash(top) == hash(found) and top.num_tokens == 8
        assert scheduler.cache.get_height(top) == 1 and top.parent == found.parent == root
        plain = [20, 30] if size == 1 else [(20, 21, 22, 23), (30, 31, 32, 33)]
        keys = plain if extra_key is None else [(extra_key, key) for key in plain]
        assert sorted(top.children) == sorted(found.children) == keys
        for end, leaf in zip(ends, [top.children[key] for key in keys], strict=True):
            match = scheduler.cache.match_prefix(RadixKey([*stem, *end], extra_key))
            assert leaf == match.last_device_node and leaf.parent == match.last_device_node.parent == top
            assert scheduler.cache.get_height(leaf) == 2 and not leaf.children
            assert scheduler.cache.inc_lock_ref(leaf) == -len(stem) - len(end)
            assert scheduler.cache.dec_lock_ref(match.last_device_node) == len(stem) + len(end)
    assert root.parent is None and scheduler.cache.get_height(root) == 0
    assert scheduler.cache.match_prefix([99] * 8).last_device_node is root


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_meets_branches_in_the_order_in_which_prompts_came(scheduler: Scheduler, seed: int) -> None:
    """`dfs-weight` breaks ties by it. After each of some random prompts, the leaves of a walk are those of a tree of
    plain dicts, which keep the order in which keys came; a prompt that comes again moves nothing."""
    choose, size, model = random.Random(seed), scheduler.page_size, dict[tuple[int, ...], Any]()
    prompts = [[choose.randrange(3) for _ in range(size * choose.randint(1, 5))] for _ in range(6)]
    for _ in range(20):
        tokens = choose.choice(prompts)
        scheduler.serve(tokens, [])
        scheduler.client.land_all()
        place = model
        for start in range(0, len(tokens), size):
            place = place.setdefault(tuple(tokens[start : start + size]), {})
        leaves = [
            np.frombuffer(node.tokens, "<i4").tolist() for node in walk(scheduler.cache.root_node) if not node.children
        ]
        assert leaves == leaves_of(model)
    assert len(leaves_of(model)) > 1


def leaves_of(pages: dict[tuple[int, ...], Any]) -> list[list[int]]:
    """The tokens up to each leaf of a tree of dicts, in the order of a walk."""
    below = [[[*page, *rest] for rest in leaves_of(behind) or [[]]] for page, behind in pages.items()]
    return [leaf for leaves in below for leaf in leaves]


@pytest.mark.parametrize("extra_key", [None, "lora", ""])
@pytest.mark.parametrize("num_tokens", [0, 3, 8, 9, 16, 22])
def test_tokens_behind_a_node_are_packed_alone(scheduler: Scheduler, num_tokens: int, extra_key: str | None) -> None:
    """Tokens in parts name what they name as one key: whichever node they begin with, under their own extra key or
    another's, with fewer tokens than the node has, and as arrays."""
    tokens, size = [*range(22)], scheduler.page_size
    scheduler.serve(tokens, [1])
    node = scheduler.cache.match_prefix(RadixKey(tokens[:8])).last_device_node
    assert node.num_tokens == 8 and node.tokens == np.arange(8, dtype="<i4").tobytes()
    whole = new_request(RadixKey(tokens[:num_tokens], extra_key), size)
    for first in (scheduler.cache.root_node, node):
        for parts in (
            (tokens[:num_tokens],),
            (tokens[:5][:num_tokens], tokens[5:num_tokens]),
            (np.arange(num_tokens), ()),
        ):
            request = request_from(first, parts, extra_key, size)
            if whole is None:
                assert request is None
            else:
                assert request is not None
                assert (request.prompt, request.namespace) == (whole.prompt, whole.namespace)


def test_hashes_follow_from_tokens(scheduler: Scheduler) -> None:
    """The last page's hash, and those of all pages up to the parent, are the chain's; the root has none."""
    size, tokens = scheduler.page_size, [*range(16)]
    for end in (8, 16):
        scheduler.serve(tokens[:end], [])
    node = scheduler.cache.match_prefix(tokens).last_host_node
    assert node.parent is not None
    joined = BlockHasher(size).extend(root_hash("", size), node.request.tokens, 0, 16 // size)
    chain = [joined[i : i + 32].hex() for i in range(0, len(joined), 32)]
    assert node.get_last_hash_value() == chain[-1]
    assert node.get_prefix_hash_values(node.parent) == chain[: 8 // size]
    root = scheduler.cache.root_node
    assert root.get_last_hash_value() is None and root.get_prefix_hash_values(root.parent) == []


def test_a_node_knows_where_it_is(scheduler: Scheduler) -> None:
    """On the GPU alone, with a copy, with the copy alone, and nowhere any more."""
    tokens = [*range(16)]
    seen = []
    scheduler.serve(tokens, [])
    node = scheduler.cache.match_prefix(tokens).last_host_node
    seen.append((node.evicted, node.backuped))
    scheduler.client.land_all()
    seen.append((node.evicted, node.backuped))
    scheduler.cache.evict(16)
    seen.append((node.evicted, node.backuped))
    scheduler.cache.evict_host(16)
    seen.append((node.evicted, node.backuped))
    assert seen == [(False, False), (False, True), (True, True), (True, False)]
    root = scheduler.cache.root_node
    assert (root.evicted, root.backuped) == (False, True) and scheduler.cache.get_height(node) == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_walk_meets_every_place_of_a_waiting_request(seed: int) -> None:
    """A scheduler that sorts by the tree loses no request: ends of matches stay nodes, also where an eviction has left
    a part of a node on the GPU, and while loads land."""
    choose, size = random.Random(seed), 1 + seed % 2
    scheduler = Scheduler(48, size, 256)
    cache = scheduler.cache = HiRadixCache(scheduler.manager, scheduler.pool, load_back_threshold=1, overlap_loads=True)
    texts = [[(5 * i * i + text * (i // 7)) % 4 for i in range(40)] for text in range(4)]
    for _ in range(6):
        scheduler.serve(choose.choice(texts)[: choose.randint(2, 24)], [9])
        scheduler.client.land_all()
        cache.loading_check()
    waiting = list[Node]()
    for _ in range(8):
        scheduler.manager.blocks.evict(choose.randint(0, 5))
        match = cache.match_prefix(choose.choice(texts)[: choose.randint(2, 40)])
        waiting = [node for node in waiting if not node.evicted]
        waiting.append(match.last_device_node)
        if match.host_hit_length and choose.random() < 0.5:
            cache.init_load_back(match.last_host_node, match.host_hit_length)
        if choose.random() < 0.5:
            scheduler.client.land_all()
        met = set(walk(cache.root_node))
        assert all(node in met for node in waiting), "a request would never be scheduled"
    scheduler.client.land_all()
    cache.loading_check()
    scheduler.close()
