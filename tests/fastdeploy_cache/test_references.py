"""What is noted of uses: equal prefixes have equal marks, whatever happens to the runs that they lie in."""

from __future__ import annotations

import random

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.references import HEADER, References
from fastdeploy_cache.request import Image
from fastdeploy_cache.what_if.records import Records

SIZE = 4


def test_equal_prefixes_have_equal_marks_in_a_random_walk() -> None:
    """Prompts that part and go on anywhere, with images and without, in a cache that evicts: each block's mark is that
    of its tokens and image, and the books add up after each step."""
    rng = random.Random(5)
    config = CacheConfig(block_size=SIZE, num_gpu_blocks=24, num_cpu_blocks=10, transfer_client="inline")
    known, records, num_records = dict[tuple[object, ...], bytes](), Records(), 0
    with PrefixCacheManager(config) as cache:
        references = References(SIZE * 4, lambda: 0.0, lambda: None)
        cache._books.note_references(references)
        for number in range(400):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
            images = [Image(0, 3, b"image")] if rng.random() < 0.3 and len(tokens) > 3 else []
            request = Request(request_id=str(number), prompt_token_ids=tokens, images=images)
            match = cache.match(request)
            cache.allocate(request, -(-len(tokens) // SIZE) - len(match.block_ids))
            cache.commit(request, len(tokens))
            cache.release(request)
            cache.check_invariants()
            for reference in records.feed(references.take()):
                num_records += 1
                assert reference.num_prompt_tokens == len(tokens)
                assert len(reference.marks) == len(tokens) // SIZE * 4
                for block in range(len(tokens) // SIZE):
                    mark = reference.marks[block * 4 : block * 4 + 4]
                    content = (*tokens[block * SIZE : block * SIZE + SIZE], bool(images) and block == 0)
                    assert known.setdefault(content, mark) == mark
    assert num_records > 300 and references.num_lost == 0
    assert len(set(known.values())) == len(known) > 16


def test_what_nobody_takes_is_dropped_and_counted() -> None:
    """A bounded number waits."""
    references = References(16, lambda: 0.0, lambda: None)
    request = Request(request_id="a", prompt_token_ids=[1, 2, 3])
    for _ in range(5000):
        references.note([], request, 0)
    assert len(references.take()) == 4096 * HEADER.size and references.num_lost == 5000 - 4096
    assert references.take() == b""
