"""The reference model serves the same conversations under every calling convention, over a real rank."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from fastdeploy_cache.launch.demo.conversations import CONVERSATIONS
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles
from tests.rigs.conventions import BLOCK_TOKENS, Model, Played, new_config, new_conventions, opened, play
from tests.rigs.conventions_by_block import Native
from tests.rigs.reference_model import needs_model

pytestmark = [pytest.mark.processes, needs_model]
NAMES = ["native", "FastDeploy v1", "FastDeploy v0", "vLLM block pool", "SGLang", "mini-sglang", "contiguous slots"]
NUM_TURNS, NUM_NEW_TOKENS = 2, 3


def played(files: ModelFiles, tokenizer: ChatTokenizer, num_gpu_blocks: int, *numbers: int) -> list[Played]:
    """Two turns of these conversations under every convention, each of which answered every turn in full."""
    config, found = new_config(files, num_gpu_blocks), list[Played]()
    for new in new_conventions(config, NUM_NEW_TOKENS, f"conventions{os.getpid()}"):
        with opened(new) as calls:
            chosen = [CONVERSATIONS[number] for number in numbers]
            model = Model(files, calls.cache)
            found.append(play(model, tokenizer, calls, chosen, NUM_TURNS, NUM_NEW_TOKENS))
    assert [each.name for each in found] == NAMES
    for each in found:
        assert [len(a.token_ids) for a in each.answers] == [NUM_NEW_TOKENS] * NUM_TURNS * len(numbers), each.name
        assert len({a.token_ids for a in each.answers}) > 1, "or any answer would do"
    return found


def test_all_conventions_give_the_same_answers_and_hits(files: ModelFiles, tokenizer: ChatTokenizer) -> None:
    """With room for all: every answer is the same, token for token; where hits go by blocks, each is as long."""
    native, *others = played(files, tokenizer, 256, 0, 2)
    assert native.num_hit_tokens > native.num_prompt_tokens // 3, "later turns find the earlier ones"
    for other in others:
        assert [a.token_ids for a in other.answers] == [a.token_ids for a in native.answers], other.name
        hits = [(a.num_hit_tokens, b.num_hit_tokens) for a, b in zip(native.answers, other.answers, strict=True)]
        if other.token_granularity == BLOCK_TOKENS:
            assert all(mine == theirs for mine, theirs in hits), (other.name, hits)
        else:
            assert all(mine <= theirs < mine + BLOCK_TOKENS for mine, theirs in hits), (other.name, hits)


def test_answers_are_the_same_where_blocks_come_back_from_the_cpu_tier(
    files: ModelFiles, tokenizer: ChatTokenizer
) -> None:
    """A GPU pool that holds one conversation and a half: those that know a CPU tier load from it; answers stay."""
    native, *others = played(files, tokenizer, 20, 0, 1)
    assert native.num_swapped_in_blocks
    for other in others:
        assert [a.token_ids for a in other.answers] == [a.token_ids for a in native.answers], other.name
    loading = {other.name for other in others if other.num_swapped_in_blocks}
    assert loading == {"FastDeploy v1", "FastDeploy v0", "vLLM block pool", "SGLang"}


def test_a_convention_that_reads_other_blocks_gives_other_answers(
    files: ModelFiles, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said hangs on the cached blocks: with the first one read for all of them the later turn differs."""
    config, begin, blocks, num_hit_blocks = new_config(files, 64), Native.begin, Native.blocks, [0]

    def noted(calls: Native, prompt: list[int]) -> int:
        num_hit_tokens = begin(calls, prompt)
        num_hit_blocks[0] = num_hit_tokens // BLOCK_TOKENS
        return num_hit_tokens

    def mistaken(calls: Native, num_tokens: int) -> Sequence[int]:
        ids = blocks(calls, num_tokens)
        return [*[ids[0]] * num_hit_blocks[0], *ids[num_hit_blocks[0] :]]

    def said() -> list[tuple[int, ...]]:
        with opened(lambda: Native(config)) as calls:
            model = Model(files, calls.cache)
            found = play(model, tokenizer, calls, CONVERSATIONS[:1], NUM_TURNS, NUM_NEW_TOKENS)
        return [each.token_ids for each in found.answers]

    right = said()
    monkeypatch.setattr(Native, "begin", noted)
    monkeypatch.setattr(Native, "blocks", mistaken)
    wrong = said()
    assert wrong[0] == right[0] and wrong[1] != right[1]
