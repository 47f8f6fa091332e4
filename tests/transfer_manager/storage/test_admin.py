"""What every store shows and does for its operator, and what its server's faults come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fastdeploy_cache.errors import StorageError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage import mooncake_admin
from fastdeploy_cache.transfer_manager.storage.admin import Space, StorageAdmin, open_admin
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace, weights_digest_of
from tests.rigs.places import NUM_BLOCKS, FilePlace, MooncakePlace, Place, ValkeyPlace
from tests.rigs.storage_servers import MooncakeLender, MooncakeMaster, ValkeyServer, free_port

pytestmark = pytest.mark.processes

KINDS = ["file", "valkey", pytest.param("mooncake", marks=pytest.mark.leaks_allowed)]
ODD_KEYS = ("other", "fdc1:", "fdc1:a:b:c", "fdc2:" + "0" * 32, "ü [x]?&=#\nfdc1:")


class Servers:
    """What is started once for all tests here: they keep to weights of their own."""

    def __init__(self, folder: Path) -> None:
        self.valkey = ValkeyServer(folder)
        self.master = MooncakeMaster()
        self.valkey.start()
        self.master.start()
        self.lender = MooncakeLender(self.master)

    def place(self, kind: str, folder: Path) -> tuple[Place, dict[str, Any]]:
        """An empty place, and what its admin needs beside its options."""
        if kind == "file":
            folder.mkdir()
            return FilePlace(folder), {}
        if kind == "valkey":
            return ValkeyPlace(self.valkey), {}
        return MooncakePlace(self.master, self.lender), {"metrics_url": self.master.metrics_url}

    def stop(self) -> None:
        self.lender.kill()
        self.master.kill()
        self.valkey.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One of each."""
    servers = Servers(tmp_path_factory.mktemp("valkey"))
    yield servers
    servers.stop()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[tuple[Place, StorageAdmin]]:
    """A place of each kind, and its admin."""
    place, options = servers.place(request.param, tmp_path / "store")
    yield place, open_admin(place.kind, place.options | options)
    place.close()


def fill(place: Place, space: KeySpace, num_blocks: int = NUM_BLOCKS) -> Any:
    """Write blocks of a prompt, and make them durable."""
    store, prompt = place.open(space)
    assert store.write(prompt.blocks(0, num_blocks)).num_leading == num_blocks
    store.close()
    return prompt


def counts(admin: StorageAdmin, *spaces: KeySpace) -> list[tuple[int, int | None]]:
    """Objects and bytes of these spaces; where there are none, nothing is said."""
    found = {summary.space.where.rstrip(":")[-32:]: summary for summary in admin.spaces()}
    summaries = [found[space.digest] for space in spaces if space.digest in found]
    return [(summary.num_objects, summary.num_bytes) for summary in summaries]


def test_spaces(store: tuple[Place, StorageAdmin]) -> None:
    """Each space is told with its weights and sizes; what it is for, where the store knows it."""
    place, admin = store
    first, second = place.space(), place.space(rank=1, object_bytes=70_000)
    fill(place, first)
    fill(place, second, 5)
    assert counts(admin, first, second) == [(NUM_BLOCKS, NUM_BLOCKS * 1000), (5, 350_000)]
    ours = [one.space for one in admin.spaces() if one.space.weights_digest == weights_digest_of(place.weights_id)]
    if place.kind == "mooncake":
        assert [(space.key_space, space.weights_id) for space in ours] == [(None, None)] * 2
    else:
        assert {space.key_space for space in ours} == {first, second}
        assert {space.weights_id for space in ours} == {place.weights_id}


def test_verify(store: tuple[Place, StorageAdmin]) -> None:
    """Damaged objects of the chosen weights are found, and found again: verify removes nothing."""
    place, admin = store
    sound, bad, other = place.space(), place.space(rank=1), place.space(weights_id=f"not {place.weights_id}")
    prompt = fill(place, bad)
    place.change("flip", bad, prompt, 3)
    place.change("cut", bad, prompt, NUM_BLOCKS - 1)
    for space in (sound, other):  # of the same bytes, by which a place finds an object
        fill(place, space)
    for _ in range(2):
        found = {one.space.where.rstrip(":")[-32:]: one for one in admin.verify(place.weights_id)}
        assert found.keys() == {sound.digest, bad.digest}
        assert [
            (one.num_objects, one.num_damaged, one.num_gone) for one in (found[sound.digest], found[bad.digest])
        ] == [
            (NUM_BLOCKS, 0, 0),
            (NUM_BLOCKS, 2, 0),
        ]
    assert sum(one.num_damaged for one in admin.verify()) >= 2
    assert admin.verify("no such weights") == []
    admin.clear(place.weights_id)


