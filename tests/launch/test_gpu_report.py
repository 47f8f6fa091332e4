"""The sections of `gpu.sh` on a simulated driver, in real processes: one that is right, one that is not, and none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.launch.gpu.layouts import HYBRID_LAYOUTS
from tests.rigs.fake_cuda_processes import write_bindings

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """One run of the command, and what it wrote."""

    status: int
    printed: str
    said: str
    found: dict[str, Any]

    def section(self, name: str) -> dict[str, Any]:
        (section,) = [each for each in self.found["sections"] if each["name"] == name]
        return section


def run(folder: Path, driver: str, *arguments: str) -> Run:
    """The command with this driver in the place of NVIDIA's bindings; bounded."""
    paths = f"{write_bindings(folder / 'bindings', driver)}:{ROOT}"
    file = folder / "report.json"
    command = [sys.executable, "-m", "fastdeploy_cache.launch.gpu", "--quick", "--json", str(file), *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=folder
    )
    return Run(done.returncode, done.stdout, done.stderr, json.loads(file.read_text()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All sections, once."""
    return run(tmp_path_factory.mktemp("gpu"), "SharedDriver", "--markdown", "report.md")


def test_a_simulated_driver_is_called_one(whole: Run) -> None:
    """The report says so in its first lines, in its facts, and beside the driver's name."""
    assert whole.found["is_simulated"] is True
    assert "SIMULATED" in whole.printed.splitlines()[2]
    (driver,) = [line for line in whole.section("environment")["lines"] if line["what"] == "driver"]
    assert driver["detail"].startswith("SIMULATED: nothing here ran on a GPU; CUDA 13.0")


@pytest.mark.parametrize("name", ["environment", "steps", "device", "bandwidth", "arrays", "kills", "engine"])
def test_sections_that_need_no_framework_are_right(whole: Run, name: str) -> None:
    """Each has looked at something, and found nothing wrong."""
    section = whole.section(name)
    assert section["outcome"] == "ok", section
    assert sum(line["outcome"] == "ok" for line in section["lines"]) >= 1
    assert f"| {section['title']} | ok |" in whole.printed


def test_the_run_as_a_whole_is_right(whole: Run) -> None:
    """Status 0; frameworks that are not here, or cannot use a GPU, are skipped with the reason."""
    assert whole.status == 0, whole.printed
    for name in ("torch", "paddle", "vllm"):
        section = whole.section(name)
        assert section["outcome"] == "skipped"
        assert section["reason"] or section["lines"][0]["detail"]


def test_ranks_were_killed_and_came_back(whole: Run) -> None:
    """Tasks were cut off, every byte was right afterwards, and the engine's answers are those computed alone."""
    kills, files, _ = whole.section("kills")["lines"]
    assert "every byte is right; restarts [1, 1]" in kills["detail"] and "nothing is left" in files["detail"]
    by_ranks, by_engine, model = whole.section("engine")["lines"]
    assert "all as computed alone" in by_ranks["detail"] and "restarted 1 times" in by_engine["detail"]
    assert model["outcome"] == "skipped" and "not possible because" in model["detail"]


def test_speeds_stand_beside_a_pinned_copy(whole: Run) -> None:
    """One rank and two, in both directions; and the ways of the device beside each other."""
    facts = whole.section("bandwidth")["facts"]
    ranks = [value for name, value in facts.items() if name.startswith("ranks: ")]
    assert len(ranks) == 2 and all(value > 0 for each in ranks for value in each.values())
    assert {name.rpartition(": ")[2] for name in facts if name.startswith("way: ")} == {
        "single copies",
        "batch",
        "kernel",
    }


def test_wrong_bytes_are_found(tmp_path: Path) -> None:
    """A driver that spoils the last byte of each copy: the sections that compare fail, say where, and status 1."""
    sections = [word for name in ("steps", "device", "arrays", "kills") for word in ("--section", name)]
    wrong = run(tmp_path, "WrongDriver", *sections)
    assert wrong.status == 1
    for name in ("steps", "device", "arrays", "kills"):
        assert wrong.section(name)["outcome"] == "failed"
        errors = [line["detail"] for line in wrong.section(name)["lines"] if line["outcome"] == "wrong"]
        assert errors and all("bytes differ, the first at" in error for error in errors)
        num_checks = {"steps": 3, "device": 4 * (5 + len(HYBRID_LAYOUTS))}  # each by each way
        assert len(errors) == num_checks.get(name, len(errors))


def test_without_a_driver_one_message(tmp_path: Path) -> None:
    """Status 3 and what is missing, no traceback, and the report holds what could be read without a GPU."""
    none = run(tmp_path, "NoDriver")
    assert none.status == 3 and "Traceback" not in none.said + none.printed
    assert "no GPU to run on: DeviceError: no NVIDIA driver can be loaded (libcuda.so.1 cannot be found)" in none.said
    assert [each["name"] for each in none.found["sections"]] == ["environment"]


def test_the_benchmark_of_ranks_takes_a_gpu(tmp_path: Path) -> None:
    """`bench transfer --device cuda`: every layout with one rank and two, and it says that the driver is simulated."""
    file = tmp_path / "bench.json"
    program = "from fastdeploy_cache.launch.cli import main; main()"
    options = ["--device", "cuda", "--memory", "16MiB", "--repeats", "1", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", program, "bench", "transfer", *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{write_bindings(tmp_path / 'bindings')}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert {each["ranks"] for each in found["bandwidth"]} == {1, 2} and len(found["ways"]) == 10
    assert "The driver is simulated" in done.stdout
