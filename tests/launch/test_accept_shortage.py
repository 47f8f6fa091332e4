"""Servers with fewer open files than clients: they live, keep some for their children, and say it once."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.rigs.short_server import LIMIT

pytestmark = pytest.mark.processes

SECONDS = 30.0
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class ShortServer:
    """`short_server` as a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.api, self.metrics = map(int, process.stdout.readline().split())

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    @property
    def num_sockets(self) -> int:
        num_sockets = 0
        for handle in Path(f"/proc/{self._process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                num_sockets += str(handle.readlink()).startswith("socket:")
        return num_sockets

    def end(self) -> str:
        """Its log; it has ended in order."""
        _, log = self._process.communicate(timeout=SECONDS)
        assert self._process.returncode == 0, log
        return log


@contextmanager
def short_server() -> Iterator[ShortServer]:
    command = [sys.executable, "-m", "tests.rigs.short_server"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield ShortServer(process)
        finally:
            process.kill()


def connect(port: int, client: int = 1) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(SECONDS)
    connection.bind((f"127.0.0.{client}", 0))
    connection.connect(("127.0.0.1", port))
    return connection


def answer(connection: socket.socket, path: bytes) -> bytes:
    connection.sendall(GET % path)
    return connection.recv(12)


def test_idle_clients_leave_files_for_others(eventually: Callable[..., None]) -> None:
    """However many come, from however many addresses: the API's have half of the open files, those of the metrics an
    eighth. Who comes later waits, and is answered when others have gone."""
    with short_server() as server, ExitStack() as stack:
        before = server.num_sockets
        for port in (server.api, server.metrics):
            most = LIMIT // 2 if port == server.api else LIMIT // 8
            idle = [stack.enter_context(connect(port, client)) for client in range(1, most + 3)]
            late = stack.enter_context(connect(port, 99))
            late.sendall(GET % b"/health")
            eventually(lambda most=most, before=before: server.num_sockets == before + most)
            for connection in idle:
                connection.close()
            assert late.recv(5) == b"HTTP/"
            late.close()
            eventually(lambda before=before: server.num_sockets == before)
        log = server.end()
    assert "Traceback" not in log and log.count("event=connections_full ") == 1 == log.count("connections_full_no_more")


def test_a_server_without_descriptors_says_it_once() -> None:
    """While none are left who comes waits; when there are some it is answered. Neither server writes more than a line
    at the begin and one at the end."""
    with short_server() as server, ExitStack() as stack:
        server.tell("fill")
        waiting = {
            (port, path): stack.enter_context(connect(port, client))
            for client in range(1, 4)
            for port, path in ((server.api, b"/health"), (server.metrics, b"/metrics"))
        }
        for (_, path), connection in waiting.items():
            connection.sendall(GET % path)
            connection.settimeout(1.0)
            with pytest.raises(TimeoutError):  # several tries
                connection.recv(1)
        server.tell("free")
        for (port, path), connection in waiting.items():
            connection.settimeout(SECONDS)
            assert connection.recv(8) in (b"HTTP/1.1", b"HTTP/1.0")
            with connect(port) as another:
                assert answer(another, path)[9:] == b"200"
        log = server.end()
    assert "Traceback" not in log
    assert log.count("event=cannot_accept") == 2 == log.count("event=accepts_again")
