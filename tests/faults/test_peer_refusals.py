"""Real peer processes that are asked, or told, what cannot be: that transfer fails, nothing else comes to harm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq

from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.transfer_manager.kv.layout import Place
from fastdeploy_cache.transfer_manager.peer.messages import (
    Chunk,
    Hello,
    ReaderKey,
    SendKey,
    SendState,
    Subscribe,
    ToReader,
    Welcome,
    Why,
)
from tests.rigs.peer_relay import Message, relayed
from tests.rigs.peer_rig import BLOCK_SIZE, LAYOUT, NUM_BLOCKS, NUM_LAYERS, Pair, look, pair_of

pytestmark = pytest.mark.processes

SOURCES, BLOCKS = (3, 9, 4, 17), (20, 1, 7, 8)
GONE = Why("gone", "this test is over")


@pytest.fixture(scope="module")
def kept() -> Iterator[Pair]:
    with pair_of() as pair:
        yield pair


@pytest.fixture
def pair(kept: Pair) -> Iterator[Pair]:
    """One rank each. The same processes serve all these tests."""
    sides = (kept.owner, kept.reader)
    num_restarts = [side.client.statuses()[0].num_restarts for side in sides]
    kept.wipe()
    yield kept
    assert all(side.client.wait_ready(10.0) for side in sides)
    assert num_restarts == [side.client.statuses()[0].num_restarts for side in sides], "a process has ended"
    kept.wipe()
    kept.transfer(SOURCES, BLOCKS)


def of_blocks(blocks: list[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which bytes of the reader's memory belong to these blocks."""
    layout = LAYOUT.for_rank(1, BLOCK_SIZE)
    found = np.zeros(layout.gpu_bytes(NUM_BLOCKS), bool)
    for in_layer in layout.places(NUM_BLOCKS):
        for place in in_layer:
            for block in blocks:
                start = place.offset_bytes + block * place.stride_bytes
                found[start : start + place.stride_bytes] = True
    return found


@pytest.mark.parametrize(
    "blocks",
    [(20, 1, 7), (20, 1, 7, 8, 9), (), (20, 1, 7, NUM_BLOCKS), (20, 1, 7, -1), (20, 1, 7, 2**31 - 1)],
    ids=["short", "long", "none", "above", "below", "far"],
)
def test_destinations_that_cannot_be(pair: Pair, blocks: tuple[int, ...]) -> None:
    """Nothing is written beside the blocks that were named, not even while only the first layers are there."""
    before = pair.reader.kv[0].flat()[0].copy()
    step = pair.owner.number()
    number, send = pair.send(SOURCES, 4, 0, step)
    receive = pair.receive(number, blocks, 4, seconds=5.0)
    for layer in range(NUM_LAYERS):
        pair.compute(SOURCES, [layer])
        pair.mark(step, layer + 1)
        look(lambda: pair.reader.is_answered(receive) or pair.holds((20,), (3,), range(layer + 1)))  # noqa: B023
    pair.update(number, 4, 4)
    result = pair.reader.wait(receive)
    after = pair.reader.kv[0].flat()[0]
    beside = ~of_blocks([b for b in blocks if 0 <= b < NUM_BLOCKS])
    assert np.array_equal(before[beside], after[beside])
    assert result.error is not None and "refused" in result.error
    pair.fail(number, GONE)  # the refusal may have come before the owner was asked
    assert pair.owner.error(send)


def test_sources_that_cannot_be(pair: Pair) -> None:
    """An owner's engine that names a block outside its pool."""
    number, send = pair.send([3, NUM_BLOCKS], 2, 2)
    assert "refused" in pair.reader.error(pair.receive(number, BLOCKS[:2], 2))
    assert pair.owner.error(send)


def test_a_receive_number_that_is_in_use() -> None:
    """The first receive goes on as if nothing had been, and so do the processes."""
    with pair_of() as pair:
        check_doubled(pair)
        pid = pair.reader.pid()
        pair.transfer(SOURCES, BLOCKS)
        assert pair.reader.pid() == pid


