"""What every store promises: the bytes that were written under a name, or nothing."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import StorageError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage import open_storage
from fastdeploy_cache.transfer_manager.storage.base import Blocks, seal
from fastdeploy_cache.transfer_manager.storage.keys import owned, owner_mark
from fastdeploy_cache.transfer_manager.storage.news import news_of
from tests.rigs.faulty_storage import FaultyStorage
from tests.rigs.places import MemoryPlace, Place

SECONDS = 30.0
SIZES = [1, 7, 4096, 4097, 99_999, 1_048_577]


@pytest.mark.parametrize("object_bytes", SIZES)
def test_bytes_come_back_as_they_were(place: Place, object_bytes: int) -> None:
    """Objects of even and odd sizes come back whole, and to a store opened later too."""
    space = place.space(object_bytes)
    store, prompt = place.open(space)
    written = store.write(prompt.blocks())
    assert written.num_leading == len(prompt.hashes)
    assert written.num_bytes >= prompt.data.nbytes
    assert store.count_leading(prompt.blocks()) == len(prompt.hashes)
    prompt.wipe()
    assert store.read(prompt.blocks()) == len(prompt.hashes)
    np.testing.assert_array_equal(prompt.segment, prompt.data)
    store.close()
    again, prompt = place.open(space)
    prompt.wipe()
    assert again.read(prompt.blocks()) == len(prompt.hashes)
    np.testing.assert_array_equal(prompt.segment, prompt.data)


def test_more_blocks_than_one_call_of_a_server_takes(place: Place) -> None:
    """A prompt that has to be moved in several batches comes back whole."""
    store, prompt = place.open(place.space(20_000), num_blocks=700)
    assert store.write(prompt.blocks()).num_leading == 700
    prompt.wipe()
    assert store.read(prompt.blocks()) == 700
    np.testing.assert_array_equal(prompt.segment, prompt.data)


def test_each_object_is_found_by_itself(place: Place) -> None:
    """Which are there, also behind one that is not."""
    store, prompt = place.open()
    store.write(prompt.blocks())
    store.remove(prompt.hashes[3:5])
    assert list(store.find(prompt.hashes)) == [number not in (3, 4) for number in range(len(prompt.hashes))]
    assert list(store.find([])) == []


def test_an_empty_store_has_nothing(place: Place) -> None:
    """Nothing is counted, read or removed where nothing was written, and no blocks are no work."""
    store, prompt = place.open()
    assert store.count_leading(prompt.blocks()) == 0
    assert store.read(prompt.blocks()) == 0
    assert store.remove(prompt.hashes) == 0
    assert store.clear(place.weights_id) == 0
    nothing = prompt.blocks(0, 0)
    assert store.count_leading(nothing) == store.read(nothing) == store.remove([]) == 0
    assert store.write(nothing) == (0, 0)


def test_only_leading_blocks_count(place: Place) -> None:
    """Blocks behind a hole are neither counted nor read; once the hole is filled they are."""
    store, prompt = place.open()
    store.write(prompt.blocks(0, 3))
    store.write(prompt.blocks(4))
    prompt.wipe()
    assert store.count_leading(prompt.blocks()) == 3
    assert store.read(prompt.blocks()) == 3
    np.testing.assert_array_equal(prompt.segment[:3], prompt.data[:3])
    prompt.fill()
    assert store.write(prompt.blocks()).num_leading == len(prompt.hashes)
    assert store.read(prompt.blocks()) == len(prompt.hashes)


def test_only_what_is_missing_is_written(place: Place) -> None:
    """A prompt that has grown costs its new blocks only, and one that is there costs nothing."""
    store, prompt = place.open()
    first = store.write(prompt.blocks(0, 8))
    grown = store.write(prompt.blocks(0, 12))
    assert grown.num_leading == 12
    assert grown.num_bytes * 2 == first.num_bytes
    assert store.write(prompt.blocks(0, 12)) == (12, 0)


def test_blocks_of_another_order(place: Place) -> None:
    """Each object goes by its own hash, wherever in a prompt and in memory it is asked for."""
    store, prompt = place.open()
    store.write(prompt.blocks())
    prompt.wipe()
    assert store.read(prompt.blocks(hashes=prompt.hashes[::-1])) == len(prompt.hashes)
    np.testing.assert_array_equal(prompt.segment, prompt.data[::-1])


def test_a_read_of_more_than_there_is(place: Place) -> None:
    """A read ends where the blocks end, with what there is in place."""
    store, prompt = place.open()
    store.write(prompt.blocks(0, 5))
    prompt.wipe()
    assert store.read(prompt.blocks()) == 5
    np.testing.assert_array_equal(prompt.segment[:5], prompt.data[:5])


def test_removed_blocks_are_gone(place: Place) -> None:
    """What was removed is not found, what was not is, and it can be written again."""
    store, prompt = place.open()
    store.write(prompt.blocks())
    assert store.remove(prompt.hashes[2:4]) == 2
    assert store.remove(prompt.hashes[2:4]) == 0
    assert store.count_leading(prompt.blocks()) == store.read(prompt.blocks()) == 2
    assert store.count_leading(prompt.blocks(4)) == len(prompt.hashes) - 4
    prompt.fill()
    assert store.write(prompt.blocks()).num_leading == len(prompt.hashes)


def test_clear_takes_one_kind_of_weights(place: Place) -> None:
    """All spaces of the given weights are emptied, and those of others are not."""
    store, prompt = place.open()
    store.write(prompt.blocks())
    other_space = place.space(weights_id=place.weights_id + "-tuned")
    other, other_prompt = place.open(other_space)
    other.write(other_prompt.blocks())
    assert store.clear(place.weights_id + "-unknown") == 0
    assert store.clear(place.weights_id) == len(prompt.hashes)
    assert store.count_leading(prompt.blocks()) == store.read(prompt.blocks()) == 0
    assert other.read(other_prompt.blocks()) == len(prompt.hashes)
    other.close()
    assert store.clear(other_space.weights_id) == len(prompt.hashes)
    again, prompt = place.open(other_space)
    assert again.count_leading(prompt.blocks()) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"weights_id": "others"},
        {"layout": "4 layers of bytes"},
        {"object_bytes": 1001},
        {"block_size": 8},
        {"rank": 1},
        {"tp_size": 4},
        {"version": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_another_space_never_hits(place: Place, fields: dict[str, Any]) -> None:
    """What decides a block's bytes is in its name: the same hash in another space is another object."""
    store, prompt = place.open()
    store.write(prompt.blocks())
    other, other_prompt = place.open(place.space(**fields))
    assert other.count_leading(prompt.blocks()) == other.read(other_prompt.blocks()) == 0
    other_prompt.segment[:] = 7
    assert other.write(other_prompt.blocks(0, 4)).num_leading == 4
    assert other.remove(prompt.hashes[:1]) == 1
    prompt.wipe()
    assert store.read(prompt.blocks()) == len(prompt.hashes)
    np.testing.assert_array_equal(prompt.segment, prompt.data)


