"""`serve` writes a flight recording when it is asked to by a signal."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_cache.insight.flight.file import read_recording
from fastdeploy_cache.insight.flight.records import RecordKind
from tests.rigs.reference_model import needs_model
from tests.rigs.server_process import CHAT, Server

pytestmark = [pytest.mark.processes, needs_model]


def test_sigusr1_writes_the_recording_and_the_server_goes_on(tmp_path: Path) -> None:
    """The file is private, has the requests, and is replayed; the server answers before and after, and ends well."""
    folder = tmp_path / "flights"
    server = Server(tmp_path / "log", "--ranks", "1", "--set", f"insight.flight_folder={folder}")
    try:
        for _ in range(2):
            assert server.post(CHAT)[0] == 200
        server.process.send_signal(signal.SIGUSR1)
        assert server.post(CHAT)[0] == 200
    finally:
        assert server.end(signal.SIGTERM) == 0, server.rest
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    recording = read_recording(path)
    assert recording.header["reason"] == "asked"
    assert len(list(recording.of_kind(RecordKind.RELEASED))) >= 2
    code = "from fastdeploy_cache.launch.cli import main; main()"
    replay = [sys.executable, "-c", code, "simulate", "--replay", str(path)]
    result = subprocess.run(replay, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode in (0, 4), result.stderr
    assert "steps of" in result.stdout


def test_without_a_folder_the_signal_is_a_line_of_the_log(tmp_path: Path) -> None:
    """Nothing is written, the setting is named, and the server goes on."""
    server = Server(tmp_path / "log", "--ranks", "1")
    try:
        assert server.post(CHAT)[0] == 200
        server.process.send_signal(signal.SIGUSR1)
        assert server.post(CHAT)[0] == 200
    finally:
        assert server.end(signal.SIGTERM) == 0, server.rest
    assert "insight.flight_folder is not set" in server.rest
