"""Encryption at rest: what lies in a store tells nothing, and only the right key, under the right name, opens it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.errors import ConfigError, StorageRefusedError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.transfer_manager.storage import encrypted
from fastdeploy_cache.transfer_manager.storage.base import Blocks, Written
from fastdeploy_cache.transfer_manager.storage.config import ENCRYPTED_BYTES
from fastdeploy_cache.transfer_manager.storage.encrypted import EncryptedStorage
from fastdeploy_cache.transfer_manager.storage.keys import owned, owner_mark
from fastdeploy_cache.transfer_manager.storage.tenant_keys import TenantKeys, read_keys
from tests.rigs.manual_clock import ManualClock
from tests.rigs.places import EncryptedPlace, Prompt

ACME, OTHER = owner_mark("acme"), owner_mark("other")
KEY, WRONG = bytes(range(32)), bytes(32)
SECONDS = 30.0
SECRET = np.float32(1234.5)


class Vault(EncryptedPlace):
    """Stores over one dictionary, with the keys that a test says."""

    def opened(self, keys: TenantKeys, clock: Clock = SYSTEM_CLOCK) -> tuple[EncryptedStorage, Prompt]:
        space = self.space()
        prompt = Prompt(np.zeros((6, space.object_bytes), np.uint8))
        store = EncryptedStorage(self.kind, self.options, space, prompt.segment, keys, clock=clock)
        self._stores.append(store)
        prompt.hashes = [owned(name, ACME) for name in prompt.hashes]
        prompt.fill()
        return store, prompt


@pytest.fixture
def vault() -> Iterator[Vault]:
    vault = Vault()
    yield vault
    vault.close()


def _of(prompt: Prompt, owner: bytes, first: int = 0) -> Any:
    return dataclasses.replace(prompt.blocks(first), owner=owner)


def test_what_is_stored_tells_nothing(vault: Vault) -> None:
    """No object has the bytes of a block in it, and the same bytes are never stored the same way twice."""
    store, prompt = vault.opened(TenantKeys({ACME: KEY}, None))
    prompt.data[:] = prompt.data[0]
    prompt.fill()
    store.write(_of(prompt, ACME))
    values = list(vault.objects.values())
    assert len(set(values)) == len(values) == 6
    assert not any(prompt.data[0].tobytes()[:16] in value for value in values)


def test_a_wrong_key_is_a_miss(vault: Vault) -> None:
    """Nothing is read or removed; after three objects the store is not asked for a minute, and then once more. One
    object alone never ends it, and what the key opens ends that."""
    clock = ManualClock()
    right, prompt = vault.opened(TenantKeys({ACME: KEY}, None), clock)
    right.write(_of(prompt, ACME))
    wrong, theirs = vault.opened(TenantKeys({ACME: WRONG}, None), clock)
    theirs.wipe()
    for _ in range(4):
        assert wrong.count_leading(_of(theirs, ACME)) == 6
        assert wrong.read(_of(theirs, ACME)) == 0
    for first in (1, 2):
        assert wrong.read(_of(theirs, ACME, first)) == 0
    assert wrong.count_leading(_of(theirs, ACME)) == 0
    assert wrong.stats().num_damaged == 6
    assert len(vault.objects) == 6
    prompt.wipe()
    assert right.read(_of(prompt, ACME)) == 6
    clock.advance(61.0)
    assert wrong.count_leading(_of(theirs, ACME)) == 6
    assert wrong.read(_of(theirs, ACME)) == 0
    assert wrong.count_leading(_of(theirs, ACME)) == 0
    clock.advance(61.0)
    vault.objects.clear()
    wrong.write(_of(theirs, ACME))
    assert wrong.read(_of(theirs, ACME)) == 6
    assert wrong.count_leading(_of(theirs, ACME)) == 6


def test_an_owner_without_a_key_stores_nothing(vault: Vault) -> None:
    """What has no key is declined, counted, and not found; a master key gives each owner one of its own."""
    store, prompt = vault.opened(TenantKeys({OTHER: KEY}, None))
    assert store.write(_of(prompt, ACME)) == (0, 0)
    assert (store.count_leading(_of(prompt, ACME)), store.read(_of(prompt, ACME))) == (0, 0)
    assert (vault.objects, store.stats().num_declined) == ({}, 6)
    keys = TenantKeys({OTHER: KEY}, WRONG)
    assert keys.of(OTHER) == KEY
    assert len({keys.of(ACME), keys.of(b""), keys.of(OTHER), WRONG}) == 4


def test_one_object_does_not_pass_for_another(vault: Vault) -> None:
    """Objects whose names were exchanged open under neither name, though the key is right."""
    store, prompt = vault.opened(TenantKeys({ACME: KEY}, None))
    store.write(_of(prompt, ACME))
    first, second, *_ = vault.objects
    vault.objects[first], vault.objects[second] = vault.objects[second], vault.objects[first]
    prompt.wipe()
    assert store.read(_of(prompt, ACME)) == 0


def _file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ('[keys]\nacme = "00"\n', 0o600, "the key of 'acme' is not 32, 48 or 64 hexadecimal digits"),
        ('[keys]\nacme = "zz"\n', 0o600, "the key of 'acme' is not"),
        (f'[keys]\nacme = "{KEY.hex()}"\n', 0o640, "which others may read; chmod 600 it"),
        ("[keys]\n", 0o600, "give it one table, \\[keys\\]"),
        (f'acme = "{KEY.hex()}"\n', 0o600, "give it one table, \\[keys\\]"),
        ("no toml", 0o600, "and cannot be read"),
    ],
)
def test_files_without_good_keys_are_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    """The file is named, and what is wrong with it; no key is ever shown."""
    with pytest.raises(StorageRefusedError, match=message) as refused:
        read_keys(_file(tmp_path, text, mode))
    assert KEY.hex() not in str(refused.value)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """It is refused, and not waited for."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(StorageRefusedError, match="which is no file"):
        read_keys(str(tmp_path / "pipe"))


