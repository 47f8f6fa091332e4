"""The offers of one rank: who hears what of them, and what counts as read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.ipc.codec import unpack_int32
from fastdeploy_cache.transfer_manager.peer.messages import Chunk, Confirmed, Leave, SendKey, SendState
from fastdeploy_cache.transfer_manager.peer.sender import SendEnd
from tests.rigs.sender_stage import (
    DEADLINE,
    OTHER,
    OVER,
    OWNER,
    SILENCE,
    Stage,
    reason,
    said,
)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_reader_hears_all_there_is_and_then_what_is_new(stage: Stage) -> None:
    """Ids once, blocks and layers as they are computed, nothing where nothing has changed."""
    stage.begin(10, 11, complete=1, step=5)
    assert not stage.heard()
    stage.subscribe(stage.reader())
    assert said(stage.state()) == (0, [10, 11], 1, (Chunk(2, 0),))
    stage.mark(5, 2)
    assert said(stage.state()) == (2, [], 1, (Chunk(2, 2),))
    stage.mark(5, 2)
    assert not stage.heard()
    stage.update(12, 13, complete=2, step=6)
    assert said(stage.state()) == (2, [12, 13], 2, (Chunk(4, 0),))
    stage.mark(6, 4)
    assert said(stage.state()) == (4, [], 2, (Chunk(4, 4),))
    stage.update(complete=4)
    assert said(stage.state()) == (4, [], 4, ())
    stage.mark(7, 1)
    assert not stage.heard()


def test_layers_of_another_step_say_nothing(stage: Stage) -> None:
    """A later step does not mean that the earlier one has ended well; an earlier one nothing at all."""
    stage.begin(10, 11, 12, complete=0, step=5)
    stage.subscribe(stage.reader())
    stage.heard()
    for other in (4, 6, 5 + 2**19):
        stage.mark(other, 4)
        assert not stage.heard()


def test_layers_that_were_marked_before_the_offer_count(stage: Stage) -> None:
    """The step's word may come first."""
    stage.mark(5, 3)
    stage.begin(10, 11, complete=0, step=5)
    stage.subscribe(stage.reader())
    assert said(stage.state()) == (0, [10, 11], 0, (Chunk(2, 3),))


def test_pieces_of_several_steps_are_told_in_order(stage: Stage) -> None:
    """A step that computes nothing new names no piece of its own."""
    stage.begin(10, step=5)
    stage.update(11, 12, step=6)
    stage.update(step=7)
    stage.mark(6, 1)
    stage.subscribe(stage.reader())
    assert said(stage.state()) == (0, [10, 11, 12], 0, (Chunk(1, 0), Chunk(3, 1)))
    stage.update(13, complete=1, step=8)
    assert said(stage.state()) == (3, [13], 1, (Chunk(3, 1), Chunk(4, 0)))


@pytest.mark.parametrize(("known", "told"), [(0, [10, 11, 12]), (2, [12]), (3, []), (9, [])])
def test_who_asks_again_hears_from_where_it_is(stage: Stage, known: int, told: list[int]) -> None:
    """A state was lost on the way, or the reader has the first blocks already and names those not at all."""
    stage.begin(10, 11, 12, complete=3)
    stage.subscribe(stage.reader())
    stage.heard()
    stage.subscribe(stage.reader(), known=known)
    assert said(stage.state()) == (min(known, 3), told, 3, ())


@given(st.data())
def test_a_reader_that_misses_messages_gets_every_id_by_asking(data: st.DataObject) -> None:
    """It takes what joins on to what it has, as a receive does; what it then knows is what was sent."""
    stage = Stage()
    known: list[int] = []
    sent: list[int] = []
    stage.begin()
    stage.subscribe(stage.reader())
    stage.heard()
    for index in range(4):
        sent.append(index + 50)
        stage.update(index + 50, complete=index + 1)
        if data.draw(st.booleans()):
            stage.subscribe(stage.reader(), known=len(known))
        for _, message in stage.heard():
            assert isinstance(message, SendState)
            if data.draw(st.booleans()) and message.first_id <= len(known):
                known += unpack_int32(message.block_ids).tolist()[len(known) - message.first_id :]
        assert known == sent[: len(known)]
    stage.subscribe(stage.reader(), known=len(known))
    first, ids, complete, _ = said(stage.state())
    assert known[:first] + ids == sent and complete == 4


def test_it_ends_well_once_all_readers_have_confirmed(stage: Stage) -> None:
    """Two ranks read: the first confirmation ends nothing, bytes are counted together."""
    stage.begin(10, 11, 12, 13, complete=4)
    for rank in (0, 1):
        stage.subscribe(stage.reader(rank), readers=2)
    assert stage.confirm(stage.reader(0), 10) == Confirmed(stage.key, stage.reader(0))
    assert not stage.ends() and stage.sender.has_sends
    assert stage.confirm(stage.reader(1), 30) == Confirmed(stage.key, stage.reader(1))
    assert stage.ends() == [SendEnd(70, 40, 4, None, "decode")]
    assert not stage.sender.has_sends and not stage.ends()


def test_the_first_reader_alone_does_not_end_it(stage: Stage) -> None:
    """It was fast: the second one has not even asked yet."""
    stage.begin(10, 11, 12, 13, complete=4)
    stage.subscribe(stage.reader(0), readers=2)
    stage.confirm(stage.reader(0))
    assert not stage.ends()


