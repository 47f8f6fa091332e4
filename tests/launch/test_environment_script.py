"""What `launch/environment.sh` says to a person whom it cannot install a package for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "launch" / "environment.sh"
pytestmark = pytest.mark.processes


def refused(tools: Path, call: str, user: int, *, has_sudo: bool) -> str:
    """The one line that a function ends with, for this user, on a machine without a python3."""
    (tools / "id").write_text(f"#!/bin/sh\necho {user}\n")
    if has_sudo:
        (tools / "sudo").write_text("#!/bin/sh\nexit 1\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    command = [shutil.which("bash") or "bash", "-c", f"dirname() {{ echo .; }}; source {SCRIPT}; {call}"]
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
    return done.stderr.rstrip("\n")


@pytest.mark.parametrize("call", ["need_packages libgomp1", "find_python"])
@pytest.mark.parametrize(
    ("user", "has_sudo", "words"),
    [
        (1000, True, ": sudo apt-get update && sudo apt-get install "),
        (1000, False, ": as root, apt-get update && apt-get install "),
        (0, False, ": apt-get update && apt-get install "),
    ],
)
def test_what_is_missing_is_named_with_a_command_that_works(
    tmp_path: Path, call: str, user: int, has_sudo: bool, words: str
) -> None:
    """Also on a system that is fresh and has no lists of packages, and where there is no sudo; in one line, at whose
    end the packages stand."""
    said = refused(tmp_path, call, user, has_sudo=has_sudo)
    assert words in said and said.endswith("install libgomp1" if "libgomp1" in call else "install python3 python3-venv")
