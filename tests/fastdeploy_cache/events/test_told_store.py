"""The told tree and a store: what its ranks say of names, and what runs say of tokens, become events of one medium."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher, root_hash
from fastdeploy_cache.events.journal import Began, RunGone, StoreGone, StoreTold, TreeCleared
from fastdeploy_cache.events.names import NameKind, NameScheme
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from fastdeploy_cache.transfer_manager.kv.groups import Row
from fastdeploy_cache.transfer_manager.storage.keys import owned, owner_mark, page_names
from tests.rigs.told_runs import SIZE, tokens, told

BLOCKS = tokens(1, 2, 3)


def names_of(blocks: bytes = BLOCKS, namespace: str = "", extras: dict[int, bytes] | None = None) -> list[bytes]:
    """What a store calls them."""
    num_blocks = len(blocks) // SIZE // 4
    joined = BlockHasher(SIZE).extend(root_hash(namespace, SIZE), blocks, 0, num_blocks, extras)
    mark = owner_mark(namespace)
    return [owned(joined[at : at + HASH_BYTES], mark) for at in range(0, len(joined), HASH_BYTES)]


class Told:
    """A tree that has begun, and ranks that tell it what their stores have."""

    def __init__(self, num_ranks: int = 1, kind: NameKind = "own", rows: Sequence[Row] = ()) -> None:
        self.tree = ToldTree(NameScheme(kind=kind, block_size=SIZE), rows)
        self._num_ranks = num_ranks
        self._numbers = [itertools.count() for _ in range(num_ranks)]
        self.opened_ns = 1
        self.hear(Began())

    def hear(self, record: Any) -> list[Event]:
        """What follows from a record."""
        self.tree.apply(record)
        return self.tree.take()

    def said(self, rank: int, came: Sequence[bytes] = (), gone: Sequence[bytes] = ()) -> StoreTold:
        """What a rank says next."""
        number = next(self._numbers[rank])
        return StoreTold(rank, self._num_ranks, self.opened_ns, number, b"".join(came), b"".join(gone))

    def restart(self, rank: int) -> None:
        """Another process has opened this rank's store, and all of them seem to be later."""
        self.opened_ns += 1
        self._numbers[rank] = itertools.count()


def on_disk(events: Sequence[Event]) -> list[tuple[str, int]]:
    """Of the events about the store, each one's kind, and how many blocks it names."""
    about = [event for event in events if isinstance(event, BlockStored | BlockRemoved) and event.medium == "DISK"]
    return [(type(event).__name__, len(event.block_hashes)) for event in about]


def test_a_block_is_told_when_every_rank_has_it() -> None:
    """With its tokens and the block before it; and as gone when one of them has it no more."""
    cache, names = Told(num_ranks=2), names_of()
    (on_gpu,) = cache.hear(told(1, BLOCKS))
    assert cache.hear(cache.said(0, names)) == []
    (stored,) = cache.hear(cache.said(1, names[:2]))
    assert isinstance(stored, BlockStored) and isinstance(on_gpu, BlockStored) and stored.medium == "DISK"
    assert stored.block_hashes == on_gpu.block_hashes[:2] and stored.token_ids == on_gpu.token_ids[: 2 * SIZE]
    assert stored.parent_block_hash is None
    (last,) = cache.hear(cache.said(1, names[2:]))
    assert isinstance(last, BlockStored) and last.parent_block_hash == on_gpu.block_hashes[1]
    (removed,) = cache.hear(cache.said(0, gone=names[1:]))
    assert isinstance(removed, BlockRemoved) and removed.medium == "DISK"
    assert removed.block_hashes == on_gpu.block_hashes[1:]
    assert cache.hear(cache.said(1, gone=names[1:])) == []


def test_the_store_may_speak_first() -> None:
    """Of names that nobody knows yet, and what it calls unknown costs no tokens."""
    cache, names = Told(), names_of()
    assert cache.hear(cache.said(0, names)) == []
    assert on_disk(cache.hear(told(1, BLOCKS))) == [("BlockStored", 3)]


