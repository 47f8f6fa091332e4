"""An engine whose requests do not all fit: `cache.step` for those that run, and what to do where blocks run out.

Six prompts begin alike, and the pool has room for about three of them with their answers. When one finds no room for
its next token, the youngest gives way: it is released, waits in front of the queue, and is matched again when another
one has ended. What it had computed stays cached as long as nobody needs the room.
Run it with `python examples/giving_way.py`. It needs no GPU, and starts no process.
"""

from collections import deque

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import OutOfBlocksError

BLOCK_SIZE, NUM_BLOCKS, NUM_NEW = 4, 14, 12
KV = np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.int64)  # one number for each token


def compute(request: Request, table: list[int], num_computed: int) -> int:
    """The model: writes the keys of what is not computed yet, reads all, and samples a token from them."""
    keys = np.cumsum(request.token_ids(0, request.num_tokens), dtype=np.int64)  # each depends on all tokens before it
    block, slot = np.repeat(table, BLOCK_SIZE)[: len(keys)], np.arange(len(keys)) % BLOCK_SIZE
    KV[block[num_computed:], slot[num_computed:]] = keys[num_computed:]
    assert np.array_equal(KV[block, slot], keys), "a wrong block was read"
    return int(keys.sum()) % 50


class Engine:
    """Requests that wait, and those that run, oldest first, each with its block table and its number of computed
    tokens."""

    def __init__(self, cache: PrefixCacheManager, requests: list[Request]) -> None:
        self.cache, self.waiting = cache, deque(requests)
        self.running = dict[Request, tuple[list[int], int]]()

    def admit(self) -> None:
        """Match and allocate for those that wait, in their order, while there is room."""
        while self.waiting:
            request = self.waiting[0]
            match = self.cache.match(request).wait()
            num_missing = self.cache.blocks_for(request.num_tokens) - len(match.block_ids)
            try:  # where nothing runs, what copies in flight hold is worth waiting for
                new = self.cache.allocate(request, num_missing, wait_seconds=0.0 if self.running else 1.0)
            except OutOfBlocksError:
                self.cache.release(request)  # who waits holds nothing; it is tried again before the next step
                if not self.running:
                    raise  # no request is going to give its blocks back: the pool is too small
                return
            self.waiting.popleft()
            self.running[request] = (match.block_ids + new, match.num_tokens)
            print(f"{request.request_id} runs: {match.num_tokens} of {request.num_tokens} tokens were cached")

    def step(self) -> None:
        """One step of the model for all that run, and one call that tells the cache of it."""
        steps = []
        for request, (table, num_computed) in list(self.running.items()):
            token = compute(request, table, num_computed)
            if request.num_tokens + 1 == request.num_prompt_tokens + NUM_NEW:  # its last token
                request.append_output([token])
                self.cache.commit(request, request.num_tokens - 1)
                self.cache.release(request)
                del self.running[request]
            else:
                steps.append((request, [token], request.num_tokens))  # computed is what it has without the new token
        while steps:  # nothing is done of a step that is refused: it is given again when somebody has given way
            refused = []
            for step, answer in zip(steps, self.cache.step(steps), strict=True):
                request, _, num_computed = step
                if isinstance(answer, OutOfBlocksError):
                    refused.append(step)
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    self.running[request] = (self.running[request][0] + answer, num_computed)
            steps = self.give_way(refused) if refused else []

    def give_way(self, refused: list) -> list:
        """Release the youngest that runs; returns the refused steps of the others."""
        request, _ = self.running.popitem()
        mine = [step for step in refused if step[0] is request]
        for _, tokens, num_computed in mine:  # its own step was refused: keep what it has computed and sampled
            self.cache.commit(request, num_computed)
            request.append_output(tokens)
        self.cache.release(request)
        self.waiting.appendleft(request)
        print(f"{request.request_id} gives way; new tokens so far: {request.num_tokens - request.num_prompt_tokens}")
        return [step for step in refused if step not in mine]


def alone(prompt: list[int]) -> list[int]:
    """The answer that the model gives without any cache."""
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        tokens.append(int(np.cumsum(tokens).sum()) % 50)
    return tokens[len(prompt) :]


def main() -> None:
    prompts = {name: [*range(8), 100 + number, 1, 2, 3] for number, name in enumerate("abcdef")}
    requests = [Request(request_id=name, prompt_token_ids=prompt) for name, prompt in prompts.items()]
    config = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS, num_cpu_blocks=0, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, requests)
        while engine.waiting or engine.running:
            engine.admit()
            engine.step()
    for request in requests:
        answer = list(request.token_ids(request.num_prompt_tokens, request.num_tokens))
        assert answer == alone(prompts[request.request_id]), "a wrong answer"
    print(f"{len(requests)} answers are those that the model gives alone")


if __name__ == "__main__":
    main()
