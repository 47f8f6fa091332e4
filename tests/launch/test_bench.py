"""The benchmark: it serves what it says, finds every promised figure, and its verdict follows from value and limit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench import control_command
from fastdeploy_cache.launch.bench.control import chain_floor, match_over_edges
from fastdeploy_cache.launch.bench.control_command import bench_control
from fastdeploy_cache.launch.bench.options import ControlOptions
from fastdeploy_cache.launch.bench.scale import FullCache, eviction_cost, full_server
from fastdeploy_cache.launch.bench.serving import PHASES, new_server, serve_workload
from fastdeploy_cache.launch.bench.steps import our_step, step_cost
from fastdeploy_cache.launch.bench.workloads import Recipe, Scale, Work, chat, long, recorded
from fastdeploy_cache.launch.cli import app
from tests.rigs.stand_in_vllm import write_stand_in
from tests.rigs.traces import line, write


def test_workloads_are_what_they_say() -> None:
    """Lengths, sharing, and the same tokens in every run."""
    talks = chat(64)
    lengths = [len(work.prompt) for work in talks.works]
    assert len(lengths) == 600
    assert 500 <= min(lengths) < 2000 < 30_000 < max(lengths) <= 32_000
    assert np.array_equal(talks.works[5].prompt, chat(64).works[5].prompt)
    documents = long(64)
    assert {len(work.prompt) for work in documents.works} == {131_072}
    assert np.array_equal(documents.works[0].prompt[:117_900], documents.works[4].prompt[:117_900])
    assert not np.array_equal(documents.works[0].prompt[:100], documents.works[1].prompt[:100])


def test_a_recorded_trace_shares_what_its_ids_share(tmp_path: Path) -> None:
    """Equal ids, equal tokens; the unnamed rest of a prompt is its own."""
    path = write(tmp_path / "t", [line(0, [1, 2], 9 * 4), line(1, [1, 3], 8)])
    first, second = (work.prompt for work in recorded(path, 4, block_size=2).works)
    assert (len(first), len(second)) == (36, 8)
    assert np.array_equal(first[:4], second[:4])
    assert not np.array_equal(first[4:8], second[4:8])


def test_the_chain_floor_is_a_sha256_chain() -> None:
    """Checked by hand over two blocks and a rest."""
    tokens = np.arange(10, dtype=np.int32)
    first = hashlib.sha256(tokens[:4].tobytes()).digest()
    assert chain_floor(tokens, 4) == [first, hashlib.sha256(first + tokens[4:8].tobytes()).digest()]


@pytest.mark.parametrize(
    ("policy", "cpu_ratio", "from_list"),
    [("lru", 0.0, False), ("lru", 0.0, True), ("lru", 2.0, False), ("reuse", 0.0, False)],
)
def test_a_served_workload_hits_and_every_phase_takes_time(policy: str, cpu_ratio: float, from_list: bool) -> None:
    """The hit rate is that of the workload, so the work measured was done."""
    workload = Recipe("chat", 64, 80).make()
    found = serve_workload(new_server(workload, policy, cpu_ratio, from_list=from_list), workload)
    assert all(found[phase] > 0 for phase in PHASES)
    assert 0.3 < found["hit"] < 1
    assert found["all"] == pytest.approx(sum(found[phase] for phase in PHASES if phase != "request"))
    assert found["whole"] == pytest.approx(sum(found[phase] for phase in PHASES))


def test_the_whole_output_is_cached() -> None:
    """A next turn hits all full blocks of the prompt and the output before."""
    workload = chat(64, num_requests=2)
    first = workload.works[0]
    again = Work(np.concatenate([first.prompt, first.output]), first.output[:0])
    server = new_server(workload)
    server.serve([first])
    server.serve([again])
    assert server.num_hit_tokens == (len(again.prompt) - 1) // 64 * 64


def test_a_decode_step_steps_all() -> None:
    """So many steps for each request, in blocks of their own."""
    assert step_cost(our_step(16), 2) > 0


def test_the_edges_and_the_evictions_are_there() -> None:
    """What is measured asserts its own preconditions: a whole hit, a full pool."""
    assert match_over_edges(20, repeats=2)["match"] > 0
    assert eviction_cost(6400, 16, num_calls=20) > 0
    server = full_server(Scale.num_sequence_blocks * 20)
    full = FullCache(Scale.num_sequence_blocks * 20, server)
    before = server.cache.stats().gpu
    assert before.num_free == 0
    full.serve(10)
    assert server.cache.stats().gpu.num_evicted >= 10 * 64 - 5 * 64


@pytest.mark.processes
def test_the_program_writes_every_promised_figure(tmp_path: Path) -> None:
    """A small run of the whole: names, values and limits of all figures; its answer is their verdict."""
    trace = write(tmp_path / "t", [line(i, [1, 2, 10 + i], 12 * 128) for i in range(30)])
    recipes = Recipe("chat", 64, 40), Recipe("chat", 16, 40), Recipe("long", 64, 8)
    peer = f"vllm={write_stand_in(tmp_path)}"
    options = ControlOptions(trace, 512, 1, "640,6400", max_runs=100, peer=peer)
    are_kept = bench_control(options, tmp_path / "j", recipes)
    found = json.loads((tmp_path / "j").read_text())
    reach = {entry["name"]: entry for entry in found["reach"]}
    assert len(reach) == len(found["reach"])
    for words in (
        *("chat", "long", "trace", "edges", "eviction", "scale", "with CPU tier", "reuse / lru"),
        *("chat, block 16: from a list / vLLM", "decode step", "full pool of 640 blocks: whole / vLLM"),
        *(
            "64 blocks, 6400: any verb",
            "64 blocks with a CPU tier, 6400: lock held",
            "64 blocks, 640: reset",
            "collection",
        ),
    ):
        assert any(words in name for name in reach), words
    assert not any("bytes per block" in name for name in reach), "of such small pools none are promised"
    assert all(entry["ok"] == (entry["value"] <= entry["limit"]) for entry in found["reach"])
    assert are_kept == all(entry["ok"] for entry in found["reach"])
    assert found["machine"]["num_cores"] >= 1
    figures = {(figure["table"], figure["line"], figure["name"]): figure for figure in found["figures"]}
    assert len(figures) == len(found["figures"]), "a run of another version finds each by these three names"
    lines = ("lru", "lru, from a list", "lru + CPU tier", "reuse", "vLLM")
    assert all(figures["long, block 64", name, "whole"]["value"] > 0 for name in lines)
    chat_at_64 = figures["chat, block 64", "lru", "all"]
    chain = figures["chat, block 64, floors", "", "chain"]["value"]
    assert chat_at_64["ratio"] == pytest.approx(chat_at_64["value"] / chain)
    assert round(chat_at_64["ratio"], 3) == reach["chat, block 64: request / SHA-256 chain"]["value"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_command_passes_its_options_on(is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and the verdict is its exit status."""
    asked: list[tuple[ControlOptions, Path | None]] = []

    def run(options: ControlOptions, json_file: Path | None) -> bool:
        asked.append((options, json_file))
        return is_kept

    monkeypatch.setattr(control_command, "bench_control", run)
    given = ["--trace", "t", "--trace-block-size", "16", "--repeats", "2", "--scale-blocks", "640,1280"]
    given += ["--max-runs", "9", "--peer", "vllm=there", "--json", str(tmp_path / "j")]
    assert CliRunner().invoke(app, ["bench", "control", *given]).exit_code == (0 if is_kept else 1)
    assert CliRunner().invoke(app, ["bench", "control"]).exit_code == (0 if is_kept else 1)
    expected = ControlOptions(Path("t"), 16, 2, "640,1280", 9, "vllm=there")
    assert asked == [(expected, tmp_path / "j"), (ControlOptions(), None)]


@pytest.mark.parametrize(
    ("sizes", "wanted"), [("640", [640]), ("640,6400", [640, 6400]), ("", None), ("639,6400", None)]
)
def test_one_size_of_a_pool_is_enough(sizes: str, wanted: list[int] | None) -> None:
    """Without a second one there is no ratio; what is too small is refused, and the help says how small."""
    if wanted is None:
        with pytest.raises(LaunchError, match="give sizes of at least 640 blocks"):
            control_command._scale_blocks(sizes)
    else:
        assert control_command._scale_blocks(sizes) == wanted
    shown = CliRunner().invoke(app, ["bench", "control", "--help"], env={"COLUMNS": "300"}).stdout
    assert "at least 640" in shown
