"""Real peer processes that are killed and stopped: every task is answered, and no success has wrong bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.messages import Confirm, Confirmed, ToOwner, ToReader
from fastdeploy_cache.transfer_manager.process import client as process_client
from tests.rigs.peer_relay import relayed
from tests.rigs.peer_rig import NUM_LAYERS, Pair, look, pair_of
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes

SOURCES, BLOCKS = (3, 9, 4, 17), (20, 1, 7, 8)
STAGES = range(NUM_LAYERS + 1)
LARGE = KVLayout(num_layers=8, num_kv_heads=4, head_dim=2048)  # a block is 1 MiB


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause before a restart doubles with each death; these tests bring many."""
    monkeypatch.setattr(process_client, "_RESTART_BACKOFF_SECONDS", 0.001)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as made:
        yield made


def at(pair: Pair, stage: int) -> tuple[int, int, int, Callable[[], None]]:
    """An offer that has come to a layer, and the reader with it: its number, both tasks, and what completes it."""
    pair.wipe()
    step = pair.owner.number()
    number, send = pair.send(SOURCES, 4, 0, step)
    receive = pair.receive(number, BLOCKS, 4)
    pair.compute(SOURCES, range(stage))
    pair.mark(step, stage)
    pair.look(receive, BLOCKS, SOURCES, range(stage))

    def complete() -> None:
        pair.compute(SOURCES)
        pair.update(number, 4, 4)

    return number, send, receive, complete


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def tells_of_death(error: str) -> bool:
    """Of what was handed to it, or was just being handed to it when it was killed."""
    return "exited with code -9" in error or "is closed at its end" in error


def test_a_killed_reader_is_replaced(pair: Pair) -> None:
    """At each layer: its receive fails, its blocks are free, a second receive of the same offer brings them all."""
    for stage in STAGES:
        number, send, receive, complete = at(pair, stage)
        pid = pair.reader.pid()
        kill(pid)
        assert tells_of_death(pair.reader.error(receive))
        pair.reader.wait_new(pid)
        again = pair.receive(number, BLOCKS, 4)
        complete()
        assert pair.reader.wait(again).error is None
        assert pair.owner.wait(send).error is None
        pair.check(BLOCKS, SOURCES)


def test_a_killed_owner_is_replaced() -> None:
    """At each layer: the offer fails, its reader hears so from whoever is there next, or nothing; the next is read."""
    with pair_of(silence_timeout_seconds=1.5) as pair:
        for stage in STAGES:
            _, send, receive, complete = at(pair, stage)
            pid = pair.owner.pid()
            kill(pid)
            assert tells_of_death(pair.owner.error(send))
            complete()
            assert "gone" in pair.reader.error(receive)
            pair.owner.wait_new(pid)
            pair.transfer(SOURCES, BLOCKS)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_one_of_two_ranks_is_killed(ranks: tuple[int, int]) -> None:
    """On the side that has two: the other rank's part ends, too, and in time."""
    with pair_of(*ranks, silence_timeout_seconds=1.0) as pair:
        _, send, receive, _ = at(pair, 1)
        side = pair.owner if ranks[0] == 2 else pair.reader
        pid = side.pid(1)
        kill(pid)
        for error in (pair.reader.error(receive), pair.owner.error(send)):
            assert "exited" in error or "gone" in error
        side.wait_new(pid, 1)
        pair.wipe()
        pair.transfer(SOURCES, BLOCKS)


def test_the_owner_is_killed_when_it_is_asked_whether_all_counts(pair: Pair) -> None:
    """The reader has every byte, but nobody says that the blocks were held: it is no success."""
    number, send = pair.offer(SOURCES)

    def rule(message: ToOwner | ToReader) -> int:
        if isinstance(message, Confirm) and not pair.owner.is_answered(send):
            kill(pair.owner.pid())
            pair.owner.wait(send)
            pair.overwrite(SOURCES)
        return 1

    with relayed(pair, rule):
        receive = pair.receive(number, BLOCKS, 4)
        assert "gone" in pair.reader.error(receive)
    assert pair.owner.error(send)


def test_the_reader_is_killed_before_it_hears_that_all_counts(pair: Pair) -> None:
    """The owner's send ends well, the receive does not; neither waits for the other."""
    number, send = pair.offer(SOURCES)
    pid = pair.reader.pid()

    def rule(message: ToOwner | ToReader) -> int:
        if isinstance(message, Confirmed):
            kill(pid)
        return 1

    with relayed(pair, rule):
        receive = pair.receive(number, BLOCKS, 4)
        assert "exited" in pair.reader.error(receive)
        assert pair.owner.wait(send).error is None
    pair.reader.wait_new(pid)
    pair.transfer(SOURCES, BLOCKS)


