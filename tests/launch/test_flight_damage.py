"""Flight recordings that are damaged, or made to harm: an error of ours, or an end, soon and in little memory."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import resource
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import RecordingError
from fastdeploy_cache.insight.flight import file as flight_file
from fastdeploy_cache.insight.flight.file import MAGIC, VERSION, FlightRecording, head, read_recording
from fastdeploy_cache.insight.flight.records import LAYOUTS, NAMES, RecordKind, unpack_one
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay
from fastdeploy_cache.launch.simulator.recorded_prompts import RecordedPrompts
from tests.rigs.flight_walk import FlightWalk

SECRET = bytes(range(32))
ODD = (None, True, -1, 0, 10**9, 2**63, 10**12, 1e308, float("nan"), "x", "os:system", [], "9" * 5000)
DEADLINE_SECONDS = 120  # for hundreds of files, of which each takes milliseconds


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each replay of a walk tells of copies that have failed."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> FlightRecording:
    """A walk over both tiers, with images, steps, resets and failures."""
    path = tmp_path_factory.mktemp("flight") / "walk.flight"
    walk = FlightWalk(11, 4, 24, 40, is_inline=False, policy="priority")
    walk.run(90)
    walk.model.cache.insight.write_flight(path)
    return read_recording(path)


@contextlib.contextmanager
def in_bounds() -> Iterator[None]:
    """What runs in here has two GiB of memory, and its deadline."""

    def late(*_: object) -> NoReturn:
        raise TimeoutError("the files were not through in time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def built(header: bytes, pieces: list[tuple[bytes, bytes]]) -> bytes:
    """A file with checksums that are good."""
    begin = MAGIC + struct.pack("<H", VERSION) + struct.pack("<II", len(header), zlib.crc32(header)) + header
    return begin + b"".join([flight_file._piece(1, records, marks, SECRET) for records, marks in pieces])


def replay(path: Path, data: bytes) -> bool:
    """Whether it was replayed to its end; False: refused."""
    path.write_bytes(data)
    try:
        FlightReplay(read_recording(path)).run()
    except RecordingError:
        return False
    return True


def pieces_of(recording: FlightRecording) -> list[tuple[bytes, bytes]]:
    return [(records, marks.tobytes()) for records, marks in recording.pieces]


def fields(recording: FlightRecording) -> Iterator[tuple[RecordKind, str, int, int, str]]:
    """Where each field of the last record of each kind lies: the kind, its name, the piece, the byte and its format."""
    places = dict[RecordKind, tuple[int, int]]()
    for number, (records, _) in enumerate(recording.pieces):
        at = 0
        while at < len(records):
            record, end = unpack_one(records, at)
            places[record["kind"]] = number, at
            at = end
    for kind, (number, at) in places.items():
        place = 1
        for name, form in zip(NAMES[kind][1:], LAYOUTS[kind].format[2:], strict=True):
            yield kind, name, number, at + place, form
            place += struct.calcsize(f"<{form}")


def test_a_field_that_was_changed_is_an_error_or_a_difference(recording: FlightRecording, tmp_path: Path) -> None:
    """Each field of each kind of record, to its bounds, to others like it, and to what is no number."""
    header, whole, num_cases = json.dumps(recording.header).encode(), pieces_of(recording), 0
    with in_bounds():
        for _, _, number, at, form in fields(recording):
            size = struct.calcsize(f"<{form}")
            values = (b"\xff" * size, b"\0" * size, b"\xff" * (size - 1) + b"\x7f", b"\x05" + b"\0" * (size - 1))
            for value in values:
                records, marks = whole[number]
                changed = list(whole)
                changed[number] = records[:at] + value + records[at + size :], marks
                replay(tmp_path / "a", built(header, changed))
                num_cases += 1
    assert num_cases > 200


def test_a_header_that_was_changed_is_an_error_or_a_difference(recording: FlightRecording, tmp_path: Path) -> None:
    """Each of its fields and settings, to what it is not; nested too deep; and with what no recorder writes."""
    whole, header = pieces_of(recording)[:1], recording.header
    settings = header["settings"]
    others = {"storage": {"kind": "os:system"}, "transfer": {"log_dir": "x"}, "insight": {"control_socket": "x"}}
    with in_bounds():
        for value in ODD:
            for name in header:
                replay(tmp_path / "a", built(json.dumps(header | {name: value}).encode(), whole))
            for name in settings:
                replay(
                    tmp_path / "a", built(json.dumps(header | {"settings": settings | {name: value}}).encode(), whole)
                )
        for name, other in others.items():
            text = json.dumps(header | {"settings": settings | {name: other}}).encode()
            assert not replay(tmp_path / "a", built(text, whole))
        for text in (b"[" * 10**6, b'{"settings":' * 10**5 + b"1" + b"}" * 10**5, b'{"x": ' + b"9" * 10**5 + b"}"):
            assert not replay(tmp_path / "a", built(text, whole))


def test_files_that_were_changed_by_chance(recording: FlightRecording, tmp_path: Path) -> None:
    """Bits turned, bytes left out, moved or doubled, with checksums that are good."""
    choose, header, whole = random.Random(3), json.dumps(recording.header).encode(), pieces_of(recording)
    data, num_replayed = built(header, whole), 0
    with in_bounds():
        for _ in range(200):
            changed = list(whole)
            number = choose.randrange(len(whole))
            records, marks = bytearray(whole[number][0]), whole[number][1]
            how, at = (
                choose.choice(("bytes", "few", "cut", "moved", "marks", "twice", "raw")),
                choose.randrange(len(records)),
            )
            if how == "bytes":
                for _ in range(choose.choice((1, 3, 20))):
                    at = choose.randrange(len(records))
                    records[at : at + 4] = choose.choice((b"\0", b"\xff", b"\xff" * 4, b"\x7f", choose.randbytes(1)))
            elif how == "few":
                records[at] ^= 1 << choose.randrange(8)
            elif how == "cut":
                del records[at:]
            elif how == "moved":
                records = records[at:] + records[:at]
            elif how == "marks":
                marks = marks[: choose.randrange(len(marks) // 4 + 1) * 4]
            elif how == "twice":
                changed *= 2
            changed[number] = bytes(records), marks
            file = bytearray(built(header, changed))
            if how == "raw":
                file[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
            num_replayed += replay(tmp_path / "a", bytes(file))
    assert num_replayed > 20


def test_a_count_that_the_file_does_not_bear_out_is_refused(recording: FlightRecording, tmp_path: Path) -> None:
    """Of tokens, of blocks that another request has, of ranks, and of blocks of a tier: with what is wrong."""
    header, matched = recording.header, RecordKind.MATCHED

    def match(num_tokens: int, num_known: int) -> bytes:
        return LAYOUTS[matched].pack(matched, 0.0, 1, num_tokens, num_tokens, 0, 0, num_known, 0, 0, 0, 0, 255, 0)

    cases = {
        match(10**9, 0): "has 1000000000 tokens, and 0 blocks",
        match(10**9, 10**9 // 4): "more than the 16777216 that are replayed",
        match(2**23, 2**21): "nothing in the file tells of them",
    }
    for record, words in cases.items():
        (tmp_path / "a").write_bytes(built(json.dumps(header).encode(), [(record, b"")]))
        with in_bounds(), pytest.raises(RecordingError, match=words):
            FlightReplay(read_recording(tmp_path / "a")).run()
    big = header | {"settings": header["settings"] | {"num_gpu_blocks": 10**9}}
    for changed, words in ((header | {"num_ranks": 5000}, "1 to 4096"), (big, "at most 33554432 are replayed")):
        (tmp_path / "a").write_bytes(head(changed))
        with in_bounds(), pytest.raises(RecordingError, match=words):
            FlightReplay(read_recording(tmp_path / "a"))


def test_a_long_prompt_that_comes_again_and_again_is_replayed(tmp_path: Path) -> None:
    """The recorder refers to what it has told, and the file is small: what is kept is what the file holds."""
    tokens, num_times = np.arange(131_072, dtype=np.int32), 2000
    config = CacheConfig(
        block_size=16,
        num_gpu_blocks=8200,
        transfer_client="inline",
        layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=1),
        insight=InsightConfig(flight_recorder_bytes=2**24),
    )
    with PrefixCacheManager(config) as cache:
        for number in range(num_times):
            request = Request(request_id=str(number), prompt_token_ids=tokens)
            match = cache.match(request)
            cache.allocate(request, 8192 - len(match.block_ids))
            cache.commit(request, len(tokens))
            cache.release(request)
        found = read_recording(cache.insight.write_flight(tmp_path / "a"))
    assert found.num_bytes < 2**20
    prompts = RecordedPrompts(found, 16)
    num_marks = sum(len(marks) for _, marks in found.pieces)  # the last block is computed again each time
    assert num_marks == 8192 + num_times - 1
    assert sum(len(known.own) for known in prompts._known.values()) == num_marks and prompts.num_blocks == 8192
    outcome = FlightReplay(found).run()
    assert outcome.num_requests == num_times and outcome.num_different == 0


def test_what_a_request_had_is_kept_where_others_refer_to_it() -> None:
    """A chain of references, and a request that has published less than it had: each reads what it was told."""
    prompts: Any = RecordedPrompts(FlightRecording({}, [], "", 0), 4)
    marks = np.arange(100, dtype=np.uint32)
    prompts._known[1] = prompts._behind(0, 0, marks[:10])
    prompts._known[2] = prompts._behind(1, 6, marks[20:24])
    prompts._publish(1, 4, marks[30:32])
    prompts._known[3] = prompts._behind(1, 9, marks[40:41])
    prompts._known[4] = prompts._behind(3, 3, marks[:0])
    named = {block: mark for mark, block in prompts._numbers.items()}

    def marked(request: int, num_blocks: int) -> list[int]:
        return [named[block] for block in prompts.blocks(request, num_blocks).tolist()]

    assert marked(1, 10) == [0, 1, 2, 3, 30, 31, 6, 7, 8, 9]
    assert marked(2, 10) == [0, 1, 2, 3, 4, 5, 20, 21, 22, 23]
    assert marked(3, 10) == [0, 1, 2, 3, 30, 31, 6, 7, 8, 40]
    assert marked(4, 3) == [0, 1, 2] and prompts._known[4].front.front is None
    assert len(set(prompts.blocks(4, 5).tolist()) - set(named)) == 2
    assert prompts.tokens(2, 22, 26).tolist() == np.repeat(prompts.blocks(2, 7), 4)[22:26].tolist()