def test_verify_removes_what_is_damaged(store: tuple[Place, StorageAdmin]) -> None:
    """Each damaged object is named by its block and a place, and is gone after the removal; the others stay."""
    place, admin = store
    space, heard = place.space(), []
    prompt = fill(place, space)
    place.change("flip", space, prompt, 3)
    (found,) = admin.verify(place.weights_id, on_object=lambda: heard.append(1))
    assert [each.block_hash for each in found.damage] == [prompt.hashes[3].hex()]
    assert ("slab-00000" if place.kind == "file" else prompt.hashes[3].hex()) in found.damage[0].where
    assert (found.is_well, len(heard)) == (False, NUM_BLOCKS)
    (found,) = admin.verify(place.weights_id, remove=True)
    assert found.is_well and found.num_damaged == 1
    (found,) = admin.verify(place.weights_id)
    assert (found.num_objects, found.num_damaged, found.is_well) == (NUM_BLOCKS - 1, 0, True)
    admin.clear(place.weights_id)


def test_a_dry_run_removes_nothing(store: tuple[Place, StorageAdmin]) -> None:
    """It says as much as the real one; ids are known where the store has them, free bytes where it has files."""
    place, admin = store
    fill(place, place.space())
    assert (place.weights_id in admin.weights_ids()) == (place.kind != "mooncake")
    assert (admin.free_bytes() is not None) == (place.kind == "file")
    dry = admin.clear(place.weights_id, dry_run=True)
    assert counts(admin, place.space()) == [(NUM_BLOCKS, NUM_BLOCKS * 1000)]
    assert admin.clear(place.weights_id) == dry and dry.num_objects == NUM_BLOCKS
    assert counts(admin, place.space()) == []


def test_clear(store: tuple[Place, StorageAdmin]) -> None:
    """All ranks' objects of the weights go, and no others; weights that are not there are none."""
    place, admin = store
    first, second, other = place.space(), place.space(rank=1), place.space(weights_id=f"not {place.weights_id}")
    for space in (first, second, other):
        fill(place, space)
    assert admin.clear("no such weights").num_objects == 0
    cleared = admin.clear(place.weights_id)
    assert (cleared.num_objects, cleared.kept) == (2 * NUM_BLOCKS, ())
    assert {space.key_space for space in cleared.removed} == ({first, second} if place.kind != "mooncake" else set())
    assert counts(admin, first, second, other) == [(NUM_BLOCKS, NUM_BLOCKS * 1000)]
    assert admin.verify(place.weights_id) == []
    assert admin.clear(place.weights_id).num_objects == 0


def test_large_objects(store: tuple[Place, StorageAdmin]) -> None:
    """An object larger than Mooncake's own buffer is read and checked."""
    place, admin = store
    space = place.space(object_bytes=20 * 2**20 + 1)
    store_, prompt = place.open(space, num_blocks=2)
    assert store_.write(prompt.blocks()).num_leading == 2
    store_.close()
    (found,) = admin.verify(place.weights_id)
    assert (found.num_objects, found.num_damaged, found.num_gone) == (2, 0, 0)
    admin.clear(place.weights_id)


@pytest.mark.parametrize("kind", ["valkey", "mooncake"])
def test_servers_have_no_gc(servers: Servers, tmp_path: Path, kind: str) -> None:
    """Where the server evicts, the operator is told so."""
    place, options = servers.place(kind, tmp_path)
    with pytest.raises(StorageRefusedError, match="evicts by itself"):
        open_admin(kind, place.options | options).gc(0)


def test_a_store_of_one_s_own() -> None:
    """Others' stores are not looked after here."""
    with pytest.raises(StorageRefusedError, match="'mine:Store'"):
        open_admin("mine:Store", {})


