"""A run of the tree as adapters and their users may look at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.block_names import BlockNames
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run


@dataclass(frozen=True, eq=False)
class RunView:
    """Consecutive blocks with no branch in between, at one moment.

    Attributes:
        namespace: what its root is found under.
        first_block: blocks of the sequence before it.
        token_ids: int32 [num_blocks * block_size].
        joined_hashes: of each block, one after the other; `hashes` is the list of them.
        parent_hash: of the block before the first one.
        block_ids: of its first blocks, those on the GPU.
        cpu_start, cpu_block_ids: of an interval of its blocks, those in the CPU tier.
        num_held: its first blocks, which pins here or beneath keep where they are.
        num_pins: pins that end in it.
        last_used: the order of uses; higher is later. num_uses: requests that used it.
    """

    namespace: str
    first_block: int
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    joined_hashes: bytes
    parent_hash: bytes
    block_ids: list[int]
    cpu_start: int
    cpu_block_ids: list[int]
    num_held: int
    num_pins: int
    last_used: int
    num_uses: int

    @cached_property
    def hashes(self) -> list[bytes]:
        """The hash of each block."""
        return [self.joined_hashes[i : i + HASH_BYTES] for i in range(0, len(self.joined_hashes), HASH_BYTES)]

    @property
    def last_hash(self) -> bytes:
        """The hash of the last block."""
        return self.joined_hashes[-HASH_BYTES:]

    @property
    def num_blocks(self) -> int:
        """How many blocks it has."""
        return len(self.joined_hashes) // HASH_BYTES


def views_of(tree: PrefixTree) -> Iterator[RunView]:
    """Views of every run that can be found, parents first, and siblings in the order in which they came: schedulers
    break ties by it. Beyond `large_dict.SMALL` siblings there is no order. Under the manager's lock."""
    below = [(root, name, 0) for name, root in tree.roots.items()][::-1]  # taken from the end
    while below:
        run, namespace, first_block = below.pop()
        end = first_block + run.num_blocks
        below.extend([(child, namespace, end) for child in run.children.values()][::-1])
        if run.parent is not None:
            yield _view(run, run.parent, namespace, first_block, tree.names)


def path_views(path: list[Run], namespace: str, names: BlockNames) -> Iterator[RunView]:
    """Views of the runs of a path, first to last. Under the manager's lock."""
    first_block = 0
    for run in path:
        assert run.parent is not None
        yield _view(run, run.parent, namespace, first_block, names)
        first_block += run.num_blocks


def _view(run: Run, parent: Run, namespace: str, first_block: int, names: BlockNames) -> RunView:
    return RunView(
        namespace=namespace,
        first_block=first_block,
        token_ids=np.frombuffer(bytes(run.tokens), "<i4"),
        joined_hashes=names.of(run, 0, run.num_blocks),
        parent_hash=names.of_last(parent),
        block_ids=run.ids_in(GPU).tolist(),
        cpu_start=run.cpu_start,
        cpu_block_ids=run.ids_in(CPU).tolist(),
        num_held=run.num_held,
        num_pins=sum(type(pin) is Pin for pin in run.pins),
        last_used=run.last_used,
        num_uses=run.num_uses,
    )
