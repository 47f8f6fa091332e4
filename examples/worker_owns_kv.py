"""The model's worker is a process of its own and owns the KV arrays; when it dies, the CPU tier is still there.

The engine hands out block ids and never sees a key. The worker makes the arrays, gives the cache a handle of them, and
is told which blocks to read and to write. It is killed in the middle: what was on the "GPU" is forgotten, a new worker
attaches new arrays, and the next request gets its prefix from the CPU tier.
Run it with `python examples/worker_owns_kv.py`. It needs no GPU.
"""

import json
import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

from fastdeploy_cache import CacheConfig, KVHandle, KVLayout, KVMemory, PrefixCacheManager, Request, TransferConfig

BLOCK_SIZE, NUM_BLOCKS = 16, 32
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")


def compute(tokens: np.ndarray, layer: int) -> np.ndarray:
    """The model: a key for each token, which depends on all tokens before it."""
    return (np.cumsum(tokens) * (layer + 1)).astype(np.float32)[:, None, None]


def work(engine: Connection) -> None:
    """The worker: makes the arrays, then answers each step with whether the cached keys are the right ones."""
    memory = KVMemory.create(LAYOUT.for_rank(tp_size=1, block_size=BLOCK_SIZE), NUM_BLOCKS)
    engine.send_bytes(memory.handle().to_bytes())  # any channel would do
    layers = memory.views()
    while True:
        prompt, table, num_cached = json.loads(engine.recv_bytes())
        tokens = np.array(prompt)
        block, slot = np.repeat(table, BLOCK_SIZE)[: len(tokens)], np.arange(len(tokens)) % BLOCK_SIZE  # of each token
        old, new = slice(0, num_cached), slice(num_cached, None)
        is_right = True
        for layer, views in enumerate(layers):
            computed = compute(tokens, layer)
            is_right &= bool(np.all(views["key"][block[old], slot[old]] == computed[old]))
            views["key"][block[new], slot[new]] = computed[new]
        engine.send_bytes(json.dumps(is_right).encode())


class Worker:
    """The engine's end of a worker."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, far_end = context.Pipe()
        self.process = context.Process(target=work, args=(far_end,), daemon=True)
        self.process.start()
        self.handle = KVHandle.from_bytes(self.connection.recv_bytes())

    def step(self, *order: object) -> bool:
        self.connection.send_bytes(json.dumps(order).encode())
        return bool(json.loads(self.connection.recv_bytes()))


def serve(cache: PrefixCacheManager, worker: Worker, name: str, tokens: list[int]) -> None:
    request = Request(request_id=name, prompt_token_ids=tokens)
    match = cache.match(request).wait()
    table = match.block_ids + cache.allocate(request, -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids))
    is_right = worker.step(tokens, table, match.num_tokens)
    cache.commit(request, len(tokens))
    cache.release(request)
    cache.wait_for_transfers(timeout_seconds=10)  # not needed: only so that the CPU tier has all before the worker dies
    found = f"{match.num_gpu_tokens} tokens from GPU, {match.num_cpu_tokens} from CPU"
    print(f"{name}: {found}; {'each key is right' if is_right else 'WRONG KEYS'}")


def main() -> None:
    config = CacheConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=NUM_BLOCKS,
        num_cpu_blocks=NUM_BLOCKS,
        cpu_write_policy="write_through",
        load_policy="always",  # this model takes no time, so "auto" would rather compute than load
        layout=LAYOUT,
        transfer=TransferConfig(kv_owner="worker"),
    )
    with PrefixCacheManager(config) as cache:
        worker = Worker()
        cache.ranks.attach_kv(0, worker.handle)
        serve(cache, worker, "first request", list(range(200)))
        serve(cache, worker, "second request", list(range(200)))
        worker.process.kill()
        worker.process.join()
        cache.ranks.kv_lost(0)
        print("the worker was killed, and its arrays have gone with it")
        worker = Worker()
        cache.ranks.attach_kv(0, worker.handle)
        serve(cache, worker, "third request", list(range(200)))
        worker.process.kill()


if __name__ == "__main__":
    main()
