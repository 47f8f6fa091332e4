"""What a store hears of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_cache import Match, PrefixCacheManager, Request
from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher, root_hash
from fastdeploy_cache.errors import OutOfBlocksError
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine
from tests.rigs.storage_engine import SECONDS
from tests.rigs.storage_trouble import metric

LONG = list(range(50, 50 + 6 * BLOCK_SIZE + 1))
BRANCH = [*LONG[: 3 * BLOCK_SIZE], *range(900, 900 + 4 * BLOCK_SIZE)]
TURN = [*LONG, *range(700, 700 + 2 * BLOCK_SIZE)]


def asked(cache: PrefixCacheManager, kind: str) -> int:
    return metric(cache, "tasks_total", kind=kind, rank="0")


def serve(cache: PrefixCacheManager, engine: Engine, request: Request, tokens: list[int]) -> Match:
    """From match to release; whatever is readable is checked."""
    match = cache.match(request).wait(SECONDS)
    engine.check(tokens, match.block_ids)
    num_missing = -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids)
    for _ in range(100):
        try:
            table = match.block_ids + cache.allocate(request, num_missing)
            break
        except OutOfBlocksError:  # of copies in flight: nobody else is served
            cache.wait_for_transfers(SECONDS)
    engine.compute(tokens, table, len(match.block_ids))
    cache.commit(request, len(tokens))
    engine.check(tokens, table[: len(tokens) // BLOCK_SIZE])
    cache.release(request)
    return match


def names(tokens: list[int]) -> list[str]:
    """The hashes of the blocks that these tokens fill."""
    data = BlockHasher(BLOCK_SIZE).extend(
        root_hash("", BLOCK_SIZE), np.array(tokens, "<i4").tobytes(), 0, len(tokens) // BLOCK_SIZE
    )
    return [data[i : i + HASH_BYTES].hex() for i in range(0, len(data), HASH_BYTES)]


class Heard:
    """What the store was told of blocks, since one last looked; probes are about none of ours."""

    def __init__(self, record: Path) -> None:
        self._record, self._num_seen = record, 0
        self._ours = {name for tokens in (LONG, BRANCH, TURN) for name in names(tokens)}

    def new(self) -> list[dict[str, Any]]:
        """Their tokens are those of all blocks up to the last one: what else would hash to its name?"""
        lines = [json.loads(line) for line in self._record.read_text().splitlines()]
        heard = [line for line in lines[self._num_seen :] if self._ours.intersection(line["hashes"])]
        self._num_seen = len(lines)
        for line in heard:
            assert len(line["tokens"]) % BLOCK_SIZE == 0
            assert names(line["tokens"])[-len(line["hashes"]) :] == line["hashes"]
        return heard