@pytest.mark.parametrize("side", ["owner", "reader"])
def test_killed_in_the_middle_of_the_bytes(side: str) -> None:
    """Of 64 MiB, as soon as the first layers are in flight: whole, or failed. What is in flight is nothing then."""
    blocks = range(64)
    with pair_of(owner_layout=LARGE, num_blocks=64, silence_timeout_seconds=1.0) as pair:
        number, send = pair.offer(blocks)
        receive = pair.receive(number, blocks, 64, slot=3)
        look(lambda: pair.reader.client.num_layers_in_flight(3) or pair.reader.is_answered(receive), 0.0002)
        pid = getattr(pair, side).pid()
        kill(pid)
        if pair.reader.wait(receive).error is None:
            pair.check(blocks, blocks)
        assert pair.owner.wait(send).error is None or pair.reader.wait(receive).error is not None
        getattr(pair, side).wait_new(pid)
        assert pair.reader.client.num_layers_in_flight(3) == 0


def test_counts_of_a_killed_reader_are_forgotten(pair: Pair) -> None:
    """What it had in flight is in flight no more once another process is in its place."""
    pair.reader.client._owner.peer_signals[0].count_in_flight(5, 7)  # as it left it
    pid = pair.reader.pid()
    kill(pid)
    pair.reader.wait_new(pid)
    assert pair.reader.client.num_layers_in_flight(5) == 0


def test_layers_that_were_marked_count_for_a_new_process(pair: Pair) -> None:
    """The step's word outlives the owner's process: who is started in the middle of a step knows of its layers."""
    pair.mark(50, 2)
    pid = pair.owner.pid()
    kill(pid)
    pair.owner.wait_new(pid)
    pair.compute(SOURCES, range(2))
    number, send = pair.send(SOURCES, 4, 0, step=50)
    receive = pair.receive(number, BLOCKS, 4, seconds=5.0)
    pair.look(receive, BLOCKS, SOURCES, range(2))
    pair.compute(SOURCES)
    pair.update(number, 4, 4)
    assert pair.reader.wait(receive).error is None
    assert pair.owner.wait(send).error is None


def test_a_stopped_owner_is_silent() -> None:
    """The receive ends by silence; when the owner goes on it hears that nobody reads any more."""
    with pair_of(silence_timeout_seconds=1.0) as pair:
        _, send, receive, complete = at(pair, 1)
        pid = pair.owner.pid()
        stopped(pid)
        complete()
        assert "silent" in pair.reader.error(receive)
        os.kill(pid, signal.SIGCONT)
        assert "silent" in pair.owner.error(send)
        assert pair.owner.pid() == pid
        pair.transfer(SOURCES, BLOCKS)


def test_a_stopped_reader_is_silent() -> None:
    """The offer ends by silence, its blocks are another's; when the reader goes on, what it reads does not count."""
    with pair_of(silence_timeout_seconds=1.0) as pair:
        _, send, receive, complete = at(pair, 1)
        pid = pair.reader.pid()
        stopped(pid)
        complete()
        assert "silent" in pair.owner.error(send)
        pair.overwrite(SOURCES)
        os.kill(pid, signal.SIGCONT)
        assert "gone" in pair.reader.error(receive)
        assert pair.reader.pid() == pid
        pair.transfer(SOURCES, BLOCKS)


@pytest.mark.parametrize("side", ["owner", "reader"])
def test_who_stays_stopped_is_killed_at_the_deadline(side: str) -> None:
    """Its tasks are answered once it is reaped; the other side ends by itself; another process takes its place."""
    with pair_of(silence_timeout_seconds=1.0) as pair:
        pair.compute(SOURCES[:2])
        number, send = pair.send(SOURCES[:2], 4, 2, seconds=1.5 if side == "owner" else 30.0)
        receive = pair.receive(number, BLOCKS, 4, seconds=1.5 if side == "reader" else 30.0)
        pair.look(receive, BLOCKS[:2], SOURCES[:2], range(NUM_LAYERS))
        pid = getattr(pair, side).pid()
        stopped(pid)
        errors = {"reader": pair.reader.error(receive), "owner": pair.owner.error(send)}
        assert "passed its deadline" in errors.pop(side)
        assert "silent" in next(iter(errors.values()))
        getattr(pair, side).wait_new(pid)
        pair.transfer(SOURCES, BLOCKS)
