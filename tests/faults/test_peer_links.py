"""The same verbs whatever moves the bytes: NIXL, Mooncake, a store; and over TCP between hosts that know each other."""

from __future__ import annotations

import base64
import dataclasses
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import PrefixCacheManager, StorageConfig
from fastdeploy_cache.errors import ConfigError, PeerRefusedError
from fastdeploy_cache.ipc.peer_channel import make_keys
from tests.rigs.instance import BLOCK_SIZE, LAYOUT, Instance, new_config
from tests.rigs.needs import need_mooncake, need_nixl
from tests.rigs.peer_instances import NONE_HELD, NUM_BLOCKS, TOKENS, Rig
from tests.rigs.storage_servers import ValkeyServer, free_port

pytestmark = pytest.mark.processes


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as opened:
        yield Rig(opened)


def _need(link: str) -> None:
    if link == "nixl":
        need_nixl()
    if link == "mooncake":
        need_mooncake()


def _hand_over(prefill: Instance, decode: Instance, name: str) -> None:
    """One prompt, chunk by chunk."""
    decode.receive(name, TOKENS, prefill.offer(name, TOKENS))
    for num_tokens in (10, len(TOKENS)):
        prefill.compute(name, num_tokens)
    prefill.release(name)
    assert decode.wait_receive(name) == [True, None, None]
    assert decode.serve(name) == NUM_BLOCKS * BLOCK_SIZE
    assert prefill.wait_send(name) == [True, None, None]
    assert prefill.check() == decode.check() == NONE_HELD


@pytest.mark.parametrize("link", ["nixl", "mooncake"])
def test_other_libraries_move_the_bytes(rig: Rig, link: str) -> None:
    """Two ranks to one, as over shared memory."""
    _need(link)
    settings: dict[str, Any] = {"link": link, "silence_timeout_seconds": 10.0}
    _hand_over(rig.here("prefill", tp_size=2, **settings), rig.here("decode", **settings), "a")


@pytest.mark.parametrize("link", ["nixl", "mooncake"])
def test_prefill_killed_over_other_libraries(rig: Rig, link: str) -> None:
    """The receive ends within the time of silence, well before its deadline, and the next one is as good as ever."""
    _need(link)
    settings: dict[str, Any] = {"link": link, "silence_timeout_seconds": 3.0}
    doomed, other, decode = (
        rig.apart("prefill", **settings),
        rig.here("prefill", **settings),
        rig.here("decode", **settings),
    )
    decode.receive("a", TOKENS, base64.b64decode(doomed.do("offer", "a", TOKENS)))
    doomed.do("compute", "a", 16)
    doomed.kill()
    assert decode.wait_receive("a")[0] is False
    assert decode.serve("a") == 0
    assert decode.cache.peers.wait_ready(20)
    _hand_over(other, decode, "b")


def test_over_tcp_with_keys(rig: Rig, tmp_path: Path) -> None:
    """Each host has a key of its own and the other's public one; a host that the owner does not know gets nothing."""
    folders = {name: tmp_path / name for name in ("prefill", "decode", "stranger")}
    for folder in folders.values():
        make_keys(folder)
    for mine, other in (("prefill", "decode"), ("decode", "prefill"), ("stranger", "prefill")):
        shutil.copy(folders[other] / "own.key", folders[mine] / "trusted" / f"{other}.key")
    at = {name: {"listen": f"tcp://127.0.0.1:{free_port()}", "keys_folder": str(folders[name])} for name in folders}
    prefill, decode = rig.here("prefill", **at["prefill"]), rig.here("decode", **at["decode"])
    _hand_over(prefill, decode, "a")
    stranger = rig.here("decode", **at["stranger"])
    stranger.receive("b", TOKENS, prefill.offer("b", TOKENS))
    assert stranger.wait_receive("b")[:2] == [False, "gone"]
    unarmed = rig.here("decode")
    unarmed.receive("b", TOKENS, prefill.sends["b"].offer)
    assert unarmed.wait_receive("b")[:2] == [False, "refused"]
    prefill.release("b")


