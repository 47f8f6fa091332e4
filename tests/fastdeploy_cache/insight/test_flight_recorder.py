"""The flight recorder: what its ring holds and does not hold, and what is written of it."""

from __future__ import annotations

import os
import random
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import ConfigError, OutOfBlocksError, RecordingError
from fastdeploy_cache.insight.flight.file import mixed, read_recording
from fastdeploy_cache.insight.flight.records import RecordKind, pack

SIZE = 16


def new_cache(num_gpu_blocks: int = 256, **insight: Any) -> PrefixCacheManager:
    config = CacheConfig(
        block_size=SIZE, num_gpu_blocks=num_gpu_blocks, transfer_client="inline", insight=InsightConfig(**insight)
    )
    return PrefixCacheManager(config)


def serve(cache: PrefixCacheManager, name: str, tokens: np.ndarray[Any, Any], **given: Any) -> None:
    request = Request(request_id=name, prompt_token_ids=tokens, **given)
    match = cache.match(request)
    cache.allocate(request, cache.blocks_for(len(tokens)) - len(match.block_ids))
    cache.commit(request, len(tokens))
    cache.release(request)


def texts(num_tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(2**20, 2**30, num_tokens, dtype=np.int32)


def test_a_request_is_a_few_records(tmp_path: Path) -> None:
    """Matched with what was found, given blocks, committed, released with what it hit: in the order of the verbs."""
    with new_cache() as cache:
        serve(cache, "a", texts(100))
        serve(cache, "b", texts(100))
        recording = read_recording(cache.insight.write_flight(tmp_path / "a.flight"))
    records = list(recording.records())
    names = ["MATCHED", "ALLOCATED", "COMMITTED", "RELEASED"]
    assert [record["kind"].name for record in records] == [*names, "MATCHED", "ALLOCATED", "RELEASED"]  # nothing new
    first, second = recording.of_kind(RecordKind.MATCHED)
    assert (first["num_tokens"], first["num_found"], first["num_marks"]) == (100, 0, 6)
    assert (second["num_found"], second["num_gpu"], second["author"], second["num_known"]) == (6, 6, first["number"], 6)
    assert [record["num_matched"] for record in recording.of_kind(RecordKind.RELEASED)] == [0, 6]
    assert recording.header["settings"]["num_gpu_blocks"] == 256
    assert (recording.note, recording.header["num_dropped"]) == ("", 0)


def test_a_step_of_several_requests_is_told_and_what_is_not_released_is_marked(tmp_path: Path) -> None:
    """How many of the records in front belong to one step; at the end the published answers of those still there."""
    with new_cache() as cache:
        requests = [Request(request_id=name, prompt_token_ids=texts(30, seed)) for seed, name in enumerate("abc")]
        for request in requests:
            cache.match(request)
            cache.allocate(request, 2)
            cache.commit(request, 30)
        for _ in range(SIZE):
            assert all(isinstance(ids, list) for ids in cache.step([(r, [7], r.num_tokens) for r in requests]))
        cache.step([(requests[0], list(range(SIZE)), 46)])
        cache.release(requests[2])
        recording = read_recording(cache.insight.write_flight(tmp_path / "a.flight"))
    kinds = [record["kind"].name for record in recording.records()]
    assert kinds[9:] == [*["COMMITTED"] * 3, "STEPPED", "ALLOCATED", "RELEASED", "MARKED", "MARKED"]
    assert [record["num_records"] for record in recording.of_kind(RecordKind.STEPPED)] == [3]
    assert [(r["number"], r["first"], r["num_marks"]) for r in recording.of_kind(RecordKind.MARKED)] == [
        (1, 1, 1),
        (2, 1, 1),
    ]


def test_only_what_is_new_of_a_conversation_is_marked(tmp_path: Path) -> None:
    """A resent conversation is a reference to who had it before, and the marks of its new blocks."""
    talk = texts(64)
    with new_cache() as cache:
        for turn in range(4):
            serve(cache, str(turn), talk)
            talk = np.concatenate([talk, texts(32, turn + 1)])
        recording = read_recording(cache.insight.write_flight(tmp_path / "a.flight"))
    assert [record["num_marks"] for record in recording.of_kind(RecordKind.MATCHED)] == [4, 2, 2, 2]


def test_no_token_no_name_and_no_salt_is_in_the_file(tmp_path: Path) -> None:
    """Neither packed nor as text; and a mark is no checksum of its block, also where a block is one token."""
    tokens, salt = texts(200), "tenant-salt-9f2"
    config = CacheConfig(block_size=1, num_gpu_blocks=256, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        request = Request(
            request_id="request-name-77", prompt_token_ids=tokens, namespace=salt, images=[(3, 4, "image-hash-31")]
        )
        cache.match(request)
        cache.allocate(request, 200)
        cache.commit(request, 200)
        cache.release(request)
        path = cache.insight.write_flight(tmp_path / "a.flight")
    data, (matched,) = path.read_bytes(), read_recording(path).of_kind(RecordKind.MATCHED)
    assert matched["num_marks"] == 200 and matched["namespace"] and matched["images"]
    for secret in (salt, "request-name-77", "image-hash-31"):
        assert secret.encode() not in data
    for token in tokens.tolist():
        assert token.to_bytes(4, "little") not in data and token.to_bytes(4, "big") not in data
    plain = {zlib.crc32(token.to_bytes(4, "little")) for token in tokens.tolist()}
    assert len(plain & set(matched["marks"].tolist())) < 3


def test_mixing_marks_keeps_equal_ones_equal_and_others_apart() -> None:
    """It is one to one for each secret, and another for another."""
    marks = np.random.default_rng(1).integers(0, 2**32, 5000, dtype=np.uint32)
    marks[:100] = marks[100:200]
    a, b = (np.frombuffer(mixed(marks.tobytes(), bytes([secret]) * 31 + b"x"), "<u4") for secret in (7, 9))
    assert len(set(a.tolist())) == len(set(b.tolist())) == len(set(marks.tolist()))
    assert (a[:100] == a[100:200]).all() and not (a == b).all()


def test_the_ring_is_bounded_and_drops_its_oldest_part(tmp_path: Path) -> None:
    """However much is served: what is left is of the last requests, and says that there was more."""
    rng = random.Random(3)
    with new_cache(num_gpu_blocks=64, flight_recorder_bytes=2**16) as cache:
        recorder = cache._seen.flight.recorder
        assert recorder is not None
        for number in range(1500):
            serve(cache, str(number), texts(rng.randint(1, 400), number % 50))
            assert recorder.num_bytes < 1.2 * 2**16
        recording = read_recording(cache.insight.write_flight(tmp_path / "a.flight"))
    numbers = [record["number"] for record in recording.of_kind(RecordKind.MATCHED)]
    assert recording.header["num_dropped"] > 3
    assert numbers == list(range(numbers[0], 1501)) and 20 < len(numbers) < 1000
    known = set[int]()
    for record in recording.of_kind(RecordKind.MATCHED):  # what is referred to is there
        assert record["author"] in known | {0}
        known.add(record["number"])


def test_the_ring_is_bounded_where_no_request_comes(tmp_path: Path) -> None:
    """A request that takes block after block for ever pushes the oldest notes out."""
    with new_cache(num_gpu_blocks=2000, flight_recorder_bytes=2**16) as cache:
        recorder = cache._seen.flight.recorder
        assert recorder is not None
        request = Request(request_id="a", prompt_token_ids=[1])
        cache.match(request)
        for _ in range(1500):
            cache.allocate(request, 1)
            assert recorder.num_bytes < 1.2 * 2**16
        recording = read_recording(cache.insight.write_flight(tmp_path / "a.flight"))
    assert recording.header["num_dropped"]
    assert {record["kind"] for record in recording.records()} == {RecordKind.ALLOCATED}


def test_the_file_is_private_and_replaces_another(tmp_path: Path) -> None:
    """Mode 0600, also over a file that was open to all; nothing else is left in the folder."""
    path = tmp_path / "a.flight"
    with new_cache() as cache:
        cache.insight.write_flight(path)
    path.chmod(0o666)
    with new_cache() as cache:
        serve(cache, "a", texts(40))
        assert cache.insight.write_flight(str(path)) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert len(list(read_recording(path).records())) == 4


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that could not be written whole is gone, and the one before is as it was."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.flight"
    with new_cache() as cache:
        old = cache.insight.write_flight(path).read_bytes()
        serve(cache, "a", texts(40))
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(RecordingError, match=r"cannot write .*a\.flight: No space left on device"):
            cache.insight.write_flight(path)
    assert [each.name for each in tmp_path.iterdir()] == ["a.flight"] and path.read_bytes() == old


@pytest.mark.parametrize("kind", ["text", "empty", "link", "dangling", "link to a recording", "fifo"])
def test_nothing_but_a_recording_is_replaced(tmp_path: Path, kind: str) -> None:
    """Whatever else is there stays as it is, and so does what a link points to; the verb of the socket is this call."""
    path, other = tmp_path / "a.flight", tmp_path / "other"
    other.write_text("precious")
    with new_cache() as cache:
        if kind == "fifo":
            os.mkfifo(path)
        elif "link" in kind or kind == "dangling":
            if kind == "link to a recording":
                other.unlink()
                cache.insight.write_flight(other)
            path.symlink_to(other if "link" in kind else tmp_path / "none")
        else:
            path.write_text("precious" if kind == "text" else "")
        before, data = path.lstat(), other.read_bytes()
        with pytest.raises(RecordingError, match="what is there is none, and stays"):
            cache.insight.write_flight(path)
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert other.read_bytes() == data
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.flight", "other"]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_gets_a_new_file_each_time(tmp_path: Path, is_link: bool) -> None:
    """Nothing that is there goes for it, however many recordings; without a path and a setting, that is said."""
    folder = tmp_path / "some"
    folder.mkdir()
    for number in range(20):
        (folder / f"flight-{number}.flight").write_text("precious")
    if is_link:
        folder = tmp_path / "link"
        folder.symlink_to("some")
    with new_cache() as cache:
        files = {cache.insight.write_flight(folder) for _ in range(2)}
        with pytest.raises(RecordingError, match="is not set; name a folder, or a new file"):
            cache.insight.write_flight()
    assert len(files) == 2 and len(list(folder.iterdir())) == 22
    for file in files:
        assert file.parent == folder and read_recording(file) and file.stat().st_mode & 0o777 == 0o600


def test_without_a_ring_nothing_is_noted(tmp_path: Path) -> None:
    """With 0 bytes there is none, and asking for it says which setting to change."""
    with new_cache(flight_recorder_bytes=0) as cache:
        serve(cache, "a", texts(40))
        assert cache._seen.flight is None
        with pytest.raises(RecordingError, match=r"insight\.flight_recorder_bytes is 0"):
            cache.insight.write_flight(tmp_path / "a.flight")
    with new_cache() as cache, pytest.raises(RecordingError, match=r"insight\.flight_folder is not set"):
        cache.insight.write_flight()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"flight_recorder_bytes": 100}, "use 65536 .64KiB. or more, or 0"),
        ({"flight_recorder_bytes": True}, "whole number"),
        ({"flight_folder": ""}, "give the name of a folder"),
        ({"record_folder": "x", "flight_recorder_bytes": 0}, "comes from the ring"),
        ({"record_bytes": 5}, "1MiB"),
        ({"num_record_files": 0}, "use 1 to 10000"),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, Any], words: str) -> None:
    """Each with its name, the value seen and what to give."""
    with pytest.raises(ConfigError, match=rf"insight\.\w+ is .*{words}"):
        InsightConfig(**given)


def test_a_number_that_no_record_can_hold_costs_no_recording(tmp_path: Path) -> None:
    """A caller asks for more blocks than fit into a count: what is noted of it is the most that a record can hold."""
    with new_cache() as cache:
        request = Request(request_id="much", prompt_token_ids=texts(SIZE))
        cache.match(request)
        with pytest.raises(OutOfBlocksError):
            cache.allocate(request, 2**40)
        cache.release(request)
        cache.insight.write_flight(tmp_path / "ring.fdcflight")
    (refused,) = read_recording(tmp_path / "ring.fdcflight").of_kind(RecordKind.REFUSED)
    assert refused["num_blocks"] == refused["num_missing"] == 2**32 - 1


def test_a_note_that_cannot_be_packed_is_an_error_of_ours() -> None:
    """Whatever is noted by mistake: who writes a recording hears of it as of any other that cannot be written."""
    with pytest.raises(RecordingError, match="cannot be recorded"):
        pack((RecordKind.REFUSED, 1, 2**40, 1), lambda _: 0)
