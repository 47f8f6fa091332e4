"""Takes what is asked of a running cache over a private socket: one request, one answer, each a line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_cache.errors import CacheError, ControlError
from fastdeploy_cache.insight.control.messages import Subject, Verb, decode, is_look, known_verbs, shown
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.private_socket import PrivateListener, peer_uid, receive_line

logger = event_log(__name__)

_MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 8 * 2**20
_READ_SECONDS = 5.0
_WRITE_SECONDS = 5.0
_MAX_CONNECTIONS = 4  # that are served at a time; more wait


class ControlServer:
    """Answers at a private socket. What changes something is done one after the other, in no order; looks are answered
    meanwhile. `start` and `stop` by one thread."""

    def __init__(self, path: Path) -> None:
        """Listen; who connects waits until `start`.

        Raises:
            IPCError: see `PrivateListener`.
        """
        self._listener = PrivateListener(path)
        self._thread: threading.Thread | None = None
        self._workers = ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="control")
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._acting = threading.Lock()

    def start(self, subject: Subject) -> None:
        """Answer with what is done with, and seen of, the subject."""
        # A daemon: a program that ends without closing its cache must not wait for somebody to connect.
        self._thread = threading.Thread(target=self._serve, args=(subject,), name="control", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take the socket away; waits until the requests that are being answered are, so for their time at most."""
        self._listener.end()
        self._workers.shutdown()
        if self._thread is not None:
            self._thread.join()
        self._listener.close()

    def _serve(self, subject: Subject) -> None:
        try:
            while (connection := self._listener.accept()) is not None:
                self._places.acquire()
                try:
                    self._workers.submit(self._serve_one, connection, subject)
                except RuntimeError:  # it is being stopped
                    connection.close()
                    self._places.release()
        finally:
            self._listener.close()

    def _serve_one(self, connection: socket.socket, subject: Subject) -> None:
        try:
            with connection:
                self._answer(connection, subject)
        finally:
            self._places.release()

    def _answer(self, connection: socket.socket, subject: Subject) -> None:
        try:
            _check_user(peer_uid(connection))
            line = receive_line(connection, _READ_SECONDS, _MAX_REQUEST_BYTES)
            if line is None:  # somebody who looks whether we live
                return
            answer = self._done(connection, subject, decode(line))
            if answer is None:
                return
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            answer = _encode({"error": f"{error}; {known_verbs()}"})
        except (CacheError, OSError) as error:
            answer = _encode({"error": str(error)})
        except Exception as error:  # a cache that nobody can resume any more would be worse
            logger.exception("event=control_failed")
            answer = _encode({"error": f"{type(error).__name__}: {error}; see the log of the cache's process"})
        _send(connection, answer)

    def _done(self, connection: socket.socket, subject: Subject, verb: Verb) -> bytes | None:
        """The answer; None where nobody waits for it any more, and nothing was done."""

        def apply() -> bytes:
            found = verb.apply(subject)
            return _encode({"status": subject.life.status} | ({} if found is None else {"found": found}))

        return apply() if is_look(verb) else self._act(connection, verb, apply)

    def _act(self, connection: socket.socket, verb: Verb, apply: Callable[[], bytes]) -> bytes | None:
        with self._acting:  # held for the verbs' own times; who has gone meanwhile is asked below
            if _has_gone(connection):
                logger.info("event=control_dropped request=%s reason=its_sender_has_gone", shown(verb))
                return None
            logger.info("event=control request=%s", shown(verb))
            try:
                answer = apply()
            except BaseException as error:
                logger.info("event=control_answer error=%r", str(error))
                raise
            logger.info("event=control_answer answer=%r", answer[:200])
            return answer


def _check_user(uid: int) -> None:
    if uid != os.geteuid():
        raise ControlError(f"user {uid} asks, but the server is of user {os.geteuid()}; ask as that one")


def _has_gone(connection: socket.socket) -> bool:
    """Whether the peer has closed: what it asked for while others were served is no longer wanted."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _encode(answer: dict[str, Any]) -> bytes:
    try:
        line = msgspec.json.encode(answer)
    except UnicodeEncodeError:  # a request's id has half of a surrogate pair: no UTF-8, but JSON has a way to write it
        line = json.dumps(msgspec.to_builtins(answer)).encode()
    if len(line) >= MAX_ANSWER_BYTES:
        raise ControlError(f"the answer has {len(line)} bytes, and at most {MAX_ANSWER_BYTES} are sent; ask for less")
    return line


def _send(connection: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError):  # it has gone, or does not read
        connection.settimeout(_WRITE_SECONDS)
        connection.sendall(answer + b"\n")
