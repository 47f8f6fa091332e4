"""How blocks that came to a tier join the tree. Under the lock."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import RUN, TASK
from fastdeploy_cache.books.growing import adopt, extend
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import CPU, GPU, Run, as_kept
from fastdeploy_cache.books.run_notes import Stored
from fastdeploy_cache.books.transfer import Segment


def insert_copies(
    tree: PrefixTree,
    namespace: str,
    keys: BlockKeys,
    first: int,
    ids: array[int],
    *,
    stored: bool = True,
    hashes: bytes = b"",
) -> Run | None:
    """Put blocks [first, first + len(ids)) of `keys`, which a task has brought into CPU blocks `ids`, behind what is
    cached of them. `stored`: storage has them. `hashes`: of these blocks, joined, where they are known.

    Returns the run of those that joined: the last ones; None where what they continue has gone. The other ids are still
    the task's.
    """
    path, num_found = tree.find(namespace, keys, first + len(ids))
    joined = ids[max(0, num_found - first) :]
    if num_found < first or not joined:
        return None
    above, end = tree.place(path, num_found)
    if above is None:
        above = tree.root(namespace)
    elif end < above.num_blocks:
        above = tree.split(above, end)
    run = Run(above, tree.epoch, tenant=above.tenant)
    extend(tree, run, keys, num_found, joined, tier=CPU)
    run.hashes = hashes[max(0, num_found - first) * HASH_BYTES :]
    if stored:
        run.stored = Stored(run.num_blocks, run.num_blocks)
    tree.policy.touch(run.path())  # or it would be the coldest
    key = keys.key(num_found, tree.block_bytes)
    above.add_child(key, run)
    try:
        tree.pools[CPU].hand_over(joined, TASK, RUN)
    except BaseException:  # no memory: in the tree with blocks of the task's it would have two owners
        above.remove_child(key)
        raise
    tree.residency.added_ids(run, CPU, len(joined))
    return run


def land(tree: PrefixTree, segment: Segment, succeeded: bool) -> int:
    """End a segment: its blocks join the run where they still fit, the pin goes.

    Returns how many joined: the last ones. The other ids are still the task's; all of them where memory runs out.
    """
    run, joined = segment.run, array("i")
    try:
        if succeeded and run.epoch == tree.epoch:
            joined = _fitting(segment)
        if joined:
            _join(tree, segment, joined)
    except MemoryError:
        tree.mishaps.note("landing")
        joined = array("i")
    tree.unpin(segment)
    return len(joined)


def _join(tree: PrefixTree, segment: Segment, ids: array[int]) -> None:
    run, residency = segment.run, tree.residency
    if segment.transfer.tier is GPU:
        adopt(tree, run, ids, TASK)
        return
    if run.cpu and run.cpu_start == segment.end:
        _add_in_front(residency, run, ids)
    else:
        if not run.cpu:
            run.cpu_start = segment.start
        residency.add_ids(run, CPU, ids)
    tree.pools[CPU].hand_over(ids, TASK, RUN)


def _add_in_front(residency: Residency, run: Run, ids: array[int]) -> None:
    """More copies in front of those that the run has."""
    before = run.num_in(CPU, run.num_held)
    run.cpu = as_kept(ids.tobytes() + run.cpu)
    run.cpu_start -= len(ids)
    residency.count_held(run, CPU, run.num_in(CPU, run.num_held) - before)
    for came in residency.taps.came:
        came(run, CPU, run.cpu_start, len(ids))


def _fitting(segment: Segment) -> array[int]:
    """The tail of a segment's ids that continues the run's interval in the destination tier."""
    run = segment.run
    if segment.transfer.tier is CPU:
        fits = not run.cpu or run.cpu_end == segment.start or run.cpu_start == segment.end
        return segment.ids if fits else array("i")
    # freshly computed blocks may have been adopted meanwhile; an earlier load may have failed
    assert run.parent is not None
    fits = segment.start <= run.num_gpu < segment.end and run.parent.num_gpu == run.parent.num_blocks
    return segment.ids[run.num_gpu - segment.start :] if fits else array("i")
