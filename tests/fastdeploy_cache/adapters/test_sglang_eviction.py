"""What SGLang's cache evicts, against a plain model of its tree: whole nodes, in the order of the policy."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from fastdeploy_cache.adapters.sglang.radix_cache import HiRadixCache, RadixKey, new_config, new_manager

Tokens = tuple[int, ...]
NUM_PAGES = 64


@dataclass
class ModelNode:
    """A node, by all tokens up to its end."""

    end: Tokens
    above: Tokens
    used: int
    inserted: int


class Model:
    """The tree as a list of nodes. A match inside a node splits it, and makes only the front younger."""

    def __init__(self, policy: str, size: int) -> None:
        self.policy, self.size, self.now = policy, size, 0
        self.nodes: list[ModelNode] = []

    def match(self, key: Tokens) -> Tokens:
        self.now += 1
        at: Tokens = ()
        while child := self.child(at, key):
            end = len(at)
            while end < len(child.end) and child.end[end : end + self.size] == key[end : end + self.size]:
                end += self.size
            if end < len(child.end):
                front = ModelNode(child.end[:end], at, self.now, child.inserted)
                child.above = front.end
                self.nodes.append(front)
                return front.end
            child.used, at = self.now, child.end
        return at

    def child(self, at: Tokens, key: Tokens) -> ModelNode | None:
        first = key[: len(at) + self.size]
        behind = [n for n in self.nodes if n.above == at and n.end[: len(first)] == first]
        return behind[0] if behind and len(key) > len(at) else None

    def insert(self, key: Tokens) -> int:
        at = self.match(key)
        if len(at) < len(key):
            self.nodes.append(ModelNode(key, at, self.now, self.now))
        return len(at)

    def evict(self, num_tokens: int) -> int:
        gone = 0
        while gone < num_tokens and self.nodes:
            leaves = [n for n in self.nodes if not any(m.above == n.end for m in self.nodes)]
            ranks = [n.used if self.policy.endswith("ru") else n.inserted for n in leaves]
            victim = leaves[ranks.index((min if self.policy in {"lru", "fifo"} else max)(ranks))]
            self.nodes.remove(victim)
            gone += len(victim.end) - len(victim.above)
        return gone

    def total(self) -> int:
        return sum(len(n.end) - len(n.above) for n in self.nodes)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("policy", ["lru", "mru", "fifo", "filo"])
@pytest.mark.parametrize("seed", range(4))
def test_nodes_go_as_in_a_plain_tree(policy: str, size: int, seed: int) -> None:
    """After every match, insert and eviction the same prefixes are there, and the same number of tokens has gone."""
    choose, model = random.Random(seed), Model(policy, size)
    config = new_config(NUM_PAGES * size, size, hicache_ratio=0, transfer_client="inline", eviction_policy=policy)
    cache = HiRadixCache(new_manager(config))
    allocator = cache.token_to_kv_pool_allocator
    texts = [[(7 * i * i + text * (i // 9)) % 5 for i in range(30 * size)] for text in range(5)]
    num_evicted = 0
    for _ in range(100):
        key = tuple(choose.choice(texts)[: choose.randint(1, 30) * size])
        if choose.random() < 0.3:
            key += (choose.randint(5, 9),) * size
        if (missing := len(key) - allocator.available_size()) > 0:
            num_evicted += (gone := model.evict(missing))
            assert cache.evict(missing) == gone
        assert len(cache.match_prefix(RadixKey(key)).device_indices) == len(model.match(key))
        if choose.random() < 0.6:
            slots = allocator.alloc(len(key))
            num_known = cache.insert(RadixKey(key), slots)
            assert num_known == model.insert(key)
            if num_known:
                allocator.free(slots[:num_known])
        assert cache.evictable_size() == model.total()
    assert num_evicted > NUM_PAGES * size, "the walk evicts often"
    cache.manager.check_invariants()
    cache.manager.close()
