"""The commands `fastdeploy-cache storage`: what they print, refuse and leave alone, on real stores."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import PrefixCacheManager
from tests.rigs.command_line import CLI
from tests.rigs.faulty_engine import Engine
from tests.rigs.file_rig import Rig, space_of
from tests.rigs.places import MooncakePlace, ValkeyPlace
from tests.rigs.storage_engine import PROMPT, drained, file_storage, storage_config
from tests.rigs.storage_servers import MooncakeLender, MooncakeMaster, ValkeyServer, free_port

pytestmark = pytest.mark.processes

ODD_ID = "[red]odd\x1b[2J\n 重み"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, "storage", *arguments], capture_output=True, text=True, timeout=60, check=False)


def found(*arguments: str, status: int = 0) -> Any:
    """What a command says to programs; it says the rest elsewhere."""
    result = run(*arguments, "--json", "-")
    assert result.returncode == status, result.stderr
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    """The one line that a command ends with."""
    result = run(*arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1), result
    return result.stderr


def fill(folder: Path) -> None:
    """Two ranks of llama@1, one of weights with an odd name."""
    for weights_id, rank in (("llama@1", 0), ("llama@1", 1), (ODD_ID, 0)):
        with Rig(folder, space=space_of(weights_id, rank=rank), num_slots=100) as rig:
            rig.write(1, 2, 3, 4)


def test_ls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each weights; names that would play tricks on a terminal are quoted."""
    monkeypatch.setenv("COLUMNS", "120")
    fill(tmp_path)
    result = run("ls", "--folder", str(tmp_path))
    assert result.returncode == 0 and result.stderr == ""
    odd, llama = [line for line in result.stdout.splitlines() if line.startswith("│")]
    cells = [cell.strip() for cell in llama.strip("│").split("│")]
    assert cells[:5] == ["llama@1", "2 of 2", "2", "8", "32.0 KiB"] and cells[6] == "no"
    assert repr(ODD_ID) in odd
    rows = found("ls", "--folder", str(tmp_path))["weights"]
    assert [(row["weights_id"], row["spaces"], row["objects"]) for row in rows] == [(ODD_ID, 1, 4), ("llama@1", 2, 8)]
    (row,) = found("ls", "--folder", str(tmp_path), "--weights-id", ODD_ID)["weights"]
    assert row["ranks"] == [{"tp_size": 2, "ranks": [0]}]


def test_names_that_a_terminal_cannot_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shown by their numbers, and one of no letters in quotes."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for weights_id in ("重み", ""):
        with Rig(tmp_path, space=space_of(weights_id)) as rig:
            rig.write(1)
    for command in ("ls", "stat", "verify"):
        result = run(command, "--folder", str(tmp_path))
        assert result.returncode == 0 and "''" in result.stdout and r"\u91cd\u307f" in result.stdout, result


def test_stat(tmp_path: Path) -> None:
    """Each space with all that is known of it, also in a file."""
    fill(tmp_path / "store")
    result = run("stat", "--folder", str(tmp_path / "store"), "--json", str(tmp_path / "facts.json"))
    assert result.returncode == 0
    assert "  block size    16 tokens, 4.0 KiB" in result.stdout.splitlines()
    rows = json.loads((tmp_path / "facts.json").read_text())["spaces"]
    assert [(row["rank"], row["objects"], row["open"]) for row in rows] == [(0, 4, False), (0, 4, False), (1, 4, False)]
    assert all(Path(row["where"]).is_dir() and row["allocated_bytes"] >= 16384 and row["last_written"] for row in rows)


def test_verify_finds_a_flipped_byte(tmp_path: Path) -> None:
    """Status 0 while all is well, then 1; the space is named, and other weights are well."""
    fill(tmp_path)
    assert [row["damaged"] for row in found("verify", "--folder", str(tmp_path))["spaces"]] == [0, 0, 0]
    (space,) = found("stat", "--folder", str(tmp_path), "--weights-id", ODD_ID)["spaces"]
    with (Path(space["where"]) / "slab-00000").open("r+b") as slab:
        byte = slab.read(1)[0]
        slab.seek(0)
        slab.write(bytes([byte ^ 1]))
    rows = found("verify", "--folder", str(tmp_path), status=1)["spaces"]
    assert [(row["where"] == space["where"], row["damaged"]) for row in rows] == [(True, 1), (False, 0), (False, 0)]
    assert run("verify", "--folder", str(tmp_path), "--weights-id", "llama@1").returncode == 0


