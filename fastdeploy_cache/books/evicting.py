"""Making room: blocks leave a tier, those that the policy names first. Under the lock."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.block_pool import CALLER, RUN
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import CPU, GPU, ID_BYTES, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.transfer import Segment

_LOSSES = (Loss.GPU, Loss.CPU)  # by Tier: why something is evicted from it


def evict(residency: Residency, tier: Tier, num_blocks: int) -> None:
    """Free exactly `num_blocks` of a tier, those that the policy chooses.

    The caller has checked `num_available`: asked for more, it would go on to victims that nobody named, and in the
    end find none.
    """
    if residency.make_room is not None:
        residency.make_room(tier, num_blocks)
        return
    if residency.shares is not None:
        make_room(residency, tier, num_blocks + residency.pools[tier].num_free)
        return
    if residency.graves.open:  # what a reset has forgotten goes first
        num_blocks -= residency.graves.free(tier, num_blocks)
    pool, policy, gone = residency.pools[tier], residency.policy, None
    in_parts = pool.num_read > 0
    try:
        while num_blocks > 0:
            run, at_most = policy.victim(tier, num_blocks)
            ids = run.cpu if tier else run.gpu
            if in_parts or (run.gpu if tier else run.cpu) or run.num_held or run.children:
                num_blocks -= evict_tail(residency, run, tier, at_most)
            elif len(ids) > at_most * ID_BYTES:
                _shorten(residency, run, tier, run.num_blocks - at_most)
                num_blocks -= at_most
            else:
                gone = gone or _Gone()
                num_blocks -= run.num_blocks
                _remove_leaf(residency, tier, run, gone)
                while num_blocks > 0 and (runs := policy.small_leaves(tier, num_blocks)):
                    num_blocks -= sum([small.num_blocks for small in runs])
                    _remove_leaves(residency, tier, runs, gone)
                    policy.drop_small_leaves(tier, len(runs))
    finally:
        if gone is not None:  # where they are small they are many: their ids are freed all at once
            del gone.ids[gone.num_blocks :]
            pool.free(gone.ids, RUN)
            residency.ages.evicted_together(tier, gone.runs)


def make_room(residency: Residency, tier: Tier, num_blocks: int, tenant: int | None = None) -> None:
    """Let `num_blocks` be free, and a tenant's to take. The caller has checked `num_available` for that tenant."""
    num_short = num_blocks - residency.pools[tier].num_free
    if residency.shares is None:
        if num_short > 0:
            evict(residency, tier, num_short)
        return
    if num_short > 0 and residency.graves.open:
        residency.graves.free(tier, num_short)
    while (named := next_victim(residency, tier, num_blocks, tenant)) is not None:
        run, at_most = named
        evict_tail(residency, run, tier, at_most)


def next_victim(residency: Residency, tier: Tier, num_blocks: int, tenant: int | None) -> tuple[Run, int] | None:
    """The leaf that loses its tail next, and how much of it at most, so that `num_blocks` are free and a tenant's to
    take; None where they are, or nothing can go."""
    if residency.shares is not None:
        return residency.shares.next_victim(tier, num_blocks, tenant)
    num_free = residency.pools[tier].num_free
    if num_free >= num_blocks or residency.num_available(tier) <= num_free:
        return None
    run, at_most = residency.policy.victim(tier, num_blocks - num_free)
    return run, min(num_blocks - num_free, at_most)


def _shorten(residency: Residency, run: Run, tier: Tier, num_left: int) -> None:
    """What `evict_tail` does to a leaf that is in this tier alone, of which nothing is read, and which keeps a part."""
    taps, policy, why, num_gone = residency.taps, residency.policy, _LOSSES[tier], run.num_blocks - num_left
    run.free_ids(tier, num_left, residency.pools[tier])
    for left in taps.left:
        left(run, tier, num_left, num_gone, why)
    for ended in taps.ended:
        ended(run, num_left, why)
    if policy.hears_losses:
        policy.shrink(run, num_left)
    run.cut(num_left, residency.block_bytes)


class _Gone:
    """What went whole: the ids, of which no run knows the first `num_blocks` any more, and the runs that went alone."""

    __slots__ = ("ids", "num_blocks", "runs")

    def __init__(self) -> None:
        self.ids, self.num_blocks, self.runs = array("i"), 0, list[Run]()


