"""The cache file of dequantised weights, when its bytes are not those that were written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_cache.launch.reference_engine.weight_cache import CacheDamagedError, read_cache, write_cache
from tests.rigs.file_damage import Damage, damages

TENSORS = {"a": np.arange(1000, dtype=np.float32).reshape(10, 100), "b": np.full((3,), 0.5, np.float32)}
HEADER = {"digest": "重み", "spec": [1, 2]}


@pytest.fixture(scope="module")
def written() -> Iterator[bytes]:
    """The file's bytes."""
    with tempfile.TemporaryDirectory() as name:
        write_cache(Path(name) / "w", HEADER, TENSORS)
        yield (Path(name) / "w").read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(damages, max_size=3))
def test_a_damaged_file_is_found_out(written: bytes, tmp_path: Path, misfortunes: list[Damage]) -> None:
    """It gives every number as it was, or the error by which its reader builds it anew."""
    data, file = written, tmp_path / "w"
    for damage in misfortunes:
        data = damage.applied_to(data)
    file.write_bytes(data)
    try:
        header, tensors = read_cache(file)
    except CacheDamagedError:
        assert data != written
        return
    assert {name: header[name] for name in HEADER} == HEADER
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, TENSORS[name])
