"""The reference model: answers do not depend on how the work is cut."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from fastdeploy_cache.launch.reference_engine.model import Llama
from fastdeploy_cache.launch.reference_engine.paged_kv import KVShard, SequenceChunk
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles
from tests.rigs.reference_model import (
    BLOCK_SIZE,
    LOGIT_TOLERANCE,
    NUM_BLOCKS,
    ORDERED,
    SCATTERED,
    greedy,
    make_chunk,
    make_shards,
    needs_model,
)


@needs_model
def test_greedy_answer_is_sensible(llama: Llama, tokenizer: ChatTokenizer) -> None:
    """The weights, the rotation and the chat format fit together: the model knows a capital."""
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    tokens = greedy(llama, prompt, 8)
    assert tokenizer.decode(tokens).startswith("The capital of France is Paris.")
    assert tokenizer.eos_token_id in tokens


@needs_model
def test_three_ranks_give_the_tokens_of_one(
    files: ModelFiles, prompt: np.ndarray, full: np.ndarray, answer: list[int]
) -> None:
    """Splitting the kv heads over three ranks changes where KV lies, not what is generated."""
    split = Llama(files, make_shards(3))
    assert greedy(split, prompt, 6) == answer
    np.testing.assert_allclose(full, split.forward([make_chunk(prompt, 0)]), atol=LOGIT_TOLERANCE)


@pytest.fixture(scope="module")
def full(llama: Llama, prompt: np.ndarray) -> np.ndarray:
    """What the prompt gives, computed in one go."""
    return llama.forward([make_chunk(prompt, 0)])


@pytest.fixture(scope="module")
def answer(llama: Llama, prompt: np.ndarray) -> list[int]:
    """The tokens that follow the prompt, computed in one go."""
    return greedy(llama, prompt, 6)


@needs_model
@pytest.mark.parametrize("cached", [1, 16, 37, 48])
def test_suffix_on_cached_prefix_equals_full(
    llama: Llama, prompt: np.ndarray, full: np.ndarray, answer: list[int], cached: int
) -> None:
    """Computing only the tokens behind a cached prefix gives the same next tokens, at any cut."""
    llama.forward([make_chunk(prompt[:cached], 0, SCATTERED)])
    suffix = llama.forward([make_chunk(prompt[cached:], cached, SCATTERED)])
    np.testing.assert_allclose(suffix, full, atol=LOGIT_TOLERANCE)
    assert greedy(llama, prompt, 3, SCATTERED, start=cached) == answer[:3]


@needs_model
def test_scattered_blocks_equal_ordered_blocks(llama: Llama, prompt: np.ndarray, full: np.ndarray) -> None:
    """Which blocks a sequence holds, and in which order, does not matter, not even in the last bit."""
    np.testing.assert_array_equal(llama.forward([make_chunk(prompt, 0, SCATTERED)]), full)


@needs_model
def test_long_prompt_in_one_go_equals_pieces(llama: Llama) -> None:
    """A prompt longer than one query tile gives the same logits in one go and in uneven pieces."""
    prompt = np.random.default_rng(1).integers(3, 49000, 300).astype(np.int32)
    whole = llama.forward([make_chunk(prompt, 0)])
    for start, end in [(0, 150), (150, 151), (151, 300)]:
        pieces = llama.forward([make_chunk(prompt[start:end], start, SCATTERED)])
    np.testing.assert_allclose(pieces, whole, atol=LOGIT_TOLERANCE)


@needs_model
def test_batched_sequences_do_not_mix(
    llama: Llama, tokenizer: ChatTokenizer, prompt: np.ndarray, full: np.ndarray
) -> None:
    """A prefill and a decode step in one batch each give what they give alone."""
    other = tokenizer.encode("The sea is")
    halves = SCATTERED[:12], SCATTERED[12:]
    alone = [full[0], llama.forward([make_chunk(other, 0)])[0]]
    llama.forward([make_chunk(other[:-1], 0, halves[1])])
    together = llama.forward([make_chunk(prompt, 0, halves[0]), make_chunk(other[-1:], len(other) - 1, halves[1])])
    np.testing.assert_allclose(together, alone, atol=LOGIT_TOLERANCE)
    assert together.shape == (2, llama.spec.vocab_size)
    assert together.dtype == np.float32


@pytest.mark.processes
@needs_model
def test_kv_is_visible_in_another_process(files: ModelFiles, prompt: np.ndarray) -> None:
    """KV goes straight into the given shared memory: a second mapping and a child process read it."""
    per_array = NUM_BLOCKS * BLOCK_SIZE * 3 * 64
    fd = os.memfd_create("kv")
    try:
        os.ftruncate(fd, 60 * per_array * 4)
        mine, other = (np.frombuffer(mmap.mmap(fd, 0), np.float32).reshape(60, -1) for _ in range(2))
        arrays = [array.reshape(NUM_BLOCKS, BLOCK_SIZE, 3, 64) for array in mine]
        Llama(files, [KVShard(arrays[:30], arrays[30:])]).forward([make_chunk(prompt, 0, SCATTERED)])
        blocks = other.reshape(60, NUM_BLOCKS, BLOCK_SIZE, 3, 64)
        num_full = len(prompt) // BLOCK_SIZE
        assert np.abs(blocks[:, SCATTERED[:num_full]]).min(axis=(3, 4)).all()
        assert not blocks[:, SCATTERED[num_full + 1 :]].any()
        script = f"import hashlib, os; print(hashlib.sha256(os.pread({fd}, 1 << 30, 0)).hexdigest())"
        command = [sys.executable, "-c", script]
        seen = subprocess.run(command, pass_fds=[fd], capture_output=True, text=True, check=True)
        assert seen.stdout.strip() == hashlib.sha256(mine.tobytes()).hexdigest()
    finally:
        os.close(fd)


@needs_model
@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (make_chunk([], 0), "needs >= 1 tokens"),
        (make_chunk([5], -1), "needs >= 1 tokens"),
        (make_chunk([5] * 17, 0, ORDERED[:1]), "1 blocks of 16 tokens cannot hold 17"),
        (make_chunk([5], 0, np.array([NUM_BLOCKS], np.int32)), "block ids 24..24"),
        (make_chunk([49152], 0), "token ids must be in 0..49151"),
        (make_chunk([5], 8192, np.zeros(600, np.int32)), "8193 tokens exceed the context of 8192"),
    ],
)
def test_forward_refuses_what_does_not_fit(llama: Llama, chunk: SequenceChunk, message: str) -> None:
    """A chunk that has no place in the blocks or the model is refused before anything is written."""
    with pytest.raises(ValueError, match=message):
        llama.forward([chunk])


@needs_model
@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "0 ranks cannot share 3 kv heads"),
        (make_shards(1) * 2, "2 ranks cannot share 3 kv heads"),
        (make_shards(3) * 2, "6 ranks cannot share 3 kv heads"),
        (make_shards(1, num_layers=2), "2 key arrays, expected 30"),
        (make_shards(3)[:1], "expected writable C-contiguous float32"),
    ],
)
def test_shards_that_do_not_fit_are_refused(files: ModelFiles, shards: list[KVShard], message: str) -> None:
    """Too many ranks, heads that do not divide and arrays of a wrong shape are named."""
    with pytest.raises(ValueError, match=message):
        Llama(files, shards)
