"""`fastdeploy-cache config check`: what it tries on the machine, and what its exit status says."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.errors import DeviceError, NotEnoughMemoryError
from fastdeploy_cache.launch import config_check
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.transfer_manager.device import cuda_driver
from tests.rigs.file_rig import Rig

SETTINGS = """
num_gpu_blocks = 4
num_cpu_blocks = 8
block_size = 16
[layout]
num_layers = 2
num_kv_heads = 2
head_dim = 8
"""
CAPACITY = 2**20


class Usage(NamedTuple):
    free: int


def check(tmp_path: Path, more: str) -> tuple[int, str, list[str]]:
    """Status, standard output, and the lines of standard error."""
    file = tmp_path / "cache.toml"
    file.write_text(SETTINGS + more)
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr.splitlines()


def storage(folder: Path | str, capacity_bytes: int = CAPACITY) -> str:
    return f"[storage]\nfolder = '{folder}'\nweights_id = 'w1'\ncapacity_bytes = {capacity_bytes}\n"


def test_all_is_there(tmp_path: Path) -> None:
    """Status 0, the sizes, and no trace: a folder that was missing is missing again, with those above it."""
    with Rig(tmp_path / "old") as rig:
        rig.write(1)
    before = sorted((tmp_path / "old").rglob("*"))
    for folder in (tmp_path / "new" / "store", tmp_path / "old"):
        status, words, problems = check(tmp_path, storage(folder))
        assert (status, problems) == (0, []) and f"bytes on disk: {CAPACITY}" in words
    assert not (tmp_path / "new").exists() and sorted((tmp_path / "old").rglob("*")) == before


@pytest.mark.parametrize("place", ["cache.toml", "cache.toml/below", "/proc/none/store", "n" * 300])
def test_a_folder_that_cannot_be_used(tmp_path: Path, place: str) -> None:
    """Status 1 and one line with the folder; the sizes are printed all the same."""
    status, words, (problem,) = check(tmp_path, storage(tmp_path / place))
    assert status == 1 and "GPU pool: 4 blocks" in words
    assert problem.startswith(f"fastdeploy-cache: storage.folder is '{tmp_path / place}', which cannot be used: ")


def test_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free and what the store has already have to be as much as its capacity."""
    with Rig(tmp_path / "old", num_slots=8, slots_per_slab=4) as rig:
        rig.write(1)  # a slab of four pages
    monkeypatch.setattr(config_check.shutil, "disk_usage", lambda _: Usage(CAPACITY - 4 * 4096))
    assert check(tmp_path, storage(tmp_path / "old"))[0] == 0
    status, _, (problem,) = check(tmp_path, storage(tmp_path / "old", CAPACITY + 1))
    assert status == 1 and f"has {CAPACITY - 4 * 4096} bytes free, and the store there takes 16384 already" in problem
    status, _, (problem,) = check(tmp_path, storage(tmp_path / "new"))
    assert status == 1 and f"storage.capacity_bytes is {CAPACITY}, but the disk of" in problem


def test_room_on_the_real_disk(tmp_path: Path) -> None:
    """More than there is."""
    num_bytes = shutil.disk_usage(tmp_path).total * 2
    status, _, (problem,) = check(tmp_path, storage(tmp_path / "new", num_bytes))
    assert status == 1 and f"storage.capacity_bytes is {num_bytes}" in problem


STORES = {  # settings that an engine refuses, by what it says
    "kind = 'valkey'\nserver_url = 'localhost:6379'": "storage.server_url (valkey server",
    "kind = 'valkey'\npassword_file = '/no/such/file'": "storage.password_file '/no/such/file' cannot be read",
    "kind = 'no_such_module:Store'": "and no_such_module:Store cannot be imported: No module named",
    "kind = 'tests.rigs.memory_storage:Misspelt'": "and tests.rigs.memory_storage:Misspelt cannot be imported",
}


