"""The scheduler over the real cache, with a model that reads its whole context back from the KV blocks."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, TransferConfig
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationError
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
        self._keys = [cache.kv_views(rank)[0]["key"] for rank in range(cache.config.transfer.tp_size)]
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
    return cache, Engine(cache, model, eos_token_id=EOS, context_length=1000, max_running=max_running), model


def finish(engine: Engine, generations: Sequence[Generation]) -> None:
    for _ in range(10_000):
        if all(g.finish_reason for g in generations):
            return
        engine.step()
    raise AssertionError("the engine makes no progress")


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_is_the_one_computed_alone(seed: int) -> None:
    """Conversations through pools too small for them: evicted, loaded back, preempted, never a wrong token."""
    choose = random.Random(seed)
    cache, engine, _ = make(num_gpu=choose.randint(16, 40), num_cpu=choose.choice((0, 30, 200)))
    with cache:
        histories = [[choose.randrange(VOCABULARY) for _ in range(choose.randint(1, 20))] for _ in range(6)]
        for _ in range(3):
            prompts = [[*history, *(choose.randrange(VOCABULARY) for _ in range(5))][:50] for history in histories]
            generations = [engine.submit(np.array(prompt), 9) for prompt in prompts]
            finish(engine, generations)
            for prompt, generation in zip(prompts, generations, strict=True):
                assert generation.output == expected(prompt, 9)
            histories = [prompt + g.output for prompt, g in zip(prompts, generations, strict=True)]
            cache.check_invariants()
        assert cache.stats().num_requests == 0


def test_cached_tokens_are_not_computed_again() -> None:
    """A resent prompt computes what lies behind its last full block, no more."""
    cache, engine, model = make(num_gpu=40, num_cpu=0)
    prompt = np.arange(1, 22)
    with cache:
        for num_expected in (21, 1):
            before = model.num_computed_tokens
            finish(engine, [engine.submit(prompt, 1)])
            assert model.num_computed_tokens - before == num_expected


def test_two_equal_prompts_in_a_pool_that_cannot_hold_both_copies() -> None:
    """Duplicates of a request that runs alone go home by preemption: no deadlock."""
    cache, engine, _ = make(num_gpu=12, num_cpu=0)
    prompt = list(range(1, 22))
    with cache:
        generations = [engine.submit(np.array(prompt), 20) for _ in range(2)]
        finish(engine, generations)
        assert all(g.output == expected(prompt, 20) for g in generations)
        cache.check_invariants()


def test_running_answers_do_not_wait_for_the_loads_of_others() -> None:
    """While one request's blocks are late, the running one goes on; when they come, the other is right as well."""
    cache, engine, _ = make(num_gpu=20, num_cpu=60, client_type=LateClient)
    client = cache._client
    assert isinstance(client, LateClient)
    client.held = []
    old, other = list(range(1, 42)), list(range(41, 0, -1))
    with cache:
        for prompt in (old, other):
            finish(engine, [engine.submit(np.array(prompt), 1)])
        running = engine.submit(np.arange(2, 9), 30)
        engine.step()
        late = engine.submit(np.array([*old, 1]), 3)
        for _ in range(5):
            engine.step()
        assert client.held, "the late one is being loaded"
        assert not late.output
        assert len(running.output) >= min(6, len(expected(list(range(2, 9)), 30)))
        client.land_all()
        finish(engine, [running, late])
        assert late.output == expected([*old, 1], 3)
        assert late.num_cpu_tokens > 0
        cache.check_invariants()


def test_what_can_never_fit_is_refused_at_once() -> None:
    """Longer than the pool or the context, no new token, empty or negative prompts: typed errors."""
    cache, engine, _ = make(num_gpu=10, num_cpu=0)
    with cache:
        for prompt, max_new_tokens in ((np.ones(40, int), 1), (np.ones(4, int), 0)):
            with pytest.raises(GenerationError, match="at most 40"):
                engine.submit(prompt, max_new_tokens)
        for prompt in (np.array([], int), np.array([-1])):
            with pytest.raises(RequestError):
                engine.submit(prompt, 1)
        assert not engine.step()


def test_a_stopped_engine_answers_everybody() -> None:
    """Stop while requests run and wait: each ends with an error, the cache holds nothing of theirs."""
    cache, engine, _ = make(num_gpu=40, num_cpu=0, max_running=1)
    with cache:
        generations = [engine.submit(np.arange(1, 9), 30) for _ in range(3)]
        thread = threading.Thread(target=engine.run)
        thread.start()
        assert generations[0].next_token(10) is not None
        engine.stop()
        thread.join(10)
        assert not thread.is_alive()
        for generation in generations:
            with pytest.raises(GenerationError, match="stopped"):
                while generation.next_token(10) is not None:
                    pass
                raise GenerationError("stopped: it had finished before")
        with pytest.raises(GenerationError, match="stopped"):
            engine.submit(np.arange(3), 1)
        assert cache.stats().num_requests == 0


def test_an_answer_that_nobody_wants_any_more_is_dropped() -> None:
    """Running or waiting: its blocks go home at the next step, the others go on."""
    cache, engine, _ = make(num_gpu=40, num_cpu=0, max_running=1)
    with cache:
        first, second, third = (engine.submit(np.arange(start, 30), 30) for start in (1, 2, 3))
        engine.step()
        first.cancelled = second.cancelled = True
        finish(engine, [first, second, third])
        assert (first.finish_reason, second.finish_reason) == ("cancelled", "cancelled")
        assert third.output == expected(list(range(3, 30)), 30)
        assert cache.stats().num_requests == 0
        cache.check_invariants()
