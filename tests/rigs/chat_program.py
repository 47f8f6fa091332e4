"""A program: a server of chats over a model that always says the same, with the deadlines of its arguments.

Its arguments are the seconds for a head and for a body. Its first line is its port; it ends with its standard input.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.launch.reference_engine.engine import Engine, EngineSettings
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from fastdeploy_cache.launch.server.limits import Limits
from tests.rigs.http_rig import served


class Ones(ChatTokenizer):
    """Every chat is the same prompt."""

    def __init__(self) -> None:
        pass

    def min_tokens(self, messages: Any) -> int:
        return 0

    def encode_chat(self, messages: Any) -> np.ndarray[Any, Any]:
        return np.ones(10, np.int32)

    def decode(self, token_ids: Any) -> str:
        return "1 " * len(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return b"1 "


class OneModel:
    """What comes next is 1."""

    def forward(self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None]) -> np.ndarray:
        logits = np.zeros((len(chunks), 3), np.float32)
        logits[:, 1] = 1.0
        return logits


def main() -> None:
    """Serve until the end of standard input."""
    limits = Limits(head_seconds=float(sys.argv[1]), body_seconds=float(sys.argv[2]))
    with PrefixCacheManager(CacheConfig(block_size=4, num_gpu_blocks=100, transfer_client="inline")) as cache:
        engine = Engine(cache, OneModel(), EngineSettings(eos_token_id=2, context_length=100))
        thread = threading.Thread(target=engine.run)
        thread.start()
        with served(InstanceApp(ChatApi(engine, Ones()), cache).build(), limits) as port:
            print(port, flush=True)
            sys.stdin.read()
        engine.stop()
        thread.join()


if __name__ == "__main__":
    main()
