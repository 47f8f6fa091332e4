"""Encryption at rest: what lies in a store tells nothing, and only the right key, under the right name, opens it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.encrypted import EncryptedStorage
from fastdeploy_cache.transfer_manager.storage.keys import owned, owner_mark
from fastdeploy_cache.transfer_manager.storage.tenant_keys import TenantKeys, read_keys
from tests.rigs.places import EncryptedPlace, Prompt

ACME, OTHER = owner_mark("acme"), owner_mark("other")
KEY, WRONG = bytes(range(32)), bytes(32)
SECONDS = 30.0
SECRET = np.float32(1234.5)


class Vault(EncryptedPlace):
    """Stores over one dictionary, with the keys that a test says."""

    def opened(self, keys: TenantKeys) -> tuple[EncryptedStorage, Prompt]:
        space = self.space()
        prompt = Prompt(np.zeros((6, space.object_bytes), np.uint8))
        store = EncryptedStorage(self.kind, self.options, space, prompt.segment, keys)
        self._stores.append(store)
        prompt.hashes = [owned(name, ACME) for name in prompt.hashes]
        prompt.fill()
        return store, prompt


@pytest.fixture
def vault() -> Iterator[Vault]:
    vault = Vault()
    yield vault
    vault.close()


def _of(prompt: Prompt, owner: bytes) -> Any:
    import dataclasses

    return dataclasses.replace(prompt.blocks(), owner=owner)


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
    """Nothing is read or removed, and after some tries the store is not asked any more; the right key reads."""
    right, prompt = vault.opened(TenantKeys({ACME: KEY}, None))
    right.write(_of(prompt, ACME))
    wrong, theirs = vault.opened(TenantKeys({ACME: WRONG}, None))
    theirs.wipe()
    for _ in range(3):
        assert wrong.count_leading(_of(theirs, ACME)) == 6
        assert wrong.read(_of(theirs, ACME)) == 0
    assert wrong.count_leading(_of(theirs, ACME)) == 0
    assert wrong.stats().num_damaged == 3
    assert len(vault.objects) == 6
    prompt.wipe()
    assert right.read(_of(prompt, ACME)) == 6
    np.testing.assert_array_equal(prompt.segment, prompt.data)


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
