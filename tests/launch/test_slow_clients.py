"""A real server process before hundreds of clients that say a byte now and then: others are answered all the same."""

from __future__ import annotations

import http.client
import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SECONDS = 30.0
NUM_SLOW = 400
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@contextmanager
def running(head_seconds: float, body_seconds: float) -> Iterator[tuple[int, int]]:
    """Its process id and port."""
    command = [sys.executable, "-m", "tests.rigs.chat_program", str(head_seconds), str(body_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()
        assert process.wait(SECONDS) == 0


def ask(port: int, method: str, path: str, body: bytes | None = None) -> int:
    """The status, once the server has closed the connection: what it has open then is nothing of this request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(method, path, body, {"Connection": "close"})
        with connection.sock.dup() as until_closed:
            response = connection.getresponse()
            response.read()
            assert until_closed.recv(1) == b""
        return response.status
    finally:
        connection.close()


def num_threads_and_handles(pid: int) -> tuple[int, int]:
    return len(list(Path(f"/proc/{pid}/task").iterdir())), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def dribble(slow: list[socket.socket]) -> list[socket.socket]:
    """A byte of each, if it is still listened to; who is."""
    poll, open_ = select.poll(), {each.fileno(): each for each in slow}
    for number in open_:
        poll.register(number, select.POLLIN)
    for number, _ in poll.poll(100):
        open_.pop(number)  # the server has nothing to say before all is there, so it has ended it
    for number, each in list(open_.items()):
        try:
            each.send(b"a")
        except OSError:
            open_.pop(number)
    return list(open_.values())


@pytest.mark.parametrize(
    ("beginning", "deadlines"), [(HEAD + b"X: ", (6.0, 60.0)), (HEAD + b"Content-Length: 5000\r\n\r\n", (60.0, 6.0))]
)
def test_slow_clients_are_ended_and_others_answered(beginning: bytes, deadlines: tuple[float, float]) -> None:
    """400 that dribble heads, or bodies: health and chats are answered meanwhile, each slow one is ended by its
    deadline though it always has something to say, and threads and handles stay as many as the connections need."""
    with running(*deadlines) as (pid, port), ExitStack() as stack:
        assert ask(port, "POST", "/v1/chat/completions", json.dumps(CHAT).encode()) == 200
        num_threads, num_handles = num_threads_and_handles(pid)
        slow = []
        for _ in range(NUM_SLOW):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SECONDS)))
            slow[-1].sendall(beginning)
        most, num_answered = (0, 0), 0
        while slow:
            assert ask(port, "GET", "/health") == 200
            assert ask(port, "POST", "/v1/chat/completions", json.dumps(CHAT).encode()) == 200
            now = num_threads_and_handles(pid)
            most = max(most[0], now[0]), max(most[1], now[1])
            slow = dribble(slow)
            num_answered += len(slow) == NUM_SLOW
        assert num_answered > 0, "none was answered while all the slow ones were there"
        assert most[0] <= num_threads + 8  # a few that tokenise
        assert num_handles + NUM_SLOW <= most[1] <= num_handles + NUM_SLOW + 5
        assert ask(port, "GET", "/health") == 200
        assert num_threads_and_handles(pid)[1] <= num_handles + 5
