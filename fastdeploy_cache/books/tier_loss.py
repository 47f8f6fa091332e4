"""What stays cached when the bytes of a tier are gone. Under the lock."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from fastdeploy_cache.books.block_pool import RUN
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of, put_in
from fastdeploy_cache.books.generations import Reason
from fastdeploy_cache.books.path import num_gpu
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import CPU, Pin, Run
from fastdeploy_cache.books.run_notes import NOT_STORED
from fastdeploy_cache.books.taps import Loss


def drop_gpu(tree: PrefixTree) -> None:
    """Forget all but what the CPU tier has from a prompt's start on.

    What is pinned stays owned, out of reach, until it is unpinned, as in a reset; its copies stay cached.
    """
    rows = tree.residency.checkpoints
    try:
        kept = [(name, run) for name, root in tree.roots.items() for run in _copied_runs(root)]
        heirs = {run: _heir(tree, run) for _, run in kept}
        images = [pair for run, heir in heirs.items() for pair in _image_heirs(run, heir)]
    except MemoryError:  # the GPU's bytes are gone all the same: then nothing is kept
        kept, heirs, images = [], {}, []
    for run, heir in heirs.items():
        heir.cpu = tree.residency.take_copies(run, Loss.MOVED)
    if rows is not None:
        rows.pass_images_on(images)
    tree.reset(Loss.RANK)
    tree.generations.begin(Reason.GPU_LOST)
    for (name, _), heir in zip(kept, heirs.values(), strict=True):
        above = heir.parent
        assert above is not None
        heir.parent = heirs[above] if above in heirs else tree.root(name)
        _hang(tree, heir, heir.parent)
    for heir in heirs.values():
        tree.residency.offer(heir, CPU)
    if rows is not None and tree.residency.trim is not None:
        for _, image in images:
            rows.came(image, CPU)
        for heir in reversed(heirs.values()):  # children first
            tree.residency.trim(heir, Loss.RANK)


def _hang(tree: PrefixTree, heir: Run, parent: Run) -> None:
    """Hang an heir, which has all its copies, below its parent."""
    parent.add_child(tree.residency.key(heir), heir)
    tree.residency.count_child(heir, CPU, 1)
    for came in tree.residency.taps.came:
        came(heir, CPU, 0, heir.num_blocks)
    if tree.policy.hears_growth:
        tree.policy.grow(heir, 0)


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


def _image_heirs(run: Run, heir: Run) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Each checkpoint of a run that has an image, as far as the copies reach, and the one that is to have it then."""
    for checkpoint in chain_of(run):
        if checkpoint.pages is not None and checkpoint.end <= heir.num_blocks:
            other = copy.copy(checkpoint)
            other.run, other.above, other.units, other.pages = heir, None, None, None
            other.num_pins, other.queued_gpu, other.queued_cpu = 0, None, None
            if not other.stored.num_blocks:  # what is being written is noted of the other one
                other.stored = NOT_STORED
            put_in(heir, other)
            yield checkpoint, other


def drop_cpu(books: Books) -> None:
    """Forget all copies, and what has no other place. Nothing is in flight, and requests are settled on GPU blocks.

    A caller's pin that goes deeper is cut.
    """
    tree = books.tree
    tree.generations.begin(Reason.CPU_LOST)
    for pin, prefix in list(books.pinned.items()):
        if pin.run.epoch == tree.epoch:
            _cut_prefix(books, pin, prefix)
    for run in reversed(list(tree.runs())):  # children first
        if run.cpu and run.epoch == tree.epoch:
            packed = tree.residency.take_copies(run, Loss.RANK)
            tree.pools[CPU].free(memoryview(packed).cast("i"), RUN)  # a list of them would need memory
            tree.residency.truncate(run, tree.residency.end_of(run), Loss.RANK)
    if books.rows is not None:
        _drop_images(books, books.rows)


def _cut_prefix(books: Books, pin: Pin, prefix: PinnedPrefix) -> None:
    """Leave to a caller what of its prefix is on the GPU."""
    tree, pinned, path = books.tree, books.pinned, pin.run.path()
    if books.rows is not None:
        books.rows.end_keeping(prefix)  # its image goes; another one may be on the GPU
    num_left = num_gpu(path, prefix.num_blocks)
    if num_left < prefix.num_blocks:
        del pinned[pin]
        moved = tree.move_pin(pin, *tree.place(path, num_left))
        prefix.cut(moved, num_left)
        if moved is not None:
            pinned[moved] = prefix


def _drop_images(books: Books, rows: RowBooks) -> None:
    tree = books.tree
    rows.checkpoints.lose_images(tree)
    for pin, prefix in books.pinned.items():
        if pin.run.epoch == tree.epoch:
            rows.keep(prefix)
    for run in reversed(list(tree.runs())):
        rows.trimmer.trim(run, Loss.RANK)
