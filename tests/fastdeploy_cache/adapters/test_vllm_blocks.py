"""The early names of vLLM's block books stand by themselves; their hashes are the cache's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.adapters.vllm.manager import (
    BlockHashType,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    hash_block_tokens,
    hash_request_tokens,
    namespace_of,
)
from fastdeploy_cache.errors import RequestError

SIZE = 4


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_a_block_is_reset_but_keeps_its_place() -> None:
    """Counts, tokens and hash go; id and links stay. Blocks are compared by identity."""
    block, other = KVCacheBlock(3), KVCacheBlock(3)
    FreeKVCacheBlockQueue([block, KVCacheBlock(4)])
    block.ref_cnt, block.num_hashed_tokens, block.block_hash = 2, 4, hash_block_tokens(None, [1, 2])
    block.token_ids += [1, 2]
    block.reset()
    assert block.block_hash is None and not block.token_ids
    assert (block.ref_cnt, block.num_hashed_tokens) == (0, 0)
    assert block.next_free_block is not None and block.next_free_block.block_id == 4 and block.block_id == 3
    assert block != other


def test_the_queue_begins_in_the_order_given_and_goes_on_in_order() -> None:
    """`popleft` and `append` keep both ends right, down to empty and up again."""
    blocks = [KVCacheBlock(i) for i in (2, 0, 1)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert ids(queue.get_all_free_blocks()) == [2, 0, 1] and queue.free_list_head is blocks[0]
    assert [queue.popleft() for _ in blocks] == blocks and queue.num_free_blocks == 0
    assert queue.free_list_head is queue.free_list_tail is None
    with pytest.raises(ValueError, match="no free block"):
        queue.popleft()
    for block in (blocks[1], blocks[0]):
        queue.append(block)
    assert ids(queue.get_all_free_blocks()) == [0, 2] and queue.free_list_tail is blocks[0]


def test_the_queue_refuses_what_would_break_it() -> None:
    """Double append, a block twice in the list, removal of an unlinked block or one of another queue."""
    blocks = [KVCacheBlock(i) for i in range(3)]
    queue, other = FreeKVCacheBlockQueue(blocks[:2]), FreeKVCacheBlockQueue([blocks[2]])
    twin = KVCacheBlock(0)  # equal in all but identity
    for remove in (twin, blocks[2]):
        with pytest.raises(RuntimeError, match="not in this queue"):
            queue.remove(remove)
    with pytest.raises(RuntimeError, match="in a queue already"):
        queue.append(blocks[1])
    with pytest.raises(RuntimeError, match="in a queue already"):
        FreeKVCacheBlockQueue([twin, twin])
    queue.append(twin)
    with pytest.raises(RuntimeError, match="in a queue already"):
        other.append(twin)
    queue.remove(twin)
    alone = other.popleft()
    with pytest.raises(RuntimeError):
        other.remove(alone)
    assert ids(queue.get_all_free_blocks()) == [0, 1] and queue.num_free_blocks == 2


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "append"]), st.integers(0, 5))))
def test_the_queue_is_a_list(steps: list[tuple[str, int]]) -> None:
    """Whatever is done, it holds what a list would, and its links agree both ways."""
    blocks = [KVCacheBlock(i) for i in range(6)]
    queue, model = FreeKVCacheBlockQueue(blocks), list(blocks)
    for verb, i in steps:
        if verb == "pop" and model:
            assert queue.popleft() is model.pop(0)
        elif verb == "remove" and blocks[i] in model:
            queue.remove(blocks[i])
            model.remove(blocks[i])
        elif verb == "append" and blocks[i] not in model:
            queue.append(blocks[i])
            model.append(blocks[i])
        assert queue.get_all_free_blocks() == model and queue.num_free_blocks == len(model)
        backwards, block = [], queue.free_list_tail
        while block is not None:
            backwards.append(block)
            block = block.prev_free_block
        assert backwards == model[::-1]


def test_hashes_are_the_caches_own() -> None:
    """Of full blocks only, chained, equal to those of the tree; block by block or all at once."""
    tokens = [*range(10, 21)]
    config = CacheConfig(block_size=SIZE, num_gpu_blocks=8, num_cpu_blocks=0, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        cache.blocks.insert(Request(request_id="a", prompt_token_ids=tokens), cache.blocks.allocate(2))
        (run,) = cache.blocks.view.runs()
    hashes = hash_request_tokens(SIZE, tokens)
    assert [h.hash_value for h in hashes] == run.hashes and len(hashes) == 2
    assert hashes[1].token_ids == (14, 15, 16, 17)
    assert hash_block_tokens(None, tokens[:4]) == hashes[0] and isinstance(hashes[0], BlockHashType)
    assert hash_block_tokens(hashes[0].hash_value, tokens[4:8]) == hashes[1]
    assert hash_block_tokens(parent_block_hash=hashes[0], curr_block_token_ids=tuple(tokens[4:8])) == hashes[1]
    assert hash_block_tokens(-5, [1]) != hash_block_tokens(5, [1]), "an early parent was a number"
    assert hash_request_tokens(SIZE, tokens[:3]) == [] == hash_request_tokens(SIZE, [])


def test_extra_keys_and_salt_change_hashes_from_their_block_on() -> None:
    """They are the cache's, too: an image's key, a namespace."""
    tokens = [*range(12)]
    plain = hash_request_tokens(SIZE, tokens)
    image = Request(request_id="i", prompt_token_ids=tokens, images=[(5, 2, "cat")])
    keyed = hash_request_tokens(SIZE, tokens, image.extra_keys(SIZE))
    assert keyed[0] == plain[0] and keyed[1] != plain[1] and keyed[2] != plain[2]
    salted = hash_request_tokens(SIZE, tokens, namespace=namespace_of(cache_salt="s"))
    assert not set(salted) & set(plain)
    assert hash_block_tokens(None, tokens[:4], namespace=namespace_of(cache_salt="s")) == salted[0]
    assert hash_block_tokens(plain[0].hash_value, tokens[4:8], image.extra_keys(SIZE)[1]) == keyed[1]  # type: ignore[index]
    for wrong in (lambda: hash_block_tokens(b"short", [1]), lambda: hash_request_tokens(0, [1]),
                  lambda: hash_block_tokens(None, [])):  # fmt: skip
        with pytest.raises(RequestError):
            wrong()
