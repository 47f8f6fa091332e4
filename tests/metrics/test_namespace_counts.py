"""Counters of single namespaces: which have labels, and what these are called."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import ConfigError

SIZE = 4
NAMES = ["", "alice", "bob", "secret tenant", "carol"]


def serve(cache: PrefixCacheManager, number: int, namespace: str, tokens: list[int]) -> int:
    request = Request(request_id=f"r{number}", prompt_token_ids=tokens, namespace=namespace)
    match = cache.match(request)
    cache.allocate(request, cache.blocks_for(len(tokens)) - len(match.block_ids))
    cache.commit(request, len(tokens))
    cache.release(request)
    return match.num_tokens


def samples(cache: PrefixCacheManager, name: str) -> dict[tuple[str, ...], float]:
    found = [family for family in cache.metrics.collect() if family.name == f"fastdeploy_cache_namespace_{name}"]
    return {
        (each.labels["namespace"], *([each.labels["tier"]] if "tier" in each.labels else [])): each.value
        for family in found
        for each in family.samples
    }


def cache_of(num_namespaces: int) -> PrefixCacheManager:
    insight = InsightConfig(num_namespaces=num_namespaces)
    return PrefixCacheManager(
        CacheConfig(block_size=SIZE, num_gpu_blocks=100, num_cpu_blocks=0, transfer_client="inline", insight=insight)
    )


@pytest.mark.parametrize("num_labels", [1, 3, 10])
def test_the_first_have_labels_and_the_rest_is_one(num_labels: int) -> None:
    """The sums of all labels are those of the cache; each label has what its namespace has asked and hit."""
    draw, asked, hit = random.Random(3), Counter[str](), Counter[str]()
    with cache_of(num_labels) as cache:
        order: list[str] = []
        for number in range(200):
            name = draw.choice(NAMES)
            tokens = list(range(draw.randint(5, 30)))
            if name not in order:
                order.append(name)
            own = str(order.index(name)) if order.index(name) < num_labels else "others"
            asked[own] += len(tokens)
            hit[own] += serve(cache, number, name, tokens)
        tokens_of, hits_of = samples(cache, "prompt_tokens"), samples(cache, "hit_tokens")
        labels = [label for (label,) in tokens_of if label != "others"]
        assert len(labels) == min(num_labels, len(NAMES))
        for place, label in enumerate(labels):
            assert tokens_of[label,] == asked[str(place)]
            assert hits_of[label, "gpu"] == hit[str(place)]
        assert tokens_of["others",] == asked["others"] and hits_of["others", "gpu"] == hit["others"]
        assert sum(samples(cache, "requests").values()) == 200
        assert sum(tokens_of.values()) == cache.metrics.token_counts()[0]


def test_labels_are_those_of_looks_and_never_names() -> None:
    """What `top` calls a namespace; the one without a name is the default."""
    with cache_of(10) as cache:
        for number, name in enumerate(NAMES):
            serve(cache, number, name, list(range(9)))
        shown = {each.namespace for each in cache.insight.top(20)}
        labels = {label for (label,) in samples(cache, "requests")} - {"others"}
        assert labels == shown
        assert "default" in labels and not labels & set(NAMES)


def test_without_the_setting_nothing_is_shown() -> None:
    """No series at all; and a number that is too large is refused."""
    with cache_of(0) as cache:
        serve(cache, 0, "alice", list(range(9)))
        assert not samples(cache, "requests")
    for wrong in (-1, 1001):
        with pytest.raises(ConfigError, match=f"insight.num_namespaces is {wrong}"):
            InsightConfig(num_namespaces=wrong)
