"""Prompts that are computed while their cached prefix is still being loaded, over real ranks: never a wrong token."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, TransferConfig
from fastdeploy_cache.launch.reference_engine.engine import Engine, EngineSettings
from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from fastdeploy_cache.transfer_manager.device.strips import load_steps
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask
from tests.rigs.echo_engine import EOS, SIZE, VOCABULARY, expected, finish, next_token
from tests.rigs.process_ends import SECONDS, pids
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes

NUM_LAYERS, NUM_GPU, NUM_CPU = 3, 24, 80
LAYOUT = KVLayout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=4096, dtype="float32")


class LayeredModel:
    """Its "key" of a token in layer l is the token plus 100 l, read only once `before_layer(l)` has returned.

    What comes next depends on every key of every layer that it finds in the blocks; a wrong one gives another answer.
    """

    def __init__(self, cache: PrefixCacheManager) -> None:
        self._ranks = [cache.ranks.kv_views(rank) for rank in range(cache.config.transfer.tp_size)]
        self.num_computed_tokens = 0
        self.on_step: Callable[[], None] = lambda: None

    def forward(self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None]) -> np.ndarray:
        self.on_step()
        contexts: list[set[tuple[int, ...]]] = [set() for _ in chunks]
        for layer in range(NUM_LAYERS):
            before_layer(layer)
            for seen, chunk in zip(contexts, chunks, strict=True):
                positions = np.arange(chunk.end)
                blocks, rows = chunk.block_ids[positions // SIZE], positions % SIZE
                for views in self._ranks:
                    keys = views[layer]["key"]
                    keys[blocks[chunk.start :], rows[chunk.start :], 0, 0] = chunk.token_ids + 100 * layer
                    seen.add(tuple(keys[blocks, rows, 0, 0].astype(int) - 100 * layer))
        logits = np.zeros((len(chunks), VOCABULARY), np.float32)
        for row, seen, chunk in zip(logits, contexts, chunks, strict=True):
            self.num_computed_tokens += len(chunk.token_ids)
            row[next_token(min(seen)) if len(seen) == 1 else EOS] = 1.0  # ranks or layers disagree: nonsense
        return logits


class FailingClient(RankClient):
    """Of its loads the next `num_to_fail` are sent with a block that is not there: the rank's device refuses them."""

    num_to_fail = 0
    num_failed = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._submit, self.submit = self.submit, self._submit_or_fail

    def _submit_or_fail(self, task: TransferTask) -> None:
        if task.kind is TaskKind.SWAP_IN and self.num_failed < self.num_to_fail:
            self.num_failed += 1
            task = dataclasses.replace(task, source_ids=task.source_ids + NUM_CPU)
        self._submit(task)


@dataclasses.dataclass
class Setup:
    """An engine over real ranks."""

    cache: PrefixCacheManager
    client: FailingClient
    model: LayeredModel
    engine: Engine

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 1) -> list[Generation]:
        """Serve prompts together; every answer must be the one computed alone."""
        generations = [self.engine.intake.submit(np.array(prompt), max_new_tokens) for prompt in prompts]
        finish(self.engine, generations)
        for prompt, generation in zip(prompts, generations, strict=True):
            assert generation.error is None
            assert generation.output == expected(prompt, max_new_tokens)
        self.cache.check_invariants()
        return generations


@contextlib.contextmanager
def serving(overlap: bool = True, tp_size: int = 2, num_gpu: int = NUM_GPU, **transfer: object) -> Iterator[Setup]:
    """Pools with room for two prompts on the GPU and many in the CPU tier; all that is computed is copied down."""
    settings = {"tp_size": tp_size, "restart_backoff_seconds": 0.01} | transfer
    config = CacheConfig(
        load_policy="always",  # this model computes in no time
        block_size=SIZE,
        num_gpu_blocks=num_gpu,
        num_cpu_blocks=NUM_CPU,
        cpu_write_policy="write_through",
        layout=LAYOUT,
        transfer=TransferConfig(**settings),  # type: ignore[arg-type]
    )
    layout = config.rank_layout()
    assert layout is not None
    assert len(load_steps(layout, layout.places(num_gpu))) > 1, "layers of a load come one after the other"
    client = FailingClient(config.transfer, layout, num_gpu, NUM_CPU)
    with PrefixCacheManager(config, client=client) as cache:
        model = LayeredModel(cache)
        settings = EngineSettings(eos_token_id=EOS, context_length=1000, overlap=overlap)
        yield Setup(cache, client, model, Engine(cache, model, settings))


