"""How blocks that came to the CPU tier from storage, or from a caller's GPU blocks, join the tree."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.block_pool import RUN, TASK
from fastdeploy_cache.books.prefix_tree import BlockKeys, PrefixTree
from fastdeploy_cache.books.run import CPU, Run, Usage


def insert_copies(
    tree: PrefixTree, namespace: str, keys: BlockKeys, first: int, ids: array[int], *, stored: bool = True
) -> int:
    """Put blocks [first, first + len(ids)) of `keys`, which a task has brought into CPU blocks `ids`, behind what is
    cached of them. `stored`: storage has them.

    Returns how many joined: the last ones; none where what they continue has gone. The other ids are still the task's.
    """
    path, num_found = tree.find(namespace, keys, first + len(ids))
    joined = ids[max(0, num_found - first) :]
    if num_found < first or not joined:
        return 0
    above, end = tree.place(path, num_found)
    if above is None:
        above = tree.root(namespace)
    elif end < above.num_blocks:
        above = tree.split(above, end)
    run = Run(above, tree.epoch, Usage())
    tree.extend(run, keys, num_found, joined, CPU)
    run.num_stored = run.num_offered = run.num_blocks if stored else 0
    tree.policy.touch(run.path())  # or it would be the coldest
    key = tree.key(keys, num_found)
    above.children[key] = run
    try:
        tree.pools[CPU].hand_over(joined, TASK, RUN)
    except BaseException:  # no memory: in the tree with blocks of the task's it would have two owners
        del above.children[key]
        raise
    tree.residency.added_ids(run, CPU, len(joined))
    return len(joined)
