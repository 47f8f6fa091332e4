"""A toy engine with two ranks: prompts come back from the GPU, from the CPU tier, and after a restart from disk.

Its model is a formula: the key of a token is the sum of all token ids up to it. So each key that comes from the cache
can be compared with what computing it would have given. Run it with `python examples/toy_engine.py`. It needs no GPU,
and leaves nothing behind. docs/embed.md walks through it.
"""

import tempfile

import numpy as np

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request, StorageConfig, TransferConfig

BLOCK_SIZE, NUM_RANKS, NUM_LAYERS = 16, 2, 2
NUM_OUTPUT_TOKENS = 24  # of each answer


def new_config(folder: str) -> CacheConfig:
    return CacheConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=32,  # room for 512 tokens
        num_cpu_blocks=128,  # room for all that is asked here
        cpu_write_policy="write_through",
        min_prefetch_tokens=64,
        prefetch_policy="wait_complete",  # an engine in a hurry takes "timeout", the default
        load_policy="always",  # this model takes no time, so "auto" would rather compute than load
        layout=KVLayout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=8, dtype="float32"),
        transfer=TransferConfig(tp_size=NUM_RANKS),
        storage=StorageConfig(folder=folder, weights_id="sum@1", admission="all", capacity_bytes=2**26),
    )


def run_model(cache: PrefixCacheManager, tokens: np.ndarray, table: list[int], num_computed: int) -> int:
    """Computes the keys of the tokens behind the first `num_computed` into their blocks, and samples the next token."""
    block = np.repeat(table, BLOCK_SIZE)[: len(tokens)]  # in which block each token lies, and where in it
    slot = np.arange(len(tokens)) % BLOCK_SIZE
    old, new = slice(0, num_computed), slice(num_computed, None)
    for rank in range(NUM_RANKS):
        for layer, views in enumerate(cache.ranks.kv_views(rank)):
            kv = views["key"]  # [blocks, tokens of a block, heads, elements]
            keys = (np.cumsum(tokens) * (layer + 1) + rank).astype(np.float32)[:, None, None]
            assert np.all(kv[block[old], slot[old]] == keys[old]), "a wrong hit"
            kv[block[new], slot[new]] = keys[new]
    return int(tokens.sum()) % 1000


def serve(cache: PrefixCacheManager, request: Request) -> str:
    """Answers one request; says where its prompt came from."""
    cache.prefetch(request)  # when it is queued: what no tier has begins to come from storage
    match = cache.match(request).wait()  # when it is scheduled: its cached prefix, pinned until the release
    table, num_computed = match.block_ids, match.num_tokens
    for _ in range(NUM_OUTPUT_TOKENS):  # the first step computes the rest of the prompt, each later one a token
        table = table + cache.allocate(request, cache.blocks_for(request.num_tokens) - len(table))
        sampled = run_model(cache, request.token_ids(0, request.num_tokens), table, num_computed)
        num_computed = request.num_tokens
        cache.commit(request, num_computed)  # now other requests find its full blocks
        request.append_output([sampled])
    cache.release(request)
    cache.wait_for_transfers(timeout_seconds=10)  # not needed: only so that each run prints the same
    tiers = f"{match.num_gpu_tokens} from GPU, {match.num_cpu_tokens} from CPU, {match.num_storage_tokens} from disk"
    return f"{request.request_id}: of {request.num_prompt_tokens} tokens {tiers}"


def main(folder: str) -> None:
    config = new_config(folder)
    question = Request(request_id="a question", prompt_token_ids=np.arange(200))
    with PrefixCacheManager(config) as cache:
        print(serve(cache, question))
        print(serve(cache, Request(request_id="the same again", prompt_token_ids=np.arange(200))))
        second_turn = Request.following(question, np.arange(500, 540), request_id="its second turn")
        print(serve(cache, second_turn))
        print(serve(cache, Request(request_id="something long", prompt_token_ids=np.arange(1000, 1320))))
        third_turn = Request.following(second_turn, np.arange(600, 640), request_id="its third turn")
        print(serve(cache, third_turn))
        cache.storage.flush(timeout_seconds=30)  # before a planned end: all that is cached is written
    with PrefixCacheManager(config) as cache:  # another life: nothing is on the GPU or in the CPU tier
        print(serve(cache, Request.following(third_turn, np.arange(700, 740), request_id="its fourth turn")))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
