"""The report on CUDA, whatever its sections do: none stops another, and each says what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.gpu_machine import parse_gpus, read_link
from fastdeploy_cache.launch.engines.results import Passed, Served, StageResult
from fastdeploy_cache.launch.gpu import command
from fastdeploy_cache.launch.gpu.command import NO_GPU, GpuRun, run_gpu
from fastdeploy_cache.launch.gpu.notes import Found, Notes
from fastdeploy_cache.launch.gpu.packages import install_packages
from fastdeploy_cache.launch.gpu.sections import SECTIONS, Section
from fastdeploy_cache.launch.gpu.vllm_run import LENGTHS, judge

ROOT = Path(__file__).parents[2]
RIG = "tests.rigs.gpu_sections"


def section(name: str, **changed: Any) -> Section:
    """One of the rig's; the first of a run is called environment."""
    given = {"title": name, "entry": f"{RIG}:{name}", "deadline_seconds": 60.0, **changed}
    return Section(name=name, **given)


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *sections: Section) -> tuple[int, dict[str, dict[str, Any]]]:
    """The status, and what the JSON holds of each section."""
    monkeypatch.setattr(command, "SECTIONS", (section("environment"), *sections))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "report.json"
    status = run_gpu(GpuRun(json_file=file))
    return status, {each["name"]: each for each in json.loads(file.read_text())["sections"]}


@pytest.mark.processes
def test_a_section_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One crashes, one raises, one finds wrong bytes: each is named with its reason, and the last one is right."""
    names = ("crash", "stumble", "find_fault", "right")
    status, found = run(monkeypatch, tmp_path, *map(section, names))
    assert status == 1
    assert [found[name]["outcome"] for name in names] == ["failed", "failed", "failed", "ok"]
    assert found["crash"]["lines"][0]["detail"] == "was well" and "status -11" in found["crash"]["reason"]
    assert "KeyError: 'no such thing'" in found["stumble"]["reason"]
    assert [line["outcome"] for line in found["find_fault"]["lines"]] == ["wrong", "ok"]
    text = capsys.readouterr().out
    assert "| bytes | wrong | LaunchError: 3 of 4 bytes differ (gpu_sections.py:" in text and "SIMULATED" not in text


@pytest.mark.processes
def test_a_section_that_hangs_is_killed_with_what_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At its deadline: what it had found stands in the report, its own process is gone, and the next one runs."""
    status, found = run(monkeypatch, tmp_path, section("hang", deadline_seconds=6.0), section("right"))
    assert status == 1
    assert "killed after 6 s" in found["hang"]["reason"] and found["right"]["outcome"] == "ok"
    (line,) = found["hang"]["lines"]
    for pid in line["detail"].split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.processes
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A framework that is not there is no fault; a package of ours is one."""
    framework = section("right", framework="no_such_framework")
    status, found = run(monkeypatch, tmp_path, framework)
    assert status == 0 and found["right"]["reason"] == "no_such_framework is not installed"
    status, found = run(monkeypatch, tmp_path, section("right", needs=("json", "no_such.package")))
    assert status == 1 and found["right"]["reason"] == "this Python has no no_such.package"


@pytest.mark.processes
def test_sections_that_have_no_time_left_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is cut short by the end of the whole, before its own deadline, and one is not begun."""
    monkeypatch.setattr(command, "_ALL_SECONDS", 8.0)
    status, found = run(monkeypatch, tmp_path, section("right"), section("hang"), section("crash"))
    assert status == 1 and [found[name]["is_late"] for name in ("right", "hang", "crash")] == [False, True, True]
    assert "s of its 60, as the 8 s of all sections are over; what it had" in found["hang"]["reason"]
    assert (found["crash"]["outcome"], found["crash"]["reason"]) == ("skipped", "the 8 s of all sections are over")
    assert "no time was left for all of: hang, crash; --section" in capsys.readouterr().err


