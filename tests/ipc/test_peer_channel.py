"""The channel between instances: private on one host, for known keys alone over TCP, and never in anybody's way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.peer_channel import (
    CurveKeys,
    PeerConnection,
    PeerListener,
    check_address,
    load_keys,
    make_keys,
    new_context,
)
from fastdeploy_cache.ipc.poller import Poller
from fastdeploy_cache.ipc.private_directory import PrivateDirectory

SECONDS = 10.0
SILENCE = 0.5  # of who is not let in: nothing tells that something will never come


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what a test opened: first the sockets, then the context."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def context(opened: ExitStack) -> zmq.Context[Any]:
    made = new_context()
    opened.callback(made.destroy, linger=0)
    return made


@pytest.fixture
def private(opened: ExitStack) -> str:
    """An address that only this user reaches."""
    folder = PrivateDirectory()
    opened.callback(folder.remove)
    return f"ipc://{folder.path}/peer"


@pytest.fixture
def keys(tmp_path: Path) -> Callable[..., CurveKeys]:
    """Makes the keys of a host; it trusts those that are named, which are there already."""

    def make(name: str, *trusted: str) -> CurveKeys:
        make_keys(tmp_path / name)
        for other in trusted:
            public = (tmp_path / other / "own.key").read_bytes()
            (tmp_path / name / "trusted" / f"{other}.key").write_bytes(public)
        return load_keys(tmp_path / name)

    return make


def trust(keys: CurveKeys, other: CurveKeys) -> CurveKeys:
    """The first one's keys, once the other's has been put among them."""
    folder = Path(keys.folder)
    (folder / "trusted" / "later.key").write_bytes((Path(other.folder) / "own.key").read_bytes())
    return load_keys(folder)


@pytest.fixture
def listen(opened: ExitStack, context: zmq.Context[Any]) -> Callable[..., PeerListener]:
    def make(address: str, keys: CurveKeys | None = None, max_messages: int = 10) -> PeerListener:
        listener = PeerListener(context, address, keys, max_messages)
        opened.callback(listener.close)
        return listener

    return make


@pytest.fixture
def connect(opened: ExitStack, context: zmq.Context[Any]) -> Callable[..., PeerConnection]:
    def make(
        address: str, keys: CurveKeys | None = None, server: bytes = b"", max_messages: int = 10
    ) -> PeerConnection:
        connection = PeerConnection(context, address, keys, server, max_messages)
        opened.callback(connection.close)
        return connection

    return make


def comes(end: PeerListener | PeerConnection, seconds: float = SECONDS) -> bool:
    """Whether a message comes in time."""
    poller = Poller()
    poller.register(end.socket, "end")
    return bool(poller.wait(seconds))


def exchange(listener: PeerListener, connection: PeerConnection) -> None:
    """There and back."""
    assert connection.put(b"hello")
    assert comes(listener)
    got = listener.get_now()
    assert got is not None and got[1] == b"hello"
    assert listener.put(got[0], b"welcome")
    assert comes(connection)
    assert connection.get_now() == b"welcome"
    assert connection.get_now() is None and listener.get_now() is None


def port_of(listener: PeerListener) -> str:
    address = listener.socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode().rstrip("\0")


Listen = Callable[..., PeerListener]
Connect = Callable[..., PeerConnection]
Keys = Callable[..., CurveKeys]


# on one host


def test_a_private_socket_needs_no_keys(private: str, listen: Listen, connect: Connect) -> None:
    """Each end hears the other; several connections are told apart."""
    listener = listen(private)
    first, second = connect(private), connect(private)
    exchange(listener, first)
    exchange(listener, second)
    names = set()
    for connection in (first, second, first):
        connection.put(b"again")
        assert comes(listener)
        names.add((listener.get_now() or (b"", b""))[0])
    assert len(names) == 2


def test_nobody_else_may_enter(private: str, listen: Listen) -> None:
    """The socket's folder is closed to others."""
    listen(private)
    folder = Path(private.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o077 == 0


def test_keys_do_not_matter_on_one_host(private: str, listen: Listen, connect: Connect, keys: Keys) -> None:
    """An instance that has some for TCP talks to a neighbour that has none."""
    exchange(listen(private, keys("a")), connect(private))


def test_who_connects_first_is_heard_later(private: str, listen: Listen, connect: Connect) -> None:
    """The listener may come after what was sent; one in its place is reached as well."""
    connection = connect(private)
    assert connection.put(b"early")
    with zmq.Context() as other:  # whose end waits until the address is given up
        listener = PeerListener(other, private, None, 10)
        assert comes(listener)
        assert (listener.get_now() or (b"", b""))[1] == b"early"
        listener.close()
    exchange(listen(private), connection)


def test_full_queues_never_block(private: str, listen: Listen, connect: Connect) -> None:
    """Of an end that does not read, both sides say at once that no more goes; what went is not lost."""
    listener, connection = listen(private, max_messages=3), connect(private, max_messages=3)
    exchange(listener, connection)
    message = bytes(2**16)  # the kernel's buffers hold few of these
    num_sent = 0
    while connection.put(message):
        num_sent += 1
        assert num_sent < 10_000
    assert comes(listener)
    name, data = listener.get_now() or (b"", b"")
    assert data == message
    num_back = 0
    while listener.put(name, message):
        num_back += 1
        assert num_back < 10_000
    for end, num in ((connection, num_back), (listener, num_sent - 1)):
        for _ in range(num):
            assert comes(end)
            assert end.get_now() is not None


def test_no_answer_to_who_is_gone(private: str, listen: Listen, connect: Connect) -> None:
    """Nor to who never was; no error is raised."""
    listener = listen(private)
    assert not listener.put(b"nobody", b"x")
    connection = connect(private)
    connection.put(b"hello")
    assert comes(listener)
    name, _ = listener.get_now() or (b"", b"")
    connection.close()
    comes(listener, 0.05)  # the listener's own thread has to see the end
    for _ in range(100):
        if not listener.put(name, b"x"):
            return
        comes(listener, 0.05)
    pytest.fail("messages to a closed connection are still taken")


def test_a_message_of_several_frames_is_none(
    private: str, listen: Listen, context: zmq.Context[Any], opened: ExitStack
) -> None:
    """Another program's: it reads as an empty one, which means nothing."""
    listener = listen(private)
    stranger = opened.enter_context(context.socket(zmq.DEALER))
    stranger.connect(private)
    for frames in ([b"a", b"b"], [b""]):
        stranger.send_multipart(frames)
        assert comes(listener)
        assert (listener.get_now() or (b"", b"x"))[1] == b""


@pytest.mark.parametrize("end", ["listen", "connect"])
def test_addresses_of_no_use_are_refused(end: str, request: pytest.FixtureRequest) -> None:
    """Of another kind, too long, or in use; nothing is left open."""
    make = request.getfixturevalue(end)
    for address in ("inproc://a", "pgm://a", "/run/a", "ipc://" + "x" * 200):
        with pytest.raises(IPCError, match=r"address|cannot"):
            make(address)


def test_an_address_in_use_is_refused(listen: Listen, keys: Keys) -> None:
    """By its name."""
    mine = keys("a")
    address = port_of(listen("tcp://127.0.0.1:*", mine))
    with zmq.Context() as other, pytest.raises(IPCError, match=f"cannot listen at {address}"):
        PeerListener(other, address, mine, 10)


# over TCP


@pytest.mark.parametrize("end", ["listen", "connect"])
def test_tcp_without_keys_is_refused(end: str, request: pytest.FixtureRequest) -> None:
    """It would be open to everybody; the message says what to give."""
    with pytest.raises(IPCError, match=r"open to everybody.*keys_folder"):
        request.getfixturevalue(end)("tcp://127.0.0.1:5999")
    check_address("ipc:///run/a", None)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_hosts_that_know_each_other_talk(listen: Listen, connect: Connect, keys: Keys, host: str) -> None:
    """Each has the other's public key."""
    if host == "[::1]" and "00000000000000000000000000000001" not in _ipv6_addresses():
        pytest.skip("this machine has no IPv6 loopback")
    owner = keys("owner")
    reader = keys("reader", "owner")
    owner = trust(owner, reader)
    listener = listen(f"tcp://{host}:*", owner)
    exchange(listener, connect(port_of(listener), reader, owner.public))


def _ipv6_addresses() -> str:
    path = Path("/proc/net/if_inet6")
    return path.read_text() if path.exists() else ""


def test_a_strangers_key_is_not_let_in(listen: Listen, connect: Connect, keys: Keys) -> None:
    """Its messages never come, those of who is known do."""
    owner = keys("owner")
    reader, stranger = keys("reader", "owner"), keys("stranger", "owner")
    listener = listen("tcp://127.0.0.1:*", trust(owner, reader))
    outside = connect(port_of(listener), stranger, owner.public)
    outside.put(b"let me in")
    exchange(listener, connect(port_of(listener), reader, owner.public))
    assert not comes(listener, SILENCE)


def test_who_has_no_key_is_not_let_in(
    listen: Listen, connect: Connect, keys: Keys, context: zmq.Context[Any], opened: ExitStack
) -> None:
    """A plain connection says nothing that is heard."""
    owner = keys("owner")
    reader = keys("reader", "owner")
    listener = listen("tcp://127.0.0.1:*", trust(owner, reader))
    stranger = opened.enter_context(context.socket(zmq.DEALER))
    stranger.set(zmq.LINGER, 0)
    stranger.connect(port_of(listener))
    stranger.send(b"let me in")
    exchange(listener, connect(port_of(listener), reader, owner.public))
    assert not comes(listener, SILENCE)


def test_an_owner_that_is_not_trusted_is_not_connected_to(connect: Connect, keys: Keys) -> None:
    """Whatever an offer says its key is: the file's folder is named."""
    reader, other = keys("reader"), keys("other")
    for key in (other.public, b"", b"x" * 40):
        with pytest.raises(IPCError, match=r"not among .*reader/trusted"):
            connect("tcp://127.0.0.1:5999", reader, key)


def test_another_host_in_the_owners_place_is_not_believed(listen: Listen, connect: Connect, keys: Keys) -> None:
    """It listens where the owner did, with a key of its own: nothing is exchanged with it."""
    owner, thief = keys("owner"), keys("thief")
    reader = keys("reader", "owner", "thief")
    listener = listen("tcp://127.0.0.1:*", trust(thief, reader))
    connect(port_of(listener), reader, owner.public).put(b"secret")
    assert not comes(listener, SILENCE)


# keys


def test_keys_are_made_once_and_kept_from_others(tmp_path: Path) -> None:
    """The public one is given out; both are of a length that ZeroMQ takes."""
    folder = tmp_path / "below" / "keys"
    public = make_keys(folder)
    assert public == folder / "own.key"
    keys = load_keys(folder)
    assert (len(keys.public), len(keys.secret), keys.trusted) == (40, 40, frozenset())
    assert keys.secret not in public.read_bytes() and keys.public in public.read_bytes()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "own.key_secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(IPCError, match="has keys already"):
        make_keys(folder)
    assert load_keys(folder) == keys


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """And says what to do."""
    make_keys(tmp_path)
    for mode in (0o640, 0o604, 0o660):
        (tmp_path / "own.key_secret").chmod(mode)
        with pytest.raises(IPCError, match="chmod 600"):
            load_keys(tmp_path)


@pytest.mark.parametrize("what", ["folder", "secret", "trusted", "damaged", "half"])
def test_keys_that_are_not_whole_are_refused(tmp_path: Path, what: str) -> None:
    """A folder or file is missing, is no key, or is a public one in the secret's place; it says how to make them."""
    folder = tmp_path / "keys"
    if what != "folder":
        make_keys(folder)
    secret = folder / "own.key_secret"
    if what == "secret":
        secret.unlink()
    elif what == "trusted":
        (folder / "trusted").rmdir()
    elif what == "damaged":
        (folder / "trusted" / "a.key").write_bytes(os.urandom(64))
    elif what == "half":
        secret.write_bytes((folder / "own.key").read_bytes())
    with pytest.raises(IPCError, match="fastdeploy-cache peer-keys"):
        load_keys(folder)


@pytest.mark.parametrize("damage", ["short", "long", "other", "text", "cut line", "public"])
def test_a_damaged_key_of_its_own_is_refused(tmp_path: Path, damage: str) -> None:
    """Of a key that is cut, changed, or another pair's half it is said at once, before any handshake fails by it."""
    make_keys(tmp_path)
    secret = tmp_path / "own.key_secret"
    text, keys = secret.read_bytes(), load_keys(tmp_path)
    key = keys.secret
    damaged = {
        "short": text.replace(key, key[:-1]),
        "long": text.replace(key, key + b"0"),
        "other": text.replace(key, bytes([key[0] ^ 1]) + key[1:]),
        "text": text.replace(key, b"~" * 40),
        "cut line": text[: text.index(b"secret-key") + 10],
        "public": text.replace(keys.public, bytes([keys.public[0] ^ 1]) + keys.public[1:]),
    }[damage]
    secret.write_bytes(damaged)
    with pytest.raises(IPCError, match=r"own\.key_secret|keys of .* make"):
        load_keys(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").touch()
    with pytest.raises(IPCError, match="no keys can be made"):
        make_keys(tmp_path / "file" / "keys")