def check_doubled(pair: Pair) -> None:
    number, send = pair.send(SOURCES, 4, 0)
    receive = pair.receive(number, BLOCKS, 4, seconds=5.0)
    doubled = pair.receive(number, (10, 11, 12, 13), 4, receive_number=receive, seconds=2.0)
    assert "refused" in pair.reader.error(doubled)
    pair.compute(SOURCES)
    pair.update(number, 4, 4)
    assert pair.reader.wait(receive).error is None
    assert pair.owner.wait(send).error is None
    assert pair.are_untouched((10, 11, 12, 13), range(NUM_LAYERS))


def test_addresses_that_cannot_be(pair: Pair) -> None:
    """Of another host without keys, or of nothing at all: refused at once; of nobody: by silence or deadline."""
    number, send = pair.offer(SOURCES)
    direct = pair.source
    try:
        for address in ("tcp://127.0.0.1:1", "pigeon://a", "ipc://" + "x" * 200):
            pair.source = msgspec.structs.replace(direct, addresses=(address,))
            assert "refused" in pair.reader.error(pair.receive(number, BLOCKS, 4))
        pair.source = msgspec.structs.replace(direct, addresses=("ipc:///nowhere/at/all",))
        assert "late" in pair.reader.error(pair.receive(number, BLOCKS, 4, seconds=1.0))
    finally:
        pair.source = direct
    pair.fail(number, GONE)
    assert pair.owner.error(send)


KEY = SendKey(bytes(16), 5)
ASKS = encode(Subscribe(KEY, ReaderKey(bytes(16), 1, 0), 1, 0, "somebody"))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", bytes(1000), ASKS[:-1], ASKS.replace(b"somebody", b"some\xff\xff\xff\xff"), ASKS],
    ids=["empty", "garbage", "zeros", "cut", "no text", "unknown offer"],
)
def test_strangers_that_say_what_cannot_be(pair: Pair, data: bytes) -> None:
    """An owner's process hears it, and those after it are served as ever."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(pair.owner.info.addresses[0])
        stranger.send(data)
        stranger.send(encode(Hello()))
        while stranger.poll(5000):
            if isinstance(decode(stranger.recv(), ToReader), Welcome):
                return
    pytest.fail("nobody answers any more")


def told(kind: type[Message], **fields: object) -> Callable[[Message], int | Message]:
    """A rule that changes messages of a kind."""
    return lambda message: msgspec.structs.replace(message, **fields) if isinstance(message, kind) else 1


FAR = (Place(0, 2**62, 2**62, 4),) * 2
WORDS = {
    "of another run": told(Welcome, instance_id=bytes(16)),
    "of another rank": told(Welcome, rank=1),
    "no endpoint": told(Welcome, endpoint=b"x"),
    "no layers": told(Welcome, places=()),
    "too few layers": told(Welcome, places=LAYOUT.for_rank(1, BLOCK_SIZE).places(NUM_BLOCKS)[:1]),
    "too few parts": told(Welcome, places=tuple(p[:1] for p in LAYOUT.for_rank(1, BLOCK_SIZE).places(NUM_BLOCKS))),
    "far away": told(Welcome, places=(FAR,) * NUM_LAYERS),
    "a piece of an id": told(SendState, block_ids=b"abc"),
    "blocks without ids": told(SendState, block_ids=b""),
    "layers without ids": told(SendState, chunks=(Chunk(9, 1),)),
    "ids below zero": told(SendState, block_ids=b"\xff" * 16),
}


@pytest.mark.parametrize("words", WORDS)
def test_an_owner_that_says_what_cannot_be(pair: Pair, words: str) -> None:
    """The receive fails, at once; so does the offer."""
    number, send = pair.offer(SOURCES)
    with relayed(pair, WORDS[words]):
        receive = pair.receive(number, BLOCKS, 4, seconds=5.0)
        error = re.sub(r"/\S+", "", pair.reader.error(receive))  # a folder's name is drawn, and may have these words
    assert "exited" not in error and "late" not in error
    pair.fail(number, GONE)  # it may never have been asked for
    assert pair.owner.error(send)
    assert pair.are_untouched(range(NUM_BLOCKS), range(NUM_LAYERS))
