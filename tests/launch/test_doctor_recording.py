"""The doctor over a recording finds what it finds over the cache that made it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import LaunchError, RecordingError
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.operating.doctor import findings_of_recording

SIZE = 4


def recording_of(folder: Path, num_gpu_blocks: int) -> tuple[Path, list[str]]:
    """The flight of a cache that serves six prompts in turn, and what the doctor says of that cache itself."""
    file = folder / "cache.flight"
    config = CacheConfig(block_size=SIZE, num_gpu_blocks=num_gpu_blocks, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        for number in range(60):
            tokens = list(range(1000 * (number % 6), 1000 * (number % 6) + 5 * SIZE + 1))
            request = Request(request_id=str(number), prompt_token_ids=tokens)
            match = cache.match(request)
            cache.allocate(request, 6 - len(match.block_ids))
            cache.commit(request, len(tokens))
            cache.release(request)
        cache.insight.write_flight(file)
        return file, [finding.name for finding in cache.examine()]


@pytest.mark.parametrize(("num_gpu_blocks", "names"), [(20, ["gpu_short"]), (200, [])])
def test_it_says_the_same_as_over_the_cache(tmp_path: Path, num_gpu_blocks: int, names: list[str]) -> None:
    """A cache that is too small is named; of one that holds all nothing is said. Without ages."""
    file, known = recording_of(tmp_path, num_gpu_blocks)
    findings = findings_of_recording(file)
    assert [finding["name"] for finding in findings] == names == known
    assert not any("seconds before" in finding["text"] for finding in findings)
    done = CliRunner().invoke(app, ["doctor", "--recording", str(file)])
    assert done.exit_code == (4 if names else 0) and ("gpu_short" in done.stdout) == bool(names)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    """In one line; and with a page of metrics beside it the usage is wrong."""
    file = tmp_path / "none.flight"
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(RecordingError, match=r"none\.flight"):
        findings_of_recording(file)
    done = CliRunner().invoke(app, ["doctor", "--recording", str(file), "--metrics", "page"])
    assert done.exit_code == 2


def test_a_recording_without_a_request_is_no_healthy_cache(tmp_path: Path) -> None:
    """One that was cut in its only piece: one line that says so, for the doctor and for a replay, and status 1."""
    file, _ = recording_of(tmp_path, 200)
    file.write_bytes(file.read_bytes()[:-1])
    for command in (["doctor", "--recording", str(file)], ["simulate", "--replay", str(file)]):
        with pytest.raises((RecordingError, LaunchError), match="was cut: its last"):
            CliRunner().invoke(app, command, catch_exceptions=False)
