"""A hybrid model served by the verbs of rows: logits are those from scratch, bit by bit, whatever is cached."""

from __future__ import annotations

import contextlib
import random

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.transfer_manager.config import TransferConfig
from tests.rigs.float64_engine import Float64Engine, serve
from tests.simulation.planting import Planted, Rewrite, in_place


def test_250_requests_from_the_cache() -> None:
    """More than 200 go on where others have been."""
    engine = Float64Engine(seed=0, num_gpu_blocks=90, num_gpu_units=(24, 60, 72))
    with engine.cache:
        assert serve(engine, 250) == 250
        assert engine.num_hits > 200 and engine.num_snapshots > 250 and not engine.num_refused


def test_preemption_drafts_and_decode_across_boundaries() -> None:
    """A request is preempted and matched again over its output; drafts are computed and rejected."""
    engine = Float64Engine(seed=1, num_gpu_blocks=60, num_gpu_units=(12, 40, 48), drafts=True)
    with engine.cache:
        assert serve(engine, 250, preempts=0.03) == 250
        assert engine.num_hits > 200 and engine.num_preempted > 20 and engine.num_rejected > 200


def test_a_pool_so_small_that_snapshots_fail() -> None:
    """Those without a slot make no checkpoint, and the request goes on; requests are preempted for units."""
    engine = Float64Engine(seed=2, num_gpu_blocks=45, num_gpu_units=(5, 14, 18))
    with engine.cache:
        assert serve(engine, 250) == 250
        assert engine.num_refused > 20 and engine.num_preempted > 20 and engine.num_hits > 50


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_cpu_tier_behind_a_small_gpu(policy: str) -> None:
    """What has left the GPU is loaded again, full KV and checkpoints: a good part of the hits."""
    engine = Float64Engine(
        seed=3, num_gpu_blocks=45, num_gpu_units=(7, 16, 20), num_cpu_blocks=160, cpu_write_policy=policy
    )
    with engine.cache:
        assert serve(engine, 250, preempts=0.03) == 250
        assert engine.num_cpu_tokens > 1000 and engine.num_hits > 200


def test_a_cpu_tier_that_is_short_of_pages() -> None:
    """Images and copies of full KV push each other out."""
    engine = Float64Engine(seed=4, num_gpu_blocks=45, num_gpu_units=(7, 16, 20), num_cpu_blocks=60, drafts=True)
    with engine.cache:
        assert serve(engine, 250, preempts=0.03) == 250
        assert engine.num_cpu_tokens > 100


@pytest.mark.parametrize("num_cpu_blocks", [0, 160])
def test_sessions_are_freed_beside_them(num_cpu_blocks: int) -> None:
    """Agents free what only a session has, or a part of it, while requests run and copies are under way."""
    engine = Float64Engine(
        seed=5, num_gpu_blocks=64, num_gpu_units=(12, 28, 34), num_cpu_blocks=num_cpu_blocks, drafts=True
    )
    draw, new_request, num_freed = random.Random(1), engine.request_of, 0

    def of_a_session(prompt: list[int]) -> Request:
        request = new_request(prompt)
        request.session_id = f"s{engine.num_requests % 5}"
        return request

    def free_some() -> None:
        nonlocal num_freed
        session, num_kept = f"s{draw.randrange(5)}", draw.choice([0, 0, 9, 17])
        with contextlib.suppress(RequestError):  # nothing is known of it
            num_freed += engine.cache.sessions.supersede(session, num_kept)
            if draw.random() < 0.2:
                num_freed += engine.cache.sessions.release_session(session)

    engine.request_of, engine.disturb = of_a_session, free_some  # type: ignore[method-assign]
    with engine.cache:
        assert serve(engine, 150, preempts=0.03) == 150
        assert num_freed > 100 and engine.num_hits > 75


@pytest.mark.processes
def test_two_ranks_have_the_same() -> None:
    """With processes, whose copies end when they end: each key, value and state is the same on both ranks."""
    engine = Float64Engine(
        seed=6, num_gpu_blocks=45, num_gpu_units=(7, 16, 20), num_cpu_blocks=200,
        transfer_client="processes", transfer=TransferConfig(tp_size=2),
    )  # fmt: skip
    with engine.cache:
        assert serve(engine, 120, preempts=0.03) == 120
        assert engine.num_cpu_tokens > 100


_ANCHORS = "requests.anchors"
_SNAPSHOTS = "requests.snapshots"
PLANTED = [
    Planted(
        "a live state is given away",
        (Rewrite(_SNAPSHOTS, "Snapshots.replace_slots", "return slots", "return old"),),
    ),
    Planted(
        "a window slides a block early",
        (Rewrite(_ANCHORS, "Anchors._slide", "gone = first - rows", "gone = 1 + first - rows"),),
    ),
    Planted(
        "a checkpoint is let go while it is read",
        (Rewrite(_ANCHORS, "Anchors._slide", "boundary <= reached", "boundary <= reached + 2"),),
    ),
    Planted(
        "states that are read once more are freed",
        (Rewrite(_SNAPSHOTS, "Snapshots._let_pass", "rows.passed = snapshot", "self._free_slots(rows, snapshot)"),),
    ),
    Planted(
        "a window is a block short",
        (Rewrite("transfer_manager.kv.groups", "Row.first_block", "reach_tokens + 1)", "reach_tokens + 5)"),),
    ),
    Planted(
        "a match settles at a checkpoint that has not come",
        (
            Rewrite("requests.row_matches", "RowMatches._reached", "each.units is not None", "True"),
            Rewrite("books.row_books", "RowBooks.end_units", "if succeeded and", "if False and"),
        ),
    ),
    Planted(
        "an image is loaded into units of another row's places",
        (Rewrite("movement.images", "ImageMover._ids", "tuple(cargo.units)", "tuple(reversed(cargo.units))"),),
    ),
    Planted(
        "pages of an image are given out while it is loaded",
        (Rewrite("movement.images", "ImageMover._start", "self._rows.checkpoints.pin(checkpoint)", "pass"),),
    ),
    Planted(
        "an evicted unit is still shown",
        (Rewrite("books.unit_pool", "UnitPool.let_go", "if not num_left:", "if True:"),),
    ),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_faults_change_logits_or_books(planted: Planted, caplog: pytest.LogCaptureFixture) -> None:
    """Each is seen by the same run."""
    with in_place(planted), pytest.raises((AssertionError, KeyError, ValueError)):
        for seed in range(4):
            engine = Float64Engine(
                seed=seed, num_gpu_blocks=45, num_gpu_units=(7, 16, 20), num_cpu_blocks=seed % 2 * 120
            )
            with engine.cache:
                serve(engine, 60, preempts=0.02)
    caplog.clear()  # tracebacks of mishaps have the cache's memory
