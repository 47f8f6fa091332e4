"""The told tree: what events follow from records, where many changes of a run have become one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.books.image_keys import image_keys
from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.journal import Began, RunGone, RunParted, RunsJoined
from fastdeploy_cache.events.names import NameKind, NameScheme, name_blocks
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from tests.rigs.told_runs import SIZE, tokens, told


def tree() -> ToldTree:
    """One that has begun."""
    begun = ToldTree(NameScheme(block_size=SIZE))
    begun.apply(Began())
    assert begun.take() == [AllBlocksCleared()]
    return begun


def kinds(events: list[Event]) -> list[tuple[str, int]]:
    """Each event's kind, and how many blocks it names."""
    return [
        (type(event).__name__, len(event.block_hashes)) for event in events if not isinstance(event, AllBlocksCleared)
    ]


@pytest.mark.parametrize("other", [{"tokens": tokens(1, 2, 9)}, {"extras": {2: b"cat"}}])
def test_other_blocks_in_the_same_place(other: dict[str, Any]) -> None:
    """A run was cut and has grown again: by tokens, or by an image alone, they are others."""
    known = tree()
    known.apply(told(1, tokens(1, 2, 3)))
    (first,) = known.take()
    known.apply(told(1, tokens(1, 2, 3), **other))
    removed, stored = known.take()
    assert isinstance(first, BlockStored) and isinstance(removed, BlockRemoved) and isinstance(stored, BlockStored)
    assert removed.block_hashes == first.block_hashes[2:]
    assert stored.parent_block_hash == first.block_hashes[1] and stored.block_hashes != first.block_hashes[2:]


def test_what_has_not_changed_is_not_told() -> None:
    """The same record twice; and a tier more."""
    known = tree()
    known.apply(told(1, tokens(1, 2, 3)))
    known.take()
    known.apply(told(1, tokens(1, 2, 3)))
    assert known.take() == []
    known.apply(told(1, b"", num_blocks=3, first=3, num_gpu=3, cpu_start=1, num_cpu=2))
    (stored,) = known.take()
    assert isinstance(stored, BlockStored) and stored.medium == "CPU" and stored.token_ids == [2] * 4 + [3] * 4


def test_a_cut_behind_what_is_known() -> None:
    """Growth was not told before the run was parted: the lower part comes with its own record."""
    known = tree()
    known.apply(told(1, tokens(1, 2)))
    known.take()
    known.apply(RunParted(2, 1, 3))
    known.apply(told(2, tokens(3), num_blocks=3, first=2, num_gpu=3))
    known.apply(told(1, tokens(4), parent=2))
    assert kinds(known.take()) == [("BlockStored", 1), ("BlockStored", 1)]
    known.apply(RunsJoined(2, 1, 3))
    known.apply(RunGone(2))
    assert kinds(known.take()) == [("BlockRemoved", 4)]


def test_a_join_behind_what_is_known() -> None:
    """What the lower run had goes, and comes again behind what was missing."""
    known = tree()
    known.apply(told(1, tokens(1)))
    known.apply(told(2, tokens(3), parent=1))
    known.take()
    known.apply(RunsJoined(1, 2, 2))
    known.apply(told(1, tokens(2, 3), num_blocks=3, first=1, num_gpu=3))
    assert kinds(known.take()) == [("BlockRemoved", 1), ("BlockStored", 2)]


def test_a_join_of_what_was_told_at_two_moments() -> None:
    """The upper run's copies are not told to its end yet: those of the lower one go, and come with the next record."""
    known = tree()
    known.apply(told(1, tokens(1, 2), cpu_start=0, num_cpu=1))
    known.apply(told(2, tokens(3), parent=1, cpu_start=0, num_cpu=1))
    known.take()
    known.apply(RunsJoined(1, 2, 2))
    known.apply(told(1, b"", num_blocks=3, first=3, num_gpu=3, cpu_start=0, num_cpu=3))
    removed, stored = known.take()
    assert isinstance(removed, BlockRemoved) and isinstance(stored, BlockStored) and removed.medium == "CPU"
    assert stored.token_ids == [2] * 4 + [3] * 4


def test_records_that_cannot_be() -> None:
    """A gap, a parent that nobody has told of, blocks that are not there: the publisher ends, and is told anew."""
    for record in (
        told(1, tokens(1), first=3, num_blocks=4),
        told(1, tokens(1), parent=5),
        told(1, tokens(1), num_gpu=2),
    ):
        with pytest.raises(CodecError):
            tree().apply(record)


def test_what_comes_behind_a_loss_counts_from_the_next_begin_on() -> None:
    """A delivery is missing: in between nothing is told."""
    known = tree()
    known.distrust()
    known.apply(told(1, tokens(1)))
    assert known.take() == []
    known.apply(Began())
    known.apply(told(1, tokens(1)))
    assert kinds(known.take()) == [("BlockStored", 1)]


def test_long_runs_are_told_in_pieces() -> None:
    """Stored and removed, no event is larger than a bound, and together they name all."""
    known = tree()
    known.apply(told(1, np.arange(20_000 * SIZE, dtype=np.int32).tobytes()))
    stored = kinds(known.take())
    known.apply(RunGone(1))
    removed = kinds(known.take())
    for found in (stored, removed):
        assert sum(count for _, count in found) == 20_000 and max(count for _, count in found) <= 4096


def test_what_comes_before_the_begin_is_for_another() -> None:
    """It changes nothing."""
    fresh = ToldTree(NameScheme(block_size=SIZE))
    fresh.apply(told(1, tokens(1), parent=5))
    assert fresh.take() == []


@pytest.mark.parametrize("kind", ["own", "sha256_cbor"])
def test_an_image_over_two_runs(kind: NameKind) -> None:
    """It begins in one run, and ends in the one below: names are those of the whole prompt, and what is told of it is
    where it begins, counted from each block."""
    scheme, images = NameScheme(kind=kind, block_size=SIZE), [(6, 8, b"cat"), (14, 1, b"\xff")]
    known, keys, blocks = ToldTree(scheme), image_keys(images, SIZE), tokens(1, 2, 3, 4)
    known.apply(Began())
    known.apply(told(1, blocks[: 32 * 1], extras={1: keys[1]}))
    known.apply(told(2, blocks[32:], parent=1, extras={0: keys[2], 1: keys[3]}))
    _, above, below = known.take()
    assert isinstance(above, BlockStored) and isinstance(below, BlockStored)
    packed = np.frombuffer(blocks, np.int32)
    assert [*above.block_hashes, *below.block_hashes] == name_blocks(scheme, scheme.names(), packed, "", images)
    assert above.extra_keys == [None, (("cat", 2),)]
    assert below.extra_keys == [(("cat", -2),), (("cat", -6), ("hex:ff", 2))]
    known.apply(RunsJoined(1, 2, 2))
    ((whole, _, _),) = known.freeze()
    assert whole.extra_keys() == [*above.extra_keys, *below.extra_keys]
