"""Hybrid prompts handed over a link in random order, on small pools: each logit is that from scratch, on both sides."""

from __future__ import annotations

import os

from tests.rigs.row_links import LinkWalk, total

NUM_WALKS = int(os.environ.get("FASTDEPLOY_CACHE_LINK_WALKS", "12"))


def test_whatever_comes_is_right_and_nothing_stays() -> None:
    """Offers, reads, ends from either side, resets and want of room, a step at a time; all books after each."""
    walks = [LinkWalk(seed) for seed in range(NUM_WALKS)]
    for walk in walks:
        walk.run(700)
    num_offers, num_came = total(walks, "num_offers"), total(walks, "num_came")
    assert num_came > 0.5 * num_offers > 100, (num_offers, num_came)
    assert total(walks, "num_whole") > 0.3 * num_offers and total(walks, "num_short") > 20
