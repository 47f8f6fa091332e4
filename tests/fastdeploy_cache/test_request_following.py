"""A conversation's next turn takes over what is packed already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import RequestError

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=9), turns=st.lists(st.tuples(TOKENS, TOKENS)))
def test_a_next_turn_is_as_a_prompt_of_all_tokens(prompt: list[int], turns: list[tuple[list[int], list[int]]]) -> None:
    """However many turns follow, of however many tokens: the request is the one that has all of them as its prompt."""
    request, tokens = Request(request_id="0", prompt_token_ids=prompt, namespace="n"), list(prompt)
    for number, (output, new) in enumerate(turns):
        request.append_output(output)
        before = request.tokens
        following = Request.following(request, new, request_id=str(number + 1))
        tokens += output + new
        whole = Request(request_id="whole", prompt_token_ids=tokens, namespace="n")
        assert (following.prompt, following.namespace) == (whole.prompt, whole.namespace)
        assert (following.num_prompt_tokens, following.num_tokens) == (len(tokens), len(tokens))
        assert request.tokens == before
        request = following


def test_a_next_turn_hits_what_the_turn_before_has_said() -> None:
    """Prompt and output of a turn are found by the next one, which is counted for itself."""
    config = CacheConfig(block_size=4, num_gpu_blocks=32, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        first = Request(request_id="first", prompt_token_ids=list(range(10)))
        cache.match(first)
        cache.allocate(first, 4)
        first.append_output([50, 51, 52, 53, 54])
        cache.commit(first, 14)
        cache.release(first)
        second = Request.following(first, [60, 61, 62], request_id="second")
        assert cache.match(second).num_tokens == 12
        assert (first.counted, second.used, second.session_ended) == (True, False, False)
        cache.release(second)


def test_images_and_namespace_are_those_of_the_turn_before() -> None:
    """Images of a turn are the next one's, with new ones behind; hints are for one request."""
    cat, dog = (2, 3, "cat"), (8, 2, b"dog")
    first = Request(
        request_id="first", prompt_token_ids=range(7), namespace="n", images=[cat], match_inside_images=True, priority=9
    )
    second = Request.following(first, range(7, 12), request_id="second", images=[dog], keep_seconds=5)
    whole = Request(request_id="whole", prompt_token_ids=range(12), namespace="n", images=[cat, dog])
    assert (second.images, second.prompt) == (whole.images, whole.prompt)
    assert second.extra_keys(4) == whole.extra_keys(4)
    assert (second.namespace, second.match_inside_images) == ("n", True)
    assert (second.priority, second.keep_seconds) == (None, 5)
    assert Request.following(second, [1], request_id="third").images == second.images


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"new_token_ids": [1, -5]}, "request 'b' has token id -5"),
        ({"images": [(1, 2, "early")]}, "request 'b' has an image at 1"),
        ({"images": [(4, 9, "long")]}, "request 'b' has an image at 4 of 9 tokens"),
        ({"images": 5}, "request 'b' has images 5"),
        ({"priority": 101}, "request 'b' has priority 101"),
        ({"request_id": 5}, "request_id of request 5"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    """The error names the new request, and the one before stays as it was."""
    previous = Request(request_id="a", prompt_token_ids=[1, 2, 3], images=[(0, 3, "cat")])
    with pytest.raises(RequestError, match=words):
        Request.following(previous, **({"new_token_ids": [4, 5], "request_id": "b"} | given))
    assert (previous.num_tokens, len(previous.images)) == (3, 1)


@pytest.mark.parametrize(("start", "end"), [(0, 3), (2, 3), (2, 6), (3, 6), (4, 5), (3, 3), (6, 6)])
def test_any_part_of_the_tokens_can_be_read(start: int, end: int) -> None:
    """Tokens of the prompt, of the output, and across their border."""
    request = Request(request_id="a", prompt_token_ids=[10, 11, 12])
    request.append_output([13, 14, 15])
    assert np.array_equal(request.token_ids(start, end), np.arange(10, 16, dtype=np.int32)[start:end])
