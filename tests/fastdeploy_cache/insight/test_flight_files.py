"""Files of flight recordings: what is cut, foreign or damaged; alerts; and the recording that never ends."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import OutOfBlocksError, RecordingError
from fastdeploy_cache.insight.flight.file import MAGIC, is_recording, read_recording
from fastdeploy_cache.insight.flight.files import FlightFolder
from fastdeploy_cache.insight.flight.records import RecordKind
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay
from fastdeploy_cache.transfer_manager.client import RankStatus
from tests.rigs.cache_model import CacheModel


def served(num_requests: int, **insight: Any) -> CacheModel:
    """A cache that has served some prompts; its copies end at once."""
    model = CacheModel(4, 64, 64, insight=InsightConfig(**insight))
    model.client.auto = True
    for number in range(num_requests):
        model.serve([number % 7] * 4 + list(range(number % 40)), stays=False, patient=True)
    return model


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Of more than one piece."""
    path = served(600).cache.insight.write_flight(tmp_path / "a.flight")
    assert len(read_recording(path).pieces) > 2
    return path


def test_a_file_that_was_cut_is_whole_up_to_its_last_piece(recording: Path) -> None:
    """Wherever it was cut: what is before is read, with a note; a cut header is an error."""
    data, whole = recording.read_bytes(), read_recording(recording)
    header = data.index(b"PIEC")
    for size in (len(data) - 1, len(data) // 2, header + 5, header + 30):
        recording.write_bytes(data[:size])
        cut = read_recording(recording)
        assert "was cut" in cut.note
        assert [piece[0] for piece in cut.pieces] == [piece[0] for piece in whole.pieces[: len(cut.pieces)]]
        assert len(cut.pieces) < len(whole.pieces)
    for size in (header - 1, len(MAGIC) + 3, len(MAGIC)):
        recording.write_bytes(data[:size])
        with pytest.raises(RecordingError, match="ends inside its header"):
            read_recording(recording)


def test_bad_files_are_one_clear_error(recording: Path, tmp_path: Path) -> None:
    """Foreign, newer, damaged in the header, in a piece, between two; and none at all."""
    data = recording.read_bytes()
    header = data.index(b"PIEC")
    newer = MAGIC + struct.pack("<H", 9) + data[len(MAGIC) + 2 :]
    cases = {
        b"{}\n": "is no flight recording",
        newer: "of version 9, and this program reads version 4",
        data[: header - 3] + b"?" + data[header - 2 :]: "checksum of its header",
        data[: header + 60] + bytes([data[header + 60] ^ 1]) + data[header + 61 :]: "checksum is not that of its bytes",
        data[:header] + b"XXXX" + data[header + 4 :]: "no piece begins there",
    }
    for bad, words in cases.items():
        recording.write_bytes(bad)
        with pytest.raises(RecordingError, match=words):
            read_recording(recording)
    with pytest.raises(RecordingError, match="No such file"):
        read_recording(tmp_path / "none")
    assert not is_recording(tmp_path / "none")


def test_an_alert_writes_one_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank that dies is noted and has a file written; a second alert within ten minutes has none."""
    model = served(5, flight_folder=str(tmp_path / "alerts"))
    model.client.up = False
    model.client.auto = False
    with pytest.raises(AssertionError), model.cache._seen.alerting("invariants"):
        raise AssertionError("the books do not add up")
    with caplog.at_level(logging.WARNING):
        model.cache.close()
    (path,) = (tmp_path / "alerts").iterdir()
    recording = read_recording(path)
    assert recording.header["reason"] in ("invariants", "rank_down")
    assert [record["up"] for record in recording.of_kind(RecordKind.RANK)] == [0]
    assert list(recording.of_kind(RecordKind.ALERT))
    assert [r.message for r in caplog.records if "flight_written" in r.message]


def test_a_rank_that_was_down_for_a_moment_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """It died and was up again between two looks: its count of restarts tells."""
    model = served(5, flight_folder=str(tmp_path / "alerts"))
    again = [RankStatus(rank=0, up=True, num_restarts=1)]
    monkeypatch.setattr(model.client, "statuses", lambda: again)
    eventually(lambda: (tmp_path / "alerts").exists() and any((tmp_path / "alerts").glob("*.flight")))
    model.cache.close()
    (path,) = (tmp_path / "alerts").iterdir()
    recording = read_recording(path)
    assert recording.header["reason"] == "rank_down"
    assert [(record["up"], record["num_restarts"]) for record in recording.of_kind(RecordKind.RANK)] == [(1, 1)]


def test_only_so_many_files_are_kept(tmp_path: Path) -> None:
    """The oldest go; what somebody else has put there stays."""
    folder = FlightFolder(tmp_path / "new" / "folder", "flight", 3)
    (tmp_path / "new").mkdir()
    for number in range(6):
        with folder.next_path() as (path, _):
            path.write_text(str(number))
        (tmp_path / "new" / "folder" / "notes.txt").write_text("mine")
    found = sorted(path.read_text() for path in (tmp_path / "new" / "folder").iterdir())
    assert found == ["3", "4", "5", "mine"]


def test_everything_is_recorded_in_files_that_follow_each_other(tmp_path: Path) -> None:
    """Rotated at the size that was asked for; each can be read by itself, and together they have every request once."""
    insight = {"record_folder": str(tmp_path), "record_bytes": 2**20, "flight_recorder_bytes": 2**22}
    model = served(0, **insight)
    num_requests = 12_000
    for number in range(num_requests):
        model.serve([number % 3] * 4 + list(range(number % 20)), stays=False, patient=True)
        if number % 500 == 499:
            model.cache._seen.flight.flush()
    model.cache.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) > 1
    numbers = list[int]()
    for path in paths:
        recording = read_recording(path)
        assert not recording.note and not recording.header["num_lost_parts"]
        numbers += [record["number"] for record in recording.of_kind(RecordKind.MATCHED)]
    assert numbers == list(range(1, num_requests + 1))
    assert not FlightReplay(read_recording(paths[0])).run().num_different
    later = FlightReplay(read_recording(paths[1])).run()
    assert later.num_taught_blocks and later.num_requests


def test_what_the_ring_has_dropped_before_it_was_recorded_is_counted(tmp_path: Path) -> None:
    """Nobody waits for the disk: the next file says that there is a gap."""
    model = served(0, record_folder=str(tmp_path), record_bytes=2**20, flight_recorder_bytes=2**16)
    for number in range(1500):
        model.serve([number % 97] * 4 + list(range(number % 40)), stays=False, patient=True)
    model.cache.close()
    lost = [read_recording(path).header["num_lost_parts"] for path in sorted(tmp_path.iterdir())]
    assert sum(lost) > 0
    for path in tmp_path.iterdir():  # and no file has a gap inside
        numbers = [record["number"] for record in read_recording(path).of_kind(RecordKind.MATCHED)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_disk_that_is_full_ends_the_recording_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache serves on; there is one line of the log, and no file is begun."""

    def full(name: str, _: int) -> Any:
        raise OSError(28, "No space left on device", name)

    monkeypatch.setattr("fastdeploy_cache.insight.flight.files.open_private", full)
    with caplog.at_level(logging.WARNING):
        model = served(300, record_folder=str(tmp_path), flight_recorder_bytes=2**16)
        model.cache._seen.flight.flush()
        model.check()
        model.cache.close()
    lines = [record.message for record in caplog.records if "flight" in record.message]
    assert len(lines) == 1 and "No space left on device" in lines[0]
    assert not list(tmp_path.iterdir())


def test_a_recording_goes_on_when_its_folder_can_be_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., None],
) -> None:
    """While a file is in its place that is one line of the log; then all goes on by itself, and alerts do, too."""
    monkeypatch.setattr("fastdeploy_cache.insight.flight.keeper._LOOK_SECONDS", 0.01)
    folder = tmp_path / "record"
    folder.write_text("in its place")
    with caplog.at_level(logging.WARNING):
        model = served(
            300, record_folder=str(folder), flight_folder=str(tmp_path / "alerts"), flight_recorder_bytes=2**16
        )
        eventually(lambda: "flight_record_stopped" in caplog.text)
        model.cache._seen.flight.flush()
        for number in range(600):
            model.serve([number % 7] * 4 + list(range(number % 40)), stays=False, patient=True)
        model.cache._seen.flight.flush()
        folder.unlink()
        for number in range(600):
            model.serve([number % 7] * 4 + list(range(number % 40)), stays=False, patient=True)
        eventually(lambda: folder.is_dir() and any(map(is_recording, folder.iterdir())))
        with pytest.raises(AssertionError), model.cache._seen.alerting("invariants"):
            raise AssertionError("the books do not add up")
        eventually(lambda: (tmp_path / "alerts").is_dir() and any(map(is_recording, (tmp_path / "alerts").iterdir())))
        model.cache.close()
    assert len([each for each in caplog.records if "flight_record_stopped" in each.message]) == 1
    assert f"can be begun in {folder}: File exists" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An alert whose folder is a file is told, and nothing else happens."""
    (tmp_path / "file").write_text("mine")
    config = CacheConfig(
        block_size=4,
        num_gpu_blocks=8,
        transfer_client="inline",
        insight=InsightConfig(flight_folder=str(tmp_path / "file")),
    )
    cache = PrefixCacheManager(config)
    with pytest.raises(AssertionError), cache._seen.alerting("invariants"):
        raise AssertionError("the books do not add up")
    with caplog.at_level(logging.WARNING):
        cache.close()
    assert [record.message for record in caplog.records if "flight_not_written" in record.message]


def test_more_than_a_part_holds_between_two_looks_is_counted(tmp_path: Path) -> None:
    """An engine that asks again and again while no request comes: no file has a gap, and the one behind it says that
    there was more."""
    config = CacheConfig(
        block_size=4,
        num_gpu_blocks=8,
        transfer_client="inline",
        insight=InsightConfig(record_folder=str(tmp_path), flight_recorder_bytes=2**16, what_if=False),
    )
    with PrefixCacheManager(config) as cache:
        flight = cache._seen.flight
        assert flight is not None

        def matched(name: str, base: int) -> Request:
            request = Request(request_id=name, prompt_token_ids=list(range(base, base + 32)))
            cache.match(request)
            return request

        first, second = matched("first", 0), matched("second", 1000)
        cache.allocate(first, 8)
        flight.flush()
        for _ in range(5000):
            with contextlib.suppress(OutOfBlocksError):
                cache.allocate(second, 8)
        flight.flush()
        cache.release(first)
        cache.release(second)
        for number in range(3):
            cache.release(matched(str(number), 2000 + 100 * number))
    recordings = [read_recording(path) for path in sorted(tmp_path.iterdir())]
    assert len(recordings) == 2
    kinds = [[record["kind"].name for record in recording.records()] for recording in recordings]
    assert kinds[0].count("MATCHED") == 2 and "RELEASED" not in kinds[0]
    assert recordings[1].header["num_lost_parts"] >= 1
