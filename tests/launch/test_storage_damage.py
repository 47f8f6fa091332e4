"""The commands `fastdeploy-cache storage` over damaged files: a line and a status, never a traceback."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.launch.cli import app
from tests.rigs.file_damage import Damage, damages, files_below
from tests.rigs.file_rig import Rig, space_of

COMMAND = get_command(app)  # once: to make it takes four times as long as to run it
COMMANDS = (
    ("ls",),
    ("stat",),
    ("verify",),
    ("clear", "--weights-id", "llama@1"),
    ("gc", "--capacity-bytes", "40000"),
    ("gc", "--capacity-bytes", "0"),
)


@pytest.fixture(scope="module")
def pristine() -> Iterator[Path]:
    """A folder of two closed spaces; examples take copies of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        for weights_id in ("llama@1", "重み@2"):
            with Rig(folder, space=space_of(weights_id), num_slots=100) as rig:
                rig.write(1, 2, 3, 4, 5, 6)
        yield folder


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Status and words, as `main` makes them of errors that it knows; every other error is raised."""
    result = CliRunner().invoke(COMMAND, ["storage", *arguments, "--folder", str(folder)])
    if isinstance(result.exception, CacheError):
        return 1, f"{result.output}{result.exception}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 100), damages), min_size=1, max_size=4))
def test_damaged_files_have_a_line_and_a_status(pristine: Path, misfortunes: list[tuple[int, Damage]]) -> None:
    """Each command ends by itself, with status 0 or 1 and words; after `gc` down to nothing slabs take no room."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        shutil.copytree(pristine, folder)
        files = files_below(folder)
        for which, damage in misfortunes:
            damage.befall(files[which % len(files)])
        for command in COMMANDS:
            status, words = run(folder, *command)
            assert status in (0, 1) and words.strip()
        assert not sum(slab.stat().st_size for slab in folder.glob("*/slab-*"))


def test_damaged_names(pristine: Path, tmp_path: Path) -> None:
    """Whatever a byte of a `space.json` has become, `ls` lists the space or names it in a line, beside the others;
    `verify` ends with status 1 then, and `gc` gives the room back."""
    shutil.copytree(pristine, tmp_path / "store")
    name = min((tmp_path / "store").glob("*/space.json"))
    data, num_damaged = name.read_bytes(), 0
    for place in range(0, len(data), 9):
        name.write_bytes(data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :])
        line = f"its space.json is damaged; the engine of that space mends it, gc removes it: {name.parent}\n"
        status, words = run(tmp_path / "store", "ls")
        assert (status, words.count("1 of 2"), line in words) in ((0, 2, False), (0, 1, True))
        num_damaged += line in words
        assert run(tmp_path / "store", "verify")[0] == int(line in words)
    assert num_damaged > 5
    name.write_bytes(b"\xff")
    assert run(tmp_path / "store", "gc", "--capacity-bytes", str(10**9))[0] == 0
    assert not name.parent.exists() and run(tmp_path / "store", "verify")[0] == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_a_damaged_name_of_a_space_that_an_engine_has(tmp_path: Path, is_there: bool) -> None:
    """`gc` and `clear` leave it, say so and end with status 1, also where the name has gone; later `gc` removes it."""
    folder = tmp_path / "store"
    with Rig(folder) as rig:
        rig.write(1, 2, 3, 4)
        name = rig.path / "space.json"
        name.write_text("{") if is_there else name.unlink()
        line = f"kept, as an engine has it open, though its space.json is damaged: {rig.path}\n"
        for dry_run in ((), ("--dry-run",)):
            status, words = run(folder, "gc", "--capacity-bytes", "0", *dry_run)
            assert status == 1 and line in words
        status, words = run(folder, "clear", "--weights-id", "llama@1")
        assert status == 1 and ("its space.json is damaged; the engine of that" in words) == is_there
        assert rig.read(1, 2, 3, 4) == 4
    assert run(folder, "gc", "--capacity-bytes", "0")[0] == 0
    assert not rig.path.exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_journal_that_is_missing(pristine: Path, tmp_path: Path, is_there: bool) -> None:
    """Slabs without one, or with an empty one, are lost objects: status 1, until `--remove` has made room of them."""
    folder = tmp_path / "store"
    shutil.copytree(pristine, folder)
    journal = min(folder.glob("*/journal"))
    journal.write_bytes(b"") if is_there else journal.unlink()
    status, words = run(folder, "verify")
    assert status == 1 and "its journal is damaged or missing, objects are lost" in words
    status, words = run(folder, "verify", "--remove")
    assert status == 0 and "removed what is damaged" in words
    assert not list(journal.parent.glob("slab-*")) and run(folder, "verify")[0] == 0


def test_a_pipe_in_place_of_a_journal(pristine: Path, tmp_path: Path) -> None:
    """Every command names it and goes on with the other space; those that check or remove end with status 1."""
    folder = tmp_path / "store"
    shutil.copytree(pristine, folder)
    journal = min(folder.glob("*/journal"))
    journal.unlink()
    os.mkfifo(journal)
    line = f"not the store's, so its space is left as it is: {journal}: it is a pipe or device, and no file; move it"
    for command in COMMANDS:
        status, words = run(folder, *command)
        assert line in words and status == int(command[0] not in ("ls", "stat"))
    assert [path.name for path in folder.iterdir()] == [journal.parent.name]