def test_foreign_things_in_a_valkey_server(tmp_path: Path) -> None:
    """Keys that only look like ours, and other types under ours, are neither counted, nor read, nor removed."""
    import valkey

    server = ValkeyServer(tmp_path)
    server.start()
    try:
        place = ValkeyPlace(server)
        admin = open_admin("valkey", place.options)
        prompt = fill(place, place.space(), 3)
        with valkey.Valkey(unix_socket_path=str(server.socket_path)) as client:
            for key in ODD_KEYS:
                client.set(key, "x")
            client.rpush(place.space().key(prompt.hashes[9]), "x")
            client.hset("fdc1:spaces", mapping={"1": "{}", "2": b"\xff"})
            assert counts(admin, place.space()) == [(3, 3000)]
            assert [(one.num_objects, one.num_damaged) for one in admin.verify()] == [(3, 0)]
            admin.clear(place.weights_id)
            assert client.exists(*ODD_KEYS) == len(ODD_KEYS)
            client.connection_pool.disconnect()
    finally:
        server.kill()


def test_verify_does_not_keep_objects_from_eviction(tmp_path: Path) -> None:
    """A Valkey server that counts uses counts no more of them after a verify."""
    import valkey

    server = ValkeyServer(tmp_path, "--maxmemory-policy", "allkeys-lfu")
    server.start()
    try:
        place = ValkeyPlace(server)
        key = place.space().key(fill(place, place.space()).hashes[0])
        with valkey.Valkey(unix_socket_path=str(server.socket_path)) as client:
            uses = client.object("freq", key)
            assert open_admin("valkey", place.options).verify()[0].num_objects == NUM_BLOCKS
            assert client.object("freq", key) == uses
            client.get(key)
            assert client.object("freq", key) == uses + 1
            client.connection_pool.disconnect()
    finally:
        server.kill()


def test_an_engine_that_writes_on_after_a_clear(tmp_path: Path) -> None:
    """Its space is listed no more; its objects are found, checked and cleared by their digests."""
    server = ValkeyServer(tmp_path)
    server.start()
    place = ValkeyPlace(server)
    try:
        admin = open_admin("valkey", place.options)
        store, prompt = place.open()
        admin.clear(place.weights_id)
        store.write(prompt.blocks())
        place.change("flip", place.space(), prompt, 0)
        (summary,) = admin.spaces()
        unknown = Space(where=place.space().prefix, weights_digest=weights_digest_of(place.weights_id), key_space=None)
        assert (summary.space, summary.num_objects, summary.num_bytes) == (unknown, NUM_BLOCKS, NUM_BLOCKS * 1000)
        assert admin.verify(place.weights_id)[0].num_damaged == 1
        assert admin.clear(place.weights_id).num_objects == NUM_BLOCKS
    finally:
        place.close()
        server.kill()


def calls(admin: StorageAdmin) -> list[Callable[[], object]]:
    return [admin.spaces, admin.verify, lambda: admin.clear("w")]


def test_no_valkey_server(tmp_path: Path) -> None:
    """Without a server every call is an error; an address that cannot be is refused."""
    options = StorageConfig(kind="valkey", weights_id="any", server_url=f"valkey://127.0.0.1:{free_port()}")
    for call in calls(open_admin("valkey", options.store_options(1))):
        with pytest.raises(StorageError, match="valkey server"):
            call()
    with pytest.raises(StorageRefusedError, match="server_url"):
        open_admin("valkey", {"server_url": "valkey://[::1"})


