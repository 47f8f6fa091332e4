"""What is cached of a hybrid model, told without a tree: from memory, owners of ids, and events of checkpoints."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from fastdeploy_cache.books.block_pool import CHECKPOINT, RUN
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import CPU, GPU, TIERS, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.request import Request
from tests.rigs.hybrid_models import read_blocks

Key = int  # of all tokens up to the end of one block, in one namespace


class Keys:
    """Numbers for prefixes: equal prefixes have equal ones."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Key, bytes], Key] = {}
        self._roots: dict[str, Key] = {}

    def of(self, namespace: str, blocks: Sequence[bytes]) -> list[Key]:
        """Of each block's end, first to last; in front of them that of the empty prefix."""
        key = self._roots.setdefault(namespace, -1 - len(self._roots))
        found = [key]
        for block in blocks:
            key = self._numbers.setdefault((key, block), len(self._numbers))
            found.append(key)
        return found


class Memory:
    """What each block, page and unit holds. What nobody has written, or a failed copy has, is garbage."""

    def __init__(self, num_pools: int) -> None:
        self.tiers: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self.units: list[dict[int, Any]] = [{} for _ in range(num_pools)]

    def lose_gpu(self) -> None:
        """Nothing is known of what blocks and units on the GPU hold."""
        for memory in (self.tiers[0], *self.units):
            memory.clear()


def blocks_of(path: Sequence[Run], block_bytes: int) -> list[bytes]:
    """What each block of a path consists of: tokens, and extra keys."""
    blocks = []
    for run in path:
        extras = run.extras or {}
        for block in range(run.num_blocks):
            tokens = bytes(run.tokens[block * block_bytes : (block + 1) * block_bytes])
            blocks.append(tokens + extras.get(block, b""))
    return blocks


class Oracle:
    """Tries each boundary of a prompt, block by block and unit by unit."""

    def __init__(self, tree: PrefixTree, books: RowBooks, memory: Memory, keys: Keys) -> None:
        self._tree, self._rows, self._memory, self._keys = tree, books.checkpoints, memory, keys
        self._there: tuple[dict[Key, list[list[int]]], dict[Key, list[int]]] = ({}, {})  # by Tier: units, and pages
        self._over: tuple[set[int], set[int]] = (set(), set())  # blocks of runs that a reset has forgotten
        self.num_events = 0
        books.checkpoints.taps.anchored += (self._anchored,)
        books.checkpoints.taps.lifted += (self._lifted,)

    def written(self, tier: Tier, ids: Sequence[int]) -> None:
        """These blocks have something new in them, which no reset has forgotten."""
        self._over[tier].difference_update(ids)

    def _key(self, checkpoint: Checkpoint) -> Key:
        path = checkpoint.run.path()
        root, size = path[0].parent, self._tree.block_bytes
        namespace = next(name for name, each in self._tree.roots.items() if each is root)
        return self._keys.of(namespace, blocks_of(path, size))[checkpoint.boundary]

    def _anchored(self, checkpoint: Checkpoint, tier: Tier) -> None:
        self.num_events += 1
        key = self._key(checkpoint)
        assert key not in self._there[tier], "a checkpoint came to a tier where it is"
        if tier is GPU:
            self._there[0][key] = [ids.tolist() for ids in self._rows.unit_ids(checkpoint)]
        else:
            self._there[1][key] = array("i", checkpoint.pages or b"").tolist()

    def _lifted(self, checkpoint: Checkpoint, tier: Tier, why: Loss) -> None:
        self.num_events += 1
        if checkpoint.run.epoch == self._tree.epoch and why is not Loss.MOVED:
            del self._there[tier][self._key(checkpoint)]
        elif why is Loss.MOVED:
            self._there[tier].pop(self._key(checkpoint), None)

    def forget(self) -> None:
        """A reset: nothing of what is cached now counts any more."""
        for tier in TIERS:
            self._over[tier].update(self._tree.pools[tier].ids_of(RUN))
            self._there[tier].clear()

    def forget_gpu(self) -> None:
        """The GPU's bytes have gone: copies from a prompt's start on count still. The rest is told of once more."""
        copies = self._readable(CPU)
        parents = {key: parent for (parent, _), key in self._keys._numbers.items()}

        def is_kept(key: Key) -> bool:
            while key >= 0:
                if key not in copies:
                    return False
                key = parents[key]
            return True

        self._over[0].update(self._tree.pools[GPU].ids_of(RUN))
        self._over[1].update(block for key, block in copies.items() if not is_kept(key))
        for tier in TIERS:
            self._there[tier].clear()

    def _readable(self, tier: Tier) -> dict[Key, int]:
        """Full blocks of a tier, by what they hold."""
        memory, over = self._memory.tiers[tier], self._over[tier]
        ids = [block for block in self._tree.pools[tier].ids_of(RUN) if block not in over]
        held = [(block, memory.get(block, ("garbage", 0))) for block in ids]
        return {key: block for block, (what, key) in held if what == "full"}

    def deepest(self, request: Request, keys: Sequence[Key], max_blocks: int) -> tuple[int, int]:
        """The deepest boundary at which a request can go on, and the deepest at which it can on the GPU at once; 0 for
        none. `keys` as `Keys.of` tells them."""
        size = self._tree.block_size
        gpu, cpu = self._readable(GPU), self._readable(CPU)
        best, best_gpu = 0, 0
        for end in range(1, max_blocks + 1):
            on_gpu = all(key in gpu for key in keys[1 : end + 1])
            if not on_gpu and not all(key in gpu or key in cpu for key in keys[1 : end + 1]):
                break
            if not request.match_inside_images and any(i.offset < end * size < i.end for i in request.images):
                continue
            has_units, has_image = self._has_units(keys, end), self._has_image(keys, end)
            best = end if has_units or has_image else best
            best_gpu = end if has_units and on_gpu else best_gpu
        return best, best_gpu

    def _has_units(self, keys: Sequence[Key], end: int) -> bool:
        units = self._there[0].get(keys[end])
        if units is None:
            return False
        pools = list({id(pool): pool for pool in self._rows.pools}.values())
        for number, (row, ids, pool) in enumerate(zip(self._rows.sizes.rows, units, self._rows.pools, strict=True)):
            read = read_blocks(row.kind, row.reach_tokens, end, self._tree.block_size)
            memory = self._memory.units[pools.index(pool)]
            assert len(ids) == len(read), "a checkpoint with units of another boundary"
            for position, unit in zip(read, ids, strict=True):
                assert pool.pool.owner(unit) == RUN, "a unit of a checkpoint has another owner"
                assert memory.get(unit) == (number, keys[position + 1]), "a unit of a checkpoint holds something else"
        return True

    def _has_image(self, keys: Sequence[Key], end: int) -> bool:
        pages = self._there[1].get(keys[end])
        if pages is None:
            return False
        for place, page in enumerate(pages):
            assert self._tree.pools[CPU].owner(page) == CHECKPOINT, "a page of an image has another owner"
            assert self._memory.tiers[1].get(page) == ("image", keys[end], place), "a page holds something else"
        return True
