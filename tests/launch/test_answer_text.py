"""The text of an answer as its tokens come: characters and stop texts that are cut between them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server.answer_text import AnswerText


class Bytes(ChatTokenizer):
    """A token is a byte."""

    def __init__(self) -> None:
        pass

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def said(text: str, stops: Sequence[str]) -> tuple[list[str], AnswerText]:
    """The pieces that are said, up to where the answer stops."""
    answer, pieces = AnswerText(Bytes(), stops), list[str]()
    for token in text.encode():
        pieces.append(answer.push(token))
        if answer.has_stopped:
            break
    return [*pieces, answer.finish()], answer


@pytest.mark.parametrize(
    ("text", "stops", "whole", "num_tokens"),
    [
        ("all of it", [], "all of it", None),
        ("all of it", ["never"], "all of it", None),
        ("one. two. three", ["."], "one", 4),
        ("one, two", ["two", "wo"], "one, ", 8),
        ("one, two", ["two", "one"], "", 3),
        ("aaab", ["aab"], "a", 4),
        ("ends with the begin", ["ginger"], "ends with the begin", None),
        ("\u4e2d\u6587\u5b57", ["\u6587"], "\u4e2d", 6),
        ("a\n\nb", ["\n\n"], "a", 3),
    ],
)
def test_an_answer_ends_before_the_first_stop_text(
    text: str, stops: list[str], whole: str, num_tokens: int | None
) -> None:
    """Nothing of the stop text is said, not even its begin; what only looked like one is said after all."""
    pieces, answer = said(text, stops)
    assert "".join(pieces) == whole
    assert answer.has_stopped is (num_tokens is not None)
    assert answer.num_tokens == (num_tokens if num_tokens is not None else len(text.encode()))


def test_text_that_can_be_no_stop_text_is_not_held_back() -> None:
    """Each piece is said as soon as nothing that follows could make it a part of one."""
    assert said("ab,c", [",d"])[0] == ["a", "b", "", ",c", ""]
    assert said("x\u4e2d", [])[0] == ["x", "", "", "\u4e2d", ""]


def test_half_a_character_at_the_end_is_said_as_such() -> None:
    """An answer that was cut by its length may end within one."""
    answer = AnswerText(Bytes(), ["b"])
    assert [answer.push(token) for token in (*b"a", 0xE4)] == ["a", ""]
    assert answer.finish() == "\ufffd" and not answer.has_stopped
