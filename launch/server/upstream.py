"""Requests of the router to instances, given up when the client that they are for has gone."""

from __future__ import annotations

import http.client
import io
import itertools
import math
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.server.json_http import LAST_CHUNK

_CONNECT_SECONDS = 5.0
_PIECE_BYTES = 65536
_HUNG_SECONDS = 15.0  # so long an instance that did not answer is asked after all others

_HEAD_END = b"\r\n\r\n"
_CHUNKS_END = b"\r\n" + LAST_CHUNK  # behind the one before it

Place = tuple[str, int]  # host and port


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class NotSentError(ConnectionError):
    """The instance cannot be reached: it knows nothing of the request, so another one may have it.

    `is_late`: nothing answered at all, so that who asks next would wait again.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"no connection: {error}")
        self.is_late = isinstance(error, TimeoutError)


class Instances:
    """URLs of instances of one role, used in turn. Any thread."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises `LaunchError` for what is no http://HOST:PORT."""
        self._places = [_place(url) for url in urls]
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._hung_until: dict[Place, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def in_turn(self) -> list[Place]:
        """Each once; a call later the next one is first. Who has hung lately is last."""
        turn = next(self._turns)
        places = [self._places[(turn + index) % len(self)] for index in range(len(self))]
        return sorted(places, key=self.is_hung)

    def in_order(self) -> list[Place]:
        """Each once, for what is no work: it takes nobody's turn. Who has hung lately is last."""
        return sorted(self._places, key=self.is_hung)

    @contextmanager
    def asked(self, place: Place, question: Question, client: socket.socket | None) -> Iterator[Upstream]:
        """A request to one of them. If it hangs, that is noted, and it gets no other one before its health answers.

        Raises what `Upstream` raises; `NotSentError`, too, where it still hangs.
        """
        try:
            if not self._may_take(place, client):
                raise NotSentError(TimeoutError("it has hung, and does not answer for its health either"))
            with Upstream(place, question, client) as upstream:
                yield upstream
        except NotSentError as error:
            if error.is_late:
                self._note_hung(place)
            raise
        except TimeoutError:
            self._note_hung(place)
            raise

    def _note_hung(self, place: Place) -> None:
        """It did not answer in time: who comes next need not wait for that again."""
        with self._lock:
            self._hung_until[place] = time.monotonic() + _HUNG_SECONDS

    def is_hung(self, place: Place) -> bool:
        """Whether that was lately."""
        with self._lock:
            return time.monotonic() < self._hung_until.get(place, 0.0)

    def _may_take(self, place: Place, client: socket.socket | None) -> bool:
        """Whether it has not hung, or answers again."""
        with self._lock:
            if place not in self._hung_until:
                return True
        if not is_healthy(place, client):
            return False
        with self._lock:
            self._hung_until.pop(place, None)
        return True


def _place(url: str) -> Place:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None or parts.path.strip("/"):
        raise LaunchError(f"{url!r} is no instance's URL; use http://HOST:PORT")
    return parts.hostname, port


class Question(NamedTuple):
    """What an instance is asked, and how long its answer may take to begin, and each piece of it.

    With `probe_seconds` the instance is asked for its health after each such time without a word.
    """

    method: str
    path: str
    body: bytes | None
    timeout_seconds: float
    probe_seconds: float = math.inf

    @property
    def may_hang(self) -> bool:
        """Whether it gives an instance work, on which that may hang."""
        return self.body is not None


HEALTH = Question("GET", "/health", None, 2.0)


def is_healthy(place: Place, client: socket.socket | None) -> bool:
    """Whether it answers for its health. Raises `ClientGoneError`."""
    try:
        with Upstream(place, HEALTH, client) as upstream:
            return upstream.answer()[0] == 200
    except (OSError, http.client.HTTPException):
        return False


class Upstream:
    """One request to an instance; its answer is read in one of two ways. A context: at the end it is closed, and an
    instance that still works for it will notice.

    Every method raises:
        NotSentError: it cannot be reached; the constructor alone.
        TimeoutError: it has the request, or a part of it, and does not answer in time: it may hang on that.
        OSError, http.client.HTTPException: it has ended, or talks nonsense.
        ClientGoneError: the client has gone first.
    """

    def __init__(self, place: Place, question: Question, client: socket.socket | None) -> None:
        self._place, self._client = place, client
        self._timeout_seconds, self._probe_seconds = question.timeout_seconds, question.probe_seconds
        seconds = min(_CONNECT_SECONDS, question.timeout_seconds)
        self._connection = http.client.HTTPConnection(*place, timeout=seconds)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        try:
            self._connection.connect()
        except OSError as error:
            self._connection.close()
            raise NotSentError(error) from error
        try:
            self._connection.request(question.method, question.path, question.body, headers)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def answer(self) -> tuple[int, bytes]:
        """Status and whole body of a short answer."""
        self._wait()
        response = self._connection.getresponse()
        return response.status, response.read()

    def pieces(self) -> Iterator[bytes]:
        """The whole answer as it comes, headers and all; empty where the instance ends without one."""
        upstream = self._connection.sock
        while True:
            self._wait()
            piece = upstream.recv(_PIECE_BYTES)
            if not piece:
                return
            yield piece

    def _wait(self) -> None:
        """Until the instance has something to say."""
        upstream, until = self._connection.sock, time.monotonic() + self._timeout_seconds
        while True:
            seconds = until - time.monotonic()
            is_probed = self._probe_seconds < seconds
            readable = _readable([upstream, self._client], min(seconds, self._probe_seconds))
            if self._client in readable:
                self._check_client()
            if upstream in readable:
                return
            if not readable and is_probed:
                self._probe()
            elif not readable:
                raise TimeoutError(f"no answer within {self._timeout_seconds} s")

    def _probe(self) -> None:
        """It may have much to do, or hang: then its HTTP server does not answer either."""
        if not is_healthy(self._place, self._client):
            raise TimeoutError("no answer, and none for its health")

    def _check_client(self) -> None:
        assert self._client is not None
        try:
            said = self._client.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise ClientGoneError from error
        if not said:
            raise ClientGoneError
        self._client = None  # its next request: there is no waiting for its end then


class AnswerSoFar:
    """What has come of an answer, as bytes of HTTP: whether it is no failure, and whether there is more to come."""

    def __init__(self) -> None:
        self._head, self._tail = b"", b""
        self._headers: Message | None = None  # once all are there
        self._num_body_bytes = 0

    def note(self, piece: bytes) -> None:
        """The next bytes have come."""
        if self._headers is None:
            self._head, end, piece = (self._head + piece).partition(_HEAD_END)
            if not end:
                return
            self._headers = http.client.parse_headers(io.BytesIO(self._head.partition(b"\r\n")[2] + _HEAD_END))
        self._num_body_bytes += len(piece)
        self._tail = (self._tail + piece)[-len(_CHUNKS_END) :]

    @property
    def has_begun(self) -> bool:
        """Whether anything has come."""
        return bool(self._head)

    @property
    def is_good(self) -> bool:
        """Whether it says so; too short a beginning does not."""
        return self._head.startswith((b"HTTP/1.1 2", b"HTTP/1.0 2"))

    @property
    def is_whole(self) -> bool:
        """Whether all that it announced has come; never, where it ends with its connection."""
        headers = self._headers
        if headers is None:
            return False
        if "Transfer-Encoding" in headers:
            return self._tail == _CHUNKS_END
        length = headers.get("Content-Length", "")
        return length.isdecimal() and self._num_body_bytes >= int(length)

    @property
    def is_cut(self) -> bool:
        """Whether something is missing of it, now that no more comes."""
        headers = self._headers
        return headers is None or (
            ("Transfer-Encoding" in headers or "Content-Length" in headers) and not self.is_whole
        )


def _readable(sockets: Sequence[socket.socket | None], timeout_seconds: float) -> list[socket.socket]:
    poll, found = select.poll(), {each.fileno(): each for each in sockets if each is not None}
    for number in found:
        poll.register(number, select.POLLIN)
    return [found[number] for number, _ in poll.poll(max(0.0, timeout_seconds) * 1000)]
