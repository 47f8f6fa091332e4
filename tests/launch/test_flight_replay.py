"""`simulate` with a flight recording: replayed and compared, or served as a trace."""

from __future__ import annotations

import json
import logging
import struct
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import RecordingError
from fastdeploy_cache.insight.flight.file import MAGIC, read_recording
from fastdeploy_cache.insight.flight.records import RecordKind
from fastdeploy_cache.launch.cli import app, main
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay
from fastdeploy_cache.launch.simulator.recorded_trace import read_recorded_trace
from fastdeploy_cache.launch.simulator.trace import TraceError
from fastdeploy_cache.policies import EVICTION_POLICIES
from tests.rigs.flight_walk import FlightWalk


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A walk of 300 steps over both tiers."""
    walk = FlightWalk(5, 4, 24, 40, is_inline=True)
    walk.run(300)
    return walk.model.cache.insight.write_flight(tmp_path / "walk.flight")


def test_a_replay_that_is_the_same_ends_with_0(recording: Path, tmp_path: Path) -> None:
    """How many steps there were is printed, and written as JSON."""
    found = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["simulate", "--replay", str(recording), "--json", str(found)])
    assert result.exit_code == 0, result.output
    assert "0 different" in result.output
    findings = json.loads(found.read_text())
    assert findings["num_steps"] > 300 and findings["num_different"] == 0


def test_a_recording_of_the_version_before_is_read(recording: Path) -> None:
    """It differs by two kinds of records alone."""
    data = recording.read_bytes()
    recording.write_bytes(data[: len(MAGIC)] + struct.pack("<H", 1) + data[len(MAGIC) + 2 :])
    assert FlightReplay(read_recording(recording)).run().num_different == 0


def test_a_change_of_the_policy_is_followed(tmp_path: Path) -> None:
    """Also by a file whose ring has dropped the change: its header has the policy in force when it begins. One of the
    version before cannot tell, and says so."""
    path = tmp_path / "a.flight"
    walk = FlightWalk(5, 4, 24, 40, is_inline=True)
    for policy in ("lru", "lfu", "reuse", "priority"):
        walk.model.cache.control.set_policy(policy)
        walk.run(150)
    walk.model.cache.insight.write_flight(path)
    result = CliRunner().invoke(app, ["simulate", "--replay", str(path)])
    assert result.exit_code == 0, result.output
    assert "0 different" in result.output and "does not tell" not in result.output
    told = [EVICTION_POLICIES[record["policy"]] for record in read_recording(path).of_kind(RecordKind.POLICY)]
    assert told == ["lfu", "reuse", "priority"]
    data = path.read_bytes()
    path.write_bytes(data[: len(MAGIC)] + struct.pack("<H", 2) + data[len(MAGIC) + 2 :])
    result = CliRunner().invoke(app, ["simulate", "--replay", str(path)])
    assert "does not tell whether the eviction policy was changed" in " ".join(result.output.split())


def test_a_ring_that_has_dropped_a_change_of_the_policy_has_it_in_its_header(tmp_path: Path) -> None:
    """It says by which policy its first record was evicted."""
    walk = FlightWalk(9, 4, 400, 0, is_inline=True, insight=InsightConfig(flight_recorder_bytes=2**16))
    walk.model.cache.control.set_policy("lfu")
    walk.run(1500)
    found = read_recording(walk.model.cache.insight.write_flight(tmp_path / "a.flight"))
    assert not list(found.of_kind(RecordKind.POLICY)) and found.header["num_dropped"]
    assert found.header["settings"]["eviction_policy"] == "lfu"


def test_a_replay_that_differs_ends_with_4_and_shows_both_sides(recording: Path) -> None:
    """With a GPU pool of another size some steps differ; the first few are shown, with what was recorded."""
    data = recording.read_bytes()
    outcome = FlightReplay(read_recording(recording), {"num_gpu_blocks": 16}).run()
    assert outcome.num_different > len(outcome.differences) == 10
    assert ": recorded " in str(outcome.differences[0]) and ", replayed " in str(outcome.differences[0])
    start = len(MAGIC) + 2
    (size,) = struct.unpack_from("<I", data, start)
    header = data[start + 8 : start + 8 + size].replace(b'"num_gpu_blocks": 24', b'"num_gpu_blocks": 16')

    recording.write_bytes(
        data[:start] + struct.pack("<II", size, zlib.crc32(header)) + header + data[start + 8 + size :]
    )
    result = CliRunner().invoke(app, ["simulate", "--replay", str(recording)])
    assert result.exit_code == 4, result.output
    assert result.output.count(": recorded ") == 10 and " more" in result.output


def test_a_recording_that_was_cut_is_replayed_up_to_there(recording: Path) -> None:
    """With a note; what is whole before its end is the same."""
    walk = FlightWalk(6, 2, 24, 40, is_inline=True)
    walk.run(1500)
    walk.model.cache.insight.write_flight(recording)
    recording.write_bytes(recording.read_bytes()[:-7])
    result = CliRunner().invoke(app, ["simulate", "--replay", str(recording)])
    assert result.exit_code == 0, result.output
    assert "was cut" in result.output


def test_bad_input_is_one_line_and_status_1(
    recording: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign file, a newer one, a damaged one, and one without a step; no traceback."""
    data = recording.read_bytes()
    newer = MAGIC + struct.pack("<H", 7) + data[len(MAGIC) + 2 :]
    for bad in (b"{}", newer, data[:-9] + b"?" + data[-8:], data[: data.index(b"PIEC")], data[:20]):
        recording.write_bytes(bad)
        monkeypatch.setattr("sys.argv", ["fastdeploy-cache", "simulate", "--replay", str(recording)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("fastdeploy-cache: "), lines


def test_settings_that_cannot_be_are_refused(recording: Path) -> None:
    """A header of another making is an error in one line."""
    with pytest.raises(RecordingError, match=r"refused here: .*lruu"):
        FlightReplay(read_recording(recording), {"eviction_policy": "lruu"})


def test_a_recording_is_a_trace(recording: Path) -> None:
    """Plain `simulate` serves its prompts at their times; each once, and equal prefixes are equal blocks."""
    trace = read_recorded_trace(recording, None)
    assert trace.block_size == 4 and len(trace.requests) > 100
    assert trace.num_distinct_blocks < sum(len(request.blocks) for request in trace.requests) / 2
    assert [r.seconds for r in trace.requests] == sorted(r.seconds for r in trace.requests)
    arguments = ["simulate", str(recording), "--gpu-blocks", "16,64", "--no-bound"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"{len(trace.requests)} requests" in result.output
    refused = CliRunner().invoke(app, [*arguments, "--block-size", "2"])
    assert "--block-size 2 with a recording of blocks of 4 tokens" in str(refused.exception)
    refused = CliRunner().invoke(app, ["simulate", str(recording)])
    assert "give --gpu-blocks" in str(refused.exception)


def test_a_recording_that_begins_in_the_midst_is_taught_what_was_there(tmp_path: Path) -> None:
    """What matches have found before anybody computed it was cached: the replay knows it then, and says how much."""
    logging.disable(logging.WARNING)
    walk = FlightWalk(9, 4, 400, 0, is_inline=True, insight=InsightConfig(flight_recorder_bytes=2**16))
    walk.run(2500)
    walk.model.cache.insight.write_flight(tmp_path / "a.flight")
    result = CliRunner().invoke(app, ["simulate", "--replay", str(tmp_path / "a.flight")])
    logging.disable(logging.NOTSET)
    assert result.exit_code in (0, 4), result.output
    assert "begins in the midst" in result.output
    outcome = FlightReplay(read_recording(tmp_path / "a.flight")).run()
    assert outcome.num_taught_blocks > 20
    assert outcome.num_different < outcome.num_steps / 4


def test_a_trace_keeps_no_more_than_it_may(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may refer to billions of tokens, and a trace keeps each prompt whole: that has an end."""
    monkeypatch.setattr("fastdeploy_cache.launch.simulator.recorded_trace._MAX_BLOCKS", 1)
    with pytest.raises(TraceError, match="more than 1 blocks"):
        read_recorded_trace(recording, None)
