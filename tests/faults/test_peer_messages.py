"""Real peer processes with a bad network between them: never a success that is none, and success where it can be."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from fastdeploy_cache.transfer_manager.peer.messages import (
    Confirm,
    Confirmed,
    Hello,
    Leave,
    SendDetail,
    SendState,
    Subscribe,
    Welcome,
    Why,
)
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.peer_relay import Message, relayed
from tests.rigs.peer_rig import NUM_LAYERS, SECONDS, Pair, pair_of

pytestmark = pytest.mark.processes

SOURCES, BLOCKS = (3, 9, 4, 17, 0, 12), (20, 1, 7, 8, 22, 5)
EARLY = Why("failed", "its blocks are needed")


@pytest.fixture(scope="module")
def kept() -> Iterator[Pair]:
    with pair_of(2, 1, silence_timeout_seconds=10.0) as pair:
        yield pair


@pytest.fixture
def pair(kept: Pair) -> Pair:
    """Two ranks own, one reads: a receive has two sources."""
    kept.wipe()
    return kept


def run(pair: Pair) -> tuple[int, int]:
    """A transfer with all that there is to say: ids in pieces, layers, blocks; tasks of owner and reader."""
    step = pair.owner.number()
    pair.compute(SOURCES[:2])
    number, send = pair.send(SOURCES[:4], 6, 2, step)
    receive = pair.receive(number, BLOCKS, 6)
    for layer in range(NUM_LAYERS):
        pair.compute(SOURCES[2:4], [layer])
        pair.mark(step, layer + 1)
    pair.update(number, 6, 4, SOURCES[4:], step + 1)
    pair.compute(SOURCES[4:])
    pair.update(number, 6, 6)
    return send, receive


@pytest.mark.parametrize("copies", [(0, 1, 1, 1, 1), (2,), (1, 3)])
def test_messages_are_lost_or_doubled(pair: Pair, copies: tuple[int, ...]) -> None:
    """Readers ask again, states are absolute: it succeeds, with the right bytes."""
    dice = random.Random(5)
    with relayed(pair, lambda message: dice.choice(copies)):
        send, receive = run(pair)
        assert pair.reader.wait(receive).error is None
        assert pair.owner.wait(send).error is None
    pair.check(BLOCKS, SOURCES)


@pytest.mark.parametrize("kind", [Hello, Welcome, Subscribe, SendState, Confirm, Confirmed])
def test_the_first_message_of_a_kind_is_lost(pair: Pair, kind: type[Message]) -> None:
    """Whichever it is: it is asked for again, and the transfer succeeds."""
    lost: list[Message] = []

    def rule(message: Message) -> int:
        if isinstance(message, kind) and not lost:
            lost.append(message)
            return 0
        return 1

    with relayed(pair, rule):
        send, receive = run(pair)
        assert pair.reader.wait(receive).error is None
        assert pair.owner.wait(send).error is None
    assert lost
    pair.check(BLOCKS, SOURCES)


def test_an_answer_that_is_lost_when_the_send_has_ended(pair: Pair) -> None:
    """Both owner ranks have ended their sends before the reader hears of it: it asks again, and it counts."""
    is_over = threading.Event()

    def rule(message: Message) -> int:
        return int(not isinstance(message, Confirmed) or is_over.is_set())

    with relayed(pair, rule):
        number, send = pair.offer(SOURCES)
        receive = pair.receive(number, BLOCKS, 6)
        assert pair.owner.wait(send).error is None
        assert not pair.reader.is_answered(receive)
        is_over.set()
        assert pair.reader.wait(receive).error is None
    pair.check(BLOCKS, SOURCES)


@pytest.mark.parametrize("kind", [Welcome, Subscribe, SendState, Confirm])
def test_the_owner_frees_its_blocks_early(pair: Pair, kind: type[Message]) -> None:
    """While the reader comes, reads, or asks whether it counts: it does not."""
    number, send = pair.offer(SOURCES)

    def rule(message: Message) -> int:
        if isinstance(message, kind) and not pair.owner.is_answered(send):
            pair.fail(number, EARLY)
            pair.owner.wait(send)
            pair.overwrite(SOURCES)
        return 1

    with relayed(pair, rule):
        error = pair.reader.error(pair.receive(number, BLOCKS, 6))
    assert "its blocks are needed" in error or "gone" in error
    assert "its blocks are needed" in pair.owner.error(send)


def test_one_of_two_owners_frees_its_blocks_early(pair: Pair) -> None:
    """The other one has confirmed: the receive fails as a whole all the same."""
    number, send = pair.offer(SOURCES)
    confirms: list[Message] = []

    def rule(message: Message) -> int:
        if isinstance(message, Confirmed):
            pair.owner.wait(pair.fail(number, EARLY))  # finds one send over, ends the other
        if isinstance(message, Confirm):
            confirms.append(message)
            return int(len(confirms) != 2)  # the second one is too late
        return 1

    with relayed(pair, rule):
        error = pair.reader.error(pair.receive(number, BLOCKS, 6))
    assert "its blocks are needed" in error or "gone" in error
    assert sorted(rank.error is None for rank in pair.owner.wait(send).ranks) == [False, True]


def cut_after(kind: type[Message]) -> Callable[[Message], int]:
    """A rule that lets nothing pass after the first message of a kind."""
    is_cut = threading.Event()

    def rule(message: Message) -> int:
        was_cut = is_cut.is_set()
        if isinstance(message, kind):
            is_cut.set()
        return int(not was_cut)

    return rule


def test_the_network_is_cut() -> None:
    """After any message: both sides end by silence, and the next transfer works."""
    with pair_of(1, 1, silence_timeout_seconds=1.0) as pair:
        for after in (Hello, Subscribe, SendState, Confirm):
            number, send = pair.offer(SOURCES)
            with relayed(pair, cut_after(after)):
                assert "silent" in pair.reader.error(pair.receive(number, BLOCKS, 6))
            if after is Confirm:  # it was answered, but the answer was cut: the owner cannot know
                assert pair.owner.wait(send).error is None
            elif after is Hello:  # it has heard of nobody
                pair.owner.wait(pair.fail(number, EARLY))
            else:
                assert "silent" in pair.owner.error(send)
            pair.transfer(SOURCES, BLOCKS)


def test_a_farewell_that_is_lost(pair: Pair) -> None:
    """A reader that cancels and is not heard: a second receive of the same offer takes over."""
    number, send = pair.send(SOURCES, 6, 0)
    with relayed(pair, lambda message: int(not isinstance(message, Leave))):
        first = pair.receive(number, BLOCKS, 6)
        pair.end_receive(first)
        assert "cancelled" in pair.reader.error(first)
        second = pair.receive(number, BLOCKS, 6)
        pair.compute(SOURCES)
        pair.update(number, 6, 6)
        assert pair.reader.wait(second, SECONDS).error is None
    assert pair.owner.wait(send).error is None
    pair.check(BLOCKS, SOURCES)


def test_a_receive_may_be_faster_than_the_offers_task(pair: Pair) -> None:
    """The owner's processes hear of the reader first, as those of a busy engine may: it waits, and gets all."""
    asked: list[Message] = []
    has_waited = threading.Event()

    def rule(message: Message) -> int:
        asked.extend([message] if isinstance(message, Subscribe) else [])
        if len(asked) == 4:  # two ranks were asked twice: the first time has long arrived
            has_waited.set()
        return 1

    number = pair.owner.number()
    with relayed(pair, rule):
        receive = pair.receive(number, BLOCKS, 6)
        assert has_waited.wait(SECONDS)
        pair.compute(SOURCES)
        send = pair.owner.submit(
            TaskKind.SEND, SOURCES, SendDetail(number=number, num_blocks=6, num_complete=6), SECONDS
        )
        assert pair.reader.wait(receive).error is None
        assert pair.owner.wait(send).error is None
    pair.check(BLOCKS, SOURCES)
