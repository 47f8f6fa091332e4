"""What of a path nobody else has: from its end up to where another prompt has parted from it. Under the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.evicting import evict_tail
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, GPU, Run
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.transfer import segments_of


def _private_runs(path: Sequence[Run], num_kept: int, session: int) -> Iterator[tuple[Run, int]]:
    """The runs, last to first, with how many blocks of each are in front of block `num_kept` of the path. `session`:
    whose they have to be; 0: of none, or of any one."""
    end = sum([run.num_blocks for run in path])
    for run in reversed(path):
        end -= run.num_blocks
        is_anothers = run.session != session if session else run.session < 0
        if run.children or run.is_shared or is_anothers or end + run.num_blocks <= num_kept:
            return
        yield run, max(0, num_kept - end)


def forget(tree: PrefixTree, path: Sequence[Run], num_kept: int, session: int) -> int:
    """Free what of a path lies behind its first `num_kept` blocks, in all tiers, but for what requests and copies hold;
    returns how many blocks. Of a hybrid model these are also blocks in front, behind which nobody can go on now."""
    num_blocks, last = sum([run.num_blocks for run in path]), None
    for run, first in _private_runs(path, num_kept, session):
        num_left, last = max(first, run.num_held), run.parent
        tree.residency.truncate(run, num_left, Loss.RESET)
        if num_left:
            last = run
            break
    if last is not None and tree.residency.trim is not None:
        tree.residency.trim(last, Loss.RESET)
    return num_blocks - sum([run.num_blocks for run in path if run.parent is not None])


def leave_gpu(
    tree: PrefixTree, path: Sequence[Run], session: int, is_storing: Callable[[Checkpoint], bool]
) -> tuple[int, bool]:
    """Free the GPU blocks of a path whose copies are in the CPU tier, from its end on, and the units of checkpoints
    whose images are; returns how many blocks, and whether more would go once copies that are on their way have come.
    `is_storing`: whether such a copy is that of a checkpoint."""
    num_gone, has_more, checkpoints = 0, False, tree.residency.checkpoints
    for run, _ in _private_runs(path, 0, session):
        for checkpoint in chain_of(run) if checkpoints is not None else ():
            has_more |= is_storing(checkpoint)
            is_copied = checkpoint.units is not None and checkpoint.pages is not None
            if checkpoints is not None and is_copied and not checkpoint.num_pins:
                checkpoints.leave(checkpoint, GPU, Loss.GPU)
        if run.num_gpu_children:
            break
        num_on_gpu = run.num_gpu
        loose = num_on_gpu - max(run.num_held, run.cpu_start if run.cpu and run.cpu_end >= num_on_gpu else num_on_gpu)
        if loose > 0:
            num_gone += evict_tail(tree.residency, run, GPU, loose)
        if run.num_gpu:
            return num_gone, has_more or bool(segments_of(run, CPU))
    return num_gone, has_more
