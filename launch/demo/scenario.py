"""Plays the conversations, with the cache or without, kills a rank in the middle, and goes on after a restart."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy_cache import CacheConfig, CacheStats
from fastdeploy_cache.launch.demo.conversations import Conversation
from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationError
from fastdeploy_cache.launch.reference_engine.serving import running_engine
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles

logger = logging.getLogger(__name__)

OnAnswer = Callable[[], None]
_RANK_RETURN_SECONDS = 20.0
_FLUSH_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """One turn's answer and what it cost."""

    conversation: int
    turn: int
    generation: Generation
    after_restart: bool = False

    @property
    def kind(self) -> str:
        """The kind of answer, by the lowest tier that it took from."""
        found = self.generation
        if found.num_storage_tokens or (self.after_restart and found.num_cached_tokens):
            return "storage hit"  # of a new engine's, also what an earlier match of this one had loaded already
        return "CPU hit" if found.num_cpu_tokens else "GPU hit" if found.num_gpu_tokens else "cold"


@dataclass(frozen=True)
class Played:
    """All answers, in the order of (turn, conversation), and the cache's state at the end."""

    answers: tuple[Answer, ...]
    last_prompts: tuple[np.ndarray, ...]  # of the last turn, by conversation
    stats: CacheStats
    task_bytes: dict[str, int]
    load_seconds: float  # of all loads that the model ran ahead of
    waited_seconds: float  # of these, how long the model stood still, waiting for a layer
    killed_rank: int | None = None
    rank_returned: bool = False
    flushed: bool = False  # storage had everything when the engine ended


def warm_up(files: ModelFiles, config: CacheConfig, prompt: np.ndarray) -> None:
    """Compute once what nobody times: the first run of a model in a process takes longer than all later ones."""
    with running_engine(files, config, max_running=1) as engine:
        _answer_all(engine, [prompt], 2, lambda: None)


def play(
    files: ModelFiles,
    tokenizer: ChatTokenizer,
    config: CacheConfig,
    conversations: Sequence[Conversation],
    *,
    max_new_tokens: int,
    kill_rank: int | None = None,
    on_answer: OnAnswer = lambda: None,
) -> Played:
    """Play all turns; a turn of every conversation at once, then the next. `kill_rank` dies before the last one.

    Raises:
        GenerationError: an answer failed.
        CacheError, TransferError, IPCError: the cache cannot be started.
    """
    num_turns = len(conversations[0].turns)
    histories: list[np.ndarray] = [np.empty(0, np.int32)] * len(conversations)
    answers = []
    with running_engine(files, config, max_running=2) as engine:
        for turn in range(num_turns):
            prompts = [
                prompt_of(tokenizer, c, turn, history) for c, history in zip(conversations, histories, strict=True)
            ]
            if turn == num_turns - 1 and kill_rank is not None:
                _kill(engine, kill_rank)
            generations = _answer_all(engine, prompts, max_new_tokens, on_answer)
            histories = [
                np.concatenate([prompt, np.array(g.output, np.int32)])
                for prompt, g in zip(prompts, generations, strict=True)
            ]
            answers += [Answer(i, turn, g) for i, g in enumerate(generations)]
        return _ended(engine, answers, prompts, kill_rank)


def play_again(
    files: ModelFiles,
    config: CacheConfig,
    prompts: Sequence[np.ndarray],
    *,
    turn: int,
    max_new_tokens: int,
    on_answer: OnAnswer = lambda: None,
) -> Played:
    """Answer these prompts, one of each conversation, with an engine that has just been started. Raises as `play`."""
    with running_engine(files, config, max_running=2) as engine:
        generations = _answer_all(engine, prompts, max_new_tokens, on_answer)
        answers = [Answer(i, turn, g, after_restart=True) for i, g in enumerate(generations)]
        return _ended(engine, answers, prompts, None)


def _ended(engine: Engine, answers: list[Answer], prompts: Sequence[np.ndarray], kill_rank: int | None) -> Played:
    """Wait for what is on its way, write to storage what is cached, and look at the books."""
    cache = engine.cache
    cache.wait_for_transfers(cache.config.transfer.task_timeout_seconds)
    returned = kill_rank is not None and cache.ranks.wait_ready(_RANK_RETURN_SECONDS)
    flushed = cache.storage.flush(_FLUSH_SECONDS)
    cache.check_invariants()
    return Played(
        answers=tuple(answers),
        last_prompts=tuple(prompts),
        stats=cache.stats(),
        task_bytes=cache.metrics.task_bytes(),
        load_seconds=engine.overlap.load_seconds,
        waited_seconds=engine.overlap.waited_for_layers_seconds,
        killed_rank=kill_rank,
        rank_returned=returned,
        flushed=flushed,
    )


def prompt_of(tokenizer: ChatTokenizer, conversation: Conversation, turn: int, history: np.ndarray) -> np.ndarray:
    """All of a conversation up to this turn's question; `history` is its last prompt with the answer to it."""
    if turn:
        return tokenizer.extend_chat(history, conversation.turns[turn])
    return tokenizer.encode_chat(
        [{"role": "system", "content": conversation.system}, {"role": "user", "content": conversation.turns[0]}]
    )


def _kill(engine: Engine, rank: int) -> None:
    status = engine.cache.stats().ranks[rank]
    assert status.pid is not None
    logger.info("event=demo_kills_rank rank=%d pid=%d", rank, status.pid)
    os.kill(status.pid, signal.SIGKILL)


def _answer_all(
    engine: Engine, prompts: Sequence[np.ndarray], max_new_tokens: int, on_answer: OnAnswer
) -> list[Generation]:
    generations = [engine.intake.submit(prompt, max_new_tokens) for prompt in prompts]
    open_ones = list(generations)
    while open_ones:
        engine.step()
        for generation in [g for g in open_ones if g.finish_reason is not None]:
            if generation.error is not None:
                raise GenerationError(generation.error)
            open_ones.remove(generation)
            on_answer()
    return generations
