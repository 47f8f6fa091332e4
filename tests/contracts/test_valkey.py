"""What a Valkey server's faults come to, and its passwords and certificates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fastdeploy_cache.errors import StorageError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage import open_storage
from fastdeploy_cache.transfer_manager.storage.base import Storage
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from tests.rigs.places import Prompt
from tests.rigs.storage_servers import TlsRelay, ValkeyServer, free_port

pytestmark = pytest.mark.processes

SPACE = KeySpace(weights_id="tests", layout="bytes", object_bytes=5000, block_size=4, rank=0, tp_size=1)
Opener = Callable[..., tuple[Storage, Prompt]]
SOMEONE = ["--user", "someone", "on", ">other:secret", "~*", "&*", "+@all"]


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[Callable[..., ValkeyServer]]:
    """Starts servers of the test's own, with more arguments where given."""
    servers: list[ValkeyServer] = []

    def new(*arguments: str) -> ValkeyServer:
        servers.append(ValkeyServer(tmp_path, *arguments))
        servers[-1].start()
        return servers[-1]

    yield new
    for server in servers:
        server.kill()


@pytest.fixture
def open_store() -> Iterator[Opener]:
    """Opens stores by settings, and closes them."""
    stores: list[Storage] = []

    def new(space: KeySpace = SPACE, **settings: Any) -> tuple[Storage, Prompt]:
        prompt = Prompt(np.zeros((12, space.object_bytes), np.uint8))
        stores.append(open_storage("valkey", options_of(**settings), space, prompt.segment))
        prompt.fill()
        return stores[-1], prompt

    yield new
    for store in stores:
        store.close()


def options_of(**settings: Any) -> dict[str, Any]:
    """The store's options of some settings."""
    return StorageConfig(kind="valkey", weights_id="any", **settings).store_options(tp_size=1)


def calls(store: Storage, prompt: Prompt) -> list[Callable[[], object]]:
    """Every call that needs the server."""
    return [
        lambda: store.count_leading(prompt.blocks()),
        lambda: store.read(prompt.blocks()),
        lambda: store.write(prompt.blocks()),
        lambda: store.remove(prompt.hashes),
        lambda: store.clear("tests"),
    ]


@pytest.mark.parametrize("way", ["tcp_url", "unix_url"])
def test_a_server_that_hangs(new_server: Callable[..., ValkeyServer], open_store: Opener, way: str) -> None:
    """Calls to a stopped server end in an error by themselves; when it goes on, so does the store."""
    server = new_server()
    store, prompt = open_store(server_url=getattr(server, way))
    store.write(prompt.blocks())
    server.pause()
    for call in calls(store, prompt)[:3]:
        with pytest.raises(StorageError, match="Timeout"):
            call()
    with pytest.raises(StorageError, match="Timeout"):
        open_store(server_url=getattr(server, way))
    server.resume()
    prompt.wipe()
    assert store.read(prompt.blocks()) == len(prompt.hashes)
    np.testing.assert_array_equal(prompt.segment, prompt.data)


@pytest.mark.parametrize("way", ["tcp_url", "unix_url"])
def test_a_server_that_is_killed(new_server: Callable[..., ValkeyServer], open_store: Opener, way: str) -> None:
    """Without a server every call fails, but the store's statistics; with a new one it works again, empty."""
    server = new_server()
    store, prompt = open_store(server_url=getattr(server, way))
    store.write(prompt.blocks())
    server.kill()
    for call in calls(store, prompt):
        with pytest.raises(StorageError, match="valkey server"):
            call()
    assert store.stats().num_damaged == 0
    with pytest.raises(StorageError, match="valkey server") as caught:
        open_store(server_url=getattr(server, way))
    assert not isinstance(caught.value, StorageRefusedError)
    server.start()
    assert store.count_leading(prompt.blocks()) == 0
    assert store.write(prompt.blocks()).num_leading == len(prompt.hashes)
    prompt.wipe()
    assert store.read(prompt.blocks()) == len(prompt.hashes)
    np.testing.assert_array_equal(prompt.segment, prompt.data)