@pytest.mark.parametrize("keys_file", [5, True, b"x", ""])
def test_what_is_no_path_is_refused(keys_file: Any) -> None:
    """By the settings themselves, as any other value that cannot be."""
    with pytest.raises(ConfigError, match="give the path of a file"):
        StorageConfig(weights_id="w", folder="/f", capacity_bytes=2**20, keys_file=keys_file)


def test_a_batch_has_its_own_tokens(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that want token ids get those up to a batch's end, in batches of two blocks here."""
    size = vault.space().object_bytes + ENCRYPTED_BYTES
    monkeypatch.setattr(encrypted, "_STAGING_BYTES", 2 * size)
    store, prompt = vault.opened(TenantKeys({ACME: KEY}, None))
    given = list[Blocks]()
    monkeypatch.setattr(store._store, "write", lambda blocks: given.append(blocks) or Written(len(blocks.hashes), 0))
    store.write(_of(prompt, ACME))
    tokens = [blocks.token_ids for blocks in given]
    assert [len(each) for each in tokens if each is not None] == [8, 16, 24]
    assert [list(blocks.hashes) for blocks in given] == [prompt.hashes[at : at + 2] for at in (0, 2, 4)]


def test_keys_of_a_file(tmp_path: Path) -> None:
    """Each namespace has its own, and `*` is for all others."""
    keys = read_keys(_file(tmp_path, f'[keys]\nacme = "{KEY.hex()}"\n"*" = "{WRONG.hex()}"\n'))
    assert keys.of(ACME) == KEY
    assert keys.of(OTHER) not in {None, KEY, WRONG}
    with pytest.raises(StorageRefusedError, match="cannot be read"):
        read_keys(str(tmp_path / "none.toml"))


def _serve(cache: PrefixCacheManager) -> int:
    """One request of the tenant, whose every number is the secret one; how many of its tokens came from somewhere."""
    request = Request(request_id="r", prompt_token_ids=list(range(33)), namespace="acme")
    cache.prefetch(request)
    match = cache.match(request).wait(SECONDS)
    blocks = cache.allocate(request, 9 - len(match.block_ids))
    for layer in cache.ranks.kv_views(0):
        for part in layer.values():
            if match.block_ids:
                assert (part[match.block_ids] == SECRET).all()
            part[blocks] = SECRET
    cache.commit(request, 32)
    cache.release(request)
    return match.num_tokens


@pytest.mark.processes
def test_with_real_processes_and_a_disk(tmp_path: Path) -> None:
    """The disk has nothing of it in clear; it is found after a restart, and with another key it is computed again."""
    keys = _file(tmp_path, f'[keys]\nacme = "{KEY.hex()}"\n')
    store = StorageConfig(
        weights_id="w", folder=str(tmp_path / "kv"), capacity_bytes=2**20, admission="all", keys_file=keys
    )
    config = CacheConfig(
        block_size=4,
        num_gpu_blocks=24,
        num_cpu_blocks=24,
        layout=KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"),
        load_policy="always",
        min_prefetch_tokens=1,
        prefetch_policy="wait_complete",
        storage=store,
    )
    with PrefixCacheManager(config) as cache:
        assert _serve(cache) == 0
        assert cache.storage.flush(SECONDS)
    disk = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert len(disk) > 8 * 512
    assert SECRET.tobytes() * 2 not in disk
    with PrefixCacheManager(config) as cache:
        assert _serve(cache) == 32
    _file(tmp_path, f'[keys]\nacme = "{WRONG.hex()}"\n')
    with PrefixCacheManager(config) as cache:
        assert _serve(cache) == 0
        cache.check_invariants()
