"""Packing of token ids: every form that is taken, every one that is refused, with the native part and without."""

from __future__ import annotations

import decimal
import enum
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.books.tokens import IS_NATIVE, PackedTokens, Packer, pack, pack_plain, pack_plain_in_python
from fastdeploy_cache.errors import RequestError

WANTED = np.array([5, 0, 2**31 - 1], dtype="<i4").tobytes()
LENGTHS = (1, 2, 16, 17, 2048, 2049, 5000)  # around what is packed in another way
native = pytest.param(pack_plain, id="native", marks=pytest.mark.skipif(not IS_NATIVE, reason="it was not built here"))
PACKERS = [pytest.param(pack_plain_in_python, id="python"), native]


class Level(enum.IntEnum):
    """An integer that is none of the plain ones."""

    LOW = 5


class Index:
    """It has `__index__`, like an integer, and is none."""

    def __index__(self) -> int:
        return 5


class Lookalike(Index):
    """Adds and compares like an integer, too."""

    def __add__(self, other: int) -> int:
        return 5 + other

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        return other == 5

    def __hash__(self) -> int:
        return 5


class Numbers(list):  # type: ignore[type-arg]
    """A list by another name."""


def by_numpy(token_ids: object) -> None:
    """A packer that leaves every decision to the slow way."""


def outcome(token_ids: Any, packer: Packer) -> bytes | str:
    """The tokens, or what is said of them."""
    try:
        return pack("a", token_ids, packer)
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    "tokens",
    [
        [5, 0, 2**31 - 1],
        (5, 0, 2**31 - 1),
        Numbers([5, 0, 2**31 - 1]),
        [Level.LOW, False, np.int32(2**31 - 1)],
        np.array([5, 0, 2**31 - 1], np.int32),
        np.array([5, 0, 2**31 - 1], ">i4"),
        np.array([5, 0, 2**31 - 1], np.uint64),
        np.array([5, 9, 0, 9, 2**31 - 1, 9], np.int64)[::2],
        np.array([5, 9, 0, 9, 2**31 - 1, 9], np.int32)[::2],
        array("i", [5, 0, 2**31 - 1]),
        array("q", [5, 0, 2**31 - 1]),
        PackedTokens(WANTED),
    ],
)
def test_all_forms_are_the_same(tokens: Any, packer: Packer) -> None:
    """All forms of the same tokens are packed alike."""
    assert pack("a", tokens, packer) == WANTED


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("empty", [[], (), array("i"), np.empty(0, np.int32), np.empty(0)])
def test_nothing_is_packed_as_nothing(empty: Any, packer: Packer) -> None:
    """No tokens of any form are no bytes."""
    assert pack("a", empty, packer) == b""


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (-3, "token id -3"),
        (2**31, f"token id {2**31}"),
        (2**63, f"token id {2**63}"),
        (2**70, f"token id {2**70}"),
        (-(2**70), f"token id {-(2**70)}"),
        (1.5, "float64"),
        (None, "object"),
        ("a", "of type"),
        (Index(), "object"),
        (Lookalike(), "object"),
        (decimal.Decimal(3), "object"),
        ([1, 2], "shape|flat list"),
    ],
)
def test_one_bad_token_is_refused_wherever_it_is(bad: object, words: str, num_tokens: int, packer: Packer) -> None:
    """The first, the middle or the last token of a list of any length is refused, and named where it is a number."""
    for place in (0, num_tokens // 2, num_tokens - 1):
        tokens: list[Any] = [7] * num_tokens
        tokens[place] = bad
        with pytest.raises(RequestError, match=words):
            pack("a", tokens, packer)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([2**63, -1], f"token id {2**63}"),
        ([5, np.uint64(7)], "float64"),
        (array("d", [1.0]), "float64"),
        ([[1], [2, 3]], "flat list"),
        ([[1, 2]], "shape"),
        ([True], "bool"),
        ([True] * 100, "bool"),
        (np.array(5), "shape"),
        (np.array([1, -1], np.int32), "token id -1"),
        (np.array([1, -1] * 400, np.int32), "token id -1"),
        (np.array([2**31], np.uint32), f"token id {2**31}"),
        (None, "shape"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(tokens: Any, words: str, packer: Packer) -> None:
    """The error names the request, and what is wrong."""
    with pytest.raises(RequestError, match=words) as caught:
        pack("of mine", tokens, packer)
    assert "request 'of mine'" in str(caught.value)


EDGES = st.sampled_from([0, 2**15, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -1, -(2**63), 2**70])
ODD = st.sampled_from([Level.LOW, Index(), Lookalike(), 1j, np.int8(3), np.uint64(7), np.True_, [], (1, 2)])
ANYTHING = st.one_of(st.integers(0, 2**31 - 1), EDGES, st.booleans(), st.none(), st.floats(), st.text(max_size=1), ODD)


@pytest.mark.parametrize("packer", PACKERS)
@given(
    token=st.integers(0, 2**31 - 1),
    num_tokens=st.sampled_from((0, *LENGTHS)),
    odd=st.lists(st.tuples(st.integers(0, 5000), ANYTHING), max_size=4),
    form=st.sampled_from((list, tuple, Numbers)),
)
def test_the_fast_ways_decide_as_the_slow_one(
    packer: Packer, token: int, num_tokens: int, odd: list[tuple[int, Any]], form: Any
) -> None:
    """Whatever is among the tokens: the same bytes, or the same words, as NumPy alone comes to."""
    tokens = [token] * num_tokens
    for place, value in odd:
        tokens.insert(place, value)
    assert outcome(form(tokens), packer) == outcome(form(tokens), by_numpy)
