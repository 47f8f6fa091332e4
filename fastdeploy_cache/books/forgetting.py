"""A namespace is forgotten: nothing of it is found any more, and its blocks are wiped when they are free. Under the
lock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import NamespaceForgotten
from fastdeploy_cache.books.checkpoints import Checkpoints
from fastdeploy_cache.books.generations import Reason
from fastdeploy_cache.books.graves import AT_ONCE
from fastdeploy_cache.books.residency import FORGOTTEN, Residency
from fastdeploy_cache.books.run import TIERS, Run
from fastdeploy_cache.books.taps import Loss


def forget_namespace(books: Books, namespace: str) -> tuple[int, int]:
    """Take the namespace's tree out of reach, all at once: half a microsecond for each block. What nobody holds is
    removed in the turns that follow, as after a reset, and the rest when it is let go. Returns the blocks that were
    cached, by Tier.

    All of it is marked in this turn. Between two turns an eviction could otherwise give a block of it to somebody else,
    with the bytes that it has.
    """
    tree = books.tree
    root = tree.roots.get(namespace)
    books.note(NamespaceForgotten(namespace=namespace))
    tree.generations.begin(Reason.FORGOTTEN)  # callers' blocks do not say whose they are
    checkpoints = tree.residency.checkpoints
    _note_stale(tree.pools, checkpoints)  # it may have had these before; and tasks have what is on its way to it
    runs = list(root.children.values()) if root is not None else []
    for run in runs:
        runs.extend(run.children.values())
    if not tree.graves.are_empty:  # a reset has forgotten some of it already, and not removed it yet
        runs += [run for run in tree.runs() if 0 <= run.epoch != tree.epoch and run.root().namespace == namespace]
    if not runs:
        return 0, 0
    _taint(tree.pools, checkpoints, runs)  # all that needs memory; then what happens, happens whole
    if root is not None:
        tree.roots.pop(namespace)
        root.epoch = FORGOTTEN
        tree.graves.add_forgotten({namespace: root})
    num_blocks = [0, 0]
    for run in reversed(runs):  # children first
        if checkpoints is not None:  # at once: units that only wait to be wiped would count as room
            checkpoints.drop_unpinned(run, Loss.RESET)
        _hide(tree.residency, run)
        for tier in TIERS:
            num_blocks[tier] += run.num_in(tier, run.num_blocks)
    tree.mishaps.contain("settling", lambda: tree.graves.clear(AT_ONCE))
    return num_blocks[0], num_blocks[1]


def _note_stale(pools: Sequence[BlockPool], checkpoints: Checkpoints | None) -> None:
    for pool in (*pools, *[units.pool for units in (checkpoints.pools if checkpoints is not None else ())]):
        pool.note_stale()


def _taint(pools: Sequence[BlockPool], checkpoints: Checkpoints | None, runs: Sequence[Run]) -> None:
    """All of it, or nothing: what is marked and still found would count as room, and give none."""
    marked = [(pools[tier], array("i", b"".join([run.packed_ids(tier) for run in runs]))) for tier in TIERS]
    marked += checkpoints.ids_of(runs) if checkpoints is not None else []
    try:
        for pool, ids in marked:
            pool.taint(ids)
    except BaseException:
        for pool, ids in marked:
            pool.untaint(ids)
        raise


def _hide(residency: Residency, run: Run) -> None:
    """A run takes part in nothing any more, and goes when nobody holds it."""
    residency.withdraw(run)
    if residency.policy.hears_losses and run.epoch == residency.epoch:
        residency.policy.shrink(run, 0)
    for hidden in residency.taps.hidden:
        hidden(run)
    if residency.shares is not None:
        residency.shares.forgot(run)
    for tier in TIERS:
        residency.num_doomed[tier] += run.num_in(tier, run.num_blocks) - run.num_in(tier, run.num_held)
    run.epoch = FORGOTTEN
