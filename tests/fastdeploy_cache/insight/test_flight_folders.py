"""Where files of flight recordings come to be: several at a time, and in a folder that somebody exchanges."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import RecordingError
from fastdeploy_cache.insight.flight import file as flight_file
from fastdeploy_cache.insight.flight import files as flight_files
from fastdeploy_cache.insight.flight.file import MAGIC, write_whole
from fastdeploy_cache.insight.flight.files import FlightFolder, GrowingFile
from tests.rigs.cache_model import CacheModel

SECONDS = 20.0


@pytest.fixture
def exchange(tmp_path: Path) -> Callable[[], None]:
    """Puts a link to `elsewhere` in the place of `own`, which is `moved` from then on. All are in the test's folder."""
    for name in ("own", "elsewhere"):
        (tmp_path / name).mkdir()

    def put_link() -> None:
        (tmp_path / "own").rename(tmp_path / "moved")
        (tmp_path / "own").symlink_to(tmp_path / "elsewhere")

    return put_link


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_two_writers_of_one_path_have_both_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole files, one after the other, however they overlap; nothing else is left."""
    both, fsync = threading.Barrier(2), os.fsync

    def meet(fd: int) -> None:
        both.wait(SECONDS)  # each has its bytes in a file, and neither has given it the name
        fsync(fd)

    monkeypatch.setattr(os, "fsync", meet)
    texts = [MAGIC + bytes([number]) * 100_000 for number in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        for written in [pool.submit(write_whole, tmp_path / "a.flight", [text]) for text in texts]:
            written.result(SECONDS)
    assert names(tmp_path) == ["a.flight"] and (tmp_path / "a.flight").read_bytes() in texts


def test_each_file_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of two caches of one process with one folder, in the same second, each asked by several threads."""
    monkeypatch.setattr(time, "strftime", lambda *_: "20261123T181502")
    caches = [CacheModel(4, 8, 0, insight=InsightConfig(flight_folder=str(tmp_path))).cache for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        written = [pool.submit(cache.insight.write_flight) for cache in caches for _ in range(2)]
        paths = {future.result(SECONDS) for future in written}
    assert len(paths) == 4 and paths == set(tmp_path.iterdir())
    for cache in caches:
        cache.close()


def test_a_link_in_the_folders_place_is_not_followed(tmp_path: Path, exchange: Callable[[], None]) -> None:
    """One that comes after the first file is an error. One that is configured is followed, as it was at that time."""
    (tmp_path / "link").symlink_to("own")
    folders = [FlightFolder(tmp_path / name, "flight", 3) for name in ("own", "link")]
    for folder in folders:
        with folder.next_path() as (path, fd):
            write_whole(path, [MAGIC], fd)
    assert len(names(tmp_path / "own")) == 2
    exchange()
    for folder in folders:
        with pytest.raises(RecordingError, match="no flight recording can be begun"), folder.next_path():
            pass
    assert len(names(tmp_path / "moved")) == 2 and names(tmp_path / "elsewhere") == []


def test_a_folder_that_is_exchanged_before_the_file_is_made(tmp_path: Path, exchange: Callable[[], None]) -> None:
    """A file is made in the folder that was looked at, and not where its path leads by then."""
    (tmp_path / "elsewhere" / "others").write_text("theirs")
    with FlightFolder(tmp_path / "own", "flight", 3).next_path() as (path, fd):
        exchange()
        write_whole(path, [MAGIC], fd)
    assert names(tmp_path / "moved") == [path.name] and names(tmp_path / "elsewhere") == ["others"]


def test_a_folder_that_is_exchanged_under_a_path_that_was_given(
    tmp_path: Path, exchange: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at what is there and the writing: what is elsewhere under that name stays."""
    (tmp_path / "elsewhere" / "a").write_text("theirs")
    check = flight_file._check_target
    monkeypatch.setattr(flight_file, "_check_target", lambda *where: (check(*where), exchange()))
    write_whole(tmp_path / "own" / "a", [MAGIC])
    assert (tmp_path / "moved" / "a").read_bytes() == MAGIC
    assert (tmp_path / "elsewhere" / "a").read_text() == "theirs" and names(tmp_path / "elsewhere") == ["a"]


def test_a_folder_that_is_exchanged_while_a_recording_begins(
    tmp_path: Path, exchange: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first file, and all that is written on it, is in the folder that was looked at."""
    open_private = flight_files.open_private
    monkeypatch.setattr(flight_files, "open_private", lambda *where: (exchange(), open_private(*where))[1])
    file = GrowingFile(FlightFolder(tmp_path / "own", "record", 3), 1000, lambda: MAGIC)
    file.begin()
    file.close()
    assert len(names(tmp_path / "moved")) == 1 and names(tmp_path / "elsewhere") == []
