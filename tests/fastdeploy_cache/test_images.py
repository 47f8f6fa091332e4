"""Images are part of the key of every block they overlap, and a match does not end inside one."""

from __future__ import annotations

import itertools

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.request import Image

TOKENS = list(range(40))


def manager(block_size: int = 4) -> PrefixCacheManager:
    return PrefixCacheManager(CacheConfig(block_size=block_size, num_gpu_blocks=400, transfer_client="inline"))


def serve(cache: PrefixCacheManager, name: str, images: list, tokens: list[int] = TOKENS, **options: bool) -> int:
    """A whole request; returns how many tokens hit."""
    request = Request(request_id=name, prompt_token_ids=tokens, images=images, **options)
    match = cache.match(request)
    num_blocks = -(-len(tokens) // cache.config.block_size)
    cache.allocate(request, num_blocks - len(match.block_ids))
    cache.commit(request, len(tokens))
    cache.release(request)
    cache.check_invariants()
    return match.num_tokens


@pytest.mark.parametrize("other", [(10, 7, "dog"), (11, 7, "cat"), (9, 7, "cat"), (10, 6, "cat"), (10, 8, "cat")])
def test_a_difference_of_an_image_keeps_its_blocks_apart(other: tuple[int, int, str]) -> None:
    """Equal tokens, another image, position or length: only the blocks before the first that either touches hit."""
    cache = manager()
    serve(cache, "a", [(10, 7, "cat")])
    assert serve(cache, "b", [other]) == min(10, other[0]) // 4 * 4
    assert serve(cache, "c", [(10, 7, "cat")]) == 36
    assert serve(cache, "d", [other]) == 36
    assert serve(cache, "e", []) == 8


@pytest.mark.parametrize(("offset", "length"), list(itertools.product(range(3, 9), (1, 3, 4, 5, 8))))
def test_every_border(offset: int, length: int) -> None:
    """An image that begins and ends anywhere against the block borders touches exactly the blocks that it overlaps."""
    cache = manager()
    serve(cache, "with", [(offset, length, "x")])
    request = Request(request_id="r", prompt_token_ids=TOKENS, images=[(offset, length, "x")])
    touched = {block for block in range(10) if offset < 4 * block + 4 and 4 * block < offset + length}
    assert set(request.extra_keys(4) or {}) == touched
    assert serve(cache, "without", []) == 4 * min(touched)
    assert serve(cache, "again", [(offset, length, "x")]) == 36


@pytest.mark.parametrize("offset", range(4, 17))
def test_a_match_ends_before_an_image_that_it_would_cut(offset: int) -> None:
    """A shorter prompt cached up to the middle of an image: the next one hits up to the block before it."""
    cache = manager()
    serve(cache, "short", [(offset, 4, "x")], TOKENS[:20])
    tokens, image = [*TOKENS[:20], 9, 9, 9, 9], (offset, 4, "x")
    longer = [image, (20, 2, "y")]
    assert serve(cache, "long", longer, tokens) == 20
    cache.reset()
    serve(cache, "whole", [(offset, 12, "x")], TOKENS[:32])
    # 16 tokens match; where that is inside the image, the match goes back to before it
    request = Request(request_id="cut", prompt_token_ids=TOKENS[:17] + [7] * 15, images=[(offset, 12, "x")])
    found = cache.match(request).num_tokens
    assert found == (16 if not offset < 16 < offset + 12 else offset // 4 * 4)
    cache.release(request)
    request = Request(
        request_id="in", prompt_token_ids=TOKENS[:17] + [7] * 15, images=[(offset, 12, "x")], match_inside_images=True
    )
    assert cache.match(request).num_tokens == 16


def test_block_size_one_and_names_as_text_or_bytes() -> None:
    """Token-granular blocks; text is its UTF-8 bytes."""
    cache = manager(1)
    serve(cache, "a", [(3, 2, "ä")])
    assert serve(cache, "b", [(3, 2, "ä".encode())]) == 39
    assert serve(cache, "c", [(3, 2, "b")]) == 3


def test_two_images_in_one_block_are_both_in_its_key() -> None:
    """Swapping them is another prompt."""
    cache = manager(8)
    serve(cache, "a", [(1, 1, "x"), (2, 1, "y")])
    assert serve(cache, "b", [(1, 1, "y"), (2, 1, "x")]) == 0
    assert serve(cache, "c", [(1, 1, "x"), (2, 1, "y")]) == 32
    assert serve(cache, "d", [(1, 1, "xy"), (2, 1, "")]) == 0, "names do not run into each other"


@pytest.mark.parametrize(
    "images",
    [[(38, 3, "x")], [(-1, 3, "x")], [(0, 0, "x")], [(4, 4, "x"), (6, 4, "y")], [(8, 2, "x"), (2, 2, "y")]],
)
def test_impossible_images_are_refused(images: list) -> None:
    """Outside the prompt, empty, overlapping, out of order: with the numbers."""
    with pytest.raises(RequestError, match=r"has an image at -?\d+ of \d+ tokens; .* prompt of 40 tokens"):
        Request(request_id="r", prompt_token_ids=TOKENS, images=images)


@pytest.mark.parametrize(
    "images", [[(1, 2)], [5], (1, 2, "a"), 5, [("0", 10, "a")], [(0, 10, 123)], [(0, 10, None)], [(0.5, 10, "a")]]
)
def test_what_is_no_image_is_refused_at_once(images: object) -> None:
    """Not at the first match."""
    with pytest.raises(RequestError, match="has image"):
        Request(request_id="r", prompt_token_ids=TOKENS, images=images)  # type: ignore[arg-type]


def test_whole_images_goes_back_over_neighbours() -> None:
    """Two images with a border inside the same block: the match goes back to before both."""
    request = Request(request_id="r", prompt_token_ids=TOKENS, images=[Image(5, 5, b"x"), Image(10, 9, b"y")])
    assert [request.whole_images(n, 4) for n in range(11)] == [0, 1, 1, 1, 1, 5, 6, 7, 8, 9, 10]
