"""Real peer processes of two instances: exact bytes, layer by layer, and an answer to everything that is asked."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import select
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.peer_channel import make_keys
from fastdeploy_cache.ipc.task_queue import TaskQueue
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.messages import Why
from fastdeploy_cache.transfer_manager.process.wire import FromProcess, StopMessage, TaskMessage
from fastdeploy_cache.transfer_manager.process.words import RankState
from fastdeploy_cache.transfer_manager.task import Lane, TaskKind, TransferTask
from tests.rigs.needs import need_mooncake, need_nixl
from tests.rigs.peer_rig import LAYOUT, NUM_BLOCKS, NUM_LAYERS, SECONDS, Instance, Pair, look, pair_of
from tests.rigs.storage_servers import free_port

pytestmark = pytest.mark.processes

SOURCES, BLOCKS = (3, 9, 4, 17, 0, 12), (20, 1, 7, 8, 22, 5)
FAILED = Why("failed", "the model fell over at layer 2")
STAGES = range(NUM_LAYERS + 1)  # layers of the second half that are computed


@pytest.fixture(scope="module")
def kept() -> Iterator[Pair]:
    with pair_of(2, 2) as pair:
        yield pair


@pytest.fixture
def shared(kept: Pair) -> Pair:
    """Two ranks each, for tests that end no process."""
    kept.wipe()
    return kept


def half_way(pair: Pair, stage: int) -> tuple[int, int, int]:
    """An offer of six blocks of which three are complete and three are at that layer, and the reader is as far.

    Returns the offer's number, and the tasks of owner and reader.
    """
    step = pair.owner.number()
    pair.compute(SOURCES[:3])
    number, send = pair.send(SOURCES, 6, 3, step)
    receive = pair.receive(number, BLOCKS, 6)
    pair.compute(SOURCES[3:], range(stage))
    pair.mark(step, stage)
    pair.look(receive, BLOCKS[:3], SOURCES[:3], range(NUM_LAYERS))
    pair.look(receive, BLOCKS[3:], SOURCES[3:], range(stage))
    return number, send, receive


def finish(pair: Pair, number: int) -> None:
    """The owner computes the rest."""
    pair.compute(SOURCES[3:])
    pair.update(number, 6, 6)


# bytes

LATENT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=12, value_head_dim=0, dtype="bfloat16")
SCALED = KVLayout(num_layers=2, num_kv_heads=4, head_dim=8, dtype="int4", scale_dtype="float16", heads_first=True)


@pytest.mark.parametrize(
    ("ranks", "layout", "reader_order"),
    [
        ((1, 1), LAYOUT, "layer_first"),
        ((2, 2), LATENT, "layer_first"),
        ((1, 2), LAYOUT, "block_first"),
        ((2, 1), SCALED, "layer_first"),
        ((4, 2), LAYOUT, "block_first"),
    ],
)
def test_bytes_are_exact(ranks: tuple[int, int], layout: KVLayout, reader_order: str) -> None:
    """Whatever the ranks on both sides, the layout, and how each side keeps it; blocks that were not asked for stay."""
    reader = dataclasses.replace(layout, device_order=reader_order)  # type: ignore[arg-type]
    with pair_of(*ranks, owner_layout=layout, reader_layout=reader) as pair:
        pair.transfer(SOURCES, BLOCKS)
        pair.compute(SOURCES[:2])
        number, send = pair.send(SOURCES[:4], 6, 2, step=8)
        receive = pair.receive(number, BLOCKS[1:], 6, first=1)
        for layer in range(layout.num_layers):
            pair.compute(SOURCES[2:4], [layer])
            pair.mark(8, layer + 1)
        pair.update(number, 6, 4, SOURCES[4:], step=9)
        pair.compute(SOURCES[4:])
        pair.update(number, 6, 6)
        received, sent = pair.reader.wait(receive), pair.owner.wait(send)
        assert (received.error, sent.error) == (None, None)
        assert sum(rank.num_bytes for rank in received.ranks) == sum(rank.num_bytes for rank in sent.ranks) > 0
        assert {rank.num_blocks for rank in received.ranks} == {5}
        assert {rank.peer for rank in sent.ranks} == {"tests"}
        pair.check(BLOCKS[1:], SOURCES[1:])


def test_layers_are_read_as_they_are_computed(shared: Pair) -> None:
    """Each layer is there before the next one is computed, and no byte of that one is."""
    step = shared.owner.number()
    blocks, sources = (2, 3, 4), (5, 6, 7)
    number, send = shared.send(sources, 3, 0, step)
    receive = shared.receive(number, blocks, 3)
    for layer in range(NUM_LAYERS):
        shared.compute(sources, [layer])
        shared.mark(step, layer + 1)
        shared.look(receive, blocks, sources, range(layer + 1))
        assert shared.are_untouched(blocks, range(layer + 1, NUM_LAYERS))
    assert not shared.reader.is_answered(receive) and not shared.owner.is_answered(send)
    shared.update(number, 3, 3)
    assert shared.reader.wait(receive).error is None
    assert shared.owner.wait(send).error is None
    shared.check(blocks, sources)
    look(lambda: shared.reader.client.num_layers_in_flight(0) == 0)


def test_many_receives_at_once(shared: Pair) -> None:
    """Twenty, each of its own offer: every one gets its own blocks."""
    offers = [shared.offer([n, n + 1]) for n in range(20)]
    receives = [shared.receive(number, [19 - n], 2, first=1, slot=n % 16) for n, (number, _) in enumerate(offers)]
    for n, (receive, (_, send)) in enumerate(zip(receives, offers, strict=True)):
        assert shared.reader.wait(receive).error is None
        assert shared.owner.wait(send).error is None
        shared.check([19 - n], [n + 1])


# when a receive begins


def test_a_receive_that_begins_first_waits_for_the_blocks(shared: Pair) -> None:
    """Nothing is computed, nor are the blocks known, when it begins."""
    number, send = shared.send([], 6, 0)
    receive = shared.receive(number, BLOCKS, 6)
    shared.compute(SOURCES)
    for n in range(6):
        shared.update(number, 6, n + 1, [SOURCES[n]])
    assert shared.reader.wait(receive).error is None
    assert shared.owner.wait(send).error is None
    shared.check(BLOCKS, SOURCES)


def test_an_offer_that_is_not_there_is_gone(shared: Pair) -> None:
    """It never was, or failed before anybody asked, or was read before: the receive is told, and does not wait."""
    never = shared.owner.number()
    number, send = shared.offer(SOURCES)
    assert "gone" in shared.reader.error(shared.receive(never, BLOCKS, 6))
    shared.owner.wait(shared.fail(number, FAILED))
    assert "failed: the model fell over" in shared.owner.error(send)
    assert "failed: the model fell over" in shared.reader.error(shared.receive(number, BLOCKS, 6))
    number, send = shared.offer(SOURCES)
    assert shared.reader.wait(shared.receive(number, BLOCKS, 6)).error is None
    assert "gone" in shared.reader.error(shared.receive(number, BLOCKS, 6))


def test_who_has_all_of_it_leaves(shared: Pair) -> None:
    """The offer ends well at once, though nothing was read."""
    number, send = shared.offer(SOURCES)
    receive = shared.receive(number, [], 6, first=6)
    assert shared.reader.wait(receive).error is None
    sent = shared.owner.wait(send)
    assert sent.error is None and sum(rank.num_bytes for rank in sent.ranks) == 0


def test_what_nobody_asks_for_ends_at_its_deadline(shared: Pair) -> None:
    """On every rank, and the processes go on."""
    pids = [shared.owner.pid(rank) for rank in range(2)]
    _, send = shared.send(SOURCES, 6, 0, seconds=1.0)
    result = shared.owner.wait(send)
    assert all(rank.error is not None and "late" in rank.error and "asked for" in rank.error for rank in result.ranks)
    assert pids == [shared.owner.pid(rank) for rank in range(2)]


def test_a_receive_of_what_is_never_computed_ends_at_its_deadline(shared: Pair) -> None:
    """Its words reach the owner, whose blocks need not wait for their own deadline."""
    number, send = shared.send(SOURCES[:3], 6, 3)
    receive = shared.receive(number, BLOCKS, 6, seconds=1.0)
    assert "late" in shared.reader.error(receive)
    assert "late" in shared.owner.error(send)


# the end of what is on its way


@pytest.mark.parametrize("stage", STAGES)
def test_the_reader_cancels(shared: Pair, stage: int) -> None:
    """At each layer: both tasks end, no deadline is waited for, the next transfer works."""
    _, send, receive = half_way(shared, stage)
    assert shared.reader.wait(shared.end_receive(receive)).error is None
    assert "cancelled" in shared.reader.error(receive)
    assert "cancelled" in shared.owner.error(send)
    shared.transfer(SOURCES, BLOCKS)


@pytest.mark.parametrize("why", [FAILED, Why("cancelled", "not wanted")])
@pytest.mark.parametrize("stage", STAGES)
def test_the_owner_gives_up(shared: Pair, stage: int, why: Why) -> None:
    """At each layer: the reader hears why; what the owner computes after that does not make it a success."""
    number, send, receive = half_way(shared, stage)
    shared.fail(number, why)
    finish(shared, number)
    assert f"{why.reason}: {why.text}" in shared.owner.error(send)
    assert f"{why.reason}: {why.text}" in shared.reader.error(receive)
    shared.transfer(SOURCES, BLOCKS)


def test_an_end_of_nothing_is_answered(shared: Pair) -> None:
    """Of a receive that has ended, and of an offer that never was."""
    assert shared.reader.wait(shared.end_receive(10**6)).error is None
    assert shared.owner.wait(shared.update(10**6, 6, 6)).error is None
    assert shared.owner.wait(shared.fail(10**6, FAILED)).error is None


def test_a_second_receive_takes_over(shared: Pair) -> None:
    """The first one's engine has forgotten it: its late farewell ends nothing."""
    number, send, first = half_way(shared, 1)
    second = shared.receive(number, (10, 11, 13, 14, 15, 16), 6)
    shared.look(second, (10, 11, 13), SOURCES[:3], range(NUM_LAYERS))
    shared.reader.wait(shared.end_receive(first))
    assert "cancelled" in shared.reader.error(first)
    finish(shared, number)
    assert shared.reader.wait(second).error is None
    assert shared.owner.wait(send).error is None
    shared.check((10, 11, 13, 14, 15, 16), SOURCES)


