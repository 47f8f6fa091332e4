"""One file that holds a dequantised model and can be memory-mapped.

Layout: 24-byte prefix | JSON header | padding to 4096 | float32 tensors, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 1
_MAGIC = b"FDCWGT01"
_PREFIX = struct.Struct("<8sQII")  # magic, header length in bytes, header crc32, tensors crc32
_TENSOR_ALIGNMENT_BYTES = 64
_PAGE_BYTES = 4096

Float32Array = np.ndarray[Any, np.dtype[np.float32]]


class CacheDamagedError(Exception):
    """The cache file is short, altered or of another format; the caller builds it again."""


def write_cache(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Float32Array]) -> None:
    """Write the file under a temporary name and rename it, so that ``path`` is never half written.

    The temporary name is fixed: what a killed writer left is overwritten by the next one. Callers hold
    a lock, so that two writers cannot meet.

    Raises:
        OSError: the folder is not writable or the disk is full.
    """
    layout: list[tuple[str, tuple[int, ...], int]] = []
    end = 0
    for name, tensor in tensors.items():
        layout.append((name, tensor.shape, _aligned(end, _TENSOR_ALIGNMENT_BYTES)))
        end = layout[-1][2] + tensor.nbytes
    text = json.dumps({**header, "layout": layout, "tensors_bytes": end}).encode()
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(_PREFIX.pack(_MAGIC, len(text), zlib.crc32(text), 0) + text)
        file.write(bytes(_aligned(file.tell(), _PAGE_BYTES) - file.tell()))
        start, checksum = file.tell(), 0
        for name, _, offset in layout:
            chunk = np.ascontiguousarray(tensors[name], dtype="<f4").reshape(-1).view(np.uint8).data
            padding = bytes(offset - (file.tell() - start))
            file.write(padding)
            file.write(chunk)
            checksum = zlib.crc32(chunk, zlib.crc32(padding, checksum))
        file.seek(0)
        file.write(_PREFIX.pack(_MAGIC, len(text), zlib.crc32(text), checksum))
    temporary.replace(path)


def read_cache(path: Path) -> tuple[dict[str, Any], dict[str, Float32Array]]:
    """Check the whole file and map it: the header as written, and the tensors by name.

    Raises:
        FileNotFoundError: there is no such file.
        CacheDamagedError: length, magic or a checksum is wrong.
    """
    # Copy-on-write, not read-only: numpy refuses to hand read-only memory to older Paddle versions.
    # Nothing writes to it, so all processes share the page cache and the file cannot change.
    if path.stat().st_size < _PREFIX.size:
        raise CacheDamagedError(f"{path}: shorter than its prefix")
    raw = np.memmap(path, dtype=np.uint8, mode="c")
    magic, header_length, header_checksum, tensors_checksum = _PREFIX.unpack(raw[: _PREFIX.size].tobytes())
    text = raw[_PREFIX.size : _PREFIX.size + header_length].tobytes()
    if magic != _MAGIC or len(text) != header_length or zlib.crc32(text) != header_checksum:
        raise CacheDamagedError(f"{path}: wrong magic or header checksum")
    header = json.loads(text)
    start = _aligned(_PREFIX.size + header_length, _PAGE_BYTES)
    data = raw[start:]
    if data.nbytes != header["tensors_bytes"] or zlib.crc32(data.data) != tensors_checksum:
        raise CacheDamagedError(f"{path}: wrong length or tensor checksum")
    tensors = {}
    for name, shape, offset in header["layout"]:
        num_bytes = 4 * int(np.prod(shape))
        tensors[name] = data[offset : offset + num_bytes].view(np.float32).reshape(shape).view(np.ndarray)
    return header, tensors


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
