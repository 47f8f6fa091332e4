"""What was recorded of a hybrid model is decided again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rigs.float64_engine import Float64Engine, serve
from tests.rigs.row_flight import recorded_walk, replayed


@pytest.mark.parametrize("num_cpu_blocks", [0, 60])
@pytest.mark.parametrize("part", range(4))
def test_recorded_walks_are_decided_alike(tmp_path: Path, part: int, num_cpu_blocks: int) -> None:
    """Of 200 walks every match, checkpoint, snapshot, refusal and eviction of the replay is the recorded one, also
    where copies ended late or failed."""
    for seed in range(25 * part, 25 * part + 25):
        outcome = recorded_walk(seed, 150, tmp_path / "walk.flight", num_cpu_blocks)
        assert outcome.num_steps > 100 and outcome.num_requests > 5
        assert not outcome.num_different, (seed, [str(each) for each in outcome.differences])


@pytest.mark.parametrize(
    "fields",
    [{"drafts": True}, {"num_cpu_blocks": 160}, {"num_cpu_blocks": 160, "state_copy": True}],
    ids=["drafts", "tiers", "in place"],
)
def test_a_served_model_is_decided_alike(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Also where snapshots were of drafts that were rejected, where requests ran ahead, and where states are copied."""
    engine = Float64Engine(seed=11, num_gpu_blocks=50, num_gpu_units=(8, 20, 24), **fields)
    with engine.cache:
        serve(engine, 80, preempts=0.05)
        outcome = replayed(engine.cache, tmp_path / "served.flight")
    assert outcome.num_requests > 80 and engine.num_snapshots > 50
    assert not outcome.num_different, [str(each) for each in outcome.differences]
