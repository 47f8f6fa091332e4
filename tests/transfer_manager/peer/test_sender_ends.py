"""The offers of one rank: when each begins and is over, and who comes too early or too late."""

from __future__ import annotations

import pytest

from fastdeploy_cache.transfer_manager.peer.messages import Leave, SendKey, SendState, Why
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
    word,
)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_who_asks_for_what_has_failed_hears_why(stage: Stage) -> None:
    """As those who were there at the end."""
    stage.begin(10)
    stage.update(why=OVER)
    stage.subscribe(stage.reader())
    assert stage.state().why == OVER


def test_a_reader_may_be_faster_than_the_offers_task(stage: Stage) -> None:
    """Nothing is said to it before; then all, and its silence counts from there."""
    for rank in (0, 1):
        stage.subscribe(stage.reader(rank), readers=2, to=b"c%d" % rank)
    assert not stage.heard()
    stage.begin(10, 11, complete=2, now=50.0)
    heard = dict(stage.heard())
    assert set(heard) == {b"c0", b"c1"}
    assert all(isinstance(m, SendState) and said(m) == (0, [10, 11], 2, ()) for m in heard.values())
    stage.sender.tick(50.0 + SILENCE)
    assert not stage.ends()


def test_what_is_skipped_is_over(stage: Stage) -> None:
    """A reader of an offer whose task never came hears so with the next one's."""
    stage.key = SendKey(OWNER, 5)
    stage.subscribe(stage.reader())
    stage.begin(10)
    ((_, message),) = stage.heard()
    assert reason(message) == "gone"


def test_a_reader_that_has_left_before_the_offers_task_is_forgotten(stage: Stage) -> None:
    """It asked, and was cancelled: the offer is bound to nobody who would then be missed, or is over by its word."""
    stage.subscribe(stage.reader())
    stage.sender.leave(Leave(stage.key, stage.reader(), OVER))
    stage.begin(10, now=50.0)
    stage.sender.tick(50.0 + SILENCE + 1)
    assert [end.why for end in stage.ends()] in ([], [OVER])


def test_who_has_it_all_may_say_so_before_the_offers_task(stage: Stage) -> None:
    """That is said once, and nobody else will ask: the offer would hold its blocks until its deadline."""
    stage.sender.leave(Leave(stage.key, stage.reader(), None))
    stage.begin(10, now=50.0)
    assert [end.why for end in stage.ends()] == [None]


def test_leaving_ends_the_send_for_all(stage: Stage) -> None:
    """With the reader's own words, which the other readers hear, too."""
    stage.begin(10)
    for rank in (0, 1):
        stage.subscribe(stage.reader(rank), readers=2, to=b"c%d" % rank)
    stage.heard()
    stage.sender.leave(Leave(stage.key, stage.reader(1), OVER))
    assert {to for to, message in stage.heard() if reason(message) == "cancelled"} == {b"c0", b"c1"}
    assert [end.why for end in stage.ends()] == [OVER]


@pytest.mark.parametrize(("why", "num_blocks"), [(None, 4), (OVER, 0)])
def test_leaving_before_asking(stage: Stage, why: Why | None, num_blocks: int) -> None:
    """The reader has all of it already, or does not want it: both end it, one of them well."""
    stage.begin(10)
    stage.sender.leave(Leave(SendKey(OTHER, 7), stage.reader(), why))
    assert not stage.ends()
    stage.sender.leave(Leave(stage.key, stage.reader(), why))
    assert stage.ends() == [SendEnd(70, 0, num_blocks, why, "")]


def test_time(stage: Stage) -> None:
    """Nothing happens until the deadline; then it says whether anybody had asked."""
    stage.begin(10)
    stage.sender.tick(DEADLINE)
    assert not stage.ends()
    stage.sender.tick(DEADLINE + 0.1)
    (end,) = stage.ends()
    assert end.why is not None and end.why.reason == "late" and "asked for" in end.why.text
    stage.begin(10)
    stage.subscribe(stage.reader(), now=DEADLINE)
    stage.sender.tick(DEADLINE + 0.1)
    (end,) = stage.ends()
    assert end.why is not None and "read to the end" in end.why.text
    assert reason(stage.heard()[-1][1]) == "late"


def test_a_silent_reader_ends_it(stage: Stage) -> None:
    """Asking again is a sign of life; one that has confirmed need not give any; which rank it was is said."""
    stage.begin(10, 11, 12, 13, complete=4)
    for rank in (0, 1):
        stage.subscribe(stage.reader(rank), readers=2)
    stage.confirm(stage.reader(0))
    stage.subscribe(stage.reader(1), known=4, now=SILENCE)
    stage.sender.tick(2 * SILENCE)
    assert not stage.ends()
    stage.sender.tick(2 * SILENCE + 0.1)
    (end,) = stage.ends()
    assert end.why is not None and end.why.reason == "gone" and "rank 1" in end.why.text


def test_updates_after_the_end_are_nothing(stage: Stage) -> None:
    """The engine cannot know yet that a reader has left."""
    stage.begin(10)
    stage.sender.leave(Leave(stage.key, stage.reader(), OVER))
    stage.ends()
    stage.update(11, 12, 13, complete=4)
    stage.update(why=OVER)
    stage.mark(1, 1)
    stage.sender.tick(DEADLINE + 1)
    assert not stage.ends() and not stage.heard() and not stage.sender.has_sends


def test_a_failure_says_at_which_layer(stage: Stage) -> None:
    """Of the step that was computing; readers hear it, too."""
    stage.begin(10, 11, complete=1, step=5)
    stage.subscribe(stage.reader())
    stage.mark(5, 3)
    stage.heard()
    stage.update(why=Why("failed", "the model fell over"))
    (end,) = stage.ends()
    assert end.why is not None and end.why == stage.state().why
    assert end.why.text.startswith("the model fell over") and "at layer 3 of 4" in end.why.text


def test_a_failure_names_layers_that_readers_have_not_heard_of(stage: Stage) -> None:
    """The model marked layers and the request ended, both since readers were last told of the step."""
    stage.begin(10, 11, complete=1, step=5)
    stage.subscribe(stage.reader())
    stage.step_word = word(5, 3)
    stage.update(why=Why("failed", "the model fell over"))
    (end,) = stage.ends()
    assert end.why is not None and "at layer 3 of 4" in end.why.text


def test_a_stopped_instance_says_so(stage: Stage) -> None:
    """To all readers at once."""
    stage.begin(10)
    stage.subscribe(stage.reader())
    stage.heard()
    stage.sender.stop()
    assert reason(stage.state()) == "gone"
    assert [end.task_id for end in stage.ends()] == [70]