def prompt_of(number: int, length: int = 41) -> list[int]:
    choose = random.Random(number)
    return [choose.randrange(1, VOCABULARY) for _ in range(length)]


def put_into_cpu_tier(setup: Setup, *numbers: int) -> None:
    """These prompts are served, copied down, and pushed off the GPU by others."""
    for number in (*numbers, 1000, 1001, 1002):
        setup.answer([prompt_of(number)])
        assert setup.cache.wait_for_transfers(SECONDS)


def hold_loads_until_computed(setup: Setup) -> list[bool]:
    """Stop the ranks now; they go on when the model begins a step. Returns a list that gets the steps begun ahead."""
    begun: list[bool] = []
    victims = pids(setup.client)
    for pid in victims:
        stopped(pid)

    def resume() -> None:
        begun.append(any(generation.is_ahead for generation in setup.engine._running))
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    setup.model.on_step = resume
    return begun


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_prompt_runs_ahead_of_its_load(tp_size: int) -> None:
    """The step begins while the ranks have surely loaded nothing: it waits layer by layer, and the answer is right."""
    with serving(tp_size=tp_size) as setup:
        put_into_cpu_tier(setup, 1)
        begun, before = hold_loads_until_computed(setup), setup.model.num_computed_tokens
        (generation,) = setup.answer([prompt_of(1)])
        assert begun == [True]
        assert generation.num_cpu_tokens == 40 and setup.model.num_computed_tokens - before == 1
        assert setup.engine.overlap.waited_for_layers_seconds > 0


def test_without_overlap_a_step_never_begins_before_its_loads() -> None:
    """The same prompt with `overlap=False`: the same answer, no step ahead, no wait inside a step."""
    with serving(overlap=False) as setup:
        put_into_cpu_tier(setup, 1)
        ahead: list[bool] = []
        setup.model.on_step = lambda: ahead.append(any(g.is_ahead for g in setup.engine._running))
        (generation,) = setup.answer([prompt_of(1)])
        assert generation.num_cpu_tokens == 40
        assert ahead and not any(ahead) and setup.engine.overlap.waited_for_layers_seconds == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_conversations_in_small_pools_are_answered_right(overlap: bool, seed: int) -> None:
    """Five conversations of four turns that push each other out: many CPU hits, and every answer is the right one."""
    choose, num_cpu_tokens = random.Random(seed), 0
    with serving(overlap, num_gpu=28) as setup:
        histories = [prompt_of(number, 17) for number in range(5)]
        for _ in range(4):
            prompts = [[*history, choose.randrange(1, VOCABULARY)] for history in histories]
            choose.shuffle(prompts)
            generations = setup.answer(prompts, 6)
            num_cpu_tokens += sum(generation.num_cpu_tokens for generation in generations)
            histories = [prompt + g.output for prompt, g in zip(prompts, generations, strict=True)]
        assert num_cpu_tokens > 50 and setup.cache.stats().num_swapped_in_blocks > 10
        assert setup.cache.stats().num_requests == 0


def test_two_prompts_ahead_in_one_step() -> None:
    """Loads of both are followed in the same step; each answer is the right one."""
    with serving(num_gpu=26) as setup:
        put_into_cpu_tier(setup, 1, 2)
        begun = hold_loads_until_computed(setup)
        first, second = setup.answer([prompt_of(1), prompt_of(2)], 4)
        assert begun[0] and first.num_cpu_tokens == second.num_cpu_tokens == 40


