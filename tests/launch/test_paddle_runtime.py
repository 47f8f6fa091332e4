"""Paddle: installed once, sharing memory, quiet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import ModelLoadError
from fastdeploy_cache.launch.reference_engine.paddle_runtime import check_distributions, import_paddle, share_array
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import load_model_files
from tests.rigs.reference_model import (
    needs_model,
)


@pytest.fixture
def blocked_import(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes ``import NAME`` fail as if it were not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("paddle", lambda path: import_paddle()),
        ("gguf", lambda path: load_model_files(path, path.parent)),
        ("tokenizers", lambda path: ChatTokenizer(_tiny_files())),
    ],
)
def test_missing_library_is_one_line(
    blocked_import: Callable[[str], None], tmp_path: Path, name: str, action: Callable[[Path], Any]
) -> None:
    """Each heavy library that is missing gives one line with the install command."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    blocked_import(name)
    with pytest.raises(ModelLoadError, match=rf"cannot import {name} .*fastdeploy-cache\[demo\]") as caught:
        action(path)
    assert "\n" not in str(caught.value)


def _tiny_files() -> Any:
    vocab = ["<|im_start|>", "<|im_end|>"]
    spec = SimpleNamespace(eos_token_id=1)
    return SimpleNamespace(spec=spec, vocab=vocab, token_types=[3, 3], merges=[])


def test_mixed_paddle_install_is_refused() -> None:
    """Both Paddle distributions together are named with their versions; one alone, or none, passes."""
    versions = {"paddlepaddle": "3.3.1", "paddlepaddle-gpu": "2.6.2"}

    def version_of(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    with pytest.raises(ModelLoadError, match=r"paddlepaddle 3\.3\.1 and paddlepaddle-gpu 2\.6\.2 .*uninstall"):
        check_distributions(version_of)
    versions.popitem()
    check_distributions(version_of)
    versions.clear()
    check_distributions(version_of)


@pytest.mark.parametrize("version", ["2.6.2", "0.0.0"])
def test_copying_paddle_is_refused(version: str) -> None:
    """A Paddle whose from_dlpack copies (2.6) would read stale KV, so it is refused by version."""
    copying = SimpleNamespace(
        __version__=version,
        from_dlpack=lambda array: SimpleNamespace(data_ptr=lambda: array.copy().ctypes.data),
    )
    with pytest.raises(ModelLoadError, match=rf"paddle {version} does not share .*>= 3\.0 is needed"):
        share_array(np.zeros(4, np.float32), copying)


def test_paddle_without_dlpack_is_refused() -> None:
    """A Paddle that cannot take a numpy array at all gives the same one line."""
    with pytest.raises(ModelLoadError, match="does not share"):
        share_array(np.zeros(4, np.float32), SimpleNamespace(__version__="1.0"))


@needs_model
def test_shared_array_is_the_same_memory() -> None:
    """A write on either side shows on the other, and the tensor keeps the array's memory alive."""
    array = np.zeros(4, np.float32)
    tensor = share_array(array)
    array[1] = 5.0
    tensor[2] = 7.0
    assert tensor.numpy().tolist() == array.tolist() == [0.0, 5.0, 7.0, 0.0]


@pytest.mark.processes
@needs_model
def test_paddle_starts_quietly() -> None:
    """Importing Paddle through us prints nothing and takes the asked number of threads."""
    script = (
        "import os; from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle;"
        "import_paddle(2);"
        "assert os.environ['OMP_NUM_THREADS'] == '2'"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