# other links, other hosts


@pytest.fixture
def networked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "nixl":
        need_nixl()
    if request.param == "mooncake":
        need_mooncake()
    monkeypatch.setenv("UCX_MODULES", "^ib")  # they bring a libnl of their own, which ends the process at its end
    with pair_of(2, 1, link=request.param, silence_timeout_seconds=2.0) as pair:
        yield pair


@pytest.mark.parametrize("networked", ["nixl", "mooncake"], indirect=True)
def test_other_links(networked: Pair) -> None:
    """Bytes, layers, a cancel, an owner that gives up, and its death, after which the next one is read."""
    number, send, receive = half_way(networked, 1)
    finish(networked, number)
    assert networked.reader.wait(receive).error is None
    assert networked.owner.wait(send).error is None
    networked.check(BLOCKS, SOURCES)
    networked.wipe()
    _, send, receive = half_way(networked, 2)
    networked.end_receive(receive)
    assert "cancelled" in networked.reader.error(receive)
    networked.wipe()
    number, send, receive = half_way(networked, 0)
    networked.fail(number, FAILED)
    assert "fell over" in networked.reader.error(receive)
    networked.wipe()
    number, send, receive = half_way(networked, 1)
    pid = networked.owner.pid(1)
    os.kill(pid, 9)
    assert networked.owner.error(send)
    assert networked.reader.error(receive)
    networked.owner.wait_new(pid, 1)
    assert networked.reader.client.wait_ready(SECONDS)  # a link may have ended the reader's process, too
    networked.transfer(SOURCES, BLOCKS)