def test_a_full_server_declines(new_server: Callable[..., ValkeyServer], open_store: Opener) -> None:
    """A server without memory and eviction takes leading blocks and declines the rest; those can be read."""
    server = new_server("--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    store, prompt = open_store(replace(SPACE, object_bytes=2**20), server_url=server.unix_url)
    written = store.write(prompt.blocks())
    assert 0 < written.num_leading < len(prompt.hashes)
    assert store.stats().num_declined == len(prompt.hashes) - written.num_leading
    prompt.wipe()
    assert store.read(prompt.blocks()) == store.count_leading(prompt.blocks()) == written.num_leading
    np.testing.assert_array_equal(prompt.segment[: written.num_leading], prompt.data[: written.num_leading])


def test_unused_objects_expire(new_server: Callable[..., ValkeyServer], open_store: Opener) -> None:
    """Objects are written with a time to live, and reading them starts it anew."""
    import valkey

    server = new_server()
    store, prompt = open_store(server_url=server.unix_url, time_to_live_seconds=1000)
    store.write(prompt.blocks())
    with valkey.Valkey(unix_socket_path=str(server.socket_path)) as client:
        keys = [SPACE.key(block_hash) for block_hash in prompt.hashes]
        assert all(0 < client.ttl(key) <= 1000 for key in keys)
        for key in keys:
            client.expire(key, 100)
        assert store.read(prompt.blocks(0, 4)) == 4
        assert [client.ttl(key) > 100 for key in keys] == [True] * 4 + [False] * 8
        client.connection_pool.disconnect()


def test_something_else_under_a_name(new_server: Callable[..., ValkeyServer], open_store: Opener) -> None:
    """A list where an object should be is not there for a count, an error for a read, and replaced by a write."""
    import valkey

    server = new_server()
    store, prompt = open_store(server_url=server.unix_url)
    with valkey.Valkey(unix_socket_path=str(server.socket_path)) as client:
        client.rpush(SPACE.key(prompt.hashes[0]), "x")
        client.connection_pool.disconnect()
    assert store.count_leading(prompt.blocks()) == 0
    with pytest.raises(StorageError, match="WRONGTYPE"):
        store.read(prompt.blocks())
    assert store.write(prompt.blocks()).num_leading == len(prompt.hashes)
    assert store.read(prompt.blocks()) == len(prompt.hashes)


@pytest.mark.parametrize("content", ["so secret\n", "default:so secret", "someone:other:secret"])
def test_the_right_password(
    new_server: Callable[..., ValkeyServer], open_store: Opener, tmp_path: Path, content: str
) -> None:
    """A password alone, or behind its user, opens the store."""
    server = new_server("--requirepass", "so secret", *SOMEONE)
    file = tmp_path / "password"
    file.write_text(content)
    store, prompt = open_store(server_url=server.tcp_url, password_file=str(file))
    assert store.write(prompt.blocks()).num_leading == len(prompt.hashes)


def test_wrong_passwords(new_server: Callable[..., ValkeyServer], open_store: Opener, tmp_path: Path) -> None:
    """A wrong, missing or unreadable password is refused for good, and no message shows one."""
    server = new_server("--requirepass", "so secret")
    file = tmp_path / "password"
    file.write_text("not it")
    with pytest.raises(StorageRefusedError) as caught:
        open_store(server_url=server.tcp_url, password_file=str(file))
    assert "not it" not in str(caught.value)
    with pytest.raises(StorageRefusedError):
        open_store(server_url=server.tcp_url)
    with pytest.raises(StorageRefusedError) as caught:
        open_store(server_url=server.tcp_url.replace("//", "//:hidden@"))
    assert "hidden" not in str(caught.value)
    with pytest.raises(StorageRefusedError, match="password_file"):
        open_store(server_url=server.tcp_url, password_file=str(tmp_path / "nowhere"))


def test_tls(new_server: Callable[..., ValkeyServer], open_store: Opener, tmp_path: Path) -> None:
    """With the right authority the store works over TLS; any other, none, or no TLS at all is refused."""
    server = new_server()
    relay, other = TlsRelay(tmp_path / "tls", server.port), TlsRelay(tmp_path / "other", server.port)
    relay.start()
    try:
        for url in (relay.url, relay.url.replace("valkeys", "rediss")):
            store, prompt = open_store(server_url=url, tls_ca_file=str(relay.certificate))
            assert store.write(prompt.blocks()).num_leading == len(prompt.hashes)
            assert store.read(prompt.blocks()) == len(prompt.hashes)
        for ca_file in (str(other.certificate), None):
            with pytest.raises(StorageRefusedError, match="CERTIFICATE_VERIFY_FAILED"):
                open_store(server_url=relay.url, tls_ca_file=ca_file)
        name = relay.url.replace("127.0.0.1", "localhost")  # the certificate is for the address only
        with pytest.raises(StorageRefusedError, match="CERTIFICATE_VERIFY_FAILED"):
            open_store(server_url=name, tls_ca_file=str(relay.certificate))
    finally:
        relay.kill()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server_url": "valkey://127.0.0.1:1/0", "tls_ca_file": "/nowhere.pem"}, "without TLS"),
        ({"server_url": "valkeys://127.0.0.1:1/0", "tls_ca_file": "/nowhere.pem"}, "tls_ca_file"),
        ({"server_url": "http://127.0.0.1:1/0"}, "server_url"),
        ({"server_url": "valkey://127.0.0.1:port/0"}, "server_url"),
    ],
)
def test_settings_that_cannot_be(open_store: Opener, settings: dict[str, str], message: str) -> None:
    """What no server could help is refused with the setting's name."""
    with pytest.raises(StorageRefusedError, match=message):
        open_store(**settings)


def test_the_package_is_missing(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the client library the message names the package."""
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(StorageRefusedError, match=r"pip install 'valkey\[libvalkey\]'"):
        open_store(server_url=f"valkey://127.0.0.1:{free_port()}")
