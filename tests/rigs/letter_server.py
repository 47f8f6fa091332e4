"""A server of a model made of letters: instances in this process, or as a program one that ends with its input.

A token is a character, and what comes next has scores of its own for each context, which the model reads back from the
KV blocks. As a program: its first line is its port; each line that it reads is a verb of the cache's life cycle.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager
from fastdeploy_cache.launch.reference_engine.engine import Engine, EngineSettings
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from tests.rigs.http_rig import served

LETTERS = "abcdefghijklmnopqrstuvwxyz .,:\n"
NUM_TOKENS, SIZE, SECONDS = len(LETTERS) + 1, 4, 10.0  # token 0 ends an answer


class LetterTokenizer(ChatTokenizer):
    """Characters and their numbers; what is no letter of ours is a blank."""

    def __init__(self) -> None:
        self.eos_token_id, self.max_token_bytes = 0, 1
        self._token_bytes = [b"", *(letter.encode() for letter in LETTERS)]

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        return np.array([1 + max(0, LETTERS.find(letter)) for letter in text], np.int32)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray[Any, Any]:
        return self.encode("".join(f"{each['role']}:{each['content']}\n" for each in messages) + "assistant:")

    def min_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        return sum(len(each["content"]) for each in messages)

    def min_text_tokens(self, text: str) -> int:
        return len(text)


class LetterModel:
    """Its key of a token is the token."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self._keys = cache.ranks.kv_views(0)[0]["key"]

    def forward(self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None]) -> np.ndarray:
        before_layer(0)
        logits = np.zeros((len(chunks), NUM_TOKENS), np.float32)
        for row, chunk in zip(logits, chunks, strict=True):
            positions = np.arange(chunk.end)
            where = chunk.block_ids[positions // SIZE], positions % SIZE
            self._keys[where[0][chunk.start :], where[1][chunk.start :], 0, 0] = chunk.token_ids
            context = self._keys[where][:, 0, 0].astype(np.int32)
            row[1:] = np.random.default_rng(zlib.crc32(context.tobytes())).normal(size=NUM_TOKENS - 1)
            row[0] = -10.0  # an answer is as long as it may be
        return logits


def letter_engine(cache: PrefixCacheManager) -> Engine:
    return Engine(cache, LetterModel(cache), EngineSettings(eos_token_id=0, context_length=400))


def letter_config(**settings: Any) -> CacheConfig:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    return CacheConfig(block_size=SIZE, num_gpu_blocks=100, layout=layout, **settings)


def main() -> None:
    """Serve until the end of standard input."""
    with PrefixCacheManager(letter_config(transfer_client="inline")) as cache:
        engine = letter_engine(cache)
        thread = threading.Thread(target=engine.run)
        thread.start()
        with served(InstanceApp(ChatApi(engine, LetterTokenizer()), cache).build()) as port:
            print(port, flush=True)
            for line in sys.stdin:
                getattr(cache.life, line.strip())(SECONDS)
                print("done", flush=True)
        engine.stop()
        thread.join()


if __name__ == "__main__":
    main()