def test_clear(tmp_path: Path) -> None:
    """All of the weights goes but what a living engine has: status 1 until that has ended; others are left alone."""
    fill(tmp_path)
    arguments = ("clear", "--folder", str(tmp_path), "--weights-id", "llama@1")
    with Rig(tmp_path, space=space_of("llama@1", rank=1), num_slots=100) as rig:
        (row,) = found("ls", "--folder", str(tmp_path), "--weights-id", "llama@1")["weights"]
        assert (row["spaces"], row["open_spaces"]) == (2, 1)
        result = run(*arguments)
        assert result.returncode == 1
        assert result.stdout.splitlines() == [
            f"4 objects of weights 'llama@1' are gone from folder '{tmp_path}'",
            f"kept, as an engine has it open: llama@1, rank 1 of 2: {rig.path}",
        ]
        assert rig.read(1, 2, 3, 4) == 4
    assert found(*arguments)["objects"] == 4
    assert "nothing of weights 'llama@1' is in" in refused(*arguments)
    assert [row["damaged"] for row in found("verify", "--folder", str(tmp_path))["spaces"]] == [0]


def test_gc(tmp_path: Path) -> None:
    """Spaces go until the folder fits; status 1 where engines hold more than may stay."""
    fill(tmp_path)
    assert len(found("gc", "--folder", str(tmp_path), "--capacity-bytes", "33000")["removed"]) == 1
    with Rig(tmp_path, space=space_of("llama@1", rank=1), num_slots=100):
        facts = found("gc", "--folder", str(tmp_path), "--capacity-bytes", "0", status=1)
    assert [space["rank"] for space in facts["kept"]] == [1]
    assert run("gc", "--folder", str(tmp_path), "--capacity-bytes", "0").returncode == 0
    assert run("ls", "--folder", str(tmp_path)).stdout.startswith(f"nothing is in folder '{tmp_path}'\n")


def test_beside_a_living_engine(tmp_path: Path) -> None:
    """What two ranks of a real cache have written is listed and whole, by the engine's own configuration file, and the
    engine keeps it."""
    storage = file_storage(tmp_path / "store")
    toml = tmp_path / "cache.toml"
    toml.write_text(
        f"num_gpu_blocks = 4\n[layout]\nnum_layers = 1\nnum_kv_heads = 1\nhead_dim = 8\n"
        f'[storage]\nfolder = "{storage.folder}"\nweights_id = "w1"\n'
    )
    with PrefixCacheManager(storage_config(2, storage)) as cache:
        Engine(cache, 2).serve(PROMPT)
        drained(cache)
        (row,) = found("ls", "--config", str(toml))["weights"]
        assert (row["weights_id"], row["open_spaces"], row["ranks"][0]["ranks"]) == ("w1", 2, [0, 1])
        assert [space["damaged"] for space in found("verify", "--config", str(toml))["spaces"]] == [0, 0]
        assert len(found("clear", "--config", str(toml), "--weights-id", "w1", status=1)["kept"]) == 2
    assert found("clear", "--config", str(toml), "--weights-id", "w1")["objects"] == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls"], "give one of --folder, --server-url, --master-address, --config; found none"),
        (["ls", "--folder", "a", "--config", "b"], "found --folder and --config"),
        (["ls", "--folder", "a", "--password-file", "b"], "--password-file goes with --server-url, not with --folder"),
        (["ls", "--server-url", "a", "--metrics-url", "b"], "goes with --master-address or --config"),
        (["ls", "--folder", "/no/such/folder"], "there is no folder '/no/such/folder'"),
        (["ls", "--folder", ""], "storage.folder is missing"),
        (["ls", "--folder", "/etc/hostname"], "there is no folder"),
        (["ls", "--folder", "/etc"], "is no store"),
        (["gc", "--folder", "/etc", "--capacity-bytes", "0"], "is no store"),
        (["ls", "--config", "/no/such/file"], "/no/such/file"),
        (["ls", "--server-url", "http://a"], "use unix:///path"),
        (["gc", "--master-address", "127.0.0.1:1", "--capacity-bytes", "0"], "evicts by itself"),
        (["ls", "--master-address", "127.0.0.1"], "use host:port"),
        (["ls", "--json", "/no/such/folder/file", "--folder", "/etc"], "cannot write"),
    ],
)
def test_refusals_in_one_line(arguments: list[str], words: str) -> None:
    """Options that make no sense together, and places that are none: status 1 and a line that says why."""
    assert words in refused(*arguments)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    """Whoever looks at or verifies weights that are not there has mistyped them, and is told which are."""
    fill(tmp_path)
    for command in ("ls", "stat", "verify"):
        line = refused(command, "--folder", str(tmp_path), "--weights-id", "llama@2")
        assert line.endswith(f"nothing of weights 'llama@2' is in folder '{tmp_path}'; there is: {ODD_ID!r}, llama@1\n")
    assert "no text in UTF-8" in refused("ls", "--folder", str(tmp_path), "--weights-id", "\udcff")


