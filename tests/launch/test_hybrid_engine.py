"""The reference engine with a hybrid model: blocks of all rows, states, and what is refused before it starts."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from fastdeploy_cache import CacheConfig, TransferConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.launch.reference_engine.delta_rule import DeltaInputs, advance
from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.hybrid_spec import (
    hybrid_layout_of,
    kinds_of,
    weights_id_of,
    with_units,
)
from fastdeploy_cache.launch.reference_engine.serving import layout_of, running_engine
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles
from fastdeploy_cache.launch.server.options import ServeOptions
from fastdeploy_cache.launch.server.settings import load_config
from tests.rigs.echo_engine import converse, finish
from tests.rigs.hybrid_echo import make_hybrid
from tests.rigs.process_ends import SECONDS, pids


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_is_the_one_computed_alone(seed: int) -> None:
    """Conversations through pools too small for them: windows and states are those of the context, always."""
    choose = random.Random(seed)
    units = (choose.randint(70, 120), choose.randint(6, 14))
    cache, engine, _ = make_hybrid(choose.randint(24, 40), choose.choice((0, 30, 200)), units)
    converse(cache, engine, choose)


def test_cached_tokens_are_not_computed_again() -> None:
    """A resent prompt, and the next turn, go on at the last checkpoint: pieces end where a state is wanted."""
    cache, engine, model = make_hybrid(40, 0, (80, 12))
    prompt = [*range(1, 22)]
    with cache:
        for num_expected in (21, 1):
            before = model.num_computed_tokens
            finish(engine, [engine.intake.submit(np.array(prompt), 1)])
            assert model.num_computed_tokens - before == num_expected
        [first] = generations = [engine.intake.submit(np.array(prompt), 12)]
        finish(engine, generations)
        turn, before = [*prompt, *first.output, 7, 8], model.num_computed_tokens
        finish(engine, [engine.intake.submit(np.array(turn), 1)])
        end = (len(prompt) + len(first.output) - 1) // 4 * 4
        assert model.num_computed_tokens - before == len(turn) - end


def sequential(state: np.ndarray, inputs: DeltaInputs) -> tuple[np.ndarray, np.ndarray]:
    """The rule by its definition, token by token, in float64."""
    read, state = [], state.astype(np.float64)
    for query, key, value, keep, strength in zip(*inputs[:3], *inputs.gates, strict=True):
        state = keep[:, None, None] * state
        change = value - np.einsum("hd,hde->he", key, state)
        state = state + strength[:, None, None] * key[:, :, None] * change[:, None, :]
        read.append(np.einsum("hgd,hde->hge", query, state))
    return np.array(read), state


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 64), (0, 200), (37, 150), (63, 2), (64, 64)])
def test_the_delta_rule_by_pieces_is_that_by_tokens(start: int, num_tokens: int) -> None:
    """What is read, and the state behind, up to rounding; pieces end at the same places wherever a step begins."""
    noise = np.random.default_rng(start)
    shapes = ((num_tokens, 3, 2, 8), (num_tokens, 3, 8), (num_tokens, 3, 8))
    query, key, value = (noise.standard_normal(shape).astype(np.float32) for shape in shapes)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    gates = noise.uniform(0.05, 0.999, (2, num_tokens, 3)).astype(np.float32)
    gates[0] = 1 - gates[0] / 8
    state = noise.standard_normal((3, 8, 8)).astype(np.float32)
    inputs = DeltaInputs(query, key, value, gates)
    read, after = advance(state, inputs, start)
    wanted_read, wanted = sequential(state, inputs)
    np.testing.assert_allclose(read, wanted_read, atol=2e-4)
    np.testing.assert_allclose(after, wanted, atol=2e-4)
    cut = 64 - start % 64
    if cut < num_tokens:  # two steps that part where a piece ends are one, to the last bit
        first, middle = advance(state, inputs.part(0, cut), start)
        second, end = advance(middle, inputs.part(cut, num_tokens), start + cut)
        assert np.array_equal(np.concatenate([first, second]), read) and np.array_equal(end, after)


def config_of(files: ModelFiles, **fields: Any) -> CacheConfig:
    base = {"block_size": 32, "num_gpu_blocks": 40, "num_cpu_blocks": 120, "load_policy": "always"}
    return with_units(CacheConfig(layout=hybrid_layout_of(files.spec), **{**base, **fields}), 2)


def answers(engine: Engine, prompts: Sequence[np.ndarray]) -> list[tuple[list[int], int]]:
    """Each with the tokens that were cached."""
    found = []
    for prompt in prompts:
        generation = engine.intake.submit(prompt, 6)
        finish(engine, [generation])
        assert generation.error is None, generation.error
        found.append((generation.output, generation.num_cached_tokens))
    return found


@pytest.mark.processes
def test_the_real_model_with_ranks_killed(files: ModelFiles) -> None:
    """Prompts from the GPU and the CPU tier: every token is that without the cache; ranks die between."""
    noise = np.random.default_rng(1)
    starts = [noise.integers(10, 40_000, length).astype(np.int32) for length in (150, 400, 60)]
    turns = [np.concatenate([each, noise.integers(10, 40_000, 40).astype(np.int32)]) for each in starts]
    prompts = [*starts, *turns, *starts]
    with running_engine(files, config_of(files, enable_prefix_caching=False, num_cpu_blocks=0)) as plain:
        expected_answers = [output for output, _ in answers(plain, prompts)]
    assert len({tuple(each) for each in expected_answers[:6]}) == 6, "all say the same: this shows nothing"
    with running_engine(files, config_of(files, transfer=TransferConfig(tp_size=3))) as engine:
        first = answers(engine, prompts)
        for pid in pids(engine.cache._movement.client):
            os.kill(pid, signal.SIGKILL)
        again = answers(engine, prompts)
        assert engine.cache.ranks.wait_ready(SECONDS)
        engine.cache.check_invariants()
    assert [output for output, _ in first] == expected_answers == [output for output, _ in again]
    assert sum(num_cached for _, num_cached in first) > 700 and sum(num_cached for _, num_cached in again) > 700


def test_the_model_is_one_of_its_own(files: ModelFiles) -> None:
    """Windows, three states, and a last layer that keeps everything; on disk it is not taken for SmolLM2."""
    kinds = kinds_of(files.spec)
    assert [kinds.count(kind) for kind in ("full", "window", "state")] == [12, 15, 3] and kinds[-1] == "full"
    names = {weights_id_of(files, layout) for layout in (layout_of(files.spec), hybrid_layout_of(files.spec))}
    assert len(names) == 2 and files.digest in names


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["block_size=512"], "block_size is 512, and a step of this engine computes 256 tokens"),
        (
            ["num_gpu_units=11,2"],
            "num_gpu_units is [11, 2], and one request of this engine needs [17, 2]; give as many",
        ),
        (["transfer.device=cuda"], "--model hybrid with transfer.device 'cuda'"),
    ],
)
def test_what_cannot_serve_it_is_refused(files: ModelFiles, tmp_path: Path, settings: list[str], said: str) -> None:
    """One line, before anything is started."""
    path = tmp_path / "cache.toml"
    path.write_text("block_size = 32\nnum_gpu_blocks = 40\n")
    with pytest.raises(ConfigError) as refused:
        load_config(files, ServeOptions(config=path, model="hybrid", settings=settings))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_an_unknown_model_is_refused() -> None:
    """With the names of those that are known."""
    with pytest.raises(typer.BadParameter, match="--model mamba; use smollm2 or hybrid"):
        ServeOptions(model="mamba")
