"""A request: its prompt, and its output behind that."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.errors import RequestError


@pytest.mark.parametrize("tokens", [[], (), array("i"), np.empty(0, np.int32)])
def test_an_empty_prompt_is_refused(tokens: Any) -> None:
    """A request has at least one token."""
    with pytest.raises(RequestError, match="request 'a' has an empty prompt"):
        Request(request_id="a", prompt_token_ids=tokens)


def test_output_is_appended_whole_or_not_at_all() -> None:
    """A bad output token leaves the request as it was."""
    request = Request(request_id="a", prompt_token_ids=[1, 2])
    request.append_output([3, 4])
    with pytest.raises(RequestError, match="-1"):
        request.append_output([5, -1])
    assert (request.num_tokens, request.num_prompt_tokens) == (4, 2)
    assert bytes(request.tokens) == np.array([1, 2, 3, 4], "<i4").tobytes()


@pytest.mark.parametrize("num_tokens", [-1, 0, 7, 11])
def test_output_is_cut_to_what_there_is(num_tokens: int) -> None:
    """The prompt stays whole, and nothing is made up."""
    request = Request(request_id="a", prompt_token_ids=range(8))
    request.append_output([1, 2])
    with pytest.raises(RequestError, match=rf"to {num_tokens} tokens; give 8, which are its prompt, to 10"):
        request.cut_output(num_tokens)
    assert request.num_tokens == 10
    request.cut_output(9)
    assert request.token_ids(0, request.num_tokens).tolist() == [*range(8), 1]
