"""Marks and keys by which what is gone is recognised: the native ones and those in Python keep the same promises."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_cache.books import block_marks as module
from fastdeploy_cache.books.block_marks import (
    MARK_BYTES,
    WINDOW_BYTES,
    BlockMarks,
    PlaceKey,
    block_marks_in_python,
    num_equal,
    place_key_in_python,
)

MARKS = [module.block_marks, block_marks_in_python]
KEYS = [module.place_key, place_key_in_python]
ROOT = bytes(range(32))


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("size", [4, 12, 32, 64, 100, 256])
def test_equal_blocks_have_equal_marks_and_others_have_not(marks: BlockMarks, size: int) -> None:
    """Wherever a block lies and in whatever kind of buffer; a change of any single byte changes its mark alone."""
    tokens = bytes(i * 7 % 251 for i in range(5 * size))
    found = marks(tokens, 0, 5, size)
    assert len(found) == 5 * MARK_BYTES and marks(bytearray(tokens), 0, 5, size) == found
    assert marks(tokens, size, 3, size) == found[MARK_BYTES : 4 * MARK_BYTES]
    for place in range(size):
        changed = bytearray(tokens)
        changed[2 * size + place] ^= 1
        assert num_equal(marks(changed, 0, 5, size), found) == 2
        assert marks(changed, 3 * size, 2, size) == found[3 * MARK_BYTES :]


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize(("num_tokens", "num_values"), [(1, 2000), (2, 60), (4, 8), (12, 2), (17, 2)])
def test_short_blocks_of_small_tokens_have_marks_of_their_own(
    marks: BlockMarks, num_tokens: int, num_values: int
) -> None:
    """All that there are: no more meet than would meet by chance. Also those that are the same but for the order."""
    blocks = list(itertools.product(range(num_values), repeat=num_tokens))[:10_000]
    packed = b"".join([struct.pack(f"<{num_tokens}i", *tokens) for tokens in blocks])
    found = marks(packed, 0, len(blocks), 4 * num_tokens)
    assert len(set(struct.unpack(f"<{len(blocks)}I", found))) >= len(blocks) - 1


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("place", [(-4, 1, 4), (0, 5, 4), (20, 1, 4), (0, -1, 4), (0, 1, 0), (2**62, 1, 4)])
def test_blocks_outside_of_the_tokens_are_refused(marks: BlockMarks, place: tuple[int, int, int]) -> None:
    """Nothing beside the buffer is ever read."""
    with pytest.raises(ValueError, match="block_marks"):
        marks(bytes(16), *place)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("place", [(-4, 4), (16, 4), (14, 4), (0, 0)])
def test_a_place_outside_of_the_tokens_is_refused(key: PlaceKey, place: tuple[int, int]) -> None:
    """Nothing beside the buffer is ever read."""
    with pytest.raises(ValueError, match=r"block_marks|place_key"):
        key(ROOT, 0, bytes(16), *place)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_of_the_place_the_namespace_the_tokens_and_those_before(key: PlaceKey) -> None:
    """What lies further in front than a window, or behind the block, does not count; all else does."""
    tokens = bytes(range(200))
    found = key(ROOT, 3, tokens, 150, 16)
    assert found == key(bytearray(ROOT), 3, bytearray(tokens), 150, 16)
    assert found == key(ROOT, 3, b"x" * (150 - WINDOW_BYTES) + tokens[150 - WINDOW_BYTES : 166], 150, 16)
    before, inside = bytearray(tokens), bytearray(tokens)
    before[150 - WINDOW_BYTES] ^= 1
    inside[165] ^= 1
    others = [key(ROOT, 4, tokens, 150, 16), key(ROOT[::-1], 3, tokens, 150, 16)]
    others += [key(ROOT, 3, before, 150, 16), key(ROOT, 3, inside, 150, 16)]
    assert len({found, *others}) == 5


@given(st.binary(max_size=80), st.binary(max_size=80))
@settings(deadline=None)
def test_as_many_are_equal_as_a_loop_finds(a: bytes, b: bytes) -> None:
    """The bisection finds the first difference that one by one is found."""
    a, b = a[: len(a) // 4 * 4], b[: len(b) // 4 * 4]
    pairs = zip([a[i : i + 4] for i in range(0, len(a), 4)], [b[i : i + 4] for i in range(0, len(b), 4)], strict=False)
    num_same = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        num_same += 1
    assert num_equal(a, b) == num_same
