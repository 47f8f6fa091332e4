"""An engine that runs ahead of loads: it computes layer 0 while the later layers of a prompt's prefix still arrive.

A prefix lies in the CPU tier. `match` starts its load and returns at once. The engine does not wait for the load: the
worker waits for each layer just before it computes that layer, and afterwards `confirm` says whether the step counts.
Run it with `python examples/ahead_of_loads.py`. It needs no GPU.
"""

import time

import numpy as np

from fastdeploy_cache import CacheConfig, KVLayout, LayerProgress, PrefixCacheManager, Request

BLOCK_SIZE, NUM_LAYERS, PROMPT = 16, 8, np.arange(1000)
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)


def compute(tokens: np.ndarray, layer: int) -> np.ndarray:
    """The model: a key for each token, which depends on all tokens before it."""
    return (np.cumsum(tokens) * (layer + 1)).astype(np.float32)[:, None, None]


def run_layer(cache: PrefixCacheManager, layer: int, table: list[int], num_cached: int) -> None:
    """The worker: one layer of a step. It reads the first `num_cached` keys and computes the others."""
    kv, computed = cache.ranks.kv_views(0)[layer]["key"], compute(PROMPT, layer)
    block, slot = np.repeat(table, BLOCK_SIZE)[: len(PROMPT)], np.arange(len(PROMPT)) % BLOCK_SIZE  # of each token
    old, new = slice(0, num_cached), slice(num_cached, None)
    assert np.all(kv[block[old], slot[old]] == computed[old]), "a wrong hit"
    kv[block[new], slot[new]] = computed[new]


def serve_and_forget(cache: PrefixCacheManager) -> None:
    """Computes the prompt, and lets another one push it out of the GPU pool: then the CPU tier alone has it."""
    for name, tokens in (("first", PROMPT), ("other", PROMPT + 5000)):
        request = Request(request_id=name, prompt_token_ids=tokens)
        table = cache.match(request).wait().block_ids + cache.allocate(request, NUM_BLOCKS)
        if name == "first":
            for layer in range(NUM_LAYERS):
                run_layer(cache, layer, table, num_cached=0)
        cache.commit(request, len(tokens))
        cache.release(request)
        cache.wait_for_transfers(timeout_seconds=10)


def serve_ahead(cache: PrefixCacheManager, progress: LayerProgress) -> bool:
    """One request; False when it did not count, and has to be served again."""
    request = Request(request_id="again", prompt_token_ids=PROMPT)
    match = cache.match(request)  # no wait
    began = time.monotonic()
    print(f"{match.num_tokens} tokens are there, {match.num_coming_tokens} are on their way")
    num_new = NUM_BLOCKS - len(match.block_ids) - len(match.coming_block_ids)
    new = cache.allocate(request, num_new, ahead_of_loads=True)
    match = match.poll()  # as it stands behind `allocate`: a load may have landed or failed since
    table = match.block_ids + list(match.coming_block_ids) + new
    if len(table) < NUM_BLOCKS:  # it has failed: what it was to bring is computed, too
        table += cache.allocate(request, NUM_BLOCKS - len(table))
    arrived = True
    for layer in range(NUM_LAYERS):
        arrived &= progress.wait_layer(match.load_ids, layer, timeout_seconds=5.0)
        print(f"layer {layer}: {'in' if arrived else 'missing'} after {1000 * (time.monotonic() - began):.1f} ms")
        if arrived:  # else the step is void; a real worker finishes it all the same
            run_layer(cache, layer, table, match.num_tokens + match.num_coming_tokens)
    counts = cache.confirm(request, arrived=arrived)
    if counts:
        cache.commit(request, len(PROMPT))
    cache.release(request)
    return counts


def main() -> None:
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=NUM_BLOCKS + 1,  # room for one prompt
        num_cpu_blocks=4 * NUM_BLOCKS,
        cpu_write_policy="write_through",
        load_policy="always",  # this model takes no time, so "auto" would rather compute than load
        layout=KVLayout(num_layers=NUM_LAYERS, num_kv_heads=8, head_dim=64, dtype="float32"),
    )
    with PrefixCacheManager(config) as cache:
        progress = cache.ranks.layer_progress(0)  # in a worker's process: LayerProgress.open(handle)
        assert progress is not None, "inline transfers have none"
        serve_and_forget(cache)
        print(f"the step counts: {serve_ahead(cache, progress)}")


if __name__ == "__main__":
    main()
