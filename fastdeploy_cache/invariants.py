"""The promises that the books keep after every verb. Checked by tests after each step, and on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fastdeploy_cache.active_request import ActiveRequest
from fastdeploy_cache.block_hash import HASH_BYTES, extend_hashes
from fastdeploy_cache.block_pool import BlockPool, Owner
from fastdeploy_cache.prefix_tree import PrefixTree
from fastdeploy_cache.run import Run, Tier, Transfer


def check(tree: PrefixTree, requests: Sequence[ActiveRequest], transfers: Sequence[Transfer]) -> None:
    """Raise `AssertionError` naming the first broken promise."""
    runs = list(tree.runs())
    _check_segments(runs, transfers)
    for tier in Tier:
        _check_owners(tree.pools[tier], tier, runs, requests, transfers)
        protected = sum(len(run.ids[tier]) for run in runs if run.pins)
        assert tree.residency.num_protected[tier] == protected, (tier, "protected", protected)
    own_pins = Counter(active.pinned for active in requests if active.pinned is not None)
    own_pins.update(segment.run for transfer in transfers for segment in transfer.segments)
    for run in runs:
        _check_shape(tree, run)
        _check_residency(tree, run)
        pins = own_pins[run] + sum(child.pins for child in run.children.values())
        assert run.pins == pins, f"{run.pins} pins counted, {pins} found"
    for active in requests:
        _check_request(active)


def _check_owners(
    pool: BlockPool,
    tier: Tier,
    runs: Iterable[Run],
    requests: Iterable[ActiveRequest],
    transfers: Iterable[Transfer],
) -> None:
    """free + runs + requests + tasks = all, and one owner each."""
    owned: dict[Owner, list[int]] = {
        Owner.FREE: list(pool.free_ids()),
        Owner.RUN: [i for run in runs for i in run.ids[tier]],
        Owner.REQUEST: [i for active in requests for i in active.private_ids()] if tier is Tier.GPU else [],
        Owner.TASK: [i for t in transfers if t.tier is tier for s in t.segments for i in s.ids],
    }
    everything = sorted(i for ids in owned.values() for i in ids)
    assert everything == list(range(pool.num_blocks)), f"{pool.tier}: some block has no owner or two"
    for owner, ids in owned.items():
        assert pool.count(owner) == len(ids), f"{pool.tier}: {pool.count(owner)} {owner.name} counted, {len(ids)} found"
        assert all(pool.owner(i) is owner for i in ids), f"{pool.tier}: owner {owner.name} is noted otherwise"


def _check_segments(runs: Iterable[Run], transfers: Iterable[Transfer]) -> None:
    listed = [segment for transfer in transfers for segment in transfer.segments]
    hanging = [segment for run in runs for segment in (*run.loads, *run.stores)]
    assert len(listed) == len(hanging) and set(listed) == set(hanging), "segments of tasks and of runs differ"
    for run in runs:
        for segment in (*run.loads, *run.stores):
            assert segment.run is run and 0 <= segment.start < segment.end <= run.num_blocks, "segment off its run"


def _check_shape(tree: PrefixTree, run: Run) -> None:
    assert run.num_blocks >= 1 and len(run.tokens) == run.num_blocks * tree.block_bytes, "tokens and blocks differ"
    assert run.parent is not None and run.parent.children[tree.residency.key(run)] is run, "run not under its key"
    assert len(run.hashes) == run.num_blocks * HASH_BYTES
    assert run.hashes == extend_hashes(run.parent.last_hash, run.tokens, tree.block_bytes), "hash chain broken"
    assert run.epoch == tree.epoch or run.pins, "an unpinned run of an older epoch is still there"
    for tier in Tier:
        num_children = sum(bool(child.ids[tier]) for child in run.children.values())
        assert run.num_children_in[tier] == num_children, (tier, "children counted", run.num_children_in, num_children)
        if tree.residency.is_leaf(run, tier):
            assert run.queued[tier] == run.last_used, f"a leaf of {tier.name} is not in its eviction queue"


def _check_residency(tree: PrefixTree, run: Run) -> None:
    assert (run.num_gpu <= run.num_blocks and run.cpu_end <= run.num_blocks) or not run.ids[Tier.CPU]
    if run.num_gpu < run.num_blocks:
        assert run.ids[Tier.CPU] and run.cpu_end == run.num_blocks and run.cpu_start <= run.num_gpu, "block nowhere"
    assert run.parent is not None
    if run.num_gpu and run.parent.parent is not None:
        assert run.parent.num_gpu == run.parent.num_blocks, "on the GPU without its parent"
    if not tree.pools[Tier.CPU].num_blocks:
        assert not run.ids[Tier.CPU]


def _check_request(active: ActiveRequest) -> None:
    depth = sum(run.num_blocks for run in active.pinned.path()) if active.pinned is not None else 0
    assert depth == active.num_pinned_blocks, f"pin at depth {depth}, noted {active.num_pinned_blocks}"
    if active.settled and active.pinned is not None:
        assert all(run.num_gpu == run.num_blocks for run in active.pinned.path()), "settled on blocks off the GPU"
        in_tree = [i for run in active.pinned.path() for i in run.ids[Tier.GPU]]
        own = active.block_ids[: active.num_committed_blocks]
        duplicates = set(active.duplicates)
        assert all(a == b or a in duplicates for a, b in zip(own, in_tree, strict=True)), "block table off the tree"
