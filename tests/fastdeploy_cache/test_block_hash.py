"""Block hashes are names for ever: known answers, and the same in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from fastdeploy_cache.books.block_hash import BlockHasher, root_hash
from fastdeploy_cache.request import Request

TOKENS = np.arange(12, dtype="<i4").tobytes()
HASHER = BlockHasher(4)
KNOWN = HASHER.extend(root_hash("tenant", 4), TOKENS, 0, 3).hex()


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
        HASHER.extend(root_hash("", 4), TOKENS, 0, 3)[-32:].hex()
        == "abd0113f6792469cbd29115ded9445b112594d2bbdff3d59af401798af32745c"
    )


def test_chains_join() -> None:
    """Hashing in two steps equals hashing in one, wherever the blocks lie in the tokens."""
    root = root_hash("tenant", 4)
    first = HASHER.extend(root, TOKENS, 0, 1)
    assert (first + HASHER.extend(first, TOKENS, 1, 2)).hex() == KNOWN
    assert HASHER.extend(first, bytearray(TOKENS[16:] + b"tail"), 0, 2).hex() == KNOWN[64:]


def test_extra_keys_follow_the_tokens_of_their_block() -> None:
    """An image changes the names of the blocks that it overlaps and of all behind them; known answers."""
    root = root_hash("tenant", 4)
    request = Request(request_id="r", prompt_token_ids=range(12), images=[(6, 3, "cat"), (9, 1, b"dog")])
    extras = request.extra_keys(4)
    cat = bytes([6, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0]) + b"cat"
    dog = bytes([9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0]) + b"dog"
    assert extras == {1: cat, 2: cat + dog}
    first = hashlib.sha256(root + TOKENS[:16]).digest()
    second = hashlib.sha256(first + TOKENS[16:32] + cat).digest()
    third = hashlib.sha256(second + TOKENS[32:] + cat + dog).digest()
    assert HASHER.extend(root, TOKENS, 0, 3, extras) == first + second + third
    assert HASHER.extend(first, TOKENS, 1, 2, extras) == second + third
    assert third.hex() == "4b626823208265984929e31c56cef3c6ced44008a3219f5da8ffff0babba2816"


def test_names_differ_by_namespace_and_block_size() -> None:
    """What must not meet has other names."""
    assert len({root_hash(namespace, size) for namespace in ("", "a", "b") for size in (1, 4, 64)}) == 9


@pytest.mark.processes
def test_other_processes_agree() -> None:
    """No environment variable or hash seed changes a name."""
    code = (
        "from fastdeploy_cache.books.block_hash import *\n"
        f"print(BlockHasher(4).extend(root_hash('tenant', 4), bytes.fromhex('{TOKENS.hex()}'), 0, 3).hex())"
    )
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C"}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
        )
        assert result.stdout.strip() == KNOWN
