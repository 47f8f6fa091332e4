"""The commands `fastdeploy-cache storage` for an operator at work: sizes, beginnings of ids, dry runs, damage."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner
from typer.main import get_command

from fastdeploy_cache import KVLayout
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.transfer_manager.storage.keys import describe_image
from tests.rigs.file_rig import Rig, name_of, space_of

COMMAND = get_command(app)
OLD, NEW, OTHER = "qwen3-8b@2024-11", "qwen3-8b@2025-01", "llama@1"
NUM_OBJECTS = 24


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    text: str
    facts: Any


def run(folder: Path, command: str, *arguments: str, as_json: bool = False, **environment: str) -> Ended:
    """What a command has said; an error of ours is raised."""
    json_arguments = ("--json", "-") if as_json else ()
    given = ["storage", command, "--folder", str(folder), *arguments, *json_arguments]
    result = CliRunner().invoke(COMMAND, given, env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.output, json.loads(result.stdout) if as_json else None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three weights, with 24 objects of a page each in slabs of four."""
    for weights_id in (OLD, NEW, OTHER):
        with Rig(tmp_path / "store", space=space_of(weights_id), num_slots=1000) as rig:
            rig.write(*range(NUM_OBJECTS))
    return tmp_path / "store"


def space_path(folder: Path, weights_id: str) -> Path:
    return folder / space_of(weights_id).digest


