"""The prefix tree as FastDeploy's tests and callers look at it: a node for each block, made anew at each look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from fastdeploy_cache.books.run_view import RunView


class CacheStatus(IntEnum):
    """Where a node's block is."""

    GPU = 0
    CPU = 3


@dataclass(eq=False)
class BlockNode:
    """One cached block, at one moment.

    Attributes:
        node_id: the block's hash, as hex digits: the same in every process.
        depth: blocks from the root on, this one included; the root's is 0.
        block_id: on the GPU, or in the CPU tier where it is there only.
        shared_count: tasks that hold it.
        is_gpu_leaf_node: on the GPU, and no child is; `is_cpu_leaf_node`: in the CPU tier only, and no children.
    """

    node_id: str
    depth: int
    block_id: int
    token_num: int
    parent: BlockNode | None
    cache_status: CacheStatus
    last_used_time: float
    cpu_block_id: int | None = None
    children: dict[str, BlockNode] = field(default_factory=dict)
    req_id_set: set[str] = field(default_factory=set)
    reverved_dec_block_ids: list[int] = field(default_factory=list)  # their spelling; here tasks hold them, no nodes

    @property
    def hash_value(self) -> str:
        """Its hash."""
        return self.node_id

    @property
    def shared_count(self) -> int:
        """Tasks that hold it."""
        return len(self.req_id_set)

    @property
    def has_in_gpu(self) -> bool:
        """Whether it is on the GPU."""
        return self.cache_status is CacheStatus.GPU

    @property
    def is_gpu_leaf_node(self) -> bool:
        """On the GPU, without a child there."""
        return self.parent is not None and self.has_in_gpu and not any(c.has_in_gpu for c in self.children.values())

    @property
    def is_cpu_leaf_node(self) -> bool:
        """In the CPU tier only, without children."""
        return self.parent is not None and not self.has_in_gpu and not self.children

    @property
    def is_persistent(self) -> bool:
        """Never evicted: the root alone."""
        return self.parent is None

    def __lt__(self, other: BlockNode) -> bool:
        """Oldest first, deeper first on a tie."""
        return (self.last_used_time, -self.depth) < (other.last_used_time, -other.depth)


class NodeView:
    """All nodes at one moment, by their hashes."""

    def __init__(self, runs: Sequence[RunView], block_size: int, holders: Mapping[str, Sequence[bytes]]) -> None:
        """`holders`: the hashes of the blocks that each task holds."""
        self.root = BlockNode("", 0, -1, 0, None, CacheStatus.GPU, 0.0)
        self.by_hash: dict[str, BlockNode] = {}
        for run in runs:
            parent = self.by_hash.get(run.parent_hash.hex(), self.root)
            for block, block_hash in enumerate(run.hashes):
                parent = self._add(run, block, block_hash.hex(), parent, block_size)
        for task_id, hashes in holders.items():
            for block_hash in hashes:
                if (node := self.by_hash.get(block_hash.hex())) is not None:
                    node.req_id_set.add(task_id)

    def _add(self, run: RunView, block: int, name: str, parent: BlockNode, block_size: int) -> BlockNode:
        on_gpu = block < len(run.block_ids)
        copied = 0 <= block - run.cpu_start < len(run.cpu_block_ids)
        cpu_id = run.cpu_block_ids[block - run.cpu_start] if copied else None
        node = BlockNode(
            node_id=name,
            depth=run.first_block + block + 1,
            block_id=run.block_ids[block] if on_gpu else cpu_id if cpu_id is not None else -1,
            token_num=block_size,
            parent=parent,
            cache_status=CacheStatus.GPU if on_gpu else CacheStatus.CPU,
            last_used_time=float(run.last_used),
            cpu_block_id=cpu_id,
        )
        parent.children[name] = self.by_hash[name] = node
        return node

    def leaves(self, order: Sequence[bytes], *, on_gpu: bool) -> list[BlockNode]:
        """The leaves of a tier that no task holds, in the order of eviction."""
        nodes = [self.by_hash[name.hex()] for name in order if name.hex() in self.by_hash]
        last = [self._last_on_gpu(node) for node in nodes] if on_gpu else nodes
        return [n for n in last if n is not None and (n.is_gpu_leaf_node if on_gpu else n.is_cpu_leaf_node)]

    @staticmethod
    def _last_on_gpu(node: BlockNode | None) -> BlockNode | None:
        while node is not None and not node.has_in_gpu:
            node = node.parent
        return node
