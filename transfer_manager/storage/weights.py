"""A name for a model's weights, from their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path

_NUM_THREADS = 4  # more would only make a disk seek


def weights_id_of(files: Iterable[str | PathLike[str]]) -> str:
    """A `StorageConfig.weights_id` for these weight files: the same for the same names and bytes, wherever they lie.

    Reads every byte (about a second per gigabyte and core), so an engine that has a revision to name is faster with it.

    Raises:
        ValueError: no files, or two of the same name.
        OSError: one cannot be read.
    """
    if isinstance(files, str):
        raise ValueError(f"weights_id_of({files!r}): give a list of files")
    paths = sorted((Path(file) for file in files), key=lambda path: path.name)
    names = [path.name for path in paths]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"weights_id_of({names}): give the weight files, each name once")
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        digests = list(threads.map(_digest, paths))
    whole = hashlib.sha256()
    for name, digest in zip(names, digests, strict=True):
        whole.update(hashlib.sha256(name.encode()).digest() + digest)
    return f"sha256-{whole.hexdigest()[:32]}"


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
