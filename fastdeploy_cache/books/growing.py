"""How runs get blocks that were computed. Ids only, under the lock."""

from __future__ import annotations

from array import array
from typing import NamedTuple, TypeAlias

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import REQUEST, RUN, Owner
from fastdeploy_cache.books.comparing import num_common
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import GPU, Pin, Run, Tier

Ids: TypeAlias = "array[int]"
_NONE: Ids = array("i")  # never changed


class Insertion(NamedTuple):
    """What `insert` did: the place where the inserted blocks end, and the ids that the tree did not want."""

    run: Run
    end: int
    duplicates: array[int]
    num_blocks: int


def insert(
    tree: PrefixTree, at: tuple[Run, int], keys: BlockKeys, first: int, ids: Ids, *, duplicates: Ids = _NONE
) -> Insertion:
    """Put blocks [first, first + len(ids)) of `keys`, which the caller computed into GPU blocks `ids`, behind `at`.

    `at` is the pinned place where the blocks before `first` end; the caller pins the place that is returned, and
    only then can it be evicted when it is let go. Where the tree has a GPU copy already, the
    caller's ids stay its own: they come behind those in `duplicates`. Where a block is in the CPU tier only, or
    still loading, the caller's id is adopted as its GPU copy. Where memory runs out between two runs, fewer blocks
    are inserted.
    """
    (run, offset), position, end = at, 0, len(ids)
    done = run, offset, duplicates, 0  # not an `Insertion` yet, which is a call of Python
    try:
        while position < end:
            if offset == run.num_blocks:
                child = run.children.get(keys.key(first + position, tree.block_bytes)) if run.children else None
                if child is None:
                    run = _append(tree, run, keys, first + position, ids[position:] if position else ids)
                    return Insertion(run, run.num_blocks, duplicates, end)
                run, offset = child, 0
            num_known = num_common(run, offset, keys, slice(first + position, first + end), tree.block_bytes)
            if not num_known:  # the prompts part here
                run = tree.split(run, offset)
                done = run, *done[1:]  # the upper part, which ends there, is what was reached
                continue
            num_there = min(num_known, max(0, run.num_gpu - offset))
            known = duplicates + ids[position : position + num_there]
            if num_there < num_known:
                adopt(tree, run, ids[position + num_there : position + num_known], REQUEST)
            position, offset, duplicates = position + num_known, offset + num_known, known
            done = run, offset, duplicates, position
    except MemoryError:
        if not done[-1]:
            raise
    return Insertion(*done)


def _append(tree: PrefixTree, at: Run, keys: BlockKeys, first: int, ids: array[int]) -> Run:
    """New blocks behind `at`: in place where it has no children, else as a new run."""
    run = at
    if at.children or at.parent is None or at.is_shared:
        at.is_shared = at.parent is not None
        run = Run(at, tree.epoch, tenant=at.tenant)
    tree.pools[0].hand_over(ids, REQUEST, RUN)
    try:
        extend(tree, run, keys, first, ids)
        if run is not at:
            key = keys.key(first, tree.block_bytes)
            if key == run.tokens:  # a run of one block has these bytes once
                run.tokens = key
            at.add_child(key, run)
    except BaseException:
        tree.pools[0].hand_over(ids, RUN, REQUEST)
        raise
    tree.residency.added_ids(run, GPU, len(ids), is_offered=False)
    return run


def extend(tree: PrefixTree, run: Run, keys: BlockKeys, first: int, ids: array[int], *, tier: Tier = GPU) -> None:
    """Add blocks' tokens, extra keys and ids in a tier to the end of a run, which may be new: all of it
    or, on `MemoryError`, nothing. What follows from the ids is the caller's to count."""
    assert run.parent is not None
    size, num_blocks, before = tree.block_bytes, len(ids), run.num_blocks
    extras = run.extras
    if keys.extras is not None:
        shift = before - first
        new = {b + shift: extra for b, extra in keys.extras.items() if first <= b < first + num_blocks}
        extras = {**(extras or {}), **new} or None
    tokens = run.tokens
    try:
        run.add_tokens(keys, first * size, (first + num_blocks) * size)
        run.add_ids(tier, ids)
    except BaseException:
        run.tokens = tokens
        if type(tokens) is bytearray:
            del tokens[before * size :]
        raise
    run.extras = extras
    run.num_blocks += num_blocks
    tree.num_grown += 1
    run.inserted = tree.num_grown
    if tree.policy.hears_growth:
        tree.policy.grow(run, before)


def grow(tree: PrefixTree, pin: Pin, keys: BlockKeys, first: int, ids: array[int]) -> bool:
    """Do what `insert` and `move_pin` would, where blocks are added behind a leaf that `pin` holds whole.

    That is each step of a decoding request, and cheap because nothing but the end of the run changes. False where
    it is not so; then nothing is done.
    """
    run = pin.run
    if pin.end != run.num_blocks or run.children or run.is_shared:
        return False
    tree.pools[0].hand_over(ids, REQUEST, RUN)
    try:
        extend(tree, run, keys, first, ids)
    except BaseException:
        tree.pools[0].hand_over(ids, RUN, REQUEST)
        raise
    for came in tree.residency.taps.came:
        came(run, GPU, pin.end, len(ids))
    pin.end = run.num_held = run.num_blocks
    residency = tree.residency
    residency.num_protected[0] += len(ids)
    if residency.shares is not None:
        residency.shares.held(run, GPU, len(ids))
    return True


def adopt(tree: PrefixTree, run: Run, ids: array[int], giver: Owner) -> None:
    """These are the next blocks of a run on the GPU, as copies of what it has below."""
    tree.pools[0].hand_over(ids, giver, RUN)
    try:
        tree.residency.add_ids(run, GPU, ids)
    except BaseException:
        tree.pools[0].hand_over(ids, RUN, giver)
        raise