def _remove_leaf(residency: Residency, tier: Tier, run: Run, gone: _Gone) -> None:
    """Unlink a leaf that is in this tier alone, and that the policy has named. Its ids are the caller's to free."""
    policy, why = residency.policy, _LOSSES[tier]
    gone.ids.frombytes(run.cpu if tier else run.gpu)  # first of all: it may need memory
    gone.runs.append(run)
    for left in residency.taps.left_whole:  # `Ages` hears of all at once
        left(run, tier, 0, run.num_blocks, why)
    for ended in residency.taps.ended:
        ended(run, 0, why)
    if policy.hears_losses:
        policy.shrink(run, 0)
    if not policy.has_marks:
        policy.pull(run, tier)
    _unlink(residency, tier, run, gone)


def _remove_leaves(residency: Residency, tier: Tier, runs: list[Run], gone: _Gone) -> None:
    """The same of many, of which the policy needs not hear one by one."""
    why = _LOSSES[tier]
    gone.ids.frombytes(b"".join([run.cpu if tier else run.gpu for run in runs]))
    all_left, all_ended = residency.taps.left_whole, residency.taps.ended[1:]  # `LostBlocks` hears of all at once, too
    for run in runs if all_left or all_ended else ():
        for left in all_left:
            left(run, tier, 0, run.num_blocks, why)
        for ended in all_ended:
            ended(run, 0, why)
    residency.lost.ended_together(runs, why)
    residency.ages.evicted_together(tier, runs)
    for run in runs:
        _unlink(residency, tier, run, gone)


def _unlink(residency: Residency, tier: Tier, run: Run, gone: _Gone) -> None:
    parent, key = run.parent, run.tokens
    assert parent is not None
    if len(key) != residency.block_bytes or run.extras is not None or type(key) is not bytes:
        key = residency.key(run)
    has_no_other = parent.remove_leaf(key, tier)
    if tier:
        run.cpu = b""
    else:
        run.gpu = b""
    gone.num_blocks += run.num_blocks
    run.forget()
    if has_no_other:
        residency.offer(parent, tier)


def evict_tail(residency: Residency, run: Run, tier: Tier, at_most: int) -> int:
    """Take up to `at_most` blocks from the end of a leaf of the tier.

    Returns how many of them are free now: blocks that storage is reading are free when it has read them.
    """
    pool, why, num_there = residency.pools[tier], _LOSSES[tier], len(run.cpu if tier else run.gpu) // ID_BYTES
    num_free = pool.num_free
    taken = run.cpu_end - max(run.num_held, run.cpu_start) if tier else num_there - run.num_held
    if taken > at_most:  # noqa: PLR1730 (min() would be a tenth of a one-block call)
        taken = at_most
    residency.free_tail(run, tier, num_there - taken, why)
    residency.truncate(run, residency.end_of(run), why)
    num_freed = pool.num_free - num_free
    return num_freed if num_freed < taken else taken  # noqa: FURB136 (as above)


def evict_run(residency: Residency, evicted: array[int]) -> None:
    """Evict of the run that the policy chooses all that is not held on the GPU. The ids, first to last, are put
    behind `evicted` and are a caller's now, but for those that are being read: they are free when they have been.
    """
    pool = residency.pools[0]
    named = next_victim(residency, GPU, pool.num_blocks, None)
    assert named is not None, "there was no run to evict"
    run = named[0]
    num_held = run.num_held
    gone, kept = run.ids_in(GPU, num_held), run.gpu[: num_held * ID_BYTES]
    unread = pool.unread(gone)
    read = array("i")
    if len(unread) < len(gone):
        mine = set(unread)
        read.extend(block_id for block_id in gone if block_id not in mine)
    evicted.extend(unread)  # the last that may need memory, and before anything has changed
    pool.hand_over(unread, RUN, CALLER)
    if read:
        pool.free(read, RUN)
    run.gpu = kept
    if not kept:
        residency.count_child(run, GPU, -1)
    for left in residency.taps.left:
        left(run, GPU, num_held, len(gone), Loss.GPU)
    residency.truncate(run, residency.end_of(run), Loss.GPU)


def drop_spare_copies(residency: Residency, run: Run) -> None:
    """Free the copies of a run that is on the GPU as far as it was copied, and of which nothing is on its way or
    being read: also of one that is held, since what is held stays readable."""
    is_spare, ids = run.cpu and run.cpu_end <= run.num_gpu and run.epoch == residency.epoch, run.ids_in(CPU)
    pool = residency.pools[CPU]
    is_used = any(isinstance(pin, Segment) for pin in run.pins) or len(pool.unread(ids)) < len(ids)
    if is_spare and not is_used:
        residency.take_copies(run, Loss.SPARE)
        pool.free(ids, RUN)