def test_without_a_driver_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages are missing, and there is no GPU to use them on: said at once. With a driver pip is asked."""
    asked: list[Path] = []
    monkeypatch.setattr(command, "missing_packages", lambda: ["no_such_module"])
    monkeypatch.setattr(command, "install_packages", lambda _, folder, __: asked.append(folder))
    monkeypatch.setattr(command, "has_driver", lambda: False)
    wanted = GpuRun(json_file=None, packages=tmp_path / "packages")
    assert run_gpu(wanted) == NO_GPU and not asked
    assert "there is neither libcuda.so.1 nor nvidia-smi; nothing was installed" in capsys.readouterr().err
    monkeypatch.setattr(command, "has_driver", lambda: True)
    monkeypatch.setattr(command, "SECTIONS", ())
    assert run_gpu(wanted) == 0 and asked == [tmp_path / "packages"]


@pytest.mark.processes
@pytest.mark.parametrize(("has_libcuda", "status"), [(True, 1), (False, NO_GPU)])
def test_a_gpu_that_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    has_libcuda: bool,
    status: int,
) -> None:
    """A package of ours is missing: with a driver each section names it; without one there is no GPU, and no more."""
    blind = section("environment", entry=f"{RIG}:{'blind' if has_libcuda else 'without_driver'}")
    monkeypatch.setattr(command, "DEVICE_NEEDS", ("no_such_module",))
    monkeypatch.setattr(command, "SECTIONS", (blind, section("right", needs=("no_such_module",))))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert run_gpu(GpuRun(json_file=None)) == status
    said = capsys.readouterr()
    assert ("this Python has no no_such_module" in said.out) == has_libcuda
    assert ("no GPU to run on: no such driver" in said.err) != has_libcuda


def test_the_sections_are_there() -> None:
    """Each entry is a function of a module, no name is there twice, and those without a framework fit the time."""
    assert len({each.name for each in SECTIONS}) == len(SECTIONS) >= 9
    for each in SECTIONS:
        module, _, function = each.entry.partition(":")
        path = ROOT / Path(*module.split(".")[1:]).with_suffix(".py")
        assert f"def {function}(notes: Notes, options: GpuOptions) -> None:" in path.read_text()
    assert sum(each.deadline_seconds for each in SECTIONS if not each.framework) <= command._ALL_SECONDS <= 470


def test_notes_that_are_cut_off_are_read_up_to_there(tmp_path: Path) -> None:
    """A process that dies while it writes leaves half a line behind."""
    file = tmp_path / "notes"
    notes = Notes(file)
    notes.note("one", "is well", seconds=1.5)
    notes.fact("two", [1, 2])
    with file.open("a") as out:
        out.write('{"what": "thr')
    found = Found.read(file)
    assert [line["what"] for line in found.lines] == ["one"] and found.facts == {"two": [1, 2]}
    assert Found.read(tmp_path / "none") == Found([], {})


@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments",
    [
        ["--section", "nothing"],
        ["--json", "/no/such/folder/x.json"],
        ["--json", "/"],
        ["--markdown", "/"],
        ["--wheels", "/no/such/folder"],
        ["--wheels", "/"],
        ["words"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    """Status 2, the argument is named, and no section has begun."""
    done = subprocess.run(
        [sys.executable, "-m", "fastdeploy_cache.launch.gpu", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2 and arguments[-1] in done.stderr and "==" not in done.stderr


@pytest.mark.processes
def test_packages_come_from_a_folder_of_wheels(tmp_path: Path) -> None:
    """Without a registry: the wheel's module lies in the folder; an empty folder is named as the reason."""
    wheels, target = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    assert install_packages(["tiny"], target, wheels) == f"{wheels} holds no wheels"
    with zipfile.ZipFile(wheels / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\ntiny-1.0.dist-info/METADATA,,\n")
    assert install_packages(["tiny"], target, wheels) is None
    assert (target / "tiny.py").exists()


def test_gpus_as_nvidia_smi_lists_them(tmp_path: Path) -> None:
    """Name, link and modes of each; what it does not know stays empty, and noise is passed over."""
    text = (
        "0, NVIDIA H200, 00000000:18:00.0, 580.1, 143771, 5, 16, Default, Disabled\n"
        "1, Quadro, 00000000:AF:00.0, 535.2, 8192, [N/A], [N/A], Exclusive_Process, [N/A]\n"
        "No devices were found\n"
    )
    first, second = parse_gpus(text)
    assert (first.name, first.bus_id, first.driver, first.memory_mib) == (
        "NVIDIA H200",
        "0000:18:00.0",
        "580.1",
        143771,
    )
    assert first.pcie_gb_per_second == pytest.approx(63.0, abs=0.1)
    assert (second.bus_id, second.compute_mode, second.pcie_gb_per_second) == (
        "0000:af:00.0",
        "Exclusive_Process",
        None,
    )
    device = tmp_path / "0000:18:00.0"
    device.mkdir()
    (device / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    (device / "max_link_width").write_text("8\n")
    assert read_link(device.name, tmp_path) == (4, 8) and read_link("other", tmp_path) == (0, 0)


def _result(equal: bool, cached: int, kills: int) -> StageResult:
    tokens = (1, 2) if equal else (1, 3)
    served = tuple(Served(tokens=tokens, num_cached_tokens=cached, seconds=0.1) for _ in LENGTHS)
    passed = Passed(served=served, hit_tokens=(0, 0, 0), cpu_seconds=1.0)
    return StageResult(version="1", passes=(passed,), up_seconds=1.0, num_kills=kills)


@pytest.mark.parametrize(
    ("equal", "cached", "kills", "is_right"),
    [(True, 200, 1, True), (False, 200, 1, False), (True, 10, 1, False)],
)
def test_what_is_asked_of_vllm(equal: bool, cached: int, kills: int, is_right: bool) -> None:
    """Equal answers, and prompts from the cache: both, or it is wrong."""
    alone, found = _result(True, 0, 0), _result(equal, cached, kills)
    if is_right:
        assert "differ from vLLM alone: [0]" in judge(alone, found)
    else:
        with pytest.raises(LaunchError, match="answers that differ"):
            judge(alone, found)
