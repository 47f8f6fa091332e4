"""Making room: blocks leave a tier, those that the policy names first. Under the lock."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.block_pool import CALLER, RUN
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import CPU, GPU, ID_BYTES, Run, Tier, Usage
from fastdeploy_cache.books.taps import Left, Loss


def evict(residency: Residency, tier: Tier, num_blocks: int) -> None:
    """Free exactly `num_blocks` of a tier, those that the policy chooses.

    The caller has checked `num_available`: asked for more, it would go on to victims that nobody named, and in the
    end find none.
    """
    if residency.graves.open:  # what a reset has forgotten goes first
        num_blocks -= residency.graves.free(tier, num_blocks)
    pool, victim, whole = residency.pools[tier], residency.policy.victim, list[tuple[Usage, int]]()
    gone, num_gone = array("i"), 0  # of the first ones no run knows any more, also after an interrupt
    in_parts = tier != 0 or pool.num_read > 0
    others = residency.taps.left[1:]  # `Ages`, the first, hears of all at once
    try:
        while num_blocks > 0:
            run, at_most = victim(tier, num_blocks)
            num_gpu = len(run.gpu) // ID_BYTES
            if in_parts or num_gpu > at_most or run.cpu or run.num_held or run.children:
                num_blocks -= evict_tail(residency, run, tier, at_most)
            else:  # where they are small they are many: their ids are freed all at once
                gone.frombytes(run.gpu)
                whole.append((run.usage, num_gpu))
                _remove_leaf(residency, run, others)
                num_blocks, num_gone = num_blocks - num_gpu, num_gone + num_gpu
    finally:
        if num_gone:
            pool.free(gone[:num_gone], RUN)
            residency.ages.evicted_together(whole)


def _remove_leaf(residency: Residency, run: Run, others: tuple[Left, ...]) -> None:
    """Unlink a leaf that is on the GPU alone, and that the policy has named. Its ids are the caller's to free."""
    for left in others:
        left(run, GPU, 0, run.num_blocks, Loss.GPU)
    parent = run.parent
    assert parent is not None
    for ended in residency.taps.ended:
        ended(run, 0, Loss.GPU)
    if residency.policy.hears_losses:
        residency.policy.shrink(run, 0)
    if not residency.policy.has_marks:
        residency.policy.pull(run, GPU)
    run.gpu, parent.num_gpu_children = b"", parent.num_gpu_children - 1
    if not parent.num_gpu_children:
        residency.offer(parent, GPU)
    residency.unlink(run, parent)


def evict_tail(residency: Residency, run: Run, tier: Tier, at_most: int) -> int:
    """Take up to `at_most` blocks from the end of a leaf of the tier.

    Returns how many of them are free now: blocks that storage is reading are free when it has read them.
    """
    num_free, num_gpu = residency.pools[tier].num_free, len(run.gpu) // ID_BYTES
    taken = run.cpu_end - max(run.num_held, run.cpu_start) if tier else num_gpu - run.num_held
    if taken > at_most:  # noqa: PLR1730 (min() would be a tenth of a one-block call)
        taken = at_most
    if tier:
        end = max(num_gpu, run.cpu_end - taken)
        on_gpu_alone = num_gpu == run.num_blocks
        residency.free_tail(run, CPU, len(run.cpu) // ID_BYTES - taken, Loss.CPU)
        if not on_gpu_alone:
            residency.truncate(run, end, Loss.CPU)
    else:
        num_left = num_gpu - taken
        end = residency.end_without(run, num_left) if run.cpu else num_left
        residency.free_tail(run, GPU, num_left, Loss.GPU)
        residency.truncate(run, end, Loss.GPU)
    num_freed = residency.pools[tier].num_free - num_free
    return num_freed if num_freed < taken else taken  # noqa: FURB136 (as above)


def evict_run(residency: Residency, evicted: array[int]) -> None:
    """Evict of the run that the policy chooses all that is not held on the GPU. The ids, first to last, are put
    behind `evicted` and are a caller's now, but for those that are being read: they are free when they have been.
    """
    run, _ = residency.policy.victim(GPU, residency.pools[0].num_blocks)
    pool, num_held = residency.pools[0], run.num_held
    gone, kept = run.ids_in(GPU, num_held), run.gpu[: num_held * ID_BYTES]
    unread = pool.unread(gone)
    evicted.extend(unread)  # first: it may need memory
    pool.hand_over(unread, RUN, CALLER)
    if len(unread) < len(gone):
        mine = set(unread)
        pool.free(array("i", [block_id for block_id in gone if block_id not in mine]), RUN)
    run.gpu = kept
    if not kept:
        residency.count_child(run, GPU, -1)
    for left in residency.taps.left:
        left(run, GPU, num_held, len(gone), Loss.GPU)
    residency.truncate(run, residency.end_without(run, num_held), Loss.GPU)