@pytest.mark.parametrize("verb", ["flip", "cut"])
def test_a_damaged_object_is_a_miss(place: Place, verb: str) -> None:
    """One flipped bit or a missing end: the read ends before it, it is removed and can be written anew."""
    store, prompt = place.open(place.space(50_001), num_blocks=6)
    store.write(prompt.blocks())
    place.change(verb, place.space(50_001), prompt, 2)
    prompt.wipe()
    num_read = store.read(prompt.blocks())
    assert num_read <= 2  # a file that was cut may have held earlier blocks behind the cut
    np.testing.assert_array_equal(prompt.segment[:num_read], prompt.data[:num_read])
    assert store.stats().num_damaged >= 1
    assert store.count_leading(prompt.blocks(2)) == 0
    prompt.fill()
    assert store.write(prompt.blocks()).num_leading == 6
    prompt.wipe()
    assert store.read(prompt.blocks()) == 6
    np.testing.assert_array_equal(prompt.segment, prompt.data)


def test_counted_and_then_gone(place: Place) -> None:
    """What vanishes between count and read is a miss: the count was only a hope."""
    store, prompt = place.open()
    store.write(prompt.blocks())
    assert store.count_leading(prompt.blocks()) == len(prompt.hashes)
    store.remove([prompt.hashes[1]])
    prompt.wipe()
    assert store.read(prompt.blocks()) == 1
    np.testing.assert_array_equal(prompt.segment[:1], prompt.data[:1])


def test_stats_are_there_at_any_time(place: Place) -> None:
    """Fresh and after work a store tells what it knows: sizes or None, and counts that begin at 0."""
    store, prompt = place.open()
    stats = store.stats()
    assert (stats.num_evicted, stats.num_declined, stats.num_damaged) == (0, 0, 0)
    store.write(prompt.blocks())
    assert store.stats().num_objects in (None, len(prompt.hashes))
    assert store.stats().num_damaged == 0


