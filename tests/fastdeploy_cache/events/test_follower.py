"""The follower alone: what it asks, and when it believes."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.follower import Follower, FollowState, ReplayFrom
from fastdeploy_cache.events.index import BlockIndex
from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.events.questions import (
    Answer,
    AskPiece,
    AskSnapshot,
    AskState,
    PublisherState,
    Refusal,
    SnapshotPiece,
)
from fastdeploy_cache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch
from fastdeploy_cache.ipc.codec import decode, encode

_SCHEME = NameScheme(block_size=4)


def stored(*names: bytes) -> bytes:
    event = BlockStored(
        block_hashes=[*names], medium="GPU", parent_block_hash=None, token_ids=[], block_size=4, lora_id=None,
        lora_name=None,
    )  # fmt: skip
    return encode_batch(0.0, [event], 0)


def state(follower: Follower, *, epoch: int = 7, sequence: int = 0, snapshot: int | None = None) -> None:
    question = follower.take_question()
    assert isinstance(question, AskState | AskSnapshot)
    follower.on_answer(
        PublisherState(
            number=question.number, epoch=epoch, sequence=sequence, scheme=_SCHEME, heartbeat_seconds=1.0,
            snapshot=snapshot,
        )
    )  # fmt: skip


def current(sequence: int = 3) -> Follower:
    """One that has taken a snapshot with block `a`."""
    follower = Follower()
    state(follower, sequence=sequence, snapshot=1)
    piece = follower.take_question()
    assert isinstance(piece, AskPiece)
    follower.on_answer(SnapshotPiece(number=piece.number, snapshot=1, piece=0, payload=stored(b"a"), is_last=True))
    assert follower.is_current
    return follower


def test_a_gap_is_closed_by_a_replay() -> None:
    """It is not current meanwhile; what came meanwhile is taken in behind what was missing."""
    follower = current(3)
    follower.on_message(5, stored(b"c"))
    assert not follower.is_current and follower.take_question() == ReplayFrom(3)
    follower.on_message(6, stored(b"d"))
    for sequence, name in ((3, b"x"), (4, b"b"), (5, b"c")):
        follower.on_replayed(sequence, stored(name))
    follower.on_replay_end()
    assert not follower.is_current, "another publisher may have answered"
    state(follower, sequence=7)
    assert follower.is_current and follower.last_sequence == 6
    assert set(follower.index.blocks) == {b"a", b"x", b"b", b"c", b"d"}


def test_a_gap_that_nobody_can_close_ends_in_a_snapshot() -> None:
    """What was known counts no more."""
    follower = current(3)
    follower.on_message(50, stored(b"c"))
    follower.on_replayed(40, stored(b"b"))
    assert follower.state is FollowState.LOST and not follower.index.blocks
    assert isinstance(follower.take_question(), AskSnapshot)


def test_a_message_that_comes_twice_changes_nothing() -> None:
    """It asks whether the publisher is the same, and goes on."""
    follower = current(3)
    follower.on_message(2, stored(b"old"))
    assert not follower.is_current
    state(follower, sequence=3)
    assert follower.is_current and set(follower.index.blocks) == {b"a"}


def test_another_epoch_is_another_publisher() -> None:
    """Nothing of the old one is believed."""
    follower = current(3)
    follower.on_message(0, stored(b"new"))
    state(follower, epoch=8, sequence=1)
    assert follower.state is FollowState.LOST and not follower.index.blocks


def test_silence_asks_and_finds_what_was_lost() -> None:
    """A publisher that has sent more than came is asked for that again."""
    follower = current(3)
    follower.on_silence()
    state(follower, sequence=4)
    assert follower.take_question() == ReplayFrom(3)
    follower.on_silence()
    assert follower.state is FollowState.LOST


def test_damage_is_a_loss() -> None:
    """A payload that is none, a piece out of turn, and a refusal."""
    for harm in range(3):
        follower = current(3)
        if harm == 0:
            follower.on_message(3, b"\xc1nonsense")
        elif harm == 1:
            follower.on_disconnected()
            state(follower, snapshot=1)
            piece = follower.take_question()
            assert isinstance(piece, AskPiece)
            follower.on_answer(SnapshotPiece(number=piece.number, snapshot=1, piece=9, payload=b"", is_last=True))
        else:
            follower.on_silence()
            question = follower.take_question()
            assert isinstance(question, AskState)
            follower.on_answer(Refusal(number=question.number, reason="no"))
            assert follower.is_refused and follower.take_question() is None
            follower.on_silence()
        assert follower.state is FollowState.LOST and isinstance(follower.take_question(), AskSnapshot)


@pytest.mark.parametrize(
    "lie", [{"sequence": -5}, {"heartbeat_seconds": -1.0}, {"scheme": NameScheme(block_size=0)}, {"epoch": "x"}]
)
def test_lies_are_no_answers(lie: dict[str, Any]) -> None:
    """What no publisher says is not read at all; a time that is no number is refused behind that."""
    said: dict[str, Any] = {"number": 1, "epoch": 7, "sequence": 0, "scheme": _SCHEME, "heartbeat_seconds": 1.0}
    with pytest.raises(CodecError):
        decode(encode(PublisherState(**{**said, **lie})), Answer)
    follower = Follower()
    question = follower.take_question()
    assert isinstance(question, AskSnapshot)
    said |= {"number": question.number, "heartbeat_seconds": float("nan")}
    follower.on_answer(PublisherState(**said, snapshot=1))
    assert follower.state is FollowState.LOST and follower.is_refused


def test_too_much_that_is_held_is_dropped() -> None:
    """Who gets no answer does not grow for ever."""
    follower = Follower()
    for sequence in range(30_000):
        follower.on_message(sequence, b"")
    assert len(follower._held) <= 10_000


def test_a_hybrid_model_goes_on_at_checkpoints_alone() -> None:
    """Full KV without one is nothing; a window and a state are asked for where they are read."""
    names = [b"%d" % number for number in range(4)]
    index = BlockIndex({1: ("sliding_window", 6), 2: ("mamba", 0)})
    plain = {"parent_block_hash": None, "token_ids": [], "block_size": 4, "lora_id": None, "lora_name": None}
    index.apply(BlockStored(block_hashes=names, medium="GPU", group_idx=0, **plain))
    assert index.find(names, 4).num_tokens == 0
    index.apply(BlockStored(block_hashes=names[1:3], medium="GPU", group_idx=1, **plain))
    assert index.find(names, 4).num_tokens == 0
    index.apply(BlockStored(block_hashes=names[2:3], medium="CPU", group_idx=2, **plain))
    assert index.find(names, 4).num_tokens == 12
    index.apply(BlockRemoved(block_hashes=names[1:2], medium="GPU", group_idx=1))
    assert index.find(names, 4).num_tokens == 0


def test_events_of_the_index() -> None:
    """Media apart; clearing; a medium of somebody else's; names twice."""
    index = current().index
    remove = BlockRemoved(block_hashes=[b"a", b"b"], medium="CPU")
    index.apply(remove)
    assert index.num_blocks("GPU") == 1 and index.num_blocks("CPU") == 0
    index.apply(BlockRemoved(block_hashes=[b"a"], medium="TAPE"))
    assert index.find([b"a", b"z"], 4).num_gpu_tokens == 4
    index.apply(AllBlocksCleared())
    assert index.find([b"a"], 4).num_tokens == 0 and index.num_blocks("GPU") == 0