def test_tokens_are_kept_as_long_as_the_store_has_the_block() -> None:
    """The run has gone: what the store has stays told, also to a late listener, and nothing is kept behind that."""
    cache, names = Told(), names_of()
    cache.hear(told(1, BLOCKS))
    cache.hear(cache.said(0, names[:2]))
    assert on_disk(cache.hear(RunGone(1))) == []
    ((stretch, medium, _),) = cache.tree.freeze()
    assert (stretch.tokens, medium) == (tokens(1, 2), "DISK")
    assert on_disk(cache.hear(cache.said(0, gone=names))) == [("BlockRemoved", 2)]
    assert cache.tree.freeze() == []
    store = cache.tree._store
    for number in range(2, 2 + 16_384 // 64):  # what has left lately is kept for a while
        cache.hear(told(number, tokens(*range(1000 * number, 1000 * number + 64))))
        cache.hear(RunGone(number))
    assert len(store._blocks) == len(store._lately) == 16_384 and store._blocks.keys() == store._lately.keys()
    assert not store._holders and not store._in_tree and not store._orphans


def test_a_block_may_leave_while_it_is_being_written() -> None:
    """The run has gone before the store says that it has its blocks: they are told all the same."""
    cache, names = Told(), names_of()
    cache.hear(cache.said(0))
    cache.hear(told(1, BLOCKS))
    cache.hear(RunGone(1))
    assert on_disk(cache.hear(cache.said(0, names))) == [("BlockStored", 3)]


def test_a_block_waits_for_the_one_before_it() -> None:
    """That is nowhere: the store's last rank answers late. It is told behind it, and all that waits behind itself."""
    cache, blocks = Told(num_ranks=2), tokens(*range(3000))
    names = names_of(blocks)
    cache.hear(told(1, blocks))
    cache.hear(cache.said(0, names))
    cache.hear(RunGone(1))
    assert cache.hear(cache.said(1, names[1:])) == []
    events = cache.hear(cache.said(1, names[:1]))
    assert sum(count for _, count in on_disk(events)) == 3000
    assert isinstance(events[0], BlockStored) and events[0].parent_block_hash is None


def test_what_waits_is_told_when_a_run_comes_back() -> None:
    """The block before it is computed again; what the store has lost meanwhile is not told, and nothing waits on."""
    cache, names = Told(num_ranks=2), names_of()
    cache.hear(told(1, BLOCKS))
    cache.hear(cache.said(0, names))
    cache.hear(RunGone(1))
    assert cache.hear(cache.said(1, names[1:])) == []
    cache.hear(cache.said(1, gone=names[2:]))
    cache.hear(cache.said(0, gone=names[2:]))
    assert on_disk(cache.hear(told(2, tokens(1)))) == [("BlockStored", 1)]
    assert not cache.tree._store._orphans


def test_answers_that_overtake_each_other() -> None:
    """What went, and what came, count in the order in which the store said them."""
    cache, names = Told(), names_of()
    cache.hear(told(1, BLOCKS))
    first, second, third = (
        cache.said(0, names),
        cache.said(0, gone=names),
        cache.said(0, names[:1]),
    )
    assert cache.hear(third) == [] and cache.hear(second) == []
    assert on_disk(cache.hear(first)) == [("BlockStored", 3), ("BlockRemoved", 3), ("BlockStored", 1)]


def test_another_process_tells_all_anew() -> None:
    """What was not durable went with the one before, and what that one has said late is not believed."""
    cache, names = Told(), names_of()
    cache.hear(told(1, BLOCKS))
    cache.hear(cache.said(0, names))
    late = cache.said(0, names)
    cache.restart(0)
    assert on_disk(cache.hear(cache.said(0, names[:2]))) == [("BlockRemoved", 3), ("BlockStored", 2)]
    assert cache.hear(late) == []


@pytest.mark.parametrize("has_run", [True, False])
def test_a_reset_leaves_the_store(has_run: bool) -> None:
    """All is cleared for listeners, and the store told again, whether or not the tree had it."""
    cache, names = Told(), names_of()
    cache.hear(told(1, BLOCKS))
    cache.hear(cache.said(0, names))
    if not has_run:
        cache.hear(RunGone(1))
    cleared, *events = cache.hear(TreeCleared())
    assert isinstance(cleared, AllBlocksCleared) and on_disk(events) == [("BlockStored", 3)]


def test_a_reset_hides_what_cannot_be_used() -> None:
    """Of blocks whose beginning the store lacks, nothing is told again before the beginning comes back."""
    cache, names = Told(), names_of()
    cache.hear(told(1, BLOCKS))
    cache.hear(cache.said(0, names[1:]))
    assert on_disk(cache.hear(TreeCleared())) == []
    assert on_disk(cache.hear(told(2, tokens(1)))) == [("BlockStored", 2)]


def test_no_store_any_more() -> None:
    """Detached: nothing of it is told, and the next one begins with nothing."""
    cache, names = Told(), names_of()
    cache.hear(told(1, BLOCKS))
    cache.hear(cache.said(0, names))
    assert on_disk(cache.hear(StoreGone())) == [("BlockRemoved", 3)]
    cache.restart(0)
    assert on_disk(cache.hear(cache.said(0, names[:1]))) == [("BlockStored", 1)]
    assert on_disk(cache.hear(Began())) == [] and on_disk(cache.hear(told(1, BLOCKS))) == []


@pytest.mark.parametrize("kind", ["own", "sha256_cbor"])
@pytest.mark.parametrize("namespace", ["", "tenant"])
def test_names_of_others_and_of_tenants(kind: NameKind, namespace: str) -> None:
    """A store goes by our own hashes with the mark of their owner, whatever blocks are called outside; runs below runs,
    and a block with an image."""
    cache, extras = Told(kind=kind), {1: b"cat"}
    (above,) = cache.hear(told(1, tokens(1, 2), namespace=namespace, extras=extras))
    (below,) = cache.hear(told(2, tokens(3), parent=1))
    (stored,) = cache.hear(cache.said(0, names_of(BLOCKS, namespace, extras)))
    assert isinstance(above, BlockStored) and isinstance(below, BlockStored) and isinstance(stored, BlockStored)
    assert stored.block_hashes == [*above.block_hashes, *below.block_hashes]
    assert stored.extra_keys == [*(above.extra_keys or []), None]
    assert cache.hear(cache.said(0, gone=names_of(BLOCKS, "other"))) == []


def test_a_checkpoint_is_told_by_its_last_page() -> None:
    """Of a hybrid model: what is read behind it is in the store when every rank has the page that look-ups ask for, as
    long as that is so, also behind a reset, and for a late listener; what two checkpoints hold is told once."""
    rows = (Row("window", 2 * SIZE, SIZE), Row("state", 0, SIZE))
    cache, names = Told(num_ranks=2, rows=rows), names_of(namespace="tenant")
    pages = [owned(page_names(own, 3)[-1], owner_mark("tenant")) for own in names_of_own("tenant")]
    cache.hear(cache.said(0))
    cache.hear(told(1, BLOCKS, namespace="tenant", anchors=[(2, 2, 1), (3, 3, 1)]))
    assert units_on_disk(cache.hear(cache.said(0, [*names, *pages]))) == []
    assert units_on_disk(cache.hear(cache.said(1, [*names, pages[1]]))) == [(1, 2), (2, 1)]
    assert units_on_disk(cache.hear(cache.said(1, [pages[2]]))) == [(1, 1), (2, 1)]
    assert units_on_disk(cache.hear(RunGone(1))) == []
    parts = [(group, stretch.num_blocks) for stretch, medium, group in cache.tree.freeze() if medium == "DISK"]
    assert sorted(parts) == [(0, 3), (1, 1), (1, 2), (2, 1), (2, 1)]
    assert units_on_disk(cache.hear(TreeCleared())) == [(1, 2), (2, 1), (1, 1), (2, 1)]
    assert units_on_disk(cache.hear(cache.said(0, gone=[pages[1]]))) == [(1, -1), (2, -1)]
    assert units_on_disk(cache.hear(StoreGone())) == [(1, -2), (2, -1)]
    for number in range(2, 1100):
        cache.hear(told(number, tokens(number * 10), anchors=[(1, 1, 1)]))
        cache.hear(RunGone(number))
    images = cache.tree._store.images
    assert len(images._images) == len(images._lately) == 1024 and not images._num_tiers


def names_of_own(namespace: str) -> list[bytes]:
    """Our own hashes of the blocks, without a mark."""
    joined = BlockHasher(SIZE).extend(root_hash(namespace, SIZE), BLOCKS, 0, 3)
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def units_on_disk(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Group and number of units that are told of the store, below 0 where they have gone; those of group 0 left out."""
    about = [event for event in events if isinstance(event, BlockStored | BlockRemoved) and event.medium == "DISK"]
    return [
        (event.group_idx, len(event.block_hashes) * (1 if isinstance(event, BlockStored) else -1))
        for event in about
        if event.group_idx
    ]
