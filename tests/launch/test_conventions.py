"""The reference model serves the same conversations under every calling convention, over real ranks."""

from __future__ import annotations

import os

import pytest

from fastdeploy_cache.launch.conventions.command import BLOCK_TOKENS, Played, new_config, new_conventions, play
from fastdeploy_cache.launch.demo.conversations import CONVERSATIONS
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles
from tests.rigs.reference_model import needs_model

pytestmark = [pytest.mark.processes, needs_model]
SUFFIX = f"conventions{os.getpid()}"
NUM_NEW_TOKENS = 3


def played(files: ModelFiles, num_gpu_blocks: int, *numbers: int) -> list[Played]:
    """Two turns of these conversations."""
    config = new_config(files, 3, num_gpu_blocks)
    found = []
    for new in new_conventions(config, NUM_NEW_TOKENS, SUFFIX):
        calls = new()
        try:
            found.append(play(files, calls, [CONVERSATIONS[n] for n in numbers], 2, NUM_NEW_TOKENS))
        finally:
            calls.close()
    return found


def test_all_conventions_give_the_same_answers_and_hits(files: ModelFiles) -> None:
    """With room for all: every answer is the same, token for token; where hits go by blocks, each is as long."""
    native, *others = played(files, 256, 0, 2)
    assert native.num_hit_tokens > native.num_prompt_tokens // 3, "later turns find the earlier ones"
    for other in others:
        assert [a.token_ids for a in other.answers] == [a.token_ids for a in native.answers], other.name
        hits = [(a.num_hit_tokens, b.num_hit_tokens) for a, b in zip(native.answers, other.answers, strict=True)]
        if other.token_granularity == BLOCK_TOKENS:
            assert all(mine == theirs for mine, theirs in hits), (other.name, hits)
        else:
            assert all(mine <= theirs < mine + BLOCK_TOKENS for mine, theirs in hits), (other.name, hits)


def test_answers_are_the_same_where_blocks_come_back_from_the_cpu_tier(files: ModelFiles) -> None:
    """A GPU pool that holds one conversation and a half: those that know a CPU tier load from it; answers stay."""
    native, *others = played(files, 20, 0, 1)
    assert native.num_swapped_in_blocks
    for other in others:
        assert [a.token_ids for a in other.answers] == [a.token_ids for a in native.answers], other.name
    loading = {other.name for other in others if other.num_swapped_in_blocks}
    assert loading == {"FastDeploy v1", "FastDeploy v0", "vLLM block pool", "SGLang"}
