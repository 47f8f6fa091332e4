"""Replays of requests that came back, or went on before their loads had come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.insight.flight.file import read_recording
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay
from fastdeploy_cache.launch.simulator.recorded_client import RecordedClient
from fastdeploy_cache.transfer_manager.task import TaskKind


class Rig:
    """A cache of 8 GPU blocks over a CPU tier, in which copies end when they are told to."""

    def __init__(self, max_load_share: float) -> None:
        config = CacheConfig(
            block_size=4,
            num_gpu_blocks=8,
            num_cpu_blocks=16,
            cpu_write_policy="write_through",
            load_policy="always",
            max_load_share=max_load_share,
            transfer_client="inline",
        )
        self.client, self.num_ended = RecordedClient(1), 0
        self.cache = PrefixCacheManager(config, client=self.client)

    def begin(self, name: str, first: int, num_tokens: int) -> Request:
        """A request that has computed its whole prompt."""
        request = Request(request_id=name, prompt_token_ids=range(first, first + num_tokens))
        match = self.cache.match(request)
        self.cache.allocate(request, self.cache.blocks_for(num_tokens) - len(match.block_ids))
        self.cache.commit(request, num_tokens)
        return request

    def end_copy(self, kind: TaskKind) -> None:
        """The next copy is through."""
        self.num_ended += 1
        self.client.end(self.num_ended, kind, failed=False, seconds=0.01)

    def waiting(self) -> Request:
        """A request of 17 tokens: two blocks are on the GPU, two on their way there. One block is free then."""
        self.cache.release(self.begin("first", 0, 17))
        self.end_copy(TaskKind.SWAP_OUT)
        self.begin("front", 0, 9)
        self.cache.release(self.begin("other", 1000, 20))
        self.end_copy(TaskKind.SWAP_OUT)
        request = Request(request_id="again", prompt_token_ids=range(17))
        match = self.cache.match(request)
        assert (match.num_gpu_tokens, match.num_coming_tokens) == (8, 8)
        holder = Request(request_id="holder", prompt_token_ids=[5000])
        self.cache.match(holder)
        self.cache.allocate(holder, 2)
        return request

    def differences(self, path: Path) -> list[str]:
        """What a replay of all that was done finds."""
        return [
            str(each) for each in FlightReplay(read_recording(self.cache.insight.write_flight(path))).run().differences
        ]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(1.0)
    yield made
    made.cache.close()


def test_a_commit_that_settles_a_match_is_no_step(rig: Rig, tmp_path: Path) -> None:
    """The load has come and nobody has looked: the blocks that the match has from then on were not allocated."""
    request = rig.waiting()
    rig.end_copy(TaskKind.SWAP_IN)
    rig.cache.commit(request, 8)
    with pytest.raises(OutOfBlocksError):
        rig.cache.allocate(request, 9)
    assert rig.differences(tmp_path / "a.flight") == []


def test_a_refused_step_of_a_match_that_waits_asks_for_as_many_blocks_again(rig: Rig, tmp_path: Path) -> None:
    """What it has asked for lies behind the blocks that its match has shown."""
    request, other = rig.waiting(), Request(request_id="third", prompt_token_ids=range(7000, 7030))
    rig.cache.match(other)
    answers = rig.cache.step([(request, range(8), 0), (other, [], 0)])
    assert all(isinstance(answer, OutOfBlocksError) for answer in answers)
    assert rig.differences(tmp_path / "a.flight") == []


def test_a_request_that_comes_back_has_its_answer_still(tmp_path: Path) -> None:
    """It finds the blocks of its answer, which may not be loaded, and goes: its release names fewer than its match."""
    rig = Rig(0.0)
    request = Request(request_id="first", prompt_token_ids=range(6))
    rig.cache.match(request)
    rig.cache.step([(request, range(100, 114), 0)])
    rig.cache.commit(request, 20)
    rig.cache.release(request)
    rig.end_copy(TaskKind.SWAP_OUT)
    rig.begin("other", 1000, 32)
    assert rig.cache.match(request).num_unloaded_tokens == 16
    rig.cache.release(request)
    assert rig.differences(tmp_path / "a.flight") == []
    rig.cache.close()
