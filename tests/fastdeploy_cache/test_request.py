"""Tokens of a request: every form that is taken, every one that is refused."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.errors import RequestError

WANTED = np.array([5, 0, 2**31 - 1], dtype="<i4").tobytes()


@pytest.mark.parametrize(
    "tokens",
    [
        [5, 0, 2**31 - 1],
        (5, 0, 2**31 - 1),
        np.array([5, 0, 2**31 - 1], np.int32),
        np.array([5, 0, 2**31 - 1], np.uint64),
        np.array([5, 9, 0, 9, 2**31 - 1, 9], np.int64)[::2],
        array("i", [5, 0, 2**31 - 1]),
        array("q", [5, 0, 2**31 - 1]),
    ],
)
def test_lists_arrays_and_numpy_arrays_are_the_same(tokens: Any) -> None:
    """All forms of a prompt give the same packed tokens."""
    assert bytes(Request(request_id="a", prompt_token_ids=tokens).tokens) == WANTED


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "empty prompt"),
        (array("i"), "empty prompt"),
        (np.empty(0, np.int32), "empty prompt"),
        ([1, -3], "token id -3"),
        ([1, 2**31], f"token id {2**31}"),
        ([1, 2**70], f"token id {2**70}"),
        ([2**63, -1], f"token id {2**63}"),
        ([1.5], "float64"),
        (array("d", [1.0]), "float64"),
        (["a"], "<U1"),
        ([[1, 2]], "shape"),
        ([[1], [2, 3]], "flat list"),
        ([True], "bool"),
    ],
)
def test_bad_prompts_are_refused(tokens: Any, words: str) -> None:
    """Each names the value."""
    with pytest.raises(RequestError, match=words):
        Request(request_id="a", prompt_token_ids=tokens)


def test_output_is_appended_whole_or_not_at_all() -> None:
    """A bad output token leaves the request as it was."""
    request = Request(request_id="a", prompt_token_ids=[1, 2])
    request.append_output([3, 4])
    with pytest.raises(RequestError, match="-1"):
        request.append_output([5, -1])
    assert (request.num_tokens, request.num_prompt_tokens) == (4, 2)
    assert bytes(request.tokens) == np.array([1, 2, 3, 4], "<i4").tobytes()
