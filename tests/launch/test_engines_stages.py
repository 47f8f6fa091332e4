"""Stages and servers of a lane: how they end, what is kept of them, and what is told while a lane runs."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.engines import progress, servers, sglang_lane, vllm_lane
from fastdeploy_cache.launch.engines.progress import LIMITS, StageLimits, StageProgress
from fastdeploy_cache.launch.engines.record import LaneRecord
from fastdeploy_cache.launch.engines.report import CaseResult, Line
from fastdeploy_cache.launch.engines.results import Passed, Served, StageResult, to_json
from fastdeploy_cache.launch.engines.servers import running
from fastdeploy_cache.launch.engines.stages import run_stage
from tests.rigs.process_ends import SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, and the processor seconds of whatever is looked at."""
    made = SimpleNamespace(now=0.0, cpu_seconds=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(progress, "_tree_of", lambda pid: [SimpleNamespace(cpu_seconds=made.cpu_seconds)])
    return made


def test_a_line_or_a_second_of_processor_time_is_progress(clock: SimpleNamespace, tmp_path: Path) -> None:
    """Each puts the end off by the whole time; less than a second does not; and the hard limit comes all the same."""
    log = tmp_path / "log"
    log.touch()
    seen = StageProgress(1, log, StageLimits(quiet_seconds=120.0, hard_seconds=1_200.0))
    assert 0 < seen.next_look_seconds <= 30
    clock.now = 119.0
    assert not seen.limit_reached()
    log.write_text("a line")
    assert not seen.limit_reached()
    clock.now, clock.cpu_seconds = 238.0, 1.5
    assert not seen.limit_reached()
    clock.now, clock.cpu_seconds = 357.0, 2.4
    assert not seen.limit_reached()
    clock.now = 358.0
    assert "120 s had passed without a line of its log or a second of processor time" in seen.limit_reached()
    clock.now, clock.cpu_seconds = 1_199.0, 9.0
    assert not seen.limit_reached() and seen.next_look_seconds == 1.0
    clock.now = 1_200.0
    assert "the hard limit of 1200 s, although it still got on" in seen.limit_reached()


@pytest.mark.processes
def test_processor_time_is_that_of_all_that_was_started(tmp_path: Path) -> None:
    """Also of a grandchild in a session of its own, as the ranks' processes may be."""
    code = """
        import subprocess, sys
        child = "import time\\nwhile time.process_time() < 0.2: pass\\nprint('done', flush=True); time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", child], start_new_session=True).wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with running(command, ready=b"done", log=tmp_path / "log", environment={}) as up:
        [found] = [each for each in progress._tree_of(up.pid) if each.session not in (up.pid, os.getsid(0))]
        assert found.cpu_seconds >= 0.1
        os.kill(found.pid, 9)


def _passed(num_answers: int, hits: int) -> Passed:
    served = tuple(Served(tokens=(1,), num_cached_tokens=hits, seconds=0.5) for _ in range(num_answers))
    return Passed(served=served, hit_tokens=(0, hits, 0))


def _line() -> Line:
    return Line(
        run="a run", num_requests=2, num_equal=2, num_prompt_tokens=9, num_cached_tokens=0, hit_tokens=(),
        median_seconds=1.0, longest_seconds=1.0, cpu_seconds=1.0,
    )  # fmt: skip


def test_what_was_done_is_told_when_a_later_stage_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage is printed and written as it ends. The tables come however the lane ends, and the error has the name
    of the stage."""
    file = tmp_path / "lane.json"

    def cases() -> Iterator[CaseResult]:
        yield CaseResult(name="a case", num_answers=3, num_equal=3, hit_tokens=(0, 1, 2))
        with record.stage("the last one"):
            raise LaunchError("it ended with status 3")

    record = LaneRecord("vLLM", file, seconds="of nothing")
    with pytest.raises(LaunchError, match="the stage 'the last one' failed: it ended with status 3"), record:
        with record.stage("the first: one") as passes:
            record.version = "1.2"
            passes.append(_passed(3, 7))
        assert "1. the first: one: 3 answers, 7 tokens hit" in capsys.readouterr().out
        written = json.loads(file.read_text())
        assert [stage["name"] for stage in written["stages"]] == ["the first: one"] and not written["is_over"]
        record.add([_line()])
        record.add(cases())
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    assert "2. the last one: failed" in printed and "a run" in printed and "a case" in printed
    assert [each["run"] for each in written["lines"]] == ["a run"] and written["is_over"] and written["vllm"] == "1.2"
    first, last = written["stages"]
    assert first["passes"][0]["num_answers"] == 3 and "failed" not in first
    assert "status 3" in last["failed"] and "the last one" in written["failed"][0]
    assert Path(first["log"]) == tmp_path / "lane-logs" / "the-first-one.log"


def test_logs_are_kept_without_a_file_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder of temporary files, which is not removed; standard output takes one document, at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LaneRecord("vLLM", None, seconds="of nothing") as record:
        record.log_of("a stage").write_text("a line")
    assert record.logs.parent == tmp_path and (record.logs / "a-stage.log").read_text() == "a line"


def test_standard_output_takes_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although the lane is written at the end of each stage."""
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: "/nowhere")
    with LaneRecord("SGLang", Path("-"), seconds="of nothing") as record, record.stage("one") as passes:
        passes.append(_passed(1, 0))
    assert json.loads(capsys.readouterr().out)["stages"][0]["name"] == "one"


@pytest.mark.parametrize("lane", [vllm_lane, sglang_lane])
def test_a_lane_that_fails_in_its_last_stage_has_written_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lane: Any
) -> None:
    """Both lanes, over stages that answer without an engine."""
    file, num_stages = tmp_path / "lane.json", 3
    environments = []

    def stage(module: str, plan: str, result: Path, **given: Any) -> bytes:
        environments.append(given["environment"])
        if len(environments) > num_stages:
            raise LaunchError("it was ended at the hard limit of 1200 s")
        passes = (_passed(len(json.loads(plan)["lengths"]), 0),) * 2
        return to_json(StageResult(version="9", passes=passes, up_seconds=1.0)).encode()

    monkeypatch.setattr(lane, "run_stage", stage)
    monkeypatch.setattr(lane, "write_hf_folder", lambda folder: None)
    run = {vllm_lane: vllm_lane.run_vllm_lane, sglang_lane: sglang_lane.run_sglang_lane}[lane]
    with pytest.raises(LaunchError, match=r"the stage '.*' failed: it was ended at the hard limit"):
        run(file)
    written = json.loads(file.read_text())
    assert ["failed" in each for each in written["stages"]] == num_stages * [False] + [True]
    assert lane is vllm_lane or all(each["OMP_NUM_THREADS"] == "1" for each in environments)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("open(sys.argv[1], 'w').write('done')", None),
        (
            "print('no such model'); sys.exit(3)",
            r"result ended with status 3; its log, \S+/logs/result.log, ends:\nno such",
        ),
        ("pass", "ended without a result"),
        ("time.sleep(60)", "as 1 s had passed without a line of its log or a second of processor time"),
        ("os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
def test_a_stage_that_fails_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, failure: str | None
) -> None:
    """A run of an engine gives its result; one that fails or hangs is ended. The message has the end of its log, which
    is kept."""
    (tmp_path / "a_stage.py").write_text(f"import os, sys, time\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "logs").mkdir()
    result, log = tmp_path / "result.json", tmp_path / "logs" / "result.log"
    if failure is None:
        assert run_stage("a_stage", str(result), result, log=log) == b"done"
        return
    limits = StageLimits(quiet_seconds=1.0) if "sleep" in code else LIMITS
    with pytest.raises(LaunchError, match=failure):
        run_stage("a_stage", str(result), result, log=log, limits=limits)
    assert log.exists()


@pytest.mark.processes
def test_a_stage_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes lines for ever meets the hard limit, and the message says that it was this one."""
    (tmp_path / "a_stage.py").write_text(
        "import time\nwhile True:\n    print('on', flush=True)\n    time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limits = StageLimits(quiet_seconds=60.0, hard_seconds=1.0)
    with pytest.raises(LaunchError, match="the hard limit of 1 s, although it still got on"):
        run_stage("a_stage", "", tmp_path / "result.json", log=tmp_path / "a.log", limits=limits)


@pytest.mark.processes
def test_a_stage_that_is_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its children, which have ended when it is over, nor the files that they had mapped in /dev/shm."""
    name = f"psm_stage_{os.getpid()}"
    code = f"""
        import mmap, os, sys, time
        from multiprocessing.shared_memory import SharedMemory

        memory = SharedMemory({name!r}, create=True, size=1 << 20)
        child = os.fork()
        if child:
            open(sys.argv[1], "w").write(str(child))
            os.kill(os.getpid(), 9)
        time.sleep(60)
    """
    (tmp_path / "a_stage.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = tmp_path / "result.json"
    child = run_stage("a_stage", str(result), result, log=tmp_path / "a.log", may_kill_itself=True).decode()
    assert not (Path("/dev/shm") / name).exists()
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.processes
def test_a_server_is_followed_until_it_says_that_it_is_up(tmp_path: Path) -> None:
    """It runs inside the block and not behind it; its log is kept. One that ends at its start is an error."""
    log = tmp_path / "server.log"

    def server(code: str) -> list[str]:
        return [sys.executable, "-c", f"import time; {code}"]

    with running(
        server("print('it is up', flush=True); time.sleep(60)"), ready=b"is up", log=log, environment={}
    ) as up:
        os.kill(up.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(up.pid, 0)
    assert log.read_text() == "it is up\n"
    with (
        pytest.raises(LaunchError, match=r"has ended at its start; its log, .*, ends:\nno such port"),
        running(server("print('no such port')"), ready=b"is up", log=log, environment={}),
    ):
        pass


@pytest.mark.processes
def test_a_server_that_hangs_at_its_start_is_ended(tmp_path: Path) -> None:
    """The message has the limit that it has reached."""
    code = [sys.executable, "-c", "import time; time.sleep(60)"]
    limits = StageLimits(quiet_seconds=0.5)
    with (
        pytest.raises(LaunchError, match="without a line of its log"),
        running(code, ready=b"is up", log=tmp_path / "server.log", environment={}, limits=limits),
    ):
        pass


@pytest.mark.processes
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_server_that_hangs_later_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_idle: bool) -> None:
    """It dies, so that who waits for its answer hears of it, and it says why. One that may have nothing to do is left
    alone."""
    hangs = threading.Event()
    made = SimpleNamespace(next_look_seconds=0.02, limit_reached=lambda: "has been quiet" if hangs.is_set() else "")
    monkeypatch.setattr(servers, "StageProgress", lambda *given: made)
    code = [sys.executable, "-c", "import time; print('it is up', flush=True); time.sleep(60)"]
    with running(code, ready=b"is up", log=tmp_path / "log", environment={}, is_idle=is_idle) as up:
        if is_idle:
            up.join(SECONDS)
        hangs.set()
        up.join(SECONDS)
        assert not up.is_alive() and up.reached == ("" if is_idle else "has been quiet")
        assert is_idle == Path(f"/proc/{up.pid}").exists()
