"""Block hashes are names for ever: known answers, and the same in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np

from fastdeploy_cache.block_hash import extend_hashes, root_hash

TOKENS = np.arange(12, dtype="<i4").tobytes()
KNOWN = extend_hashes(root_hash("tenant", 4), TOKENS, 16).hex()


def test_the_encoding_is_what_the_docstring_says() -> None:
    """Built by hand from the documented bytes."""
    parent = hashlib.sha256(b"fastdeploy_cache block hash 1\0" + bytes([4, 0, 0, 0]) + b"tenant").digest()
    chain = b""
    for i in range(3):
        parent = hashlib.sha256(parent + TOKENS[16 * i : 16 * i + 16]).digest()
        chain += parent
    assert chain.hex() == KNOWN


def test_known_answers() -> None:
    """A change of the encoding would orphan every stored block: it has to be noticed."""
    assert root_hash("", 64).hex() == "f5807406bdb7a55732cbb0af3deed0e1171d2166a0245839eac725cf75a7a17f"
    assert (
        extend_hashes(root_hash("", 4), TOKENS, 16)[-32:].hex()
        == "abd0113f6792469cbd29115ded9445b112594d2bbdff3d59af401798af32745c"
    )


def test_a_partial_block_has_no_hash_and_chains_join() -> None:
    """Only full blocks are named, and hashing in two steps equals hashing in one."""
    root = root_hash("tenant", 4)
    assert extend_hashes(root, TOKENS[:-4], 16).hex() == KNOWN[:128]
    first = extend_hashes(root, TOKENS[:16], 16)
    assert (first + extend_hashes(first, TOKENS[16:], 16)).hex() == KNOWN


def test_names_differ_by_namespace_and_block_size() -> None:
    """What must not meet has other names."""
    assert len({root_hash(namespace, size) for namespace in ("", "a", "b") for size in (1, 4, 64)}) == 9


def test_other_processes_agree() -> None:
    """No environment variable or hash seed changes a name."""
    code = (
        "from fastdeploy_cache.block_hash import *\n"
        f"print(extend_hashes(root_hash('tenant', 4), bytes.fromhex('{TOKENS.hex()}'), 16).hex())"
    )
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C"}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
        )
        assert result.stdout.strip() == KNOWN