class Cluster:
    """A Mooncake cluster of the test's own, and an admin of it."""

    def __init__(self) -> None:
        self.master = MooncakeMaster()
        self.master.start()
        self.lender = MooncakeLender(self.master)
        self.place = MooncakePlace(self.master, self.lender)
        self.admin = open_admin("mooncake", self.place.options | {"metrics_url": self.master.metrics_url})


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Stopped after the test, where it still runs."""
    cluster = Cluster()
    yield cluster
    cluster.place.close()
    cluster.lender.kill()
    cluster.master.kill()


@pytest.mark.leaks_allowed
def test_a_mooncake_master_that_dies(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While objects are read: an error, as is every later call; Mooncake's own words about it are not heard."""
    fill(cluster.place, cluster.place.space())
    outcome = mooncake_admin._outcome

    def then_kill(*args: Any) -> object:
        cluster.master.kill()
        return outcome(*args)

    monkeypatch.setattr(mooncake_admin, "_outcome", then_kill)
    capfd.readouterr()
    with pytest.raises(StorageError, match=r"-90[01]: its master does not answer"):
        cluster.admin.verify()
    for call in calls(cluster.admin):
        with pytest.raises(StorageError, match=r"metrics port|is it running"):
            call()
    assert capfd.readouterr().err == ""


@pytest.mark.leaks_allowed
def test_the_memory_s_owner_dies(cluster: Cluster) -> None:
    """Objects whose memory is gone are not called damaged."""
    fill(cluster.place, cluster.place.space(), 3)
    cluster.lender.kill()
    for found in cluster.admin.verify():  # nothing, once the master has noticed
        assert (found.num_objects, found.num_damaged, found.num_gone) == (3, 0, 3)


@pytest.mark.leaks_allowed
def test_foreign_objects_in_a_mooncake_cluster(cluster: Cluster) -> None:
    """Keys of others are neither counted, nor read, nor removed; nor is a verify stopped by one of no bytes."""
    fill(cluster.place, cluster.place.space(), 3)
    with mooncake_admin._client(cluster.place.options) as client:
        assert [client.put(key, b"x") for key in ODD_KEYS] == [0] * len(ODD_KEYS)
        client.put(cluster.place.space().key(bytes(32)), b"x")
        assert counts(cluster.admin, cluster.place.space())[0][0] == 4
        assert [(one.num_objects, one.num_damaged) for one in cluster.admin.verify()] == [(4, 1)]
        assert cluster.admin.clear(cluster.place.weights_id).num_objects == 4
        assert [client.is_exist(key) for key in ODD_KEYS] == [1] * len(ODD_KEYS)


class Pages(BaseHTTPRequestHandler):
    """A server that lists a key, and says of it what no master would."""

    pages: dict[str, bytes] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        page = self.pages.get(self.path.partition("?")[0])
        self.send_response(500 if page is None else 200)
        self.end_headers()
        self.wfile.write(page or b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[tuple[dict[str, bytes], str]]:
    """What a server answers by path, and its address."""
    pages: dict[str, bytes] = {}
    server = HTTPServer(("127.0.0.1", 0), type("", (Pages,), {"pages": pages}))
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield pages, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_that_is_no_mooncake_master(pages: tuple[dict[str, bytes], str]) -> None:
    """What refuses is an error with its address; a size that is not understood is not known."""
    answers, url = pages
    admin = open_admin("mooncake", {"master_address": "h:1", "metrics_url": f"{url}/"})
    with pytest.raises(StorageError, match=f"{url}/get_all_keys: HTTP Error 500.*metrics port"):
        admin.spaces()
    answers["/get_all_keys"] = f"fdc1:{'a' * 32}:{'b' * 32}:{'c' * 64}\n".encode()
    with pytest.raises(StorageError, match="HTTP Error 500"):
        admin.spaces()
    for answer in (b"", b'{"data": 1}', b'{"data": []}', b'{"data": [{"size": 1}]}'):
        answers["/query_key"] = answer
        assert [(one.num_objects, one.num_bytes) for one in admin.spaces()] == [(1, None)]
    answers["/query_key"] = b'{"data": [{"size_": 1008}]}'
    assert admin.spaces()[0].num_bytes == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master_address": "host"}, "use host:port"),
        ({"master_address": "host:1", "metrics_url": "file:///etc/passwd"}, "metrics_url"),
        ({"master_address": "host:1", "metrics_url": "http://host:port"}, "metrics_url"),
        ({"master_address": "etcd://host:1"}, "metrics_url"),
    ],
)
def test_addresses_of_a_master_that_cannot_be(options: dict[str, str], message: str) -> None:
    """They are refused before anything is asked."""
    with pytest.raises(StorageRefusedError, match=message):
        open_admin("mooncake", options)
