"""The policies that take the newest first, beside those that take the oldest first."""

from __future__ import annotations

import random

import pytest

from tests.rigs.policy_cache import Cache


def test_mru_takes_what_was_used_last() -> None:
    """A used again after C: A goes first; then C, B's elder."""
    cache = Cache("mru", 13)
    for name in "ABCA":
        cache.serve(name)
    cache.serve("D")
    assert cache.cached("ABCD") == {"A": 0, "B": 4, "C": 4, "D": 4}
    for name in "DCE":
        cache.serve(name)
    assert cache.cached("BCDE") == {"B": 4, "C": 0, "D": 4, "E": 4}


def test_filo_takes_what_was_computed_last() -> None:
    """A used again after C: C goes all the same; what is computed behind B makes that part the newest."""
    cache = Cache("filo", 13)
    for name in "ABCA":
        cache.serve(name)
    cache.serve("D")
    assert cache.cached("ABCD") == {"A": 4, "B": 4, "C": 0, "D": 4}
    longer = Cache("filo", 12)
    longer.serve("A")
    longer.serve("B", length=2)
    longer.serve("C", length=2)
    longer.serve("B", length=5)
    longer.serve("D", length=3)
    assert longer.cached("AB", length=5) == {"A": 4, "B": 2} and longer.cached("C", length=2) == {"C": 2}


@pytest.mark.parametrize("policy", ["lru", "mru", "fifo", "filo"])
@pytest.mark.parametrize("seed", range(8))
def test_blocks_go_in_the_order_of_the_rank(policy: str, seed: int) -> None:
    """Random uses, ends and growths: of the leaves, that goes first whose last use or last growth says so."""
    choose, cache = random.Random(seed), Cache(policy, 30)
    lengths, used, computed = dict[str, int](), dict[str, int](), dict[str, int]()
    for step in range(12):
        name = choose.choice("ABCDEF")
        length = choose.randint(lengths.get(name, 1), 4)
        if cache.serve(name, length) < length:
            computed[name] = step
        used[name], lengths[name] = step, length
    when = used if policy.endswith("ru") else computed
    order = sorted(when, key=lambda name: when[name], reverse=policy in {"mru", "filo"})
    for name in order:
        last_parts = [
            len(run.token_ids) for run in cache.manager.blocks.view.runs() if run.token_ids[0] // 100 == ord(name)
        ]
        assert sum(last_parts) == lengths[name]
        cache.manager.blocks.evict(1)
        found = cache.cached(name, lengths[name])[name]
        assert found == lengths[name] - 1, f"{policy}: the end of {name} was to go first, of {order}"
        cache.manager.blocks.evict(found)
        if cache.cached(name, lengths[name])[name]:
            break  # an older part of it is worth more than what others have
