"""The file store over files that are not what was written: it starts, and what is damaged is a miss."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_cache.transfer_manager.storage.file_admin import FileAdmin
from tests.rigs.file_damage import Damage, damages, files_below
from tests.rigs.file_rig import QuickDisk, Rig, space_of

SPACES = (space_of("llama@1"), space_of("重み@2", rank=1), space_of("mistral@1"))
NUMBERS = range(6)


def opened(folder: Path, number: int, num_slots: int = 24) -> Rig:
    """One engine's store; there is room for all spaces of its rank."""
    return Rig(folder, space=SPACES[number], num_slots=num_slots, slots_per_slab=4, disk=QuickDisk())


@pytest.fixture(scope="module")
def pristine() -> Iterator[Path]:
    """A folder of several closed spaces; examples take copies of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        for number in range(len(SPACES)):
            with opened(folder, number) as rig:
                rig.write(*NUMBERS)
        yield folder


def check_lives(folder: Path) -> None:
    """Every engine's store opens, gives right bytes or misses, takes everything anew, and has it in its next life."""
    for number in range(len(SPACES)):
        with opened(folder, number) as rig:
            for block in NUMBERS:
                rig.read(block)  # that its bytes are right is asserted there
            assert rig.write(*NUMBERS)[0] == len(NUMBERS)
            assert rig.read(*NUMBERS) == len(NUMBERS)
    for number in range(len(SPACES)):
        with opened(folder, number) as rig:
            assert rig.read(*NUMBERS) == len(NUMBERS)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 100), damages), min_size=1, max_size=4))
def test_damaged_files_cost_misses(pristine: Path, misfortunes: list[tuple[int, Damage]]) -> None:
    """Bits, ends, pages and whole files of any of a folder's files are lost, and garbage is put behind them: every
    engine on the folder starts all the same, and never gets a wrong byte."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        shutil.copytree(pristine, folder)
        files = files_below(folder)
        for which, damage in misfortunes:
            damage.befall(files[which % len(files)])
        check_lives(folder)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 100), damages, st.booleans())
def test_files_that_are_damaged_under_an_open_store(pristine: Path, which: int, damage: Damage, is_read: bool) -> None:
    """A store that is open when it happens gives right bytes or misses, and its next life does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        shutil.copytree(pristine, folder)
        files = files_below(folder)
        with opened(folder, 0) as rig:
            damage.befall(files[which % len(files)])
            for block in NUMBERS:
                if is_read:
                    rig.read(block)
            rig.write(7, 8)
            rig.read(7, 8)
        check_lives(folder)


def test_the_folder_of_another_space(pristine: Path, tmp_path: Path) -> None:
    """Somebody has exchanged the folders of two spaces, whose objects have the same hashes: neither finds the other's
    blocks, and both can be written and read again."""
    folder = tmp_path / "store"
    shutil.copytree(pristine, folder)
    with opened(folder, 0) as first, opened(folder, 2) as second:
        paths = first.path, second.path
        assert first.there(*NUMBERS) == second.there(*NUMBERS) == list(NUMBERS)
    paths[0].rename(tmp_path / "between")
    paths[1].rename(paths[0])
    (tmp_path / "between").rename(paths[1])
    for rank in (0, 2):
        with opened(folder, rank) as rig:
            assert rig.there(*NUMBERS) == []
            rig.write(*NUMBERS)
        with opened(folder, rank) as rig:
            assert rig.read(*NUMBERS) == len(NUMBERS)


@pytest.mark.parametrize("mask", [0x80, 0x01])
def test_every_byte_of_a_name(pristine: Path, tmp_path: Path, mask: int) -> None:
    """A flipped bit in any byte of a `space.json` keeps no engine from starting, neither its own nor another on the
    same folder; the operator is told which space it was."""
    folder = tmp_path / "store"
    shutil.copytree(pristine, folder)
    with opened(folder, 0) as rig:
        path = rig.path
    data, admin = (path / "space.json").read_bytes(), FileAdmin({"folder": str(folder)})
    for place in range(len(data)):
        (path / "space.json").write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
        with opened(folder, 2) as rig:
            assert rig.there(*NUMBERS) == list(NUMBERS)
        found = [Path(summary.space.where) for summary in admin.spaces()]
        assert (path in found) != (str(path) in admin.damaged())
    with opened(folder, 0) as rig:
        assert rig.read(*NUMBERS) == len(NUMBERS)
    assert not admin.damaged()