def test_a_doubled_confirm_is_answered_again(stage: Stage) -> None:
    """The first answer was lost; before and after the send's end; and it counts once."""
    stage.begin(10, 11, 12, 13, complete=4)
    for rank in (0, 1):
        stage.subscribe(stage.reader(rank), readers=2)
    for _ in range(2):
        assert isinstance(stage.confirm(stage.reader(0)), Confirmed)
    assert not stage.ends()
    stage.confirm(stage.reader(1))
    assert stage.ends()[0].num_bytes == 20
    for rank in (0, 1):
        assert isinstance(stage.confirm(stage.reader(rank), to=b"new"), Confirmed)


def test_confirms_are_not_believed_before_everything_is_there(stage: Stage) -> None:
    """Blocks that are not complete, or not named, cannot have been read."""
    stage.begin(10, 11, 12, complete=3)
    stage.subscribe(stage.reader())
    assert reason(stage.confirm(stage.reader())) == "gone"
    stage.update(13, complete=3)
    assert reason(stage.confirm(stage.reader())) == "gone"
    assert not stage.ends()
    stage.update(complete=4)
    assert isinstance(stage.confirm(stage.reader()), Confirmed)


@pytest.mark.parametrize("ending", ["why", "late", "silent", "left", "stopped"])
def test_confirms_of_blocks_that_are_held_no_more_are_refused(stage: Stage, ending: str) -> None:
    """However the send has ended: its blocks may have been another's while they were read."""
    stage.begin(10, 11, 12, 13, complete=4)
    stage.subscribe(stage.reader())
    if ending == "why":
        stage.update(why=OVER)
    elif ending == "left":
        stage.sender.leave(Leave(stage.key, stage.reader(), OVER))
    elif ending == "stopped":
        stage.sender.stop()
    else:
        stage.sender.tick(DEADLINE + 1 if ending == "late" else SILENCE + 1)
    ((task_id, num_bytes, num_blocks, why),) = [(e.task_id, e.num_bytes, e.num_blocks, e.why) for e in stage.ends()]
    assert (task_id, num_bytes, num_blocks) == (70, 0, 0) and why is not None
    assert reason(stage.confirm(stage.reader())) == "gone"
    assert not stage.ends()


def test_confirms_of_strangers_are_refused(stage: Stage) -> None:
    """Another receive, another instance, another rank, another run of the owner, another offer."""
    stage.begin(10, 11, 12, 13, complete=4)
    stage.subscribe(stage.reader())
    for reader in (stage.reader(receive=2), stage.reader(instance=OTHER), stage.reader(rank=1)):
        assert reason(stage.confirm(reader)) == "gone"
    for key in (SendKey(OTHER, 7), SendKey(OWNER, 6), SendKey(OWNER, 8)):
        stage.key = key
        assert reason(stage.confirm(stage.reader())) == "gone"
    assert not stage.ends()


@pytest.mark.parametrize("key", [SendKey(OWNER, 6), SendKey(OTHER, 7), SendKey(OTHER, 8)])
def test_who_asks_for_what_is_not_here_is_told(stage: Stage, key: SendKey) -> None:
    """An offer that is over, or of an earlier run of the instance."""
    stage.begin(10)
    stage.key = key
    stage.subscribe(stage.reader())
    assert reason(stage.state()) == "gone"
    assert not stage.ends() and stage.sender.has_sends


def test_a_second_receive_takes_over(stage: Stage) -> None:
    """What the first one has read and confirmed does not count for it; its farewell ends nothing."""
    stage.begin(10, 11, 12, 13, complete=4)
    old, new = stage.reader(receive=1), stage.reader(receive=2)
    stage.subscribe(old, readers=2)
    stage.confirm(old)
    stage.subscribe(new, to=b"second")
    assert said(stage.state())[1] == [10, 11, 12, 13]
    stage.sender.leave(Leave(stage.key, old, OVER))
    assert reason(stage.confirm(stage.reader(rank=1, receive=1))) == "gone"
    assert not stage.ends()
    stage.update(complete=4)
    assert not stage.heard()
    assert isinstance(stage.confirm(new, to=b"second"), Confirmed)
    assert [end.why for end in stage.ends()] == [None]


def test_a_reader_that_comes_again_is_answered_where_it_is_now(stage: Stage) -> None:
    """Its connection is another one; there is still one reader."""
    stage.begin(10, 11, complete=2)
    stage.subscribe(stage.reader(), to=b"old")
    stage.subscribe(stage.reader(), known=2, to=b"new")
    stage.heard()
    stage.update(12, 13, complete=4)
    assert [to for to, _ in stage.heard()] == [b"new"]
    stage.confirm(stage.reader())
    assert len(stage.ends()) == 1


def test_a_checkpoint_is_told_once_it_is_there() -> None:
    """Behind all blocks, also one of no units; and again to who asks again."""
    for units in (b"units", b""):
        stage = Stage(has_rows=True)
        stage.begin(10, 11, 12, 13, complete=4)
        stage.subscribe(stage.reader())
        assert stage.state().units is None
        stage.update(complete=4, units=units)
        assert stage.state().units == units
        stage.update(complete=4, units=units)
        assert not stage.heard()
        stage.subscribe(stage.reader(), known=4)
        assert stage.state().units == units


def test_what_lacks_its_checkpoint_is_not_confirmed() -> None:
    """All blocks are there, and nobody could go on behind them."""
    stage = Stage(has_rows=True)
    stage.begin(10, 11, 12, 13, complete=4)
    stage.subscribe(stage.reader())
    assert reason(stage.confirm(stage.reader())) == "gone"
    stage.update(complete=4, units=b"")
    assert isinstance(stage.confirm(stage.reader()), Confirmed)
    assert [end.why for end in stage.ends()] == [None]
