"""How the next token is chosen from the scores of all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fastdeploy_cache.launch.reference_engine.sampling import Sampling

SCORES = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def drawn(sampling: Sampling, num: int = 4000) -> Counter[int]:
    return Counter(sampling.choose(SCORES, position) for position in range(num))


def test_without_temperature_the_likeliest_is_taken() -> None:
    """Whatever the seed is; a tiny temperature comes to the same, without a warning."""
    for sampling in (Sampling(), Sampling(seed=7), Sampling(5e-324, 1.0, 7), Sampling(1e-3, 1.0, 7)):
        assert drawn(sampling, 50) == {1: 50}


def test_tokens_are_drawn_by_their_shares() -> None:
    """At temperature 1 as likely as the model says, above it more evenly, below it less so."""
    shares = [drawn(Sampling(1.0, 1.0, 3))[token] / 4000 for token in range(4)]
    assert shares == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)
    rare = [drawn(Sampling(temperature, 1.0, 3))[0] for temperature in (0.5, 1.0, 2.0)]
    assert rare == sorted(rare) and rare[0] < rare[1] < rare[2]


@pytest.mark.parametrize(
    ("top_p", "tokens"), [(0.0, {1}), (0.39, {1}), (0.5, {1, 3}), (0.75, {1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_only_the_likeliest_that_have_the_share(top_p: float, tokens: set[int]) -> None:
    """The fewest that together have it, and at least one."""
    assert set(drawn(Sampling(1.0, top_p, 5), 500)) == tokens


def test_a_seed_draws_the_same_again() -> None:
    """At each position by itself, so that a step which is done again changes nothing; other seeds draw others."""
    sampling = Sampling(1.0, 1.0, 11)
    first = [sampling.choose(SCORES, position) for position in range(100)]
    again = [Sampling(1.0, 1.0, 11).choose(SCORES, position) for position in reversed(range(100))]
    assert first == again[::-1]
    for seed in (12, -11, 2**63 - 1, -(2**63)):
        assert [Sampling(1.0, 1.0, seed).choose(SCORES, position) for position in range(100)] != first
