"""The promises that the books keep after every verb. Checked by tests after each step, and on demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher
from fastdeploy_cache.books.block_marks import MARK_BYTES, block_marks
from fastdeploy_cache.books.block_pool import CALLER, CHECKPOINT, FREE, REQUEST, RUN, TASK, BlockPool, Owner
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.residency import FORGOTTEN
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run, Tier
from fastdeploy_cache.books.transfer import Segment, Transfer
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.requests import Requests


@dataclass(frozen=True, kw_only=True)
class Held:
    """What rooms hold of the books.

    Attributes:
        cpu_ids: CPU blocks that storage fills now.
        gpu_ids: GPU blocks that other instances fill or read.
        pins: of callers and of peers.
        ahead: how often callers use the destinations of a load before it has ended.
        waiting: loads that receives wait for, once for each.
    """

    requests: Requests
    transfers: Sequence[Transfer]
    cpu_ids: Sequence[int]
    gpu_ids: Sequence[int]
    pins: Sequence[Pin]
    ahead: Mapping[Transfer, int]
    waiting: Sequence[Transfer]


def check(tree: PrefixTree, held: Held) -> None:
    """Raise `AssertionError` naming the first broken promise."""
    runs, requests, transfers = list(tree.runs()), list(held.requests), held.transfers
    _check_pins(runs, requests, transfers, held.pins)
    for tier in Tier:
        held_ids = held.gpu_ids if tier is GPU else held.cpu_ids
        _check_owners(tree.pools[tier], tier, runs, requests, transfers, held_ids=held_ids)
        protected = sum(run.num_in(tier, run.num_held) for run in runs)
        assert tree.residency.num_protected[tier] == protected, (tier, "protected", protected)
        doomed = [run for run in runs if run.epoch == FORGOTTEN]
        num_doomed = sum(run.num_in(tier, run.num_blocks) - run.num_in(tier, run.num_held) for run in doomed)
        assert tree.residency.num_doomed[tier] == num_doomed, (tier, "of forgotten namespaces", num_doomed)
        ages = tree.residency.ages
        num_evicted = sum(ages.num_evicted[tier])
        ages.count_evicted()
        num_aged = sum(ages.residency[tier].counts), sum(ages.idle[tier].counts)
        assert num_aged == (num_evicted, num_evicted), (tier, "evicted blocks without an age", num_evicted, num_aged)
    if tree.residency.shares is not None:
        tree.residency.shares.check(runs)
    last_hashes = {root: bytes(root.hashes) for root in (*tree.roots.values(), *tree.graves.all_roots())}
    below = _below(runs)
    for run in runs:  # parents first
        _check_shape(tree, run, last_hashes, below)
        _check_residency(tree, run)
    for active in requests:
        _check_request(active)
    waiting = [active.room for active in requests if active.room is not None]
    assert all(not room.done.is_set() for room in waiting), "a match waits for room, and its wait has ended"
    assert len(waiting) == held.requests.room.num_matches, "a match waits outside the queue, or one that has gone in it"
    is_moving = any(not transfer.done.is_set() for transfer in transfers)
    assert is_moving or not len(held.requests.room), "somebody waits for room, and no copy is in flight"
    num_missed, by_cause = held.requests.accounts.missed()
    assert sum(by_cause) == num_missed and min(by_cause) >= 0, "the causes of missed tokens do not add up"
    for transfer in transfers:
        num_ahead = sum(transfer in active.ahead for active in requests) + held.ahead.get(transfer, 0)
        num_waiting = sum(transfer in active.loads for active in requests) + list(held.waiting).count(transfer)
        assert (transfer.num_ahead, transfer.num_waiting) == (num_ahead, num_waiting), "waiters of a load miscounted"
        is_held = num_ahead or transfer.is_quarantined or not transfer.done.is_set()
        assert is_held, "an ended task is still held"


def _check_owners(
    pool: BlockPool,
    tier: Tier,
    runs: Iterable[Run],
    requests: Iterable[ActiveRequest],
    transfers: Iterable[Transfer],
    *,
    held_ids: Sequence[int],
) -> None:
    """Check that free + runs + requests + tasks = all, and that each block has one owner."""
    owned: dict[Owner, list[int]] = {
        FREE: pool.ids_of(FREE),
        RUN: [i for run in runs for i in run.ids_in(tier)],
        REQUEST: [i for active in requests for i in active.private_ids()] if tier is GPU else [],
        TASK: [i for t in transfers if t.tier is tier and t.cargo is not None for i in t.cargo.ids],
        CALLER: pool.ids_of(CALLER),
        CHECKPOINT: pool.ids_of(CHECKPOINT),  # see `check_rows`
    }
    if tier is GPU:
        owned[TASK] += [i for transfer in transfers for ids in transfer.kept for i in ids]
    owned[TASK] += held_ids
    owned[TASK] += pool.deferred_ids
    everything = sorted(i for ids in owned.values() for i in ids)
    assert everything == list(range(pool.num_blocks)), f"{pool.name}: some block has no owner or two"
    assert pool.num_free == len(owned[FREE])
    for owner, ids in owned.items():
        assert pool.count(owner) == len(ids), f"{pool.name}: {pool.count(owner)} {owner.name} counted, {len(ids)} found"
        assert sorted(ids) == pool.ids_of(owner), f"{pool.name}: owner {owner.name} is noted otherwise"


def _check_pins(
    runs: Iterable[Run], requests: Iterable[ActiveRequest], transfers: Iterable[Transfer], pins: Iterable[Pin]
) -> None:
    """Each pin hangs on its run once, and what is held follows from the pins."""
    listed: list[Pin] = [pin for t in transfers if t.cargo is not None for pin in t.cargo.pins]
    listed += pins
    listed += [active.pin for active in requests if active.pin is not None]
    hanging = [pin for run in runs for pin in run.pins]
    below = _below(runs)
    assert len(listed) == len(hanging) and set(listed) == set(hanging), (
        "pins of requests and tasks, and of runs, differ"
    )
    for run in runs:
        for pin in run.pins:
            assert pin.run is run and 0 < pin.end <= run.num_blocks, "pin off its run"
            if isinstance(pin, Segment):
                assert pin.start >= 0 and pin.end == pin.start + len(pin.ids) > pin.start, "segment off its run"
        num_held_children = sum(child.num_held > 0 for child in below.get(run, ()))
        assert run.num_held_children == num_held_children, "held children miscounted"
        held = run.num_blocks if num_held_children else max((pin.end for pin in run.pins), default=0)
        assert run.num_held == held, f"{run.num_held} blocks held by count, {held} by pins"


def _check_shape(tree: PrefixTree, run: Run, last_hashes: dict[Run, bytes], below: Mapping[Run, list[Run]]) -> None:
    assert run.num_blocks >= 1 and len(run.tokens) == run.num_blocks * tree.block_bytes, "tokens and blocks differ"
    assert run.parent is not None and _hangs(tree, run), "run not under its key"
    assert run.extras is None or all(0 <= block < run.num_blocks for block in run.extras), "extra key off its run"
    assert len(run.hashes) % HASH_BYTES == 0 and len(run.hashes) <= run.num_blocks * HASH_BYTES
    assert 0 <= run.stored.num_blocks <= run.num_blocks and 0 <= run.stored.num_offered <= run.num_blocks
    hashes = BlockHasher(tree.block_size).extend(last_hashes[run.parent], run.tokens, 0, run.num_blocks, run.extras)
    assert hashes.startswith(run.hashes), "hash chain broken"
    num_marked = len(run.block_marks) // MARK_BYTES
    assert num_marked <= run.num_blocks and len(run.block_marks) % MARK_BYTES == 0
    if run.extras is None:
        assert run.block_marks == block_marks(run.tokens, 0, num_marked, tree.block_bytes), "marks of other blocks"
    last_hashes[run] = hashes[-HASH_BYTES:]
    is_over = run.epoch != tree.epoch and not tree.graves.open
    assert not is_over or run.num_held == run.num_blocks, "unheld blocks of an older epoch are still there"
    for tier in Tier:
        num_children = sum(bool(child.ids_in(tier)) for child in below.get(run, ()))
        assert run.num_children_in(tier) == num_children, (tier, "children counted", num_children)
        if tree.policy.has_marks and tree.residency.is_leaf(run, tier):
            assert (run.queued_gpu, run.queued_cpu)[tier] is not None, (
                f"a leaf of {tier.name} is unknown to the eviction policy"
            )


def _check_residency(tree: PrefixTree, run: Run) -> None:
    assert (run.num_gpu <= run.num_blocks and run.cpu_end <= run.num_blocks) or not run.cpu
    if run.num_gpu < run.num_blocks and run.epoch == tree.epoch:  # an older run's copies may have got another owner
        assert run.cpu and run.cpu_end == run.num_blocks and run.cpu_start <= run.num_gpu, "block nowhere"
    assert run.parent is not None
    if run.num_gpu and run.parent.parent is not None:
        assert run.parent.num_gpu == run.parent.num_blocks, "on the GPU without its parent"
    if not tree.pools[CPU].num_blocks:
        assert not run.cpu


def _check_request(active: ActiveRequest) -> None:
    if active.pin is None:
        assert not active.num_pinned_blocks
        return
    *above, last = active.pin.run.path()
    depth = sum(run.num_blocks for run in above) + active.pin.end
    assert depth == active.num_pinned_blocks, f"pin at depth {depth}, noted {active.num_pinned_blocks}"
    if active.is_settled and not active.is_detached:
        in_tree = [i for run in (*above, last) for i in run.ids_in(GPU)][:depth]
        assert len(in_tree) == depth, "settled on blocks off the GPU"
        own = active.block_ids[: active.num_committed_blocks]
        duplicates = {*active.duplicates, *(i for transfer in active.ahead for ids in transfer.kept for i in ids)}
        assert all(a == b or a in duplicates for a, b in zip(own, in_tree, strict=True)), "block table off the tree"


def _below(runs: Iterable[Run]) -> dict[Run, list[Run]]:
    """The children of each run and root: those that hang below it, and those that wait to be removed."""
    below: dict[Run, list[Run]] = {}
    for run in runs:
        assert run.parent is not None
        below.setdefault(run.parent, []).append(run)
    return below


def _hangs(tree: PrefixTree, run: Run) -> bool:
    """Whether a run is found under its key, or is one that waits to be removed."""
    assert run.parent is not None
    key = tree.residency.key(run)
    if run.epoch != tree.epoch and run not in run.parent.children.values():
        return any(run is each for each in tree.graves.unlinked())
    return run.parent.children[key] is run
