"""How soon the state of a hybrid model is at another instance once its prompt is computed. All in host memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.image_transfer import IMAGE_CASES
from fastdeploy_cache.launch.bench.peer_instances import TRAVEL_SECONDS, moment_of_end
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig

BLOCK_SIZE, NUM_BLOCKS = 64, 8
STATE_CASE = IMAGE_CASES[1]
_SECONDS = 60.0


class StateInstances:
    """Prompts of 8 blocks and a token, of `STATE_CASE`, are computed on one side and received by the other. One
    thread."""

    def __init__(self, link: str) -> None:
        self._sides = list[PrefixCacheManager]()
        self._num_prompts = 0
        try:
            for role in ("prefill", "decode"):
                self._sides.append(_instance(role, link))
            rng = np.random.default_rng(1)
            for views in self._sides[0].ranks.kv_views(0):
                for array in views.values():
                    array[:] = rng.integers(0, 100, array.shape, np.uint8)
        except BaseException:
            self.close()
            raise

    @property
    def state_bytes(self) -> int:
        """The bytes of one state, in all layers."""
        layout = self._sides[0].config.rank_layout()
        assert layout is not None
        return layout.unit_bytes(1)

    def close(self) -> None:
        """Stop both."""
        for side in self._sides:
            side.close()

    def after_commit_seconds(self) -> float:
        """The time from the call of the last commit, by when all layers are marked, to the end of `receive`: by then
        the state's last byte is there, and its owner has confirmed that it was held."""
        prefill, decode = self._sides
        self._num_prompts += 1
        tokens = np.arange(NUM_BLOCKS * BLOCK_SIZE + 1, dtype=np.int32)
        tokens[0] = self._num_prompts
        mine, theirs = (Request(request_id=str(self._num_prompts), prompt_token_ids=tokens) for _ in range(2))
        prefill.match(mine)
        new, end, step = prefill.rows.allocate(mine, NUM_BLOCKS + 1), NUM_BLOCKS * BLOCK_SIZE, self._num_prompts
        send = prefill.peers.offer(mine)
        time.sleep(TRAVEL_SECONDS)
        receive = decode.peers.receive(theirs, send.offer)
        prefill.peers.begin_step(mine, end, step)
        progress = prefill.peers.step_progress(0)
        for layer in range(STATE_CASE.layout.num_layers):
            progress.mark(step, layer + 1)
        time.sleep(TRAVEL_SECONDS)  # the model is still at work on what does not concern the blocks
        prefill.rows.snapshot(mine, end, new.tables[0].block_ids)
        started = time.perf_counter()
        prefill.commit(mine, end)
        seconds = moment_of_end(receive) - started
        if not send.wait(_SECONDS):
            raise LaunchError(f"a send of the benchmark failed: {send.error}")
        match = decode.match(theirs)
        if match.num_tokens != end:
            raise LaunchError(f"{match.num_tokens} tokens of {end} were received")
        self._compare(new.tables[0].block_ids, match.tables[0].block_ids)
        decode.release(theirs)
        prefill.release(mine)
        return seconds

    def _compare(self, sent: list[int], received: list[int]) -> None:
        sides = (side.ranks.kv_views(0) for side in self._sides)
        for layer, (mine, theirs) in enumerate(zip(*sides, strict=True)):
            for part, array in mine.items() if layer in STATE_CASE.layout.groups[1].layers else ():
                if self._num_prompts == 1 and not np.array_equal(array[sent], theirs[part][received]):
                    raise LaunchError("a state did not arrive as it was sent")


def _instance(role: Any, link: Any) -> PrefixCacheManager:
    return PrefixCacheManager(
        CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks=2 * (NUM_BLOCKS + 1),
            num_gpu_units=(4,),
            layout=STATE_CASE.layout,
            role=role,
            peer=PeerConfig(weights_id="benchmark", link=link, name=role),
        )
    )
