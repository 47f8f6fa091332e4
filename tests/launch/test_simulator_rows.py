"""`simulate` of a hybrid model: a made trace, beside what anybody can count of it, and figures that were recorded."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.simulator.command import simulate
from fastdeploy_cache.launch.simulator.hybrid import HybridModel
from fastdeploy_cache.launch.simulator.options import SimulateOptions
from fastdeploy_cache.launch.simulator.recorded_trace import read_recorded_trace
from fastdeploy_cache.launch.simulator.replay import Replay
from fastdeploy_cache.launch.simulator.trace import Trace, read_trace
from tests.rigs.hybrid_models import TABLES
from tests.rigs.row_flight import recorded_walk

SIZE = 512
CONFIG = TABLES.replace("block_size = 4", f"block_size = {SIZE}").replace("reach_tokens = 10", "reach_tokens = 1024")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations that go on, in the order in which users come back, and prompts that share a beginning."""
    choose, names, lines = random.Random(4), iter(range(1, 10**6)), []
    shared = [[next(names) for _ in range(length)] for length in (6, 9)]
    talks = [[*choose.choice(shared)] for _ in range(40)]
    for second in range(300):
        talk = choose.choice(talks[: 8 + second // 10])
        talk += [next(names) for _ in range(choose.randint(1, 5))]
        tokens = len(talk) * SIZE + choose.randint(0, 1) * 100
        named = {"timestamp": second * 1000, "input_length": tokens, "output_length": 5, "hash_ids": talk[:]}
        lines.append(json.dumps(named))
        if len(talk) > 60:
            talks.remove(talk)
            talks.append([*choose.choice(shared)])
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model with a full layer, a window of 1,024 tokens and a state."""
    path = tmp_path / "model.toml"
    path.write_text(CONFIG)
    return path


def hit_rate_without_limits(trace: Trace) -> float:
    """By the definition: a request goes on at the deepest place within what has been seen of its prompt where an
    earlier one has left a checkpoint, which is at its last whole block, and where it has parted from the others."""
    seen, checkpoints, num_hits = set[int](), set[int](), 0
    for request in trace.requests:
        blocks, last = request.blocks.tolist(), (request.num_tokens - 1) // trace.block_size
        num_seen = next((place for place, each in enumerate(blocks[:last]) if each not in seen), min(len(blocks), last))
        num_hit = max((end for end in range(1, num_seen + 1) if blocks[end - 1] in checkpoints), default=0)
        num_hits += num_hit
        checkpoints.update(blocks[end - 1] for end in (num_seen, last) if num_hit < end)
        seen.update(blocks)
    return num_hits * trace.block_size / trace.num_tokens


def replayed(trace: Path, config: Path, cpu_blocks: str, tmp_path: Path, policy: str = "lru") -> list[dict[str, float]]:
    target = tmp_path / "found.json"
    options = SimulateOptions(
        gpu_blocks=["80"], cpu_blocks=[cpu_blocks], policy=[policy], write_policy="write_through", json_file=target,
        config_file=config,
    )  # fmt: skip
    simulate(trace, options)
    found = json.loads(target.read_text())
    assert found["rows"] == ["full", "window 1024", "state"] and found["bounds"] == []
    return found["results"]


def test_a_cache_without_limits_hits_what_can_be_counted(trace: Path, config: Path, tmp_path: Path) -> None:
    """With room for everything: the same to the token as by the definition, which knows no cache."""
    (row,) = replayed(trace, config, "100000", tmp_path)
    assert row["token_hit_rate"] == pytest.approx(hit_rate_without_limits(read_trace(trace, SIZE, SIZE)), abs=1e-12)
    assert row["token_hit_rate"] > 0.5


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_recorded_figures(trace: Path, config: Path, tmp_path: Path, policy: str) -> None:
    """Less room gives less; the figures are those of the day on which they were recorded."""
    rates = [row["token_hit_rate"] for row in replayed(trace, config, "150,400,800", tmp_path, policy)]
    assert [round(100 * rate, 2) for rate in rates] == RECORDED[policy]


def test_what_cannot_be_simulated_is_one_line(trace: Path, config: Path, tmp_path: Path) -> None:
    """A store, and chunks that are no multiple of the trace's blocks."""
    options = SimulateOptions(gpu_blocks=["80"], cpu_blocks=["100"], storage_blocks=["100"], config_file=config)
    with pytest.raises(LaunchError, match="--storage-blocks with a layout of several groups"):
        simulate(trace, options)
    config.write_text(CONFIG.replace('kind = "window"', 'kind = "chunk"').replace("1024", "700"))
    with pytest.raises(LaunchError, match="chunks of 700 tokens are no multiple of --block-size 512"):
        simulate(trace, SimulateOptions(gpu_blocks=["80"], config_file=config))


def test_books_add_up_after_a_trace(trace: Path, config: Path) -> None:
    """No leaf has dead KV, and no unit is lost."""
    read = read_trace(trace, SIZE, SIZE)
    model = HybridModel.of(CacheConfig.load(config), SIZE)
    assert model is not None
    replay = Replay(read, 80, 300, model=model)
    replay.run(lambda *_: replay.cache.check_invariants())
    replay.cache.close()


def test_a_recording_is_served_with_its_rows(tmp_path: Path) -> None:
    """The model is that of the header. In a pool 200 times as large there are 200 times as many units."""
    recorded_walk(3, 150, tmp_path / "walk.flight", 0)
    options = SimulateOptions(gpu_blocks=["24"], json_file=tmp_path / "found.json")
    simulate(tmp_path / "walk.flight", options)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"] == ["full", "state", "window 6"] and found["results"][0]["token_hit_rate"] > 0
    hybrid = read_recorded_trace(tmp_path / "walk.flight", None).hybrid
    assert hybrid is not None and hybrid.num_gpu_units == (8, 14) and hybrid.num_gpu_blocks == 24
    model = HybridModel.of(hybrid, hybrid.block_size, grows=True)
    assert model is not None and model.settings(24 * 200)["num_gpu_units"] == (8 * 200, 14 * 200)


RECORDED = {"lru": [42.47, 67.55, 85.82], "reuse": [42.47, 67.55, 85.82]}
