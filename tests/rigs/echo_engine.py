"""An engine whose model reads its whole context back from the KV blocks."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, TransferConfig
from fastdeploy_cache.launch.reference_engine.engine import Engine, EngineSettings
from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from fastdeploy_cache.transfer_manager.rank.inline_client import InlineClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask

VOCABULARY, EOS, SIZE = 50, 0, 4


def next_token(context: Sequence[int]) -> int:
    return zlib.crc32(np.array(context, np.int32).tobytes()) % VOCABULARY


def expected(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    context, output = list(prompt), list[int]()
    while len(output) < max_new_tokens and (not output or output[-1] != EOS):
        output.append(next_token(context))
        context.append(output[-1])
    return output


class EchoModel:
    """Its "key" of a token is the token; what comes next depends on every key that it finds in the blocks."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self._keys = [cache.ranks.kv_views(rank)[0]["key"] for rank in range(cache.config.transfer.tp_size)]
        self.num_computed_tokens = 0

    def forward(self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None]) -> np.ndarray:
        before_layer(0)
        logits = np.zeros((len(chunks), VOCABULARY), np.float32)
        for row, chunk in zip(logits, chunks, strict=True):
            self.num_computed_tokens += len(chunk.token_ids)
            positions = np.arange(chunk.end)
            where = chunk.block_ids[positions // SIZE], positions % SIZE
            for keys in self._keys:
                keys[where[0][chunk.start :], where[1][chunk.start :], 0, 0] = chunk.token_ids
            contexts = {tuple(keys[where][:, 0, 0].astype(int)) for keys in self._keys}
            assert len(contexts) == 1, "the ranks disagree"
            row[next_token(contexts.pop())] = 1.0
        return logits


class LateClient(InlineClient):
    """Holds loads back until told otherwise."""

    held: ClassVar[list[TransferTask]]

    def submit(self, task: TransferTask) -> None:
        if task.kind is TaskKind.SWAP_IN:
            self.held.append(task)
        else:
            super().submit(task)

    def land_all(self) -> None:
        while self.held:
            super().submit(self.held.pop(0))


def make(
    num_gpu: int, num_cpu: int, max_running: int = 4, client_type: type[InlineClient] = InlineClient
) -> tuple[PrefixCacheManager, Engine, EchoModel]:
    config = CacheConfig(
        load_policy="always",  # this model computes in no time
        block_size=SIZE,
        num_gpu_blocks=num_gpu,
        num_cpu_blocks=num_cpu,
        layout=KVLayout(num_layers=1, num_kv_heads=2, head_dim=1, dtype="float32"),
        transfer_client="inline",
        transfer=TransferConfig(tp_size=2),
    )
    cache = PrefixCacheManager(config, client=client_type(config.rank_layout(), num_gpu, num_cpu, 2))
    model = EchoModel(cache)
    settings = EngineSettings(eos_token_id=EOS, context_length=1000, max_running=max_running)
    return cache, Engine(cache, model, settings), model


def finish(engine: Engine, generations: Sequence[Generation]) -> None:
    for _ in range(10_000):
        if all(g.finish_reason for g in generations):
            return
        engine.step()
    raise AssertionError("the engine makes no progress")


def converse(cache: PrefixCacheManager, engine: Engine, choose: random.Random) -> None:
    """Three turns of six conversations, closing the cache at the end: every answer is the one computed alone."""
    with cache:
        histories = [[choose.randrange(VOCABULARY) for _ in range(choose.randint(1, 20))] for _ in range(6)]
        for _ in range(3):
            prompts = [[*history, *(choose.randrange(VOCABULARY) for _ in range(5))][:50] for history in histories]
            generations = [engine.intake.submit(np.array(prompt), 9) for prompt in prompts]
            finish(engine, generations)
            for prompt, generation in zip(prompts, generations, strict=True):
                assert generation.output == expected(prompt, 9)
            histories = [prompt + g.output for prompt, g in zip(prompts, generations, strict=True)]
            cache.check_invariants()
        assert cache.stats().num_requests == 0
