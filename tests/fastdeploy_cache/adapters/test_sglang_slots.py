"""SGLang's pools: slots follow each other inside pages, nothing is handed out twice, and groups are freed at once."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from fastdeploy_cache.adapters.sglang.radix_cache import ReqToTokenPool, new_config, new_manager
from fastdeploy_cache.adapters.sglang.slot_pools import TokenToKVPoolAllocator
from fastdeploy_cache.errors import BlockOwnerError, RequestError


def new_allocator(num_tokens: int, page_size: int) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(
        new_manager(new_config(num_tokens, page_size, hicache_ratio=0, transfer_client="inline"))
    )


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_sequences_grow_through_their_pages(page_size: int, seed: int) -> None:
    """Extended or decoded, alone or many at once: position p of a sequence is at place p of its pages, which are its
    own; where there is no room nothing is taken."""
    choose, allocator = random.Random(seed), new_allocator(32 * page_size, page_size)
    sequences: list[list[int]] = [[] for _ in range(4)]
    for _ in range(60):
        some = choose.sample(range(4), choose.randint(1, 4))
        news = [choose.randint(0, 5) for _ in some] if choose.random() < 0.5 else [1] * len(some)
        starts = np.array([len(sequences[i]) for i in some])
        last = np.array([sequences[i][-1] if sequences[i] else -1 for i in some])
        before = allocator.available_size()
        ends = starts + news
        if news == [1] * len(some):
            got = allocator.alloc_decode(ends, last)
        else:
            got = allocator.alloc_extend(starts, ends, last, int(sum(news)))
        needed = int((-(-ends // page_size) - -(-starts // page_size)).sum()) * page_size
        if needed > before:
            assert got is None and allocator.available_size() == before
            gone = sequences[some[0]]
            if gone:
                allocator.free(gone)
            sequences[some[0]] = []
            continue
        assert len(got) == sum(news) and before - allocator.available_size() == needed
        for i, num in zip(some, news, strict=True):
            sequences[i] += got[:num].tolist()
            got = got[num:]
        pages = [slot // page_size for sequence in sequences for slot in sequence[::page_size]]
        assert len(set(pages)) == len(pages), "two sequences share a page"
        for sequence in sequences:
            assert all(slot % page_size == place % page_size for place, slot in enumerate(sequence))
            assert all(a // page_size == b // page_size or b % page_size == 0 for a, b in pairwise(sequence))
    allocator._manager.check_invariants()
    allocator._manager.close()


def test_lengths_that_do_not_fit_together_are_refused() -> None:
    """Not one of each for every sequence, a prefix beyond its end, another sum: nothing is taken."""
    allocator = new_allocator(16, 4)
    for starts, ends, last, num in (
        ([0, 0], [1], [-1], 1),
        ([2], [1], [0], -1),
        ([0], [3], [-1], 4),
    ):
        with pytest.raises(RequestError, match=r"prefix_lens|tokens of these lengths"):
            allocator.alloc_extend(starts, ends, last, num)
    assert allocator.available_size() == 16
    allocator._manager.close()


def test_a_group_is_freed_at_its_end() -> None:
    """Until then nothing is free; a slot twice in two frees of a group is one page; a stranger's page frees nothing."""
    allocator = new_allocator(16, 4)
    first, second = allocator.alloc(4), allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free(first)
    allocator.free(second[:6])
    allocator.free(second[6:])
    assert allocator.available_size() == 4
    allocator.free_group_end()
    assert allocator.available_size() == 16
    kept = allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free(kept)
    allocator.free([12])
    with pytest.raises(BlockOwnerError):
        allocator.free_group_end()
    assert allocator.available_size() == 12
    allocator.free_group_begin()
    allocator.free(kept)
    allocator.clear()
    assert allocator.available_size() == 12, "what somebody holds stays theirs"
    allocator.free(kept)
    allocator.free_group_begin()
    allocator.free_group_end()
    allocator._manager.close()


def test_rows_are_written_as_an_array_is() -> None:
    """A row and a slice, or rows and positions; what is outside, or of another size, is refused and changes nothing."""
    pool = ReqToTokenPool(2, 8)
    pool.write((1, slice(2, 5)), [7, 8, 9])
    pool.write((np.array([0, 1]), np.array([0, 7])), np.array([5, 6]))
    assert pool.req_to_token.tolist() == [[5, 0, 0, 0, 0, 0, 0, 0], [0, 0, 7, 8, 9, 0, 0, 6]]
    for indices, values in (((1, slice(6, 9)), [1, 2, 3]), ((2, slice(0, 1)), [1]), (([0], [8]), [1])):
        with pytest.raises(RequestError, match="places"):
            pool.write(indices, values)
    assert pool.row(1, 5).tolist() == [0, 0, 7, 8, 9] and pool.req_to_token.sum() == 35
    assert pool.alloc(2) == [0, 1] and pool.alloc(1) is None
    pool.free([1, 0])
    assert pool.free_slots == [1, 0] and pool.alloc(1) == [1]
    pool.clear()
    assert pool.available_size() == 2
