"""Recordings of hybrid models as files: what an older program says of one, what is cut, what begins in the midst."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import CacheError, RecordingError
from fastdeploy_cache.insight.flight import file as flight_file
from fastdeploy_cache.insight.flight.file import MAGIC, read_recording
from fastdeploy_cache.insight.flight.records import RecordKind
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay
from tests.rigs.float64_engine import Float64Engine, serve
from tests.rigs.hybrid_requests import TEXT, UNIFORM, computed, manager


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of twenty requests, in pieces of twenty notes."""
    monkeypatch.setattr(flight_file, "_PIECE_NOTES", 20)
    path = tmp_path / "rows.flight"
    with manager(num_cpu_blocks=60, max_load_share=1.0) as cache:
        for number in range(20):
            cache.release(computed(cache, str(number), [*TEXT[: 4 + number], *[number % 3] * 8]))
        cache.insight.write_flight(path)
    return path


def version_of(path: Path) -> int:
    (version,) = struct.unpack_from("<H", path.read_bytes(), len(MAGIC))
    return int(version)


def test_an_older_program_says_in_one_line_that_it_cannot(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version of the file is another, as its records are; that of other models is what it was."""
    monkeypatch.setattr(flight_file, "VERSION", 3)
    with pytest.raises(RecordingError, match="is a flight recording of version 4, and this program reads version 3"):
        read_recording(recording)
    with manager(UNIFORM) as cache:
        cache.insight.write_flight(tmp_path / "uniform.flight")
    assert version_of(tmp_path / "uniform.flight") == 3
    assert "num_gpu_units" not in read_recording(tmp_path / "uniform.flight").header["settings"]


def test_a_file_that_is_cut_is_read_to_its_last_whole_piece_or_refused_in_a_line(recording: Path) -> None:
    """Wherever it ends."""
    data, num_read, num_refused = recording.read_bytes(), 0, 0
    for size in range(0, len(data), 97):
        recording.write_bytes(data[:size])
        result = CliRunner().invoke(app, ["simulate", "--replay", str(recording)])
        if isinstance(result.exception, CacheError):
            assert "\n" not in str(result.exception)
            num_refused += 1
        else:
            assert result.exit_code in (0, 4), result.output
            num_read += 1
    assert num_read and num_refused


def test_a_record_that_is_damaged_is_named(recording: Path) -> None:
    """A snapshot at more tokens than any request has, of a request that never came, and a kind that is none."""
    whole = read_recording(recording)
    records, marks = whole.pieces[-1]
    kinds = (RecordKind.SNAPSHOT, RecordKind.DRAFTED, RecordKind.STATE_COPIED)
    bad = {"snapshot at": struct.pack("<BIIB", kinds[0], 20, 2**31, 1), "kind": b"\xff", "cut": b"\x13\x01"}
    for words, record in bad.items():
        whole.pieces[-1] = (records[: _before_last_release(records)] + record, marks)
        with pytest.raises(RecordingError) as refused:
            FlightReplay(whole).run()
        assert "damaged" in str(refused.value), words
    strange = b"".join(
        [struct.pack("<BIIB", kinds[0], 999, 4, 1), *(struct.pack("<BI", kind, 999) for kind in kinds[1:])]
    )
    whole.pieces[-1] = (records + strange, marks)
    assert FlightReplay(whole).run().num_without_begin == 2


def _before_last_release(records: bytes) -> int:
    """Where the record of the last release begins: it is the last one."""
    return len(records) - struct.calcsize("<BdIIIIIQQIIfIIB")


def test_it_begins_in_the_midst_and_is_taught_checkpoints(tmp_path: Path) -> None:
    """What a match has found was there, with a checkpoint behind it: most is decided alike after that."""
    logging.disable(logging.WARNING)
    insight = InsightConfig(flight_recorder_bytes=2**16)
    engine = Float64Engine(seed=3, num_gpu_blocks=300, num_gpu_units=(60, 160, 200), insight=insight)
    with engine.cache:
        serve(engine, 150)
        engine.cache.insight.write_flight(tmp_path / "a.flight")
    logging.disable(logging.NOTSET)
    recording = read_recording(tmp_path / "a.flight")
    assert recording.header["num_dropped"]
    outcome = FlightReplay(recording).run(lambda cache: cache.check_invariants())
    assert outcome.num_taught_blocks > 20
    assert outcome.num_different < outcome.num_steps / 4
