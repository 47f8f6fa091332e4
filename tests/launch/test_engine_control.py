"""Verbs between the steps of an engine: answers stand still, come back, and never change by it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from fastdeploy_cache.errors import LaunchError, LifeCycleError
from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationError
from fastdeploy_cache.launch.server.engine_control import EngineControl
from fastdeploy_cache.transfer_manager.rank.inline_client import InlineClient
from fastdeploy_cache.transfer_manager.task import TransferTask
from tests.rigs.echo_engine import VOCABULARY, LateClient, expected, finish, make

VERBS = ("pause", "resume", "sleep", "sleep gpu", "sleep cpu", "wake", "clear", "update-weights")


class OnceLateClient(LateClient):
    """Holds loads back until `is_late` is over."""

    is_late = True

    def submit(self, task: TransferTask) -> None:
        if self.is_late:
            super().submit(task)
        else:
            InlineClient.submit(self, task)


def apply(control: EngineControl, verb: str, timeout_seconds: float = 10) -> None:
    name, _, tier = verb.partition(" ")
    if name == "sleep":
        control.sleep(timeout_seconds, (tier,) if tier else ("gpu", "cpu"))  # type: ignore[arg-type]
    elif name == "update-weights":
        control.update_weights(timeout_seconds, None)
    else:
        getattr(control, name)(timeout_seconds)


def bring_back(control: EngineControl) -> None:
    apply(control, "wake" if control.status == "asleep" else "resume")


@contextmanager
def running(engine: Engine) -> Iterator[threading.Thread]:
    """The engine in a thread of its own."""
    thread = threading.Thread(target=engine.run)
    thread.start()
    yield thread
    engine.stop()
    thread.join(10)
    assert not thread.is_alive()


def tokens(generation: Generation) -> list[int]:
    while generation.next_token(10) is not None:
        pass
    return generation.output


@pytest.mark.parametrize("verb", ["pause", "sleep", "sleep gpu", "sleep cpu"])
def test_answers_stand_still_and_go_on(verb: str) -> None:
    """No step between the verb and its reverse; then what ran and what came meanwhile is answered as ever."""
    cache, engine, _ = make(num_gpu=40, num_cpu=40)
    control = EngineControl(engine)
    with cache:
        prompts = [list(range(start, 20)) for start in (1, 2)]
        before = engine.intake.submit(np.array(prompts[0]), 30)
        for _ in range(4):
            engine.step()
        apply(control, verb)
        num_tokens = len(before.output)
        meanwhile = engine.intake.submit(np.array(prompts[1]), 30)
        assert engine.step() and engine.step()
        assert (len(before.output), meanwhile.output) == (num_tokens, [])
        cache.check_invariants()
        bring_back(control)
        finish(engine, [before, meanwhile])
        assert [before.output, meanwhile.output] == [expected(prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("verb", ["sleep", "sleep gpu", "clear", "update-weights"])
def test_nobody_holds_kv_that_goes(verb: str) -> None:
    """What runs gives its blocks back before its KV goes, and computes it again; here KV that has gone reads as 0."""
    cache, engine, model = make(num_gpu=40, num_cpu=0)
    control = EngineControl(engine)
    with cache:
        prompt = list(range(1, 25))
        generations = [engine.intake.submit(np.array([*prompt, last]), 20) for last in (1, 2)]
        for _ in range(3):
            engine.step()
        before = model.num_computed_tokens
        apply(control, verb)
        assert cache.stats().num_requests == 0
        if control.status == "asleep":
            bring_back(control)
        finish(engine, generations)
        assert [g.output for g in generations] == [expected([*prompt, last], 20) for last in (1, 2)]
        assert model.num_computed_tokens - before >= len(prompt)


def test_clear_and_new_weights_let_it_go_on_by_itself() -> None:
    """A verb that ends where it began needs no resume; a paused engine stays paused."""
    cache, engine, _ = make(num_gpu=40, num_cpu=0)
    control = EngineControl(engine)
    with cache:
        for verb in ("clear", "update-weights"):
            generation = engine.intake.submit(np.arange(1, 9), 3)
            apply(control, verb)
            finish(engine, [generation])
            apply(control, "pause")
            apply(control, verb)
            assert control.status == "paused"
            waiting = engine.intake.submit(np.arange(1, 9), 3)
            engine.step()
            assert not waiting.output
            apply(control, "resume")
            finish(engine, [waiting])


def test_a_request_that_waits_for_its_loads_gives_them_back() -> None:
    """It holds a match without running: sleep takes that back as well, and it is matched again."""
    cache, engine, _ = make(num_gpu=20, num_cpu=60, client_type=OnceLateClient)
    engine.overlap._progress = []  # it waits for its loads instead of running ahead of them
    client = cache._movement.client
    assert isinstance(client, OnceLateClient)
    client.held = []
    old, other = list(range(1, 42)), list(range(41, 0, -1))
    with cache:
        for prompt in (old, other):
            finish(engine, [engine.intake.submit(np.array(prompt), 1)])
        running_one = engine.intake.submit(np.arange(2, 9), 30)
        engine.step()
        late = engine.intake.submit(np.array([*old, 1]), 3)
        engine.step()
        assert late.match is not None and client.held
        engine.pause(1)
        engine.preempt_all()
        assert late.match is None and cache.stats().num_requests == 0
        client.land_all()
        client.is_late = False
        control = EngineControl(engine)
        apply(control, "sleep")
        apply(control, "wake")
        finish(engine, [running_one, late])
        assert late.output == expected([*old, 1], 3)
        assert running_one.output == expected(list(range(2, 9)), 30)


@pytest.mark.parametrize("seed", range(12))
def test_random_verbs_change_no_answer(seed: int) -> None:
    """Conversations through small pools with verbs between steps, refused ones too: each answer is the one computed
    alone."""
    choose = random.Random(seed)
    cache, engine, _ = make(num_gpu=choose.randint(16, 40), num_cpu=choose.choice((0, 30, 200)))
    control = EngineControl(engine)
    with cache:
        asked: list[tuple[Sequence[int], Generation]] = []
        for _ in range(60):
            if choose.random() < 0.3:
                prompt = [*range(choose.randint(1, 20)), choose.randrange(VOCABULARY)]
                asked.append((prompt, engine.intake.submit(np.array(prompt), choose.randint(1, 12))))
            for _ in range(choose.randint(0, 4)):
                engine.step()
            try:
                apply(control, choose.choice(VERBS))
            except LifeCycleError:
                assert control.status in ("running", "paused", "asleep")
            cache.check_invariants()
        bring_back(control)
        finish(engine, [generation for _, generation in asked])
        for prompt, generation in asked:
            assert generation.output == expected(prompt, generation.max_new_tokens)
        assert cache.stats().num_requests == 0


def test_verbs_from_another_thread_change_no_answer() -> None:
    """The engine steps in its own thread while verbs come from this one."""
    cache, engine, _ = make(num_gpu=40, num_cpu=40)
    control, prompts = EngineControl(engine), [list(range(start, 20)) for start in range(1, 7)]
    with cache, running(engine):
        generations = [engine.intake.submit(np.array(prompt), 60) for prompt in prompts]
        for verb in ("pause", "resume", "clear", "sleep", "wake", "update-weights", "sleep gpu", "wake"):
            apply(control, verb)
        assert [tokens(generation) for generation in generations] == [expected(prompt, 60) for prompt in prompts]


def test_a_refused_verb_leaves_the_engine_as_it_was() -> None:
    """Asleep, it stays still after a `resume` that is refused; running, it goes on after a `wake`: nothing to do."""
    cache, engine, _ = make(num_gpu=40, num_cpu=0)
    control = EngineControl(engine)
    with cache:
        generation = engine.intake.submit(np.arange(1, 9), 3)
        apply(control, "wake")
        assert engine.step() and len(generation.output) == 1
        apply(control, "sleep")
        with pytest.raises(LifeCycleError, match="asleep"):
            apply(control, "resume")
        engine.step()
        assert len(generation.output) == 1
        apply(control, "wake")
        finish(engine, [generation])


def test_a_step_that_takes_too_long_is_not_waited_for() -> None:
    """The verb fails in its time, and the engine goes on as if it had not been asked; while paused it stays paused."""
    cache, engine, model = make(num_gpu=40, num_cpu=0)
    control, inside, go_on = EngineControl(engine), threading.Event(), threading.Event()
    forward = model.forward

    def slow(*arguments: object) -> np.ndarray:
        inside.set()
        assert go_on.wait(10)
        return forward(*arguments)  # type: ignore[arg-type]

    model.forward = slow  # type: ignore[method-assign]
    with cache, running(engine):
        generation = engine.intake.submit(np.arange(1, 9), 3)
        assert inside.wait(10)
        with pytest.raises(LaunchError, match=r"not over within 0\.01 s"):
            apply(control, "pause", 0.01)
        assert control.status == "running"
        go_on.set()
        assert tokens(generation) == expected(list(range(1, 9)), 3)


@pytest.mark.parametrize("verb", ["pause", "sleep"])
def test_a_paused_engine_can_be_stopped(verb: str) -> None:
    """What ran and what waited is answered with an error; nothing of theirs stays."""
    cache, engine, _ = make(num_gpu=40, num_cpu=0, max_running=1)
    with cache:
        generations = [engine.intake.submit(np.arange(1, 9), 30) for _ in range(2)]
        engine.step()
        apply(EngineControl(engine), verb)
        with running(engine):
            pass
        for generation in generations:
            with pytest.raises(GenerationError, match="stopped"):
                tokens(generation)
        assert cache.stats().num_requests == 0


def test_the_longest_running_one_comes_back_first() -> None:
    """Preempting all keeps their order."""
    cache, engine, _ = make(num_gpu=40, num_cpu=0)
    with cache:
        generations = [engine.intake.submit(np.arange(start, 9), 30) for start in (1, 2, 3)]
        engine.step()
        assert engine.pause(1)
        engine.preempt_all()
        assert engine._line.snapshot() == generations
        engine.resume()
        finish(engine, generations)