def tcp(keys: Path) -> dict[str, str]:
    return {"listen": f"tcp://127.0.0.1:{free_port()}", "keys_folder": str(keys)}


def test_over_tcp_with_keys(tmp_path: Path) -> None:
    """Both sides trust each other's key: the same bytes."""
    public = {side: make_keys(tmp_path / side) for side in ("owner", "reader")}
    for side, other in (("owner", "reader"), ("reader", "owner")):
        (tmp_path / side / "trusted" / f"{other}.key").write_bytes(public[other].read_bytes())
    with pair_of(owner=tcp(tmp_path / "owner"), reader=tcp(tmp_path / "reader")) as pair:
        pair.transfer(SOURCES, BLOCKS)


def test_strangers_get_nothing(tmp_path: Path) -> None:
    """A reader whose key the owner does not have: it waits for an answer as long as for any that is silent."""
    public = {side: make_keys(tmp_path / side) for side in ("owner", "reader")}
    (tmp_path / "reader" / "trusted" / "owner.key").write_bytes(public["owner"].read_bytes())
    with pair_of(silence_timeout_seconds=1.0, owner=tcp(tmp_path / "owner"), reader=tcp(tmp_path / "reader")) as pair:
        number, send = pair.offer(SOURCES)
        assert "gone" in pair.reader.error(pair.receive(number, BLOCKS, 6))
        assert not pair.owner.is_answered(send)
        assert pair.are_untouched(BLOCKS, range(NUM_LAYERS))


# the end


def test_a_process_ends_when_every_lane_was_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the engine held up between two lanes it goes on with the second; it ends in order, and no log says else."""
    side = Instance(1, LAYOUT, NUM_BLOCKS, {})
    assert side.client._processes.io is not None
    (rank,), (words,) = side.client._processes.io.ranks, side.client._owner.signals
    last = [*Lane][-1]
    put, answers, nothing = TaskQueue.put, [], np.array([], np.int32)
    task = TransferTask(
        task_id=999, kind=TaskKind.SWAP_OUT, source_ids=nothing, destination_ids=nothing, deadline=math.inf
    )

    def put_late(queue: TaskQueue, message: bytes, lane: int = 0) -> None:
        if lane == last and message == encode(StopMessage()):
            look(lambda: words.state is RankState.STOPPING)  # it has read the other lane's
            put(queue, encode(TaskMessage(rank.incarnation, task)), last)
            if select.select([queue.fd], [], [], SECONDS / 3)[0]:
                answers.append(decode(queue.get() or b"", FromProcess))
        put(queue, message, lane)

    monkeypatch.setattr(TaskQueue, "put", put_late)
    side.close()
    assert ["does not swap_out" in str(answer) for answer in answers] == [True]
    assert rank.exit_code == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
