"""What is given away: a source archive that is complete, and a wheel that needs nothing beside it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import fastdeploy_cache

ROOT = Path(__file__).parent.parent
BESIDE = ("ipc", "launch", "metrics", "transfer_manager")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed"),
]
# In the repository and in no archive: what only the repository's own tools read.
NOT_GIVEN_AWAY = {".gitignore"}


def tracked_files() -> set[str]:
    """What the repository has, links apart: those are folders of the repository under a second name."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout")
    files = {name for name in listed.decode().split("\0") if name}
    return {name for name in files if (ROOT / name).is_file() and not (ROOT / name).is_symlink()}


def set_up(folder: Path, *arguments: str) -> None:
    """Run setup.py there, without what other tests are told by the environment."""
    command = [sys.executable, "setup.py", "-q", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of a copy of the repository, unpacked."""
    folder = tmp_path_factory.mktemp("archive")
    copy = folder / "copy"
    for name in tracked_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in BESIDE:
        (copy / "fastdeploy_cache" / name).symlink_to(f"../{name}")
    set_up(copy, "sdist", "--dist-dir", str(folder))
    (packed,) = folder.glob("*.tar.gz")
    with tarfile.open(packed) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def test_a_source_archive_is_complete(archive: Path) -> None:
    """It has every file of the repository: C source, examples, pages, scripts, tests; none of it twice."""
    inside = {str(path.relative_to(archive)) for path in archive.rglob("*") if path.is_file()}
    assert not (tracked_files() - NOT_GIVEN_AWAY) - inside
    assert not [name for name in inside for beside in BESIDE if name.startswith(f"fastdeploy_cache/{beside}/")]
    assert {"fastdeploy_cache/_native.c", "examples/toy_engine.py", "launch/start.sh", "docs/engine.md"} <= inside


def test_a_wheel_from_it_needs_nothing_beside_it(archive: Path, tmp_path: Path) -> None:
    """What a wheel would hold is built from the archive alone: the command line starts from it, with its files."""
    set_up(archive, "build_py", "--build-lib", str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fastdeploy_cache.launch", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    (tmp_path / "fastdeploy_cache" / "launch" / "background" / "deploy" / "other.conf").write_text("# Proof\n")
    assert "other.conf: Proof" in run("deploy").stdout, "it was another installation"
    assert "prometheus.json" in run("deploy", "--print", "prometheus.yml").stdout
    status = run("status")
    assert (status.returncode, status.stdout) == (3, "== not running\n"), status.stderr
    assert "--prefill-ranks" in run("up", "--help").stdout


def test_the_description_of_the_package(archive: Path) -> None:
    """It has the version of the package, the README without links that lead nowhere, and what Python it is for."""
    text = (archive / "PKG-INFO").read_text()
    assert f"\nVersion: {fastdeploy_cache.__version__}\n" in text
    assert "\nDescription-Content-Type: text/markdown\n" in text
    assert "\nClassifier: Programming Language :: Python :: 3.11\n" in text
    assert "from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request" in text
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
