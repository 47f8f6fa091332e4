"""A toy engine with two ranks: prompts come back from the GPU, from the CPU tier, and after a restart from disk.

Its model is a formula: the key of a token is the sum of all token ids up to it. So each key that comes from the cache
can be compared with what computing it would have given. Run it with `python examples/toy_engine.py`. It needs no GPU,
and leaves nothing behind.
"""

import tempfile

import numpy as np

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request, StorageConfig, TransferConfig

BLOCK_SIZE, NUM_RANKS = 16, 2
PROMPTS = [np.arange(start, start + 200) for start in (0, 1000, 2000)]  # 13 blocks each; the last one is not full


def compute(tokens: np.ndarray, rank: int, layer: int) -> np.ndarray:
    """The model: a key for each token, which depends on all tokens before it, as in a real one."""
    return (np.cumsum(tokens) * (layer + 1) + rank).astype(np.float32)[:, None, None]


def serve(cache: PrefixCacheManager, name: str, tokens: np.ndarray) -> str:
    """Answers one request; says where its prompt came from."""
    request = Request(request_id=name, prompt_token_ids=tokens)
    cache.prefetch(request)  # when it is queued: what no tier has begins to come from storage
    match = cache.match(request).wait()  # when it is scheduled: its cached prefix, pinned until the release
    table = match.block_ids + cache.allocate(request, -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids))
    block, slot = np.repeat(table, BLOCK_SIZE)[: len(tokens)], np.arange(len(tokens)) % BLOCK_SIZE  # of each token
    old, new = slice(0, match.num_tokens), slice(match.num_tokens, None)
    for rank in range(NUM_RANKS):
        for layer, views in enumerate(cache.ranks.kv_views(rank)):
            kv, computed = views["key"], compute(tokens, rank, layer)  # kv: [blocks, tokens, heads, elements]
            assert np.all(kv[block[old], slot[old]] == computed[old]), "a wrong hit"
            kv[block[new], slot[new]] = computed[new]
    cache.commit(request, len(tokens))  # now other requests find its full blocks
    cache.release(request)
    cache.wait_for_transfers(timeout_seconds=10)  # not needed: only so that each run prints the same
    return f"{match.num_gpu_tokens} from GPU, {match.num_cpu_tokens} from CPU, {match.num_storage_tokens} from disk"


def main(folder: str) -> None:
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=32,  # room for two prompts
        num_cpu_blocks=128,  # room for all
        cpu_write_policy="write_through",
        min_prefetch_tokens=64,
        prefetch_policy="wait_complete",  # an engine in a hurry takes "timeout", the default
        load_policy="always",  # this model takes no time, so "auto" would rather compute than load
        layout=KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"),
        transfer=TransferConfig(tp_size=NUM_RANKS),
        storage=StorageConfig(folder=folder, weights_id="sum@1", admission="all", capacity_bytes=2**26),
    )
    for life in ("first", "second"):
        with PrefixCacheManager(config) as cache:
            for number in (0, 1, 1, 2, 0):
                print(f"{life} engine, prompt {number}: {serve(cache, f'request {number}', PROMPTS[number])}")
            cache.storage.flush(timeout_seconds=30)  # before a planned end: all that is cached is written


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
