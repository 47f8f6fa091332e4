"""What stays cached when the bytes of a tier are gone. Under the lock."""

from __future__ import annotations

from collections.abc import Iterator

from fastdeploy_cache.books.block_pool import RUN
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.generations import Reason
from fastdeploy_cache.books.path import num_gpu
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, Run
from fastdeploy_cache.books.taps import Loss


def drop_gpu(tree: PrefixTree) -> None:
    """Forget all but what the CPU tier has from a prompt's start on.

    What is pinned stays owned, out of reach, until it is unpinned, as in a reset; its copies stay cached.
    """
    try:
        kept = [(name, run) for name, root in tree.roots.items() for run in _copied_runs(root)]
        heirs = {run: _heir(tree, run) for _, run in kept}
    except MemoryError:  # the GPU's bytes are gone all the same: then nothing is kept
        kept, heirs = [], {}
    for run, heir in heirs.items():
        heir.cpu = tree.residency.take_copies(run, Loss.MOVED)
    tree.reset(Loss.RANK)
    tree.generations.begin(Reason.GPU_LOST)
    for (name, _), heir in zip(kept, heirs.values(), strict=True):
        above = heir.parent
        assert above is not None
        heir.parent = heirs[above] if above in heirs else tree.root(name)
        heir.parent.add_child(tree.residency.key(heir), heir)
        tree.residency.count_child(heir, CPU, 1)
        for came in tree.residency.taps.came:
            came(heir, CPU, 0, heir.num_blocks)
        if tree.policy.hears_growth:
            tree.policy.grow(heir, 0)
    for heir in heirs.values():
        tree.residency.offer(heir, CPU)


def _copied_runs(root: Run) -> Iterator[Run]:
    """The runs below a root that begin with copies, as do all above them wholly; parents first."""
    below = list(root.children.values())
    for run in below:
        if run.cpu and run.cpu_start == 0:
            if run.cpu_end == run.num_blocks:
                below.extend(run.children.values())
            yield run


def _heir(tree: PrefixTree, run: Run) -> Run:
    """A run that is to take over another one's copies; `parent` is still that one's."""
    heir = run.front(run.cpu_end, tree.block_bytes)
    heir.epoch, heir.gpu, heir.cpu, heir.author = tree.epoch + 1, b"", b"", 0
    heir.notes = heir.notes.with_sample(None)
    return heir


def drop_cpu(books: Books) -> None:
    """Forget all copies, and what has no other place. Nothing is in flight, and requests are settled on GPU blocks.

    A caller's pin that goes deeper is cut.
    """
    tree, pinned = books.tree, books.pinned
    tree.generations.begin(Reason.CPU_LOST)
    for pin, prefix in list(pinned.items()):
        path = pin.run.path()
        num_left = num_gpu(path, prefix.num_blocks)
        if pin.run.epoch == tree.epoch and num_left < prefix.num_blocks:
            del pinned[pin]
            moved = tree.move_pin(pin, *tree.place(path, num_left))
            prefix.cut(moved, num_left)
            if moved is not None:
                pinned[moved] = prefix
    for run in reversed(list(tree.runs())):  # children first
        if run.cpu and run.epoch == tree.epoch:
            packed = tree.residency.take_copies(run, Loss.RANK)
            tree.pools[CPU].free(memoryview(packed).cast("i"), RUN)  # a list of them would need memory
            tree.residency.truncate(run, tree.residency.end_of(run), Loss.RANK)
