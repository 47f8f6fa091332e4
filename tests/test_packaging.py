"""What is given away: a source archive that is complete, and a wheel that needs nothing beside it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fastdeploy_cache

ROOT = Path(__file__).parent.parent
BESIDE = ("ipc", "launch", "metrics", "transfer_manager")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed"),
]


def can_make_wheels() -> bool:
    """By what is installed: to look for the modules would change `distutils` in this process.

    To import setuptools replaces it, and the mere search for pip makes setuptools leave it alone from then on, so that
    Paddle cannot be imported any more.
    """
    installed = {distribution.name for distribution in metadata.distributions()}
    if not installed >= {"pip", "setuptools"}:
        return False
    numbers = re.findall(r"\d+", metadata.version("setuptools"))
    return tuple(map(int, numbers[:2])) >= (70, 1) or "wheel" in installed


needs_wheels = pytest.mark.skipif(not can_make_wheels(), reason="a wheel takes pip, and setuptools 70.1 or newer")
CHECKOUT_ONLY = {".sh", ".c"}  # scripts that set up a checkout, and what is compiled
FILTER: dict[str, Any] = (
    {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
)  # 3.11.4, and 3.11 of Debian 12 is older
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
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, links included."""
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    for name in tracked_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in BESIDE:
        (copy / "fastdeploy_cache" / name).symlink_to(f"../{name}")
    return copy


@pytest.fixture(scope="module")
def archive(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of the copy, unpacked."""
    folder = tmp_path_factory.mktemp("archive")
    set_up(copy, "sdist", "--dist-dir", str(folder))
    (packed,) = folder.glob("*.tar.gz")
    with tarfile.open(packed) as tar:
        tar.extractall(folder / "unpacked", **FILTER)
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def wheel_of(source: Path, folder: Path) -> Path:
    """A real wheel, as pip builds it for somebody who has the source; nothing is downloaded."""
    shutil.copytree(source, folder / "source", symlinks=True)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(folder / "source"))
    (wheel,) = folder.glob("*.whl")
    return wheel


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the copy."""
    return wheel_of(copy, tmp_path_factory.mktemp("wheel"))


class Installed:
    """The wheel alone in a folder of its own, and what runs from there, far from any checkout."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder, self.cwd = folder / "installed", folder / "elsewhere"
        self.cwd.mkdir()
        pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(self.folder), str(wheel))
        self._environment = {**os.environ, "PYTHONPATH": str(self.folder), "XDG_STATE_HOME": str(folder / "state")}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.cwd, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )

    def told(self, *arguments: str) -> str:
        """What the command line prints."""
        done = self.run(sys.executable, "-m", "fastdeploy_cache.launch", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


def test_a_source_archive_is_complete(archive: Path) -> None:
    """It has every file of the repository: C source, examples, pages, scripts, tests; none of it twice."""
    inside = {str(path.relative_to(archive)) for path in archive.rglob("*") if path.is_file()}
    assert not (tracked_files() - NOT_GIVEN_AWAY) - inside
    assert not [name for name in inside for beside in BESIDE if name.startswith(f"fastdeploy_cache/{beside}/")]
    sources = {"fastdeploy_cache/_native.c", "fastdeploy_cache/books/id_table.c"}
    assert sources | {"examples/toy_engine.py", "launch/start.sh", "docs/engine.md"} <= inside


def test_a_source_archive_runs_where_it_lies(archive: Path) -> None:
    """Unpacked, it is as a checkout: the package has all its parts, by links."""
    program = (
        "from fastdeploy_cache import PrefixCacheManager; import fastdeploy_cache.launch as it; print(it.__file__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=archive,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == str(archive / "fastdeploy_cache" / "launch" / "__init__.py"), done.stderr


def inside(wheel: Path) -> set[str]:
    """The wheel's files, but for those that say what it is."""
    with zipfile.ZipFile(wheel) as packed:
        return {name for name in packed.namelist() if ".dist-info/" not in name and not name.endswith(".so")}


@needs_wheels
def test_a_wheel_is_complete(copy: Path, archive: Path, wheel: Path, tmp_path: Path) -> None:
    """It has each module and each data file of the packages, and nothing else. One from the archive without its links
    is the same."""
    bare = tmp_path / "bare"
    shutil.copytree(archive, bare, ignore=lambda folder, names: [n for n in names if Path(folder, n).is_symlink()])
    ours = {name for name in tracked_files() if name.partition("/")[0] in (*BESIDE, "fastdeploy_cache")}
    ours = {name for name in ours if Path(name).suffix not in CHECKOUT_ONLY}
    expected = {name if name.startswith("fastdeploy_cache/") else f"fastdeploy_cache/{name}" for name in ours}
    assert inside(wheel) == expected == inside(wheel_of(bare, tmp_path))
    data = {name.removeprefix("fastdeploy_cache/") for name in expected if not name.endswith(".py")}
    places = (copy / "launch" / "background" / "deploy").rglob("*")
    deploy = {str(path.relative_to(copy)) for path in places if path.is_file()}
    page = {name for name in data if name.startswith("insight/looks/page_parts/")}
    assert data == {"py.typed", "_native.pyi", "launch/serve.toml", *deploy, *page}
    assert len(deploy) >= 4 and "insight/looks/page_parts/page.html" in page


@needs_wheels
def test_the_command_line_of_a_wheel(installed: Installed) -> None:
    """Each of its commands starts from the wheel alone, with the files that it reads."""
    program = "import fastdeploy_cache.launch as it; print(it.__file__)"
    home = installed.run(sys.executable, "-c", program).stdout.strip()
    assert Path(home).parent == installed.folder / "fastdeploy_cache" / "launch", "it was another installation"
    version = installed.told("--version")
    assert version.splitlines()[0] == f"fastdeploy-cache {fastdeploy_cache.__version__}"
    assert installed.run(str(installed.folder / "bin" / "fastdeploy-cache"), "--version").stdout == version
    sample = installed.told("config", "sample")
    assert "num_gpu_blocks" in sample
    tomllib.loads(sample)
    for line in installed.told("deploy").splitlines()[:-1]:
        name, _, words = line.partition(": ")
        assert words in installed.told("deploy", "--print", name).replace("\n# ", " ")
    status = installed.run(sys.executable, "-m", "fastdeploy_cache.launch", "status")
    assert status.returncode == 3 and status.stdout.startswith("== not running: no server listens at "), status.stderr


@needs_wheels
def test_every_command_of_a_wheel_has_its_help(installed: Installed) -> None:
    """All that it imports for that is in the wheel."""
    program = """
import typer
from fastdeploy_cache.launch.cli import app
commands = typer.main.get_command(app)
for name in commands.commands:
    commands.main([name, "--help"], prog_name="fastdeploy-cache", standalone_mode=False)
print(len(commands.commands), "commands")
"""
    done = installed.run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert "--prefill-ranks" in done.stdout and int(done.stdout.split()[-2]) > 10


@needs_wheels
def test_an_engine_over_a_wheel(copy: Path, installed: Installed) -> None:
    """The cache starts processes from the wheel, and an example runs over it."""
    done = installed.run(sys.executable, str(copy / "examples" / "toy_engine.py"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_description_of_the_package(archive: Path) -> None:
    """It has the version of the package, the README without links that lead nowhere, and what Python it is for."""
    text = (archive / "PKG-INFO").read_text()
    assert f"\nVersion: {fastdeploy_cache.__version__}\n" in text
    assert "\nDescription-Content-Type: text/markdown\n" in text
    assert "\nClassifier: Programming Language :: Python :: 3.11\n" in text
    assert "from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request" in text
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
