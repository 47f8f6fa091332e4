"""The storage benchmark: it measures all that it promises, over real processes, and its verdict follows from that."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.command_line import CLI
from tests.rigs.storage_servers import ValkeyServer
from tests.rigs.verdicts import is_consistent

pytestmark = pytest.mark.processes

TINY = ["--repeats", "1", "--memory", "16MiB", "--reopen", "20MB", "--no-model"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, "bench", "storage", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], Path]:
    """The whole benchmark with tiny sizes, once, with a server beside the files."""
    folder = tmp_path_factory.mktemp("bench")
    server = ValkeyServer(folder)
    server.start()
    (folder / "files").mkdir()
    try:
        result = run(
            *TINY,
            "--json",
            str(folder / "found.json"),
            "--folder",
            str(folder / "files"),
            "--server-url",
            server.unix_url,
        )
    finally:
        server.kill()
    assert result.returncode in (0, 1), result.stderr
    return result, json.loads((folder / "found.json").read_text()), folder / "files"


def test_every_promised_figure_has_a_verdict_that_follows(
    tiny: tuple[subprocess.CompletedProcess[str], dict[str, Any], Path],
) -> None:
    """Writes and reads of the file store, the folder opened again, the store that hangs; the status is theirs."""
    result, found, _ = tiny
    assert [entry["name"].partition(":")[0].partition(",")[0] for entry in found["reach"]] == [
        *["file"] * 6, "re-open of 0.02 GB", "objects there after it", "hung store", "hung store",
    ]  # fmt: skip
    assert all(is_consistent(entry) for entry in found["reach"])
    assert result.returncode == (0 if all(entry["ok"] for entry in found["reach"]) else 1)
    assert found["reopen"]["num_objects"] == 19


def test_stores_are_measured_beside_plain_files_and_nothing_is_left(
    tiny: tuple[subprocess.CompletedProcess[str], dict[str, Any], Path],
) -> None:
    """Three sizes of each store and pages of images, every figure above 0, `durable` for files only; the folder is
    empty again."""
    _, found, folder = tiny
    for kind, rows in found["stores"].items():
        assert [row["object_bytes"] for row in rows] == [2**16, 2**20, 2**23, 3 * 2**19]
        assert all(value > 0 for row in rows for value in row.values())
        assert all(("durable" in row) == (kind == "file") for row in rows)
    assert set(found["stores"]) == {"file", "valkey"}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--folder", "/no/such/folder"], "is no folder"),
        (["--reopen", "1000000TB"], "choose --folder"),
        ([*TINY, "--server-url", "valkey://127.0.0.1:1/0"], "cannot be opened"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str], words: str) -> None:
    """Status 1, and nothing else on standard error."""
    result = run(*arguments)
    assert result.returncode == 1
    assert words in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
