"""`engines.sh` before it sets anything up: what it refuses costs no time, and nothing is removed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A copy in a checkout of its own, beside something that must not be removed."""
    (tmp_path / "checkout" / "launch" / "engines").mkdir(parents=True)
    for pattern in ("*.sh", "engines/*.sh"):
        for path in LAUNCH.glob(pattern):
            shutil.copy(path, tmp_path / "checkout" / "launch" / path.relative_to(LAUNCH))
    (tmp_path / "precious").mkdir()
    return tmp_path / "checkout" / "launch" / "engines.sh"


def _run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    command = [str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vllm", "--zork"], "'--zork' is not known here"),
        (["vllm", "words"], "'words' is not known here"),
        (["vllm", "--only-answers", "--json"], "--json needs the name of a file"),
        (["vllm", "--json", "--only-answers"], "--json needs the name of a file"),
        (["vllm", "--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: the folder does not exist"),
        (["sglang", "--json", "/"], "--json /: the folder does not exist, or this is a folder"),
        (["sglang", "--only-answers"], "'--only-answers' is not known here"),
        (["zork"], "'zork' is not known here"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_set_up(script: Path, arguments: list[str], said: str) -> None:
    """Status 2, the argument is named, and no environment has been begun."""
    done = _run(script, *arguments)
    assert done.returncode == 2 and said in done.stderr and not done.stdout
    assert not (script.parents[1] / ".engines").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("version", ["../../precious", "1/../../precious", "..", "1 2", "-1"])
def test_a_version_that_is_none_is_refused(script: Path, engine: str, version: str) -> None:
    """It would become part of a path that is removed."""
    done = _run(script, engine, **{f"{engine.upper()}_VERSION": version})
    assert done.returncode == 2 and "is no version" in done.stderr
    assert (script.parents[2] / "precious").exists() and not (script.parents[1] / ".engines").exists()


def test_right_arguments_are_passed_on(script: Path) -> None:
    """Where everything is set up: to the command of that environment."""
    place = script.parents[1] / ".engines" / "vllm-1.2.3rc1"
    (place / "bin").mkdir(parents=True)
    (place / ".complete").touch()
    for name, code in (("python", "exit 0"), ("fastdeploy-cache", 'echo "given: $*"')):
        (place / "bin" / name).write_text(f"#!/bin/sh\n{code}\n")
        (place / "bin" / name).chmod(0o755)
    file = str(script.parent / "found.json")
    done = _run(script, "vllm", "--json", file, "--only-answers", VLLM_VERSION="1.2.3rc1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"given: engines vllm --json {file} --only-answers"
