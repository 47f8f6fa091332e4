"""A prefill and a decode instance in this process, each with a peer process: whole receives, and a model that computes
layer by layer while what it has computed is sent."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Receive, Request, Send
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig

_SECONDS = 60.0
TRAVEL_SECONDS = 0.02  # of an offer to the other instance


class Instances:
    """Prompts of `num_blocks` blocks are computed on one side and received by the other. One thread.

    The decode side's free blocks are every other one of its pool, as in a pool that has been in use: no two of a
    prompt lie side by side.
    """

    def __init__(self, link: str, layout: KVLayout, block_size: int, num_blocks: int) -> None:
        self.num_layers, self.num_blocks, self.block_size = layout.num_layers, num_blocks, block_size
        self.layer_bytes = num_blocks * layout.for_rank(1, block_size).layer_bytes
        self._prefill = _instance("prefill", link, layout, block_size, num_blocks + 1)
        try:
            self._decode = _instance("decode", link, layout, block_size, 2 * (num_blocks + 1))
            self._prepare()
        except BaseException:
            self.close()
            raise
        self._num_prompts = 0
        self._step = 0

    def _prepare(self) -> None:
        rng = np.random.default_rng(1)
        for views in self._prefill.ranks.kv_views(0):
            for array in views.values():
                array[:] = rng.integers(0, 100, array.shape, np.uint8)
        fillers = [self._request(f"filler {i}", -2 - i, 1) for i in range(2 * (self.num_blocks + 1))]
        for request in fillers:
            self._decode.match(request)
            self._decode.allocate(request, 1)
        for request in fillers[::2]:
            self._decode.release(request)

    def close(self) -> None:
        """Stop both."""
        for name in ("_prefill", "_decode"):
            if hasattr(self, name):
                getattr(self, name).close()

    def whole_seconds(self) -> float:
        """The time from the call of `receive` to its end, for a prompt that is computed already."""
        mine, theirs, ids = self._new_prompt()
        self._prefill.commit(mine, self.num_blocks * self.block_size)
        send = self._offer(mine)
        started = time.perf_counter()
        ended = moment_of_end(self._decode.peers.receive(theirs, send.offer))
        self._finish(mine, theirs, ids, send)
        return ended - started

    def after_last_layer_seconds(self, layer_seconds: float, pause_seconds: float = 0.0) -> float:
        """The time from the moment at which the last layer is computed to the end of `receive`.

        A layer's keys and values are written, and the rest of its `layer_seconds` is slept away. With a pause before
        the last layer, nothing but that layer is left to be sent.
        """
        mine, theirs, ids = self._new_prompt()
        send = self._offer(mine)
        receive = self._decode.peers.receive(theirs, send.offer)
        self._step += 1
        progress, num_tokens = self._prefill.peers.step_progress(0), self.num_blocks * self.block_size
        self._prefill.peers.begin_step(mine, num_tokens, self._step)
        until = time.perf_counter()
        for layer, views in enumerate(self._prefill.ranks.kv_views(0)):
            if layer == self.num_layers - 1:
                until += pause_seconds
            until += layer_seconds
            for array in views.values():
                array[:] += 1  # of the spare block, too: one pass, and no copy
            time.sleep(max(0.0, until - time.perf_counter()))
            computed = time.perf_counter()
            progress.mark(self._step, layer + 1)
        self._prefill.commit(mine, num_tokens)
        ended = moment_of_end(receive)
        self._finish(mine, theirs, ids, send)
        return ended - computed

    def _new_prompt(self) -> tuple[Request, Request, list[int]]:
        """A prompt's requests on both sides, and the blocks that the prefill side has taken."""
        self._num_prompts += 1
        name = f"prompt {self._num_prompts}"
        mine, theirs = (self._request(name, self._num_prompts, self.num_blocks) for _ in range(2))
        self._prefill.match(mine)
        return mine, theirs, self._prefill.allocate(mine, self.num_blocks)

    def _offer(self, mine: Request) -> Send:
        send = self._prefill.peers.offer(mine)
        time.sleep(TRAVEL_SECONDS)
        return send

    def _request(self, name: str, number: int, num_blocks: int) -> Request:
        tokens = np.arange(num_blocks * self.block_size + 1, dtype=np.int32)
        tokens[0] = number % 2**31
        return Request(request_id=name, prompt_token_ids=tokens)

    def _finish(self, mine: Request, theirs: Request, ids: list[int], send: Send) -> None:
        """The receive has ended: compare what came with what was sent, and let go of the prompt on both sides."""
        if not send.wait(_SECONDS):
            raise LaunchError(f"a send of the benchmark failed: {send.error}")
        match = self._decode.match(theirs)
        if match.num_gpu_tokens != self.num_blocks * self.block_size:
            raise LaunchError(f"{match.num_gpu_tokens} tokens of {self.num_blocks * self.block_size} were received")
        for sent, received in zip(self._prefill.ranks.kv_views(0), self._decode.ranks.kv_views(0), strict=True):
            for part, array in sent.items():
                if self._num_prompts == 1 and not np.array_equal(array[ids], received[part][match.block_ids]):
                    raise LaunchError("blocks did not arrive as they were sent")
        self._decode.release(theirs)
        self._prefill.release(mine)


def _instance(role: Any, link: Any, layout: KVLayout, block_size: int, num_blocks: int) -> PrefixCacheManager:
    return PrefixCacheManager(
        CacheConfig(
            block_size=block_size,
            num_gpu_blocks=num_blocks,
            layout=layout,
            role=role,
            peer=PeerConfig(weights_id="benchmark", link=link, name=role),
        )
    )


def moment_of_end(receive: Receive) -> float:
    """When; on the clock of `time.perf_counter`."""
    moments: list[float] = []
    is_over = threading.Event()

    def note() -> None:
        moments.append(time.perf_counter())
        is_over.set()

    receive.on_done(note)
    if not is_over.wait(_SECONDS) or not receive.succeeded:
        raise LaunchError(f"a receive of the benchmark failed: {receive.error or 'no answer'}")
    return moments[0]
