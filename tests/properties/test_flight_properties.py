"""What was recorded is decided again: random verbs, replayed from a file of marks and counts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_cache.config.cache import WRITE_POLICIES
from fastdeploy_cache.policies import EVICTION_POLICIES
from tests.rigs.flight_walk import FlightWalk


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    num_gpu=st.integers(16, 40),
    num_cpu=st.sampled_from([60, 15, 0]),
    policy=st.sampled_from(EVICTION_POLICIES),
    recompute=st.booleans(),
    write_policy=st.sampled_from(WRITE_POLICIES),
    is_inline=st.booleans(),
)
def test_a_recorded_walk_is_decided_alike(
    seed: int,
    size: int,
    num_gpu: int,
    num_cpu: int,
    policy: str,
    recompute: bool,
    write_policy: str,
    is_inline: bool,
) -> None:
    """Every hit by tier, every refusal and every eviction of the replay is the recorded one, also where copies ended
    late or failed."""
    walk = FlightWalk(
        seed,
        size,
        num_gpu,
        num_cpu,
        is_inline=is_inline,
        policy=policy,
        recompute_last_token=recompute,
        write_policy=write_policy,
    )
    walk.run(200)
    with tempfile.TemporaryDirectory() as folder:
        outcome = walk.replayed(Path(folder) / "walk.flight")
    walk.model.finish()
    assert outcome.num_steps > 50
    assert not outcome.num_different, [str(each) for each in outcome.differences]