def test_configurations_without_a_store_to_look_after(tmp_path: Path) -> None:
    """No table [storage], and a store of the user's own: one line each."""
    toml = tmp_path / "cache.toml"
    text = "num_gpu_blocks = 4\n[layout]\nnum_layers = 1\nnum_kv_heads = 1\nhead_dim = 8\n"
    toml.write_text(text)
    assert "has no table [storage]" in refused("ls", "--config", str(toml))
    toml.write_text(text + "[storage]\nkind = 'mine:Store'\nweights_id = 'w1'\n")
    assert "storage.kind is 'mine:Store'" in refused("ls", "--config", str(toml))


def test_a_valkey_server(tmp_path: Path) -> None:
    """Listed, found damaged and cleared over the socket; one that has gone is one line."""
    server = ValkeyServer(tmp_path)
    server.start()
    place = ValkeyPlace(server)
    try:
        store, prompt = place.open()
        store.write(prompt.blocks())
        place.change("flip", place.space(), prompt, 3)
        (row,) = found("ls", "--server-url", server.unix_url)["weights"]
        assert (row["weights_id"], row["objects"], row["open_spaces"]) == (place.weights_id, 24, None)
        assert found("verify", "--server-url", server.tcp_url, status=1)["spaces"][0]["damaged"] == 1
        assert found("clear", "--server-url", server.unix_url, "--weights-id", place.weights_id)["objects"] == 24
        password = tmp_path / "password"
        password.write_text("secret")
        line = refused("ls", "--server-url", server.unix_url, "--password-file", str(password))
        assert "secret" not in line and "AUTH" in line
    finally:
        place.close()
        server.kill()
    assert "Connection refused" in refused("ls", "--server-url", server.unix_url)


@pytest.mark.leaks_allowed
def test_a_mooncake_cluster() -> None:
    """Weights are digests until the operator names them; a master that has gone is one line, and Mooncake's own words
    about it are not heard."""
    master = MooncakeMaster()
    master.start()
    lender = MooncakeLender(master)
    place = MooncakePlace(master, lender)
    where = ("--master-address", master.address, "--metrics-url", master.metrics_url)
    named = (*where, "--weights-id", place.weights_id)
    try:
        store, prompt = place.open()
        store.write(prompt.blocks())
        place.change("flip", place.space(), prompt, 3)
        (row,) = found("ls", *where)["weights"]
        assert (row["weights_id"], row["objects"], row["bytes"], row["ranks"]) == (None, 24, 24_000, [])
        assert run("ls", *named).stdout.count(place.weights_id) == 1
        assert found("verify", *named, status=1)["spaces"][0]["damaged"] == 1
        assert "there is: digest" in refused("stat", *where, "--weights-id", "w1")
        result = run("clear", *named)
        assert (result.returncode, result.stderr, result.stdout[:10]) == (0, "", "24 objects")
    finally:
        place.close()
        lender.kill()
        master.kill()
    for command in ("ls", "verify", "clear"):
        refused(command, *named)
    assert ":9003" in refused("ls", "--master-address", f"127.0.0.1:{free_port()}")
