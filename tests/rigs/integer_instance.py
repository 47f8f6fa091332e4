"""Instances of prefill and decode in this process, under a model of integers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, TransferConfig
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.launch.reference_engine.engine import Engine, EngineSettings
from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from tests.rigs.echo_engine import EOS, SIZE, VOCABULARY, next_token

NUM_LAYERS = 3
SECONDS = 20.0
PROMPT = list(range(1, 23))  # five full blocks and two tokens


class LayerModel:
    """Keys and values of a token are the token and its layer, on all heads; what comes next depends on all of them."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self._views = [cache.ranks.kv_views(rank) for rank in range(cache.config.transfer.tp_size)]
        self.num_computed_tokens = 0
        self.on_layer: Callable[[int], None] = lambda _: None

    def forward(self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None]) -> np.ndarray:
        contexts: list[set[tuple[int, ...]]] = [set() for _ in chunks]
        self.num_computed_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        for layer in range(NUM_LAYERS):
            before_layer(layer)
            self.on_layer(layer)
            for chunk, found in zip(chunks, contexts, strict=True):
                positions = np.arange(chunk.end)
                where = chunk.block_ids[positions // SIZE], positions % SIZE
                new = where[0][chunk.start :], where[1][chunk.start :]
                for views in self._views:
                    for part, factor in (("key", 1), ("value", -1)):
                        array = views[layer][part]
                        array[new] = (factor * (chunk.token_ids + layer * VOCABULARY))[:, None, None]
                        heads = factor * array[where][:, :, 0].astype(int) - layer * VOCABULARY
                        found.update(tuple(heads[:, head]) for head in range(heads.shape[1]))
        logits = np.zeros((len(chunks), VOCABULARY), np.float32)
        for row, found in zip(logits, contexts, strict=True):
            assert len(found) == 1, "ranks, heads or layers disagree"
            row[next_token(found.pop())] = 1.0
        return logits


class Numbers(ChatTokenizer):
    """Every chat is the same prompt; a token is its number."""

    def __init__(self) -> None:
        self._token_bytes = [f"{token} ".encode() for token in range(VOCABULARY)]

    def min_tokens(self, messages: Any) -> int:
        return 0

    def encode_chat(self, messages: Any) -> np.ndarray[Any, Any]:
        return np.array(PROMPT)


class Instance:
    """A cache, its engine and the thread that runs it."""

    def __init__(
        self,
        role: str,
        tp_size: int,
        num_gpu: int = 100,
        *,
        max_running: int = 4,
        recompute: bool = True,
        events: EventsConfig | None = None,
        **peer: Any,
    ):
        config = CacheConfig(
            block_size=SIZE,
            num_gpu_blocks=num_gpu,
            layout=KVLayout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=1, dtype="float32"),
            transfer=TransferConfig(tp_size=tp_size),
            role=role,
            events=events,
            peer=PeerConfig(weights_id="integers", name=role, silence_timeout_seconds=2.0, **peer),
        )
        self.cache = PrefixCacheManager(config)
        self.model = LayerModel(self.cache)
        self.engine = Engine(
            self.cache,
            self.model,
            EngineSettings(
                eos_token_id=EOS, context_length=1000, max_running=max_running, recompute_not_received=recompute
            ),
        )
        self._thread = threading.Thread(target=self.engine.run)
        self._thread.start()

    def close(self) -> None:
        self.engine.stop()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self.cache.check_invariants()
        assert self.cache.stats().num_requests == 0
        self.cache.close()

    def offer(self, prompt: Sequence[int]) -> tuple[Generation, bytes]:
        generation = self.engine.intake.submit_prefill(np.array(prompt))
        return generation, generation.wait_send(SECONDS).offer

    def num_bytes(self, kind: str) -> float:
        name = "fastdeploy_cache_peer_bytes"
        samples = [s for family in self.cache.metrics.collect() if family.name == name for s in family.samples]
        return sum(sample.value for sample in samples if sample.labels["kind"] == kind)


@contextmanager
def instances(*wanted: Callable[[], Instance]) -> Iterator[list[Instance]]:
    with ExitStack() as stack:
        made = []
        for make in wanted:
            made.append(make())
            stack.callback(made[-1].close)
        yield made


def prefill() -> Instance:
    return Instance("prefill", 1)
