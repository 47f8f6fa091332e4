"""A cache that lives a life given by a seed, and prints a digest of all that it has decided: run in a new process."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

from fastdeploy_cache.books.block_pool import RUN
from fastdeploy_cache.books.run import TIERS
from tests.rigs.flight_walk import FlightWalk


def main() -> int:
    """Print one line for each walk: of its records, of who has which block, and of all that it counts."""
    for policy in ("lru", "reuse", "slru", "priority"):
        for is_inline in (True, False):
            walk = FlightWalk(7, 4, 24, 24, is_inline=is_inline, policy=policy)
            walk.run(1500)
            print(policy, is_inline, digest_of(walk))
    walk = FlightWalk(7, 4, 6_000, 6_000, is_inline=True, policy="lru")
    for number in range(3000):  # prompts of their own: the children of a root are too many for one dictionary
        walk.model.serve([number, 1, 2, 3, number], stays=False, patient=True)
    walk.model.cache.reset()
    for number in range(3000):
        walk.model.serve([number, 3, 2, 1, number], stays=False, patient=True)
    print("many", digest_of(walk))
    return 0


def digest_of(walk: FlightWalk) -> str:
    """A hash of the recording, of the blocks of every run in the order of a walk over the tree, and of the counts."""
    cache = walk.model.cache
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.flight"
        cache.insight.write_flight(path)
        found = hashlib.sha256(path.read_bytes())
    for run in cache._books.tree.runs():
        found.update(repr([run.ids_in(tier).tolist() for tier in TIERS]).encode())
    found.update(repr([pool.count(RUN) for pool in cache._books.pools]).encode())
    found.update(repr(cache.stats().missed_tokens).encode())
    return found.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