def snapshot(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """All files with their bytes and times."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def spoil(folder: Path, weights_id: str, slab: int) -> None:
    """Change a byte of the first slot of a slab."""
    with (space_path(folder, weights_id) / f"slab-{slab:05}").open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


def sound_objects(folder: Path, weights_id: str) -> int:
    """How many objects an engine finds and reads."""
    with Rig(folder, space=space_of(weights_id), num_slots=1000) as rig:
        return sum(rig.read(number) for number in range(NUM_OBJECTS))


def test_ls_shows_what_the_disk_gives(folder: Path) -> None:
    """The bytes that files take beside those of the objects, and what the file system has free."""
    facts = run(folder, "ls", as_json=True).facts
    taken = sum(path.stat().st_blocks * 512 for path in space_path(folder, OLD).iterdir())
    (row,) = [row for row in facts["weights"] if row["weights_id"] == OLD]
    assert (row["bytes"], row["allocated_bytes"]) == (NUM_OBJECTS * 4096, taken) and taken >= row["bytes"]
    assert abs(facts["free_bytes"] - shutil.disk_usage(folder).free) < 2**30
    text = run(folder, "ls").text
    assert "on the disk" in text and f"{taken / 1024:.1f} KiB" in text
    assert re.search(rf"^[\d.,]+ \w+ are free on the file system of folder '{folder}'$", text, re.MULTILINE)
    assert run(folder, "stat", as_json=True).facts["free_bytes"] > 0


def test_the_beginning_of_an_id_is_enough(folder: Path) -> None:
    """Every command that clears nothing takes it, and says for which id it stands."""
    for command in (("ls",), ("stat",), ("verify",), ("clear", "--dry-run")):
        ended = run(folder, *command, "--weights-id", "lla")
        assert ended.status == 0 and ended.text.startswith("'lla' stands for 'llama@1'\n")
        assert "qwen" not in ended.text


@pytest.mark.parametrize(("beginning", "named"), [("lla", "llama@1"), ("qwen3", f"{OLD}, {NEW}")])
def test_clear_takes_whole_ids_alone(folder: Path, beginning: str, named: str) -> None:
    """The beginning of one id or of several is refused, with what begins so; the folder stays as it is."""
    before = snapshot(folder)
    with pytest.raises(LaunchError, match=f"'{beginning}' is only the beginning of {named}; clear takes the whole id"):
        run(folder, "clear", "--weights-id", beginning)
    assert snapshot(folder) == before
    assert run(folder, "clear", "--weights-id", "llama@1").status == 0
    assert not space_path(folder, OTHER).exists() and space_path(folder, OLD).exists()


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "clear --dry-run"])
def test_the_beginning_of_several_ids_is_refused(folder: Path, command: str) -> None:
    """They are named, and nothing is done; a whole id that another one begins with is that id."""
    before = snapshot(folder)
    with pytest.raises(LaunchError, match=f"begin with 'qwen3': {OLD}, {NEW}; give more of the id"):
        run(folder, *command.split(), "--weights-id", "qwen3")
    assert snapshot(folder) == before
    with Rig(folder, space=space_of("qwen3"), num_slots=1000) as rig:
        rig.write(1)
    assert "stands for" not in run(folder, *command.split(), "--weights-id", "qwen3").text
    assert space_path(folder, OLD).exists()


def test_an_empty_id_begins_nothing(folder: Path) -> None:
    """A variable that is not set in a script clears nothing."""
    for weights_id in (OLD, NEW):
        shutil.rmtree(space_path(folder, weights_id))
    for more in ((), ("--dry-run",)):
        with pytest.raises(LaunchError, match="--weights-id is empty, so nothing is cleared"):
            run(folder, "clear", "--weights-id", "", *more)
    assert space_path(folder, OTHER).exists()


def test_clear_of_an_unknown_id_is_an_error(folder: Path) -> None:
    """It was mistyped, and what was meant is still there: the message has what is; nothing changes."""
    before = snapshot(folder)
    for more in ((), ("--dry-run",)):
        with pytest.raises(LaunchError, match=f"nothing of weights 'llama@2' is in .*; there is: .*{OLD}"):
            run(folder, "clear", "--weights-id", "llama@2", *more)
    assert snapshot(folder) == before


def test_a_dry_run_of_clear(folder: Path) -> None:
    """It says what would go and what would stay, with the status of the real one, and changes nothing."""
    arguments = ("--weights-id", OLD)
    with Rig(folder, space=space_of(OLD, rank=1), num_slots=1000) as rig:
        rig.write(1)
        rig.commit()
        before = snapshot(folder)
        dry = run(folder, "clear", *arguments, "--dry-run", as_json=True)
        assert snapshot(folder) == before
        text = run(folder, "clear", *arguments, "--dry-run").text
        real = run(folder, "clear", *arguments, as_json=True)
    assert f"{NUM_OBJECTS} objects of weights '{OLD}' would be removed from folder '{folder}'" in text
    assert "kept, as an engine has it open" in text
    assert (dry.facts.pop("dry_run"), real.facts.pop("dry_run")) == (True, False)
    assert dry.status == real.status == 1 and dry.facts == real.facts
    assert not space_path(folder, OLD).exists()


def test_a_dry_run_of_gc(folder: Path) -> None:
    """Likewise, what a crash has left included."""
    (space_path(folder, OTHER) / "space.json").unlink()
    before = snapshot(folder)
    arguments = ("--capacity-bytes", "100KiB")
    dry = run(folder, "gc", *arguments, "--dry-run", as_json=True)
    text = run(folder, "gc", *arguments, "--dry-run").text
    assert snapshot(folder) == before
    real = run(folder, "gc", *arguments, as_json=True)
    assert (dry.facts.pop("dry_run"), real.facts.pop("dry_run")) == (True, False)
    assert dry.status == real.status == 0 and dry.facts == real.facts
    assert f"would be removed: {OLD}" in text and "192.0 KiB would be free" in text
    assert [path.name for path in folder.iterdir()] == [space_path(folder, NEW).name]


def test_sizes_have_units(folder: Path) -> None:
    """As in configurations; what is no size is refused with the value."""
    assert run(folder, "gc", "--capacity-bytes", "10GB").status == 0
    ended = run(folder, "gc", "--capacity-bytes", "10 apples")
    words = " ".join(ended.text.replace("│", " ").split())
    assert ended.status == 2 and "--capacity-bytes is '10 apples'" in words and "64MiB" in words
    assert len(list(folder.iterdir())) == 3


def test_verify_names_what_is_damaged(folder: Path) -> None:
    """The file, the slot, the block and what is wrong: changed bytes, a slab that is cut, one that is gone."""
    path = space_path(folder, OLD)
    spoil(folder, OLD, 0)
    (path / "slab-00001").unlink()
    with (path / "slab-00002").open("r+b") as file:
        file.truncate(3 * 4096)
    ended = run(folder, "verify", as_json=True)
    assert ended.status == 1
    (row,) = [row for row in ended.facts["spaces"] if row["damaged"]]
    assert (row["weights_id"], row["damaged"]) == (OLD, 6)
    damage = {each["where"]: each for each in row["damaged_objects"]}
    assert damage[f"slot 0 of {path / 'slab-00000'}"] == {
        "where": f"slot 0 of {path / 'slab-00000'}",
        "hash": name_of(0).hex(),
        "reason": "its bytes are not those that were written",
        "page": False,
    }
    assert [damage[f"slot {slot} of {path / 'slab-00001'}"]["reason"] for slot in range(4)] == [
        "the file is missing"
    ] * 4
    assert "cannot be read: the file ends" in damage[f"slot 3 of {path / 'slab-00002'}"]["reason"]
    line = f"damaged: slot 0 of {path / 'slab-00000'}: its bytes are not those that were written"
    assert f"{line} (block {name_of(0).hex()})" in run(folder, "verify").text


def test_verify_names_no_more_than_can_be_read(folder: Path) -> None:
    """Of very many damaged objects the first twenty are shown; all are in the JSON."""
    for slab in space_path(folder, OLD).glob("slab-*"):
        slab.unlink()
    text = run(folder, "verify").text
    assert text.count("damaged: slot") == 20 and "damaged: 4 more; --json FILE has all" in text
    rows = run(folder, "verify", as_json=True).facts["spaces"]
    assert max(len(row["damaged_objects"]) for row in rows) == NUM_OBJECTS


def test_verify_removes_what_is_damaged(folder: Path) -> None:
    """Just that: the others are found by the next engine, and a second look finds nothing."""
    spoil(folder, OLD, 0)
    spoil(folder, OLD, 2)
    assert run(folder, "verify").status == 1
    ended = run(folder, "verify", "--remove")
    assert ended.status == 0 and f"removed what is damaged: {OLD}" in ended.text
    again = run(folder, "verify", as_json=True)
    assert again.status == 0
    assert sorted((row["objects"], row["damaged"]) for row in again.facts["spaces"]) == [(22, 0), (24, 0), (24, 0)]
    assert sound_objects(folder, OLD) == NUM_OBJECTS - 2


def test_verify_removes_nothing_from_under_an_engine(folder: Path) -> None:
    """It says so, with status 1; the engine drops what is damaged by itself."""
    spoil(folder, OLD, 0)
    with Rig(folder, space=space_of(OLD), num_slots=1000) as rig:
        before = snapshot(folder)
        ended = run(folder, "verify", "--remove")
        assert ended.status == 1 and "kept, as an engine has it open" in ended.text
        assert snapshot(folder) == before
        assert rig.read(0) == 0 and rig.read(1) == 1


@pytest.mark.parametrize("place", [3, -1])
def test_verify_mends_a_damaged_journal(folder: Path, place: int) -> None:
    """What it does not list any more is lost; after `--remove` it is whole, and nobody complains of it again."""
    journal = space_path(folder, OLD) / "journal"
    data = bytearray(journal.read_bytes())
    data[place] ^= 1
    journal.write_bytes(data)
    assert run(folder, "verify").status == 1
    assert run(folder, "verify", "--remove").status == 0
    assert run(folder, "verify").status == 0
    assert sound_objects(folder, OLD) == 0
    assert sound_objects(folder, NEW) == NUM_OBJECTS


def test_verify_shows_how_far_it_is(folder: Path) -> None:
    """On a terminal, with the number of objects; elsewhere it does not."""
    assert f"{NUM_OBJECTS}/{NUM_OBJECTS}" in run(folder, "verify", "--weights-id", OLD, FORCE_COLOR="1").text
    assert "/24" not in run(folder, "verify", "--weights-id", OLD).text


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_a_long_id_is_on_one_line(tmp_path: Path, columns: str) -> None:
    """Such as that of `serve`, a digest of 64 digits: it can be copied from a terminal of any width."""
    weights_id = "0123456789abcdef" * 4
    with Rig(tmp_path, space=space_of(weights_id), num_slots=1000) as rig:
        rig.write(1)
    for command in ("ls", "verify"):
        lines = [line for line in run(tmp_path, command, COLUMNS=columns).text.splitlines() if weights_id in line]
        assert len(lines) == 1 and weights_id in lines[0].split()


def test_stat_says_what_the_numbers_of_a_shape_are(tmp_path: Path) -> None:
    """Of each part of a block, which of them counts tokens."""
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8).for_rank(1, 16)
    with Rig(tmp_path, space=msgspec.structs.replace(space_of(), layout=describe_image(layout)), num_slots=1000) as rig:
        rig.write(1)
    text = run(tmp_path, "stat").text
    assert "2 layers of key float16[16, 3, 8] (axis 0 counts the block's tokens), value" in text
