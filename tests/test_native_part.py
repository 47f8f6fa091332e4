"""The native part is built where it can be, and missed nowhere."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed"),
]

ROOT = Path(__file__).parent.parent
HAS_COMPILER = shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build what is native, as an installation does."""
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}", f"--build-temp={folder}/temp"]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.skipif(not HAS_COMPILER, reason="no compiler, or no headers of Python")
def test_it_is_built_without_a_warning_and_packs(tmp_path: Path) -> None:
    """A strict compiler has nothing to say, and what it made packs what is a list of tokens, and nothing else."""
    done = build(tmp_path, CFLAGS="-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers -Werror")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (module,) = (tmp_path / "fastdeploy_cache").iterdir()
    code = (
        "import array, importlib.util as util, sys\n"
        "spec = util.spec_from_file_location('fastdeploy_cache._native', sys.argv[1])\n"
        "native = util.module_from_spec(spec)\n"
        "spec.loader.exec_module(native)\n"
        "print(native.pack_plain([1, 2**31 - 1]).hex(), native.pack_plain((0,)).hex(), native.pack_plain([]))\n"
        "arrays = [array.array(kind, [5, 0, 2**31 - 1]) for kind in 'iIq'] + [array.array('i', [5, -1])]\n"
        "print([native.pack_plain(each) and native.pack_plain(each).hex() for each in arrays])\n"
        "print([native.pack_plain(odd) for odd in ([True], [-1], [2**31], [1.0], 'a', b'abcd', range(3), None)])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(module)], capture_output=True, text=True, timeout=60, check=True
    )
    arrays = str(["0500000000000000ffffff7f", None, None, None])
    assert result.stdout.splitlines() == ["01000000ffffff7f 00000000 b''", arrays, str([None] * 8)]


def test_without_a_compiler_the_rest_is_installed(tmp_path: Path) -> None:
    """A compiler that fails, or is not there, is a line of warning: nothing is built, and nothing fails."""
    for compiler in ("/bin/false", str(tmp_path / "no compiler")):
        done = build(tmp_path, CC=compiler)
        assert done.returncode == 0
        assert len((done.stdout + done.stderr).splitlines()) <= 2
        assert not list(tmp_path.glob("**/_native*"))
