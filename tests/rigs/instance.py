"""An instance of a model that computes prompts, in this process or in one of its own that can be killed.

As a program: settings as JSON in the first argument; each line of standard input is a JSON list [verb, arguments ...],
answered by a line: its result, or {"error": ...}. It ends with standard input.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_cache import (
    CacheConfig,
    KVLayout,
    PeerConfig,
    PrefixCacheManager,
    Receive,
    Request,
    Send,
    TransferConfig,
)
from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.peers.link_road import LinkRoad

BLOCK_SIZE = 4
LAYOUT = KVLayout(num_layers=4, num_kv_heads=6, head_dim=4, dtype="float16")
SECONDS = 30.0


def new_config(tp_size: int = 1, num_gpu: int = 64, num_cpu: int = 0, role: str = "mixed", **peer: Any) -> CacheConfig:
    """Short deadlines; `peer` settings may be overridden."""
    deadlines = {"silence_timeout_seconds": 1.5, "offer_timeout_seconds": 20.0}
    settings: dict[str, Any] = {"weights_id": "w", "name": role, **deadlines}
    return CacheConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_gpu,
        num_cpu_blocks=num_cpu,
        layout=LAYOUT,
        load_policy="always",
        cpu_write_policy="write_through",
        transfer=TransferConfig(tp_size=tp_size, restart_backoff_seconds=0.01),
        role=role,  # type: ignore[arg-type]
        peer=PeerConfig(**(settings | peer)),
    )


def content(prefix: Sequence[int], layer: int, part: str) -> np.ndarray:
    """What a block that ends this prefix holds, of all heads: [tokens, heads, head_dim]."""
    seed = [layer, len(part), *prefix]
    noise = np.random.default_rng(seed).integers(0, 2**15, (BLOCK_SIZE, LAYOUT.num_kv_heads, LAYOUT.head_dim))
    return noise.astype(np.uint16)


class Instance:
    """Requests by name, and the bytes of every layer, part and rank."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self.cache = cache
        self._tp_size = cache.config.transfer.tp_size
        self._requests: dict[str, tuple[Request, list[int], int]] = {}  # with block table and computed blocks
        self.sends: dict[str, Send] = {}
        self.receives: dict[str, tuple[Receive, Request]] = {}
        self._step = 0

    # -- prefill

    def offer(self, name: str, tokens: Sequence[int]) -> bytes:
        """Match, allocate, offer."""
        request = Request(request_id=name, prompt_token_ids=list(tokens))
        match = self.cache.match(request).wait(SECONDS)
        table = [*match.block_ids, *self.cache.allocate(request, -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids))]
        self._requests[name] = (request, table, len(match.block_ids))
        self.sends[name] = self.cache.peers.offer(request)
        return self.sends[name].offer

    def compute(self, name: str, num_tokens: int, num_layers: int = LAYOUT.num_layers) -> None:
        """A step up to `num_tokens`, of which only the first layers come to be; with all of them it is committed."""
        request, table, done = self._requests[name]
        self._step += 1
        self.cache.peers.begin_step(request, num_tokens, self._step)
        tokens = list(memoryview(request.tokens).cast("i"))
        for layer in range(num_layers):
            for block in range(done, num_tokens // BLOCK_SIZE):
                for memory, wanted in self._layer(tokens[: (block + 1) * BLOCK_SIZE], table[block], layer):
                    memory[...] = wanted
            for rank in range(self._tp_size):
                self.cache.peers.step_progress(rank).mark(self._step, layer + 1)
        if num_layers == LAYOUT.num_layers:
            self.cache.commit(request, num_tokens)
            self._requests[name] = (request, table, num_tokens // BLOCK_SIZE)

    def release(self, name: str) -> None:
        """The request ends here."""
        self.cache.release(self._requests.pop(name)[0])

    def lend(self, name: str, tokens: Sequence[int]) -> bytes:
        """What is cached of these tokens, after all of it has left the GPU where there is a CPU tier."""
        assert self.cache.wait_for_transfers(SECONDS)
        if self.cache.config.pool_sizes()[1]:
            self.cache.blocks.evict(self.cache.config.pool_sizes()[0])
        request = Request(request_id=name, prompt_token_ids=list(tokens))
        self.cache.match(request).wait(SECONDS)
        self.sends[name] = self.cache.peers.lend(request)
        self.cache.release(request)
        return self.sends[name].offer

    def wait_send(self, name: str, seconds: float = SECONDS) -> list[Any]:
        """Whether it succeeded, and the reason where not."""
        return [self.sends[name].wait(seconds), self.sends[name].reason, self.sends[name].error]

    # -- decode

    def receive(self, name: str, tokens: Sequence[int], offer: bytes, *, is_lent: bool = False) -> int:
        """Returns the blocks that are asked for."""
        request = Request(request_id=name, prompt_token_ids=list(tokens))
        receive = self.cache.peers.receive(request, offer, is_lent=is_lent)
        self.receives[name] = receive, request
        return receive.num_blocks

    def wait_for_blocks(self, name: str, num_blocks: int) -> None:
        """Until the first blocks of a receive have come, which nothing announces."""
        tokens = list(memoryview(self.receives[name][1].tokens).cast("i"))
        tier, deadline = self.cache.peers.road, time.monotonic() + SECONDS
        assert isinstance(tier, LinkRoad)
        ids = next(each.ids for each in tier.receives._by_task.values() if each.receive is self.receives[name][0])
        for block in range(num_blocks):
            prefix = tokens[: (block + 1) * BLOCK_SIZE]
            for memory, wanted in self._layer(prefix, ids[block], LAYOUT.num_layers - 1):
                while not np.array_equal(memory, wanted):
                    assert time.monotonic() < deadline
                    time.sleep(0.005)

    def wait_receive(self, name: str, seconds: float = SECONDS) -> list[Any]:
        """Whether it succeeded, and the reason where not."""
        receive = self.receives[name][0]
        return [receive.wait(seconds), receive.reason, receive.error]

    def serve(self, name: str) -> int:
        """Match what was to be received, and compare all bytes that are found; returns the tokens on the GPU."""
        request = self.receives.pop(name)[1]
        match = self.cache.match(request).wait(SECONDS)
        tokens = list(memoryview(request.tokens).cast("i"))
        for block, block_id in enumerate(match.block_ids):
            for layer in range(LAYOUT.num_layers):
                for memory, wanted in self._layer(tokens[: (block + 1) * BLOCK_SIZE], block_id, layer):
                    assert np.array_equal(memory, wanted), f"wrong KV in block {block}, layer {layer}"
        self.cache.allocate(request, 1)
        self.cache.release(request)
        return match.num_tokens

    def check(self) -> list[int]:
        """The books; blocks that somebody still holds once all sends and copies have ended, which nobody waited for."""
        for send in self.sends.values():
            send.wait(SECONDS)
        assert self.cache.wait_for_transfers(SECONDS)
        self.cache.check_invariants()
        gpu = self.cache.stats().gpu
        return [gpu.num_private, gpu.num_protected, gpu.num_in_flight]

    def _layer(self, prefix: Sequence[int], block_id: int, layer: int) -> list[tuple[np.ndarray, np.ndarray]]:
        num_heads, pairs = max(1, LAYOUT.num_kv_heads // self._tp_size), []
        for rank in range(self._tp_size):
            first = rank * LAYOUT.num_kv_heads // self._tp_size
            for part, array in self.cache.ranks.kv_views(rank)[layer].items():
                wanted = content(prefix, layer, part)[:, first : first + num_heads]
                pairs.append((array[block_id].view(np.uint16), wanted))
        return pairs


class InstanceProcess:
    """The same in a process of its own; arguments and results go as JSON."""

    def __init__(self, **settings: Any) -> None:
        command = [sys.executable, "-m", "tests.rigs.instance", json.dumps(settings)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._answer() == "ready"

    def do(self, verb: str, *arguments: Any) -> Any:
        """Call a method of its `Instance`; raises `RuntimeError` with what it raised."""
        self.tell(verb, *arguments)
        return self._answer()

    def tell(self, verb: str, *arguments: Any) -> None:
        """The same without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """It is gone at once."""
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End it in order, if it still lives."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(SECONDS)
        self.process.stdout.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the instance ended with {self.process.poll()}"
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise RuntimeError(answer["error"])
        return answer


def main(settings: str) -> None:
    """See the module."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with PrefixCacheManager(new_config(**json.loads(settings))) as cache:
        instance = Instance(cache)
        print('"ready"', file=answers, flush=True)
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            if verb == "receive":
                arguments[-1] = base64.b64decode(arguments[-1])
            try:
                result = getattr(instance, verb)(*arguments)
                answer = base64.b64encode(result).decode() if isinstance(result, bytes) else result
            except CacheError as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
