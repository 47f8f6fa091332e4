"""The data-plane benchmark: it measures all that it promises, and its verdict follows from its own figures."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.launch.bench.image_transfer import IMAGE_CASES
from fastdeploy_cache.launch.bench.report import Figure, Report, at_least, at_most
from fastdeploy_cache.launch.bench.transfer import CASES
from tests.rigs.command_line import CLI
from tests.rigs.verdicts import is_consistent

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SPEEDS = {
    "swap out": "swap_out",
    "swap in": "swap_in",
    "out, neighbours": "joined_out",
    "in, neighbours": "joined_in",
}
TINY = ["--repeats", "1", "--memory", "16MiB", "--idle-seconds", "0.5"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`fastdeploy-cache bench transfer` of this checkout; bounded."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*CLI, "bench", "transfer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


@dataclass
class Run:
    """One run of the program and what it wrote."""

    status: int
    output: str
    found: dict[str, Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole benchmark with tiny sizes, once."""
    path = tmp_path_factory.mktemp("bench") / "transfer.json"
    result = run(*TINY, "--json", str(path))
    assert result.returncode in (0, 1) and path.exists(), result.stderr
    return Run(result.returncode, result.stdout, json.loads(path.read_text()))


def test_every_promised_figure_has_a_verdict_that_follows(tiny: Run) -> None:
    """Name, value, limit and ok; no name twice; all that DESIGN promises is among them; the status is their verdict."""
    reach = tiny.found["reach"]
    assert all(set(entry) == {"name", "value", "limit", "ok"} for entry in reach)
    assert all(entry["value"] >= 0 and is_consistent(entry) for entry in reach)
    names = [entry["name"] for entry in reach]
    assert len(set(names)) == len(names)
    for words in ("empty swap with 1 rank", "idle CPU", "start of 2 ranks", "memory of an idle rank"):
        assert sum(words in name for name in names) == 1, words
    promised = [case.name for case in CASES if case.promised is not None]
    for case in promised:
        for way in SPEEDS:
            assert f"{way}, {case}, 1: of plain copy, at least" in names
    assert tiny.status == (0 if all(entry["ok"] for entry in reach) else 1)


def test_each_bandwidth_stands_beside_a_plain_copy(tiny: Run) -> None:
    """Every case has rows of growing size with the speed of both directions and of the plain copy."""
    bandwidth = tiny.found["bandwidth"]
    assert [each["case"] for each in bandwidth if each["ranks"] == 1] == [case.name for case in CASES]
    assert {each["ranks"] for each in bandwidth} == {1, 2, 4}
    for each in bandwidth:
        sizes = [row["num_blocks"] for row in each["rows"]]
        assert sizes and sizes == sorted(set(sizes))
        for row in each["rows"]:
            speeds = {name: value for name, value in row.items() if name != "num_blocks"}
            assert set(speeds) == {f"{what}_bytes_per_second" for what in ("plain", *SPEEDS.values())}
            assert all(speed > 0 for speed in speeds.values())


def test_the_shares_are_those_of_the_rows(tiny: Run) -> None:
    """A promised share is that of the largest row over its own plain copy."""
    values = {entry["name"]: entry["value"] for entry in tiny.found["reach"]}
    num_checked = 0
    for each in tiny.found["bandwidth"]:
        last = each["rows"][-1]
        for way, key in SPEEDS.items():
            name = f"{way}, {each['case']}, {each['ranks']}: of plain copy, at least"
            if name in values:
                share = last[f"{key}_bytes_per_second"] / last["plain_bytes_per_second"]
                assert values[name] == pytest.approx(share, abs=0.001)
                num_checked += 1
    assert num_checked == sum("plain copy" in name for name in values) >= 32


def test_round_trips_stand_beside_two_floors(tiny: Run) -> None:
    """Empty swaps of 1, 2 and 4 ranks, a bare ZeroMQ ping-pong and a manager's queue; the ratio is theirs."""
    trips = tiny.found["round_trip_us"]
    swaps = {"empty swap, 1 rank", "empty swap, 2 ranks", "empty swap, 4 ranks"}
    assert set(trips) == swaps | {"ZeroMQ ping-pong", "multiprocessing manager queue"}
    assert all(microseconds > 0 for microseconds in trips.values())
    (ratio,) = [entry["value"] for entry in tiny.found["reach"] if "ZeroMQ" in entry["name"]]
    assert ratio == pytest.approx(trips["empty swap, 1 rank"] / trips["ZeroMQ ping-pong"], abs=0.001)


