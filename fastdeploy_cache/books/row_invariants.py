"""The promises that checkpoints keep after every verb. Checked by tests after each step, and on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fastdeploy_cache.books.block_pool import CHECKPOINT, RUN, TASK, Owner
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.checkpoints import Checkpoints
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import TIERS, Run
from fastdeploy_cache.books.unit_pool import UnitPool


def check_rows(tree: PrefixTree, books: RowBooks, pins: Iterable[Checkpoint]) -> None:
    """Raise `AssertionError` naming the first broken promise. `pins`: of everybody who keeps a checkpoint, once for
    each."""
    runs, rows = list(tree.runs()), books.checkpoints
    held = [checkpoint for run in runs for checkpoint in chain_of(run)]
    num_pins = Counter(id(checkpoint) for checkpoint in pins)
    for run in runs:
        if run.checkpoint is not None:
            _check_chain(tree, rows, run)
        is_leaf = not run.children and run.epoch == tree.epoch
        if is_leaf and run not in books.trimmer.waiting:
            deepest = run.checkpoint.end if run.checkpoint is not None else 0
            assert run.num_blocks == max(run.num_held, deepest), f"{run!r} has dead KV behind block {deepest}"
    for checkpoint in held:
        assert checkpoint.num_pins == num_pins.pop(id(checkpoint), 0), "pins of a checkpoint miscounted"
        if rows.policy.has_marks and checkpoint.run.epoch == tree.epoch:
            for tier in TIERS:
                mark = (checkpoint.queued_gpu, checkpoint.queued_cpu)[tier]
                assert mark is not None or not rows.is_leaf(checkpoint, tier), (  # type: ignore[arg-type]
                    f"a checkpoint in {tier.name} is unknown to the eviction policy"
                )
    assert not num_pins, "somebody keeps a checkpoint that hangs nowhere"
    for pool in {id(pool): pool for pool in rows.pools}.values():
        _check_units(rows, pool, held)
    pages = Counter(page for checkpoint in held for page in memoryview(checkpoint.pages or b"").cast("i"))
    assert sorted(pages.elements()) == rows.pages.ids_of(CHECKPOINT), "pages of images are noted otherwise"
    num_pinned = sum(len(checkpoint.pages or b"") // 4 for checkpoint in held if checkpoint.num_pins)
    assert rows.num_pinned_pages == num_pinned, (rows.num_pinned_pages, "pages pinned by count", num_pinned)


def _check_chain(tree: PrefixTree, rows: Checkpoints, run: Run) -> None:
    depth = sum(above.num_blocks for above in run.path()) - run.num_blocks
    end = run.num_blocks + 1
    for checkpoint in chain_of(run):
        assert checkpoint.run is run and 0 < checkpoint.end < end, "a chain out of order, or a checkpoint off its run"
        assert checkpoint.boundary == depth + checkpoint.end, "a boundary that has moved"
        is_somewhere = checkpoint.units is not None or checkpoint.pages is not None
        is_kept = bool(checkpoint.num_pins)  # by a load that could not land
        assert is_somewhere or is_kept or run.epoch != tree.epoch, "a checkpoint that is nowhere"  # or an heir has it
        if checkpoint.units is not None:
            num_units = sum(rows.sizes.counts(checkpoint.boundary))
            assert len(checkpoint.units) == 4 * num_units, "a checkpoint has units of another boundary"
        if checkpoint.pages is not None:
            assert len(checkpoint.pages) == 4 * rows.sizes.num_pages(checkpoint.boundary), "an image of another size"
        assert not checkpoint.num_pins or run.num_held >= checkpoint.end, "a checkpoint is kept without its path"
        is_over = run.epoch != tree.epoch and not tree.graves.open
        assert not is_over or checkpoint.num_pins, "a checkpoint of an older epoch is kept by nobody, and still there"
        end = checkpoint.end


def _check_units(rows: Checkpoints, pool: UnitPool, held: Iterable[Checkpoint]) -> None:
    holders, pinned = Counter[int](), set[int]()
    for checkpoint in held:
        for of, ids in zip(rows.pools, rows.unit_ids(checkpoint), strict=True):
            if of is pool:
                holders.update(ids)
                pinned.update(ids if checkpoint.num_pins else ())
    units = pool.pool
    assert all(pool.num_holders(unit) == holders[unit] for unit in range(units.num_blocks)), "holders miscounted"
    assert sorted(holders) == units.ids_of(RUN), f"{units.name}: what checkpoints hold is noted otherwise"
    assert pool.num_pinned == len(pinned), (units.name, pool.num_pinned, "pinned by count", len(pinned))
    assert sum(units.count(owner) for owner in Owner) == units.num_blocks, f"{units.name}: a unit without an owner"


def check_own_units(books: RowBooks, owner: Owner, own: Iterable[Sequence[Iterable[int]]]) -> None:
    """The same of the units of requests, or of tasks: `own` has those of each, by row."""
    owned: dict[int, list[int]] = {}
    for rows in own:
        for pool, units in zip(books.checkpoints.pools, rows, strict=True):
            owned.setdefault(id(pool), []).extend(units)
    for pool in books.checkpoints.pools:
        deferred = pool.pool.deferred_ids if owner is TASK else ()  # that a task still reads, and nobody owns
        found = sorted([*owned.get(id(pool), ()), *deferred])
        assert found == pool.pool.ids_of(owner), f"{pool.pool.name}: units of {owner.name} are noted otherwise"