def test_a_reader_and_a_writer_at_a_time(place: Place) -> None:
    """One thread writes and removes while another reads: what is read is always what was written."""
    store, prompt = place.open(place.space(30_000))
    half = len(prompt.hashes) // 2
    done, errors = threading.Event(), list[BaseException]()

    def write() -> None:
        try:
            for _ in range(20):
                store.write(prompt.blocks(0, half))
                store.remove(prompt.hashes[: half // 2])
            store.write(prompt.blocks(0, half))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while True:
        last = done.is_set()
        num_read = store.read(prompt.blocks(half, hashes=prompt.hashes[:half]))
        np.testing.assert_array_equal(prompt.segment[half : half + num_read], prompt.data[:num_read])
        prompt.segment[half:] = 0
        if last:
            break
    writer.join(SECONDS)
    assert not errors and num_read == half
    assert store.stats().num_damaged == 0


def test_closing_twice(place: Place) -> None:
    """A store may be closed again."""
    store, prompt = place.open()
    store.write(prompt.blocks())
    store.close()
    store.close()


def test_a_lie_of_the_count_is_found_out_by_read() -> None:
    """A wrapped store that claims more than it has, or reads less: the caller goes by what `read` returns."""
    store, prompt = _faulty()
    store.write(prompt.blocks(0, 3))
    store.faults.claims = 5
    assert store.count_leading(prompt.blocks()) == 8
    assert store.read(prompt.blocks()) == 3
    store.faults.read_fewer = 2
    assert store.read(prompt.blocks()) == 1


def test_flipped_bits_show() -> None:
    """A store that hands out wrong bytes is seen through with the seal."""
    store, prompt = _faulty()
    store.write(prompt.blocks())
    store.faults.flip_bit = True
    seals = [seal(block_hash, data.tobytes()) for block_hash, data in zip(prompt.hashes, prompt.data, strict=True)]
    blocks = prompt.blocks()
    assert store.read(blocks) == len(prompt.hashes)
    same = [
        seal(*pair) == want for pair, want in zip(zip(blocks.hashes, blocks.buffers, strict=True), seals, strict=True)
    ]
    assert same == [False] + [True] * (len(same) - 1)


def test_failing_and_hanging_as_told() -> None:
    """The faulty store fails so often as told, then works; it hangs until it is let go."""
    store, prompt = _faulty(failures=2)
    for _ in range(2):
        with pytest.raises(StorageError, match="as the test said"):
            store.count_leading(prompt.blocks())
    assert store.count_leading(prompt.blocks()) == 0
    store.faults.hanging = True
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(store.count_leading(prompt.blocks())))
    thread.start()
    assert store.faults.entered.wait(SECONDS) and not found
    store.faults.released.set()
    thread.join(SECONDS)
    assert found == [0]


def test_token_ids_where_they_are_needed() -> None:
    """A store that needs token ids says so, and a call without them is a mistake of the caller."""
    store, prompt = MemoryPlace().open()
    assert store.needs_token_ids
    with pytest.raises(AssertionError, match="token ids"):
        store.count_leading(Blocks(hashes=prompt.hashes))


@pytest.mark.parametrize("kind", ["tests.rigs.memory_storage:Nothing", "tests.nowhere:Store", "flie"])
def test_a_store_that_is_not_there(kind: str, tmp_path: Path) -> None:
    """A name that cannot be imported is refused with the name."""
    place = MemoryPlace()
    place.kind = kind
    with pytest.raises(StorageRefusedError, match=kind.partition(":")[0]):
        place.open()


def _faulty(**faults: int) -> tuple[FaultyStorage, Any]:
    place = MemoryPlace()
    _, prompt = place.open()
    options = {name: str(value) for name, value in faults.items()}
    store = open_storage("tests.rigs.faulty_storage:FaultyStorage", options, place.space(), prompt.segment)
    assert isinstance(store, FaultyStorage)
    return store, prompt


def test_what_an_owner_has_is_removed(place: Place) -> None:
    """All objects with an owner's mark are gone, in one call, and those of others are not; also when opened again."""
    store, prompt = place.open(place.space(5000))
    mine, theirs = owner_mark("mine"), owner_mark("theirs")
    marks = [mine if number % 2 else theirs for number in range(len(prompt.hashes))]
    prompt.hashes = [owned(name, mark) for name, mark in zip(prompt.hashes, marks, strict=True)]
    store.write(prompt.blocks())
    assert all(store.find(prompt.hashes))
    assert store.remove_owned(place.weights_id, mine) == marks.count(mine)
    assert list(store.find(prompt.hashes)) == [mark == theirs for mark in marks]
    assert store.remove_owned(place.weights_id, mine) == 0
    store.close()
    again, prompt = place.open(place.space(5000))
    prompt.hashes = [owned(name, mark) for name, mark in zip(prompt.hashes, marks, strict=True)]
    assert list(again.find(prompt.hashes)) == [mark == theirs for mark in marks]


def test_news_are_what_came_and_went(place: Place) -> None:
    """Whoever listens knows at any time what is there: first all of it, then what has changed."""
    store, prompt = place.open(place.space(5000))
    if news_of(store, 1) is None:
        assert "file" not in place.kind  # others write to the same servers
        return
    known, number = set[bytes](), itertools.count(1)

    def told(listener: int) -> set[bytes]:
        while (news := news_of(store, listener)) is not None:
            assert news.number == next(number)
            for at in range(0, len(news.gone), 32):
                known.discard(news.gone[at : at + 32])
            known.update(news.came[at : at + 32] for at in range(0, len(news.came), 32))
        return known

    blocks = prompt.hashes
    store.write(prompt.blocks())
    assert told(1) == set(blocks)
    store.remove(blocks[:3])
    assert told(1) == set(blocks[3:])
    store.write(prompt.blocks(0, 2))
    store.remove(blocks[1:2])
    assert told(1) == {blocks[0], *blocks[3:]}
    known, number = set(), itertools.count(0)
    assert told(2) == {blocks[0], *blocks[3:]} and news_of(store, 1) is None
    store.close()
    again, prompt = place.open(place.space(5000))
    news = news_of(again, 1)
    assert news is not None and news.number == 0 and len(news.came) == 32 * len(known)
