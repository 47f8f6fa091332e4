"""The benchmark of sending between instances: it measures all that it promises, and its verdict follows from that."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench import peer
from fastdeploy_cache.launch.bench.peer import PIECE_SIZES, medians
from fastdeploy_cache.launch.bench.peer_instances import Instances
from fastdeploy_cache.launch.bench.peer_library import open_library
from fastdeploy_cache.launch.bench.peer_memory import LinkedMemory, LinkMissingError, Way, scattered
from fastdeploy_cache.transfer_manager.peer import KINDS
from fastdeploy_cache.transfer_manager.peer.peer_signal import StepProgress
from tests.rigs.command_line import CLI
from tests.rigs.needs import missing
from tests.rigs.verdicts import is_consistent

pytestmark = pytest.mark.processes

TINY = ["--repeats", "1", "--memory", "16MiB", "--link", "shm"]
ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """One run of the program and what it wrote."""

    status: int
    output: str
    found: dict[str, Any]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`fastdeploy-cache bench peer` of this checkout; bounded."""
    # NIXL's InfiniBand modules bring a libnl of their own, which ends the process at its end
    known = {"PYTHONPATH": str(ROOT), "UCX_MODULES": "^ib"}
    return subprocess.run(
        [*CLI, "bench", "peer", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | known | environment,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole benchmark with tiny sizes, once."""
    path = tmp_path_factory.mktemp("bench") / "peer.json"
    result = run(*TINY, "--json", str(path))
    assert result.returncode in (0, 1) and path.exists(), result.stderr
    return Run(result.returncode, result.stdout, json.loads(path.read_text()))


def test_a_link_that_was_asked_for_is_measured(tiny: Run) -> None:
    """And GPU memory never is, as the text says."""
    assert set(tiny.found["links"]) == {"shm"} and set(tiny.found["not_measured"]) == {"gpu"}
    assert "GPU memory is not measured" in tiny.output


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_link(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One size of pieces over each library that is here: link, library and whole receive all move bytes."""
    monkeypatch.setenv("UCX_MODULES", "^ib")
    monkeypatch.setattr(peer, "PIECE_SIZES", (2**20,))
    try:
        (row,) = peer.link_rows(kind, 2**24, 1)
    except LinkMissingError as error:
        missing(str(error))
    assert row.num_pieces == 16 and min(row.floor, row.link, row.receive) > 0


def test_an_unknown_link_is_refused() -> None:
    """With the names that are known."""
    result = run("--link", "pigeon")
    assert result.returncode == 1 and "shm, nixl, mooncake" in result.stderr


def test_each_size_of_pieces_stands_beside_its_floor(tiny: Run) -> None:
    """A row for each size with the floor, the link and a whole receive; 16 MiB at a time, or eight pieces."""
    for link in tiny.found["links"].values():
        assert [row["piece_bytes"] for row in link["rows"]] == list(PIECE_SIZES)
        for row in link["rows"]:
            assert row["num_pieces"] == max(8, 2**24 // row["piece_bytes"])
            assert all(row[f"{name}_bytes_per_second"] > 0 for name in ("floor", "link", "receive"))


def test_the_overlap_says_what_it_was_measured_with(tiny: Run) -> None:
    """8 layers that hold all of the memory asked for, no faster than 5 ms and half of what sending one takes."""
    for link in tiny.found["links"].values():
        row = link["overlap"]
        assert (row["num_layers"], row["layer_bytes"]) == (8, 2**24 // 8)
        assert row["layer_seconds"] >= 0.005
        assert all(row[name] > 0 for name in ("visible", "alone", "whole"))
        more = row["visible"] - row["alone"]
        assert row["num_layers_behind"] == pytest.approx(more / (row["whole"] / 8))
        assert link["smallest_receive_seconds"] > 0
    assert "layers behind" in " ".join(tiny.output.split())


def test_the_overlap_shows_a_sender_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that only a pause lets go: without one 7 more are left at the last; a ratio and a number of layers say so.

    The bounds are wide, as times on a busy machine are: a sender that keeps up is at a ratio of 1 and at no layer. What
    else the machine does can hide the difference, and not make one: it is measured again before that counts.
    """
    mark, measure = StepProgress.mark, Instances.after_last_layer_seconds
    has_pause = [False]

    def measure_as_told(instances: Instances, layer_seconds: float, pause_seconds: float = 0.0) -> float:
        has_pause[0] = pause_seconds > 0
        return measure(instances, layer_seconds, pause_seconds)

    def mark_the_last(progress: StepProgress, step: int, num_layers: int) -> None:
        if has_pause[0] or num_layers == 8:
            mark(progress, step, num_layers)

    monkeypatch.setattr(Instances, "after_last_layer_seconds", measure_as_told)
    monkeypatch.setattr(StepProgress, "mark", mark_the_last)
    rows = (peer.overlap("shm", 2**26, 5) for _ in range(4))
    assert any(row.num_layers_behind > 1 and row.visible > 1.2 * row.alone for row in rows)


def test_the_overlap_shows_a_sender_that_begins_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that nobody marks: the last one is as late with a pause before it as without, and no sooner than all."""
    monkeypatch.setattr(StepProgress, "mark", lambda progress, step, num_layers: None)
    rows = (peer.overlap("shm", 2**26, 5) for _ in range(4))
    assert any(row.alone > 0.5 * row.whole for row in rows)


def test_every_promised_figure_has_a_verdict_that_follows(tiny: Run) -> None:
    """Three entries for each link, five for shm, each of its own figures; the status is their verdict."""
    values = {entry["name"]: entry["value"] for entry in tiny.found["reach"]}
    assert len(values) == 3 * len(tiny.found["links"]) + 2 and all(is_consistent(e) for e in tiny.found["reach"])
    for kind, link in tiny.found["links"].items():
        promised = 2**18 if kind == "shm" else 2**20
        (row,) = [row for row in link["rows"] if row["piece_bytes"] == promised]
        share, *of_each = [value for name, value in values.items() if name.startswith(f"{kind}, pieces of")]
        assert share == pytest.approx(row["link_bytes_per_second"] / row["floor_bytes_per_second"], abs=0.001)
        assert of_each == [
            pytest.approx(row["link_bytes_per_second"] / row[name], abs=0.001)
            for name in ("each_bytes_per_second",)
            if name in row
        ]
        (ratio,) = [value for name, value in values.items() if name.startswith(f"{kind}: visible")]
        assert ratio == pytest.approx(link["overlap"]["visible"] / link["overlap"]["alone"], abs=0.001)
        alone = values[f"{kind}: last layer alone / whole"]
        assert alone == pytest.approx(link["overlap"]["alone"] / link["overlap"]["whole"], abs=0.001)
    state = tiny.found["links"]["shm"]["state"]
    assert state["num_bytes"] == 36 * (8192 * 3 + 32 * 128 * 128) * 2
    said = values["shm: the state is there, ms after the last commit"]
    assert said == pytest.approx(1e3 * state["after_commit_seconds"], abs=0.001)
    assert tiny.status == (0 if all(entry["ok"] for entry in tiny.found["reach"]) else 1)


def test_a_library_that_is_not_there_is_told_apart_from_one_that_fails() -> None:
    """A kind that nobody can open is missing, with the reason: it is named, and nothing fails."""
    with pytest.raises(LinkMissingError, match="carrier pigeon"):
        LinkedMemory("carrier pigeon", 4096)


def test_a_process_that_dies_is_an_error_with_its_last_words() -> None:
    """More pieces than the memory holds: the reader ends, and what it said last is in the error."""
    memory = LinkedMemory("shm", 2**16)
    try:
        assert memory.seconds(Way("link", 2**12, 4)) > 0
        with pytest.raises(LaunchError, match=r"does not answer \(status 1\).*no library"):
            memory.seconds(Way("library", 2**12, 4))
    finally:
        memory.close()


def test_shm_has_no_library() -> None:
    """What has no library says what to compare with instead."""
    prepare = open_library("shm", np.zeros(8, np.uint8), b"")
    with pytest.raises(LaunchError, match="plain copy"):
        prepare(scattered(2**16, 2**12, 4))


def test_pieces_are_scattered() -> None:
    """Every piece has its own place on both sides, and hardly any follows the one before it on both."""
    pieces = scattered(2**26, 2**16, 512)
    for offsets in (pieces.local_offset, pieces.remote_offset):
        assert len(set(offsets.tolist())) == 512 and offsets.max() <= 2**26 - 2**16
    steps = [np.diff(offsets) == 2**16 for offsets in (pieces.local_offset, pieces.remote_offset)]
    assert (steps[0] & steps[1]).sum() < 5


def test_medians_leave_the_first_round_out() -> None:
    """Each is measured once more than asked for; the first of them, though the slowest, does not count."""
    times = {"a": iter([9.0, 1.0, 2.0, 3.0]), "b": iter([9.0, 5.0, 4.0, 6.0])}
    assert medians({name: left.__next__ for name, left in times.items()}, 3) == {"a": 2.0, "b": 5.0}
    assert not [*times["a"], *times["b"]]


def test_a_target_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """A folder that does not exist: status 1 and one line on standard error, no table."""
    result = run(*TINY, "--json", str(tmp_path / "nowhere" / "x.json"))
    assert result.returncode == 1 and "nowhere" in result.stderr and len(result.stderr.splitlines()) == 1
    assert "GB/s" not in result.stdout


@pytest.mark.parametrize("options", [["--memory", "1MiB"], ["--repeats", "0"]])
def test_sizes_that_measure_nothing_are_refused(options: list[str]) -> None:
    """Too small to say anything: the command line says which option, status 2."""
    result = run(*options)
    assert result.returncode == 2 and options[0] in result.stderr


def test_memory_that_is_not_there_is_asked_for_in_vain() -> None:
    """More than any machine has: one line with what is needed and what there is, status 1; nothing is started."""
    result = run("--memory", "100TiB")
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and "does not answer" not in line
    assert f"--memory {100 * 2**20} MiB needs 8 times as much, {800 * 2**40} bytes" in line
    assert "bytes are available; use" in line