def test_two_prompts_share_a_load() -> None:
    """One load, two requests ahead of it: both wait for the same blocks, and both are right."""
    with serving() as setup:
        put_into_cpu_tier(setup, 1)
        begun, before = hold_loads_until_computed(setup), setup.cache.stats().num_swapped_in_blocks
        prompts = [[*prompt_of(1)[:40], token] for token in (7, 8)]
        generations = setup.answer(prompts, 3)
        assert begun[0] and [g.num_cpu_tokens for g in generations] == [40, 40]
        assert setup.cache.stats().num_swapped_in_blocks - before == 10


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_load_that_fails_discards_the_step(tp_size: int) -> None:
    """The device refuses the load: what was computed ahead of it counts for nothing, the request starts over."""
    with serving(tp_size=tp_size) as setup:
        put_into_cpu_tier(setup, 1)
        begun, before = hold_loads_until_computed(setup), setup.model.num_computed_tokens
        setup.client.num_to_fail, setup.client.num_failed = 1, 0
        (generation,) = setup.answer([prompt_of(1)], 3)
        assert setup.client.num_failed == 1 and begun[0]
        assert setup.model.num_computed_tokens - before > len(generation.output), "the first step was for nothing"


def test_a_prompt_whose_loads_never_come_is_answered_all_the_same() -> None:
    """Every load fails, one of them again: conversations are right, they only cost more. What one has computed by the
    time that it is matched again needs no load. A load that fails before its step is not asked for again, so the ranks
    stand still until the step has begun."""
    with serving() as setup:
        put_into_cpu_tier(setup, 1, 2)
        begun = hold_loads_until_computed(setup)
        setup.client.num_to_fail, setup.client.num_failed = 4, 0
        setup.answer([prompt_of(1), prompt_of(2)], 5)
        assert begun[0] and setup.client.num_failed >= 3


def test_a_rank_killed_under_a_step_ahead_discards_it() -> None:
    """Its load is surely unfinished when it dies in the middle of the step: the answer is computed, and right."""
    with serving(task_timeout_seconds=1000.0) as setup:
        put_into_cpu_tier(setup, 1)
        first, second = pids(setup.client)
        stopped(first)
        stopped(second)
        ahead: list[bool] = []

        def kill() -> None:
            if not ahead:
                os.kill(second, signal.SIGKILL)
                os.kill(first, signal.SIGCONT)
            ahead.append(any(generation.is_ahead for generation in setup.engine._running))

        setup.model.on_step = kill
        (generation,) = setup.answer([prompt_of(1)], 3)
        assert ahead[0] and len(ahead) > 1
        assert generation.output == expected(prompt_of(1), 3)
        assert setup.cache.ranks.wait_ready(SECONDS)
        setup.model.on_step = lambda: None
        put_into_cpu_tier(setup, 1)
        (again,) = setup.answer([prompt_of(1)])
        assert again.num_cpu_tokens == 40, "with the rank the CPU tier is back"


def test_an_answer_that_nobody_wants_while_it_is_ahead_is_dropped() -> None:
    """Cancelled between admission and confirmation: no block stays behind, and the next prompt is right."""
    with serving() as setup:
        put_into_cpu_tier(setup, 1)
        victims = pids(setup.client)
        for pid in victims:
            stopped(pid)
        generation = setup.engine.intake.submit(np.array(prompt_of(1)), 3)
        setup.engine._admit()
        assert generation.is_ahead
        generation.cancelled = True
        setup.engine.step()
        for pid in victims:
            os.kill(pid, signal.SIGCONT)
        assert generation.finish_reason == "cancelled"
        assert setup.cache.wait_for_transfers(SECONDS)
        stats = setup.cache.stats()
        assert (stats.num_requests, stats.gpu.num_in_flight, stats.gpu.num_private) == (0, 0, 0)
        setup.answer([prompt_of(1)], 3)
