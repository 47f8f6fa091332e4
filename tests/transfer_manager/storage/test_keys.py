"""What a store has written down of its spaces."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace, is_page, page_names
from tests.rigs.file_damage import Damage, damages

SPACE = KeySpace(weights_id="重み@1", layout="2 layers", object_bytes=4096, block_size=16, rank=0, tp_size=2)
WRITTEN = msgspec.json.encode(SPACE)


@settings(max_examples=500, deadline=None)
@given(st.lists(damages, max_size=3))
def test_a_damaged_space_is_none(misfortunes: list[Damage]) -> None:
    """Whatever became of its bytes, it is a space whose keys can be told, or none; never an error."""
    data = WRITTEN
    for damage in misfortunes:
        data = damage.applied_to(data)
    space = KeySpace.parse(data)
    assert space is None or space.prefix.endswith(f"{space.digest}:")
    assert misfortunes or space == SPACE


@pytest.mark.parametrize(
    "data",
    [
        WRITTEN.replace("重".encode(), b"\xff"),
        WRITTEN.replace("重".encode(), b"\\ud800"),
        WRITTEN.replace(b"4096", b"9" * 30),
        WRITTEN[:-1] + b',"more":' + b"[" * 100_000,
        b"",
    ],
    ids=["no UTF-8", "half a letter", "a number without end", "depth without end", "empty"],
)
def test_what_json_can_be_and_a_space_cannot(data: bytes) -> None:
    """Each of these has an error of its own where JSON is read."""
    assert KeySpace.parse(data) is None


def test_keys_of_uniform_models_stay() -> None:
    """What stores have of them is found by every later version: a known answer."""
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4).for_rank(1, 4)
    key = KeySpace.of("w", layout, 4, 0, 1).key(bytes(32))
    assert key == f"fdc1:50e721e49c013f00c62cf59f2163542a:c026cacde9ce0b3a494cd56974c07693:{'0' * 64}"


def test_names_of_pages() -> None:
    """Each has one of its own; the last has the same whatever their number is."""
    names = page_names(bytes(range(32)), 3)
    assert len(set(names)) == 3 and all(map(is_page, names)) and not is_page(bytes(range(32)))
    assert names[-1:] == page_names(bytes(range(32)), 1) and page_names(bytes(32), 0) == []
