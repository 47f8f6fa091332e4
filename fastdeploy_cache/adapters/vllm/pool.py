"""A manager's GPU blocks as vLLM's block pool shows them. The manager keeps the books; these are looks at them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from fastdeploy_cache.adapters.vllm.blocks import BlockHashType
from fastdeploy_cache.books.run_view import RunView
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.manager import PrefixCacheManager


class PooledBlock:
    """A GPU block, as `KVCacheBlock` names things; one object per id. Read only, true at the moment of the look.

    `block_hash` walks the tree: for tests and doubt.
    """

    __slots__ = ("_pool", "block_id", "ref_cnt")
    is_null = False  # there is no null block: every id is used

    def __init__(self, pool: BlockPool, block_id: int) -> None:
        self._pool = pool
        self.block_id = block_id
        self.ref_cnt = 0  # requests that hold it, and 1 where `get_new_blocks` gave it

    @property
    def block_hash(self) -> BlockHashType | None:
        """The hash of a block that can be found; None of others, also of a copy of a block that was cached before."""
        found = self._pool.find(self.block_id)
        return None if found is None else hash_of(*found)

    def __repr__(self) -> str:
        return f"PooledBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


def hash_of(run: RunView, index: int) -> BlockHashType:
    """The hash of the block at `index` of a run."""
    size = len(run.token_ids) // len(run.hashes)
    return BlockHashType(run.hashes[index], tuple(run.token_ids[index * size : (index + 1) * size].tolist()))


class KVCacheBlocks(list[PooledBlock]):
    """Blocks of a request, first to last. A list, as early engines take it, with what later ones ask for."""

    @property
    def blocks(self) -> tuple[Sequence[PooledBlock], ...]:
        """The blocks of each KV cache group: there is one."""
        return (self,)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The ids of each KV cache group: there is one."""
        return ([block.block_id for block in self],)


class FreeBlocks:
    """The blocks that can be had now, first to go first: free ids, lowest first, then what is cached and not in use.

    A cached block leaves when its prefix is pinned, which takes no walk over the others: nothing is kept in this order.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_free_blocks(self) -> int:
        """How many; O(1)."""
        return self._pool.get_num_free_blocks()

    def get_all_free_blocks(self) -> KVCacheBlocks:
        """All of them; walks pool and tree. What is cached is in the order of `lru`, else about in the policy's."""
        view = self._pool.manager.blocks.view
        cached_ids = _in_order_of_eviction(view.runs(), view.eviction_order())
        return self._pool.blocks_of([*view.free_block_ids(), *cached_ids])


def _in_order_of_eviction(runs: Iterable[RunView], order: Sequence[bytes]) -> list[int]:
    """What would be evicted, block by block: tails of leaves; a run whose children have gone is a leaf itself."""
    by_end = {run.hashes[-1]: run for run in runs if run.block_ids}
    num_children = Counter(run.parent_hash for run in by_end.values())
    leaves = [by_end[end] for end in reversed(order) if end in by_end]
    bared: list[tuple[int, int, RunView]] = []  # of these the policy does not tell: by last use
    ids: list[int] = []
    while leaves or bared:
        is_bared = bared and (not leaves or bared[0][0] <= leaves[-1].last_used)
        run = heapq.heappop(bared)[2] if is_bared else leaves.pop()
        ids += reversed(run.block_ids[run.num_held :])
        num_children[run.parent_hash] -= 1
        above = by_end.get(run.parent_hash)
        if above is not None and not num_children[run.parent_hash]:
            heapq.heappush(bared, (above.last_used, above.block_ids[0], above))
    return ids


class BlockPool:
    """One thread at a time, as vLLM's scheduler does."""

    def __init__(self, manager: PrefixCacheManager) -> None:
        self.manager = manager
        self.num_gpu_blocks = manager.config.pool_sizes()[0]
        self.free_block_queue = FreeBlocks(self)
        self._blocks: dict[int, PooledBlock] = {}

    @property
    def blocks(self) -> KVCacheBlocks:
        """Every block, by id."""
        return self.blocks_of(range(self.num_gpu_blocks))

    def blocks_of(self, block_ids: Iterable[int]) -> KVCacheBlocks:
        """The blocks of these ids."""
        known = self._blocks
        return KVCacheBlocks([known.get(i) or known.setdefault(i, PooledBlock(self, i)) for i in block_ids])

    def hold(self, block_ids: Iterable[int], change: int) -> KVCacheBlocks:
        """`change` holders more (1) or less (-1)."""
        blocks = self.blocks_of(block_ids)
        for block in blocks:
            block.ref_cnt += change
        return blocks

    def get_new_blocks(self, num_blocks: int) -> KVCacheBlocks:
        """Blocks for the caller alone, outside all requests; evicts what the policy names.

        Raises `ValueError` when there are not so many; nothing was changed.
        """
        try:
            return self.hold(self.manager.blocks.allocate(num_blocks), 1)
        except OutOfBlocksError as error:
            raise ValueError(f"cannot get {num_blocks} blocks: {error}") from error

    def free_blocks(self, ordered_blocks: Iterable[PooledBlock]) -> None:
        """Give blocks of `get_new_blocks` back. Raises `BlockOwnerError` for others; nothing was changed."""
        block_ids = [block.block_id for block in ordered_blocks]
        self.manager.blocks.free(block_ids)
        self.hold(block_ids, -1)

    def get_cached_block(self, block_hash: BlockHashType | bytes) -> PooledBlock | None:
        """The block of that hash, where it is on the GPU. Walks the tree, and holds nothing."""
        wanted = block_hash.hash_value if isinstance(block_hash, BlockHashType) else block_hash
        for run in self.manager.blocks.view.runs():
            if wanted in run.hashes[: len(run.block_ids)]:
                return self.blocks_of([run.block_ids[run.hashes.index(wanted)]])[0]
        return None

    def find(self, block_id: int) -> tuple[RunView, int] | None:
        """The run that a block is cached in, and its place there. Walks the tree."""
        run = next((run for run in self.manager.blocks.view.runs() if block_id in run.block_ids), None)
        return None if run is None else (run, run.block_ids.index(block_id))

    def get_num_free_blocks(self) -> int:
        """Blocks that are free, or cached and not in use."""
        return self.manager.blocks.view.tier_stats().num_available

    def get_usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return 1 - self.get_num_free_blocks() / self.num_gpu_blocks
