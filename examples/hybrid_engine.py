"""An engine for a model whose layers do not all keep everything: full layers, a window of 8 tokens, and a state.

Full layers keep what every token wrote, the window what the last ones did, and the state one number for all tokens
before. A conversation goes on where its last turn ended; a prompt that parts from it makes a checkpoint there.
Run it with `python examples/hybrid_engine.py`. It needs no GPU, and starts no process.
"""

import numpy as np

from fastdeploy_cache import CacheConfig, KVGroup, KVLayout, PrefixCacheManager, Request, StatePart

BLOCK_SIZE, WINDOW = 4, 8
GROUPS = (
    KVGroup(kind="full", layers=(0,)),
    KVGroup(kind="window", reach_tokens=WINDOW, layers=(1,)),
    KVGroup(kind="state", layers=(2,), parts=(StatePart(name="sum", shape=(1,)),)),
)
LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=1, groups=GROUPS)
FULL, NEAR = np.zeros((64, BLOCK_SIZE), np.int64), np.zeros((48, BLOCK_SIZE), np.int64)  # one number for each token
STATES = np.zeros(16, np.int64)  # one number for each slot


def compute(tokens: list[int], piece: range, full: list[int], near: dict[int, int], state: int) -> int:
    """A piece of the prompt: each token writes a key, reads all keys, and those of its window. The state goes on from
    token to token, and is returned."""
    for at in piece:
        FULL[full[at // BLOCK_SIZE], at % BLOCK_SIZE] = NEAR[near[at // BLOCK_SIZE], at % BLOCK_SIZE] = tokens[at]
        keys = [FULL[full[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in range(at + 1)]
        last = [NEAR[near[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in range(max(0, at - WINDOW + 1), at + 1)]
        assert keys == tokens[: at + 1] and last == keys[-WINDOW:], "a wrong block was read"
        state = (state * 31 + tokens[at]) % 1_000_003
    return state


def serve(cache: PrefixCacheManager, name: str, tokens: list[int]) -> None:
    """One prompt, piece by piece: a piece ends where a checkpoint pays."""
    request = Request(request_id=name, prompt_token_ids=tokens)
    match = cache.match(request)
    window, states = match.tables
    full, near = match.block_ids, dict(enumerate(window.block_ids, window.first_block))
    read, write = (states.block_ids or [None])[0], None  # a state that a match shows is read, and never written
    start = match.num_tokens
    for end in (*match.checkpoint_tokens, len(tokens)):
        new = cache.rows.allocate(request, cache.blocks_for(end) - len(full))
        near.update(enumerate(new.tables[0].block_ids, len(full)))
        full += new.block_ids
        write = new.tables[1].block_ids[0] if new.tables[1].block_ids else write  # with its first blocks it gets a slot
        state = STATES[read] if read is not None else 0
        STATES[write] = compute(tokens, range(start, end), full, near, int(state))
        read, start = write, end
        if end in match.checkpoint_tokens:  # from now on it writes another slot: the state in this one stays
            fresh = cache.rows.snapshot(request, end, [write])
            write = fresh[0] if fresh is not None else write
        cache.commit(request, end)
    expected = 0
    for token in tokens:
        expected = (expected * 31 + token) % 1_000_003
    assert STATES[read] == expected, "a wrong state was read"
    cache.release(request)
    print(f"{name}: {match.num_tokens} of {len(tokens)} tokens were cached")


def main() -> None:
    config = CacheConfig(
        block_size=BLOCK_SIZE, num_gpu_blocks=64, num_gpu_units=(48, 16), layout=LAYOUT, transfer_client="inline"
    )
    with PrefixCacheManager(config) as cache:
        first = list(range(30))
        serve(cache, "a question", first)
        serve(cache, "the same again", first)
        serve(cache, "its second turn", [*first, *range(50, 70)])
        serve(cache, "one that parts from it", [*first[:17], *range(80, 90)])
        serve(cache, "another one that does", [*first[:17], *range(90, 99)])
        cache.check_invariants()


if __name__ == "__main__":
    main()