def test_what_would_be_open_to_all_is_refused(tmp_path: Path) -> None:
    """TCP without keys, an address that names no host, keys that are not there."""
    with pytest.raises(ConfigError, match="keys_folder"):
        new_config(listen="tcp://127.0.0.1:1234")
    with pytest.raises(ConfigError, match="name the address"):
        new_config(listen="tcp://0.0.0.0:1234", keys_folder=str(tmp_path))
    config = new_config(listen=f"tcp://127.0.0.1:{free_port()}", keys_folder=str(tmp_path))
    with pytest.raises(PeerRefusedError, match="peer-keys"):
        PrefixCacheManager(config)


def test_an_address_that_is_taken_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody waits for it, and nothing serves without others as if all were well."""
    make_keys(tmp_path / "keys")
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(PeerRefusedError, match=f"cannot listen at {listen}: Address already in use"):
            PrefixCacheManager(new_config(listen=listen, keys_folder=str(tmp_path / "keys")))


def test_through_a_store(rig: Rig, tmp_path: Path) -> None:
    """Prefill writes, decode prefetches; the offer is worth something once the send is done. By the same verbs."""
    server = ValkeyServer(tmp_path)
    server.start()
    try:
        with ExitStack() as opened:
            prefill, decode = (_stored(opened, role, server.tcp_url) for role in ("prefill", "decode"))
            offer = prefill.offer("a", TOKENS)
            prefill.compute_all("a")
            prefill.release("a")
            assert prefill.wait_send("a") == [True, None, None]
            assert decode.receive("a", TOKENS, offer) == NUM_BLOCKS
            assert decode.wait_receive("a") == [True, None, None]
            assert decode.serve("a") == NUM_BLOCKS * BLOCK_SIZE
            again = prefill.offer("b", TOKENS)
            prefill.compute_all("b")
            assert prefill.wait_send("b") == [True, None, None], "it is there already"
            prefill.release("b")
            assert decode.receive("b", TOKENS, again) == 0 and decode.wait_receive("b")[0]
            decode.serve("b")
            other = [5, *TOKENS]
            prefill.offer("c", other)
            prefill.release("c")
            assert prefill.wait_send("c")[1] == "failed"
            server.pause()
            offer = prefill.offer("d", [6, *TOKENS])
            prefill.compute_all("d")
            prefill.release("d")
            assert prefill.wait_send("d")[0] is False, "a hung store"
            server.resume()
            assert prefill.check() == decode.check() == NONE_HELD
    finally:
        server.kill()


class _StoredInstance(Instance):
    """Steps of its own model mark no layers: a store takes whole blocks."""

    def compute_all(self, name: str) -> None:
        """The whole prompt in one step."""
        request, table, done = self._requests[name]
        tokens = list(memoryview(request.tokens).cast("i"))
        for block in range(done, len(tokens) // BLOCK_SIZE):
            for layer in range(LAYOUT.num_layers):
                for memory, wanted in self._layer(tokens[: (block + 1) * BLOCK_SIZE], table[block], layer):
                    memory[...] = wanted
        self.cache.commit(request, len(tokens))


def _stored(opened: ExitStack, role: str, url: str) -> _StoredInstance:

    config = new_config(num_cpu=64, role=role, offer_timeout_seconds=8.0)
    settings: dict[str, Any] = {
        "peer": dataclasses.replace(config.peer, link="storage"),  # type: ignore[type-var]
        "storage": StorageConfig(kind="valkey", server_url=url, weights_id="w", task_timeout_seconds=2.0),
        "min_prefetch_tokens": 4,
        "prefetch_policy": "wait_complete",
    }
    config = dataclasses.replace(config, **settings)
    return _StoredInstance(opened.enter_context(PrefixCacheManager(config)))


def test_a_store_that_is_not_shared_is_refused() -> None:
    """No store, one engine's own, other weights than the peer's."""

    with pytest.raises(ConfigError, match="without a table 'storage'"):
        new_config(link="storage")
    config = new_config()
    peer = dataclasses.replace(config.peer, link="storage")  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="one engine's own"):
        dataclasses.replace(config, peer=peer, storage=StorageConfig(kind="file", folder="/x", weights_id="w"))
    with pytest.raises(ConfigError, match="the same weights"):
        dataclasses.replace(config, peer=peer, storage=StorageConfig(kind="valkey", weights_id="v"))
