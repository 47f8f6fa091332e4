"""Prefill and decode apart: one instance computes a prompt, the other takes its blocks while they are computed.

Both are ordinary managers, here in one process; an offer is a few hundred bytes that go by any channel. The decode side
reads the blocks layer by layer, as the prefill side's worker marks layers as written. What it has cached already is not
sent again. Run it with `python examples/prefill_decode.py`. It needs no GPU.
"""

from typing import Literal

import numpy as np

from fastdeploy_cache import CacheConfig, KVLayout, PeerConfig, PrefixCacheManager, Request

BLOCK_SIZE, NUM_LAYERS = 16, 4


def new_instance(role: Literal["prefill", "decode"]) -> PrefixCacheManager:
    return PrefixCacheManager(
        CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks=32,
            layout=KVLayout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=8, dtype="float32"),
            role=role,
            peer=PeerConfig(weights_id="sum@1", name=role),  # one group: the same weights, layout and block size
        )
    )


def compute(tokens: np.ndarray, layer: int) -> np.ndarray:
    """The model: a key for each token, which depends on all tokens before it."""
    return (np.cumsum(tokens) * (layer + 1)).astype(np.float32)[:, None, None]


def places(table: list[int], tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The block and the slot of each token."""
    return np.repeat(table, BLOCK_SIZE)[: len(tokens)], np.arange(len(tokens)) % BLOCK_SIZE


def prefill(cache: PrefixCacheManager, decode: PrefixCacheManager, name: str, tokens: np.ndarray, step: int) -> int:
    """Computes a prompt whose blocks the decode instance takes; returns how many tokens came there."""
    mine, theirs = (Request(request_id=name, prompt_token_ids=tokens) for _ in range(2))
    match = cache.match(mine).wait()
    table = match.block_ids + cache.allocate(mine, -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids))
    send = cache.peers.offer(mine)
    receive = decode.peers.receive(theirs, send.offer)  # on its host: takes room, and begins to listen
    cache.peers.begin_step(mine, len(tokens), step)  # what this step is going to compute
    block, slot = places(table, tokens)
    for layer, views in enumerate(cache.ranks.kv_views(0)):
        views["key"][block[match.num_tokens :], slot[match.num_tokens :]] = compute(tokens, layer)[match.num_tokens :]
        cache.peers.step_progress(0).mark(step, layer + 1)  # the worker: this layer may be read now
    cache.commit(mine, len(tokens))
    cache.release(mine)  # what is offered stays until it has been read
    assert receive.wait(10), receive.reason  # False: the decode instance computes the prompt
    return answer(decode, theirs, tokens)


def answer(cache: PrefixCacheManager, request: Request, tokens: np.ndarray) -> int:
    """The decode instance goes on from what it has received: it computes the rest, and samples the first token."""
    match = cache.match(request).wait()
    table = match.block_ids + cache.allocate(request, -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids))
    block, slot = places(table, tokens)
    for layer, views in enumerate(cache.ranks.kv_views(0)):
        computed, old, new = compute(tokens, layer), slice(0, match.num_tokens), slice(match.num_tokens, None)
        assert np.all(views["key"][block[old], slot[old]] == computed[old]), "a wrong byte"
        views["key"][block[new], slot[new]] = computed[new]
    cache.commit(request, len(tokens))
    cache.release(request)
    return match.num_tokens


def main() -> None:
    with new_instance("prefill") as first, new_instance("decode") as second:
        conversation = np.arange(200)
        for step, num_tokens in enumerate((100, 200), start=1):
            num_there = prefill(first, second, f"turn {step}", conversation[:num_tokens], step)
            print(f"turn {step}: decode has {num_there} of {num_tokens} tokens, and computes the rest")


if __name__ == "__main__":
    main()