@pytest.mark.parametrize("settings", STORES)
def test_a_store_that_an_engine_refuses(tmp_path: Path, settings: str) -> None:
    """Status 1 and the engine's own words; the store itself is not asked."""
    status, _, (problem,) = check(tmp_path, f"[storage]\nweights_id = 'w1'\n{settings}\n")
    assert status == 1 and STORES[settings] in problem


@pytest.mark.parametrize(("kind", "package"), [("valkey", "valkey"), ("mooncake", "mooncake.store")])
def test_a_store_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str) -> None:
    """Status 1, and what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    status, _, (problem,) = check(tmp_path, f"[storage]\nweights_id = 'w1'\nkind = '{kind}'\n")
    assert status == 1 and f"storage.kind '{kind}' needs pip install" in problem


def test_keys_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 1 for a file of keys that is not there, and where the package is missing."""
    settings = "[storage]\nweights_id = 'w1'\nkind = 'valkey'\nkeys_file = '/no/such/keys'\n"
    status, _, (problem,) = check(tmp_path, settings)
    assert status == 1 and "storage.keys_file is '/no/such/keys', and cannot be read" in problem
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    status, _, (problem,) = check(tmp_path, settings)
    assert status == 1 and "pip install 'fastdeploy-cache[encryption]'" in problem


@pytest.mark.parametrize("kind", ["valkey", "tests.rigs.memory_storage:MemoryStorage"])
def test_a_store_that_can_be_opened(tmp_path: Path, kind: str) -> None:
    """Its settings are understood: an engine starts with it, also while no server answers."""
    assert check(tmp_path, f"[storage]\nweights_id = 'w1'\nkind = '{kind}'\n")[0] == 0


def test_the_secret_of_a_group(tmp_path: Path) -> None:
    """One that is not there, as the engine says it."""
    status, _, (problem,) = check(tmp_path, "[peer]\nweights_id = 'w1'\nsecret_file = '/no/such/file'\n")
    assert status == 1 and "peer.secret_file /no/such/file" in problem


def test_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked for the device of each rank."""
    asked = []

    class OneGpu:
        def __init__(self, device_id: int) -> None:
            asked.append(device_id)
            if device_id:
                raise DeviceError(f"no CUDA device {device_id}: the driver sees 1")

    monkeypatch.setattr(cuda_driver, "Cuda", OneGpu)
    transfer = "[transfer]\ndevice = 'cuda'\ntp_size = 2\ndevice_ids = "
    assert check(tmp_path, transfer + "[0, 0]\n")[0] == 0
    status, _, (problem,) = check(tmp_path, transfer + "[0, 7]\n")
    assert status == 1 and "rank 1 cannot have its device: no CUDA device 7: the driver sees 1" in problem
    assert asked == [0, 0, 0, 7]


def test_everything_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thing that is missing hides no other: a line for each."""
    monkeypatch.setattr(config_check, "check_available", _no_memory)
    monkeypatch.setattr(config_check.shutil, "disk_usage", lambda _: Usage(0))
    status, _, problems = check(tmp_path, storage(tmp_path / "store"))
    assert status == 1
    assert [word in line for word, line in zip(("bytes of memory", "0 bytes free"), problems, strict=True)] == [
        True
    ] * 2


def _no_memory(num_bytes: int, what: str) -> None:
    raise NotEnoughMemoryError(f"{what} needs {num_bytes} bytes of memory")


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("keys_folder = '/no/such/folder'", "keys of /no/such/folder"),
        ("query_token_file = '/no/such/file'", "events.query_token_file is '/no/such/file', and cannot be read"),
        ("query_token_file = '/proc/self/comm'", "which others may read; chmod 600 it"),
    ],
)
def test_what_events_need_is_tried(tmp_path: Path, setting: str, why: str) -> None:
    """Keys and the token, without a publisher."""
    status, _, (problem,) = check(tmp_path, f"[events]\nendpoint = 'ipc:///tmp/kv'\n{setting}\n")
    assert status == 1 and why in problem