def test_checkpoints_stand_beside_full_blocks(tiny: Run) -> None:
    """Of each model that fits in the memory: both ways, and the promised share is that of its own blocks."""
    values = {entry["name"]: entry["value"] for entry in tiny.found["reach"]}
    assert [row["case"] for row in tiny.found["checkpoints"]] == [IMAGE_CASES[0].name]
    for row in tiny.found["checkpoints"]:
        assert row["num_bytes"] == 3 * 2**20, "two blocks of 128 tokens in twelve layers"
        for way in ("out", "in"):
            name = f"checkpoint {way}, {row['case']}: of full blocks, at least"
            assert values[name] == pytest.approx(row[f"image_{way}"] / row[f"blocks_{way}"], abs=0.001)


def test_a_load_behind_a_checkpoint_is_told(tiny: Run) -> None:
    """Alone, behind it, and a step of it; what is promised is the second over the sum of the others."""
    delay = tiny.found["delay"]
    (value,) = [entry["value"] for entry in tiny.found["reach"] if "behind a checkpoint" in entry["name"]]
    assert all(seconds > 0 for seconds in delay.values())
    assert value == pytest.approx(delay["behind"] / (delay["alone"] + delay["step"]), abs=0.001)


def test_the_largest_image_goes_in_steps() -> None:
    """The one with which the delay is measured by default: 416 MiB, in 26 steps or more of 16 MiB at most."""
    layout = IMAGE_CASES[-1].layout.for_rank(1, 64)
    assert layout.checkpoint_bytes == 416 * 2**20


def test_machine_ranks_and_load_are_told(tiny: Run) -> None:
    """Where it ran, what ranks cost at rest, and how a load's layers come: the first not after the last."""
    machine, ranks, load = (tiny.found[name] for name in ("machine", "ranks", "load"))
    assert machine["num_cores"] >= 1 and machine["python"] and machine["text"] in " ".join(tiny.output.split())
    assert set(ranks) == {"start_seconds", "idle_share_of_core", "idle_rank_bytes"}
    assert ranks["start_seconds"] > 0 and 0 <= ranks["idle_share_of_core"] < 16 and ranks["idle_rank_bytes"] > 0
    assert 0 < load["first layer"] <= load["last layer"]


def test_a_target_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """A folder that does not exist: status 1 and one line on standard error, no table."""
    result = run(*TINY, "--json", str(tmp_path / "nowhere" / "x.json"))
    assert result.returncode == 1 and "nowhere" in result.stderr and len(result.stderr.splitlines()) == 1
    assert "GiB/s" not in result.stdout


@pytest.mark.parametrize(
    "options", [["--memory", "1MiB"], ["--memory", "much"], ["--repeats", "0"], ["--idle-seconds", "0"]]
)
def test_sizes_that_measure_nothing_are_refused(options: list[str]) -> None:
    """Too small to say anything: the command line says which option, status 2."""
    result = run(*options)
    assert result.returncode == 2 and options[0] in result.stderr


def test_verdicts_of_figures_on_either_side_of_their_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At most and at least, met, met exactly and missed; each is shown with its verdict."""
    report = Report(tmp_path / "found.json")
    for value in (1.0, 2.0, 3.0):
        low = Figure("low", value, promise=at_most("low", 2.0))
        report.line(f"both at {value}", low, Figure("high", value, promise=at_least("high", 2.0)))
    assert not report.end()
    reach = json.loads((tmp_path / "found.json").read_text())["reach"]
    assert [entry["ok"] for entry in reach] == [True, False, True, True, False, True]
    assert all(is_consistent(entry) for entry in reach)
    text = capsys.readouterr().out
    assert text.count("missed") == 2 and text.count(" ok ") == 4
