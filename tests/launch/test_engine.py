"""The scheduler over the real cache, with a model that reads its whole context back from the KV blocks."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.launch.reference_engine.generation import GenerationError
from tests.rigs.echo_engine import LateClient, converse, expected, finish, make


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_is_the_one_computed_alone(seed: int) -> None:
    """Conversations through pools too small for them: evicted, loaded back, preempted, never a wrong token."""
    choose = random.Random(seed)
    cache, engine, _ = make(num_gpu=choose.randint(16, 40), num_cpu=choose.choice((0, 30, 200)))
    converse(cache, engine, choose)


def test_cached_tokens_are_not_computed_again() -> None:
    """A resent prompt computes what lies behind its last full block, no more."""
    cache, engine, model = make(num_gpu=40, num_cpu=0)
    prompt = np.arange(1, 22)
    with cache:
        for num_expected in (21, 1):
            before = model.num_computed_tokens
            finish(engine, [engine.intake.submit(prompt, 1)])
            assert model.num_computed_tokens - before == num_expected


def test_two_equal_prompts_in_a_pool_that_cannot_hold_both_copies() -> None:
    """Duplicates of a request that runs alone go home by preemption: no deadlock."""
    cache, engine, _ = make(num_gpu=12, num_cpu=0)
    prompt = list(range(1, 22))
    with cache:
        generations = [engine.intake.submit(np.array(prompt), 20) for _ in range(2)]
        finish(engine, generations)
        assert all(g.output == expected(prompt, 20) for g in generations)
        cache.check_invariants()


def test_running_answers_do_not_wait_for_the_loads_of_others() -> None:
    """While one request's blocks are late, the running one goes on; when they come, the other is right as well."""
    cache, engine, _ = make(num_gpu=20, num_cpu=60, client_type=LateClient)
    client = cache._movement.client
    assert isinstance(client, LateClient)
    client.held = []
    old, other = list(range(1, 42)), list(range(41, 0, -1))
    with cache:
        for prompt in (old, other):
            finish(engine, [engine.intake.submit(np.array(prompt), 1)])
        running = engine.intake.submit(np.arange(2, 9), 30)
        engine.step()
        late = engine.intake.submit(np.array([*old, 1]), 3)
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
                engine.intake.submit(prompt, max_new_tokens)
        for prompt in (np.array([], int), np.array([-1])):
            with pytest.raises(RequestError):
                engine.intake.submit(prompt, 1)
        assert not engine.step()


def test_a_stopped_engine_answers_everybody() -> None:
    """Stop while requests run and wait: each ends with an error, the cache holds nothing of theirs."""
    cache, engine, _ = make(num_gpu=40, num_cpu=0, max_running=1)
    with cache:
        generations = [engine.intake.submit(np.arange(1, 9), 30) for _ in range(3)]
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
            engine.intake.submit(np.arange(3), 1)
        assert cache.stats().num_requests == 0


def test_an_answer_that_nobody_wants_any_more_is_dropped() -> None:
    """Running or waiting: its blocks go home at the next step, the others go on."""
    cache, engine, _ = make(num_gpu=40, num_cpu=0, max_running=1)
    with cache:
        first, second, third = (engine.intake.submit(np.arange(start, 30), 30) for start in (1, 2, 3))
        engine.step()
        first.cancelled = second.cancelled = True
        finish(engine, [first, second, third])
        assert (first.finish_reason, second.finish_reason) == ("cancelled", "cancelled")
        assert third.output == expected(list(range(3, 30)), 30)
        assert cache.stats().num_requests == 0
        cache.check_invariants()
