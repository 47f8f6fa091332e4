"""Control of a running server over a private socket: one request, one answer, each a line of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import socket
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec

from fastdeploy_cache.errors import CacheError, LaunchError
from fastdeploy_cache.explanation import Explanation
from fastdeploy_cache.insight.doctor import Finding
from fastdeploy_cache.launch.server.control_socket import MAX_SECONDS, PrivateListener, peer_uid, receive_line

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 4096
_READ_SECONDS = 5.0
_WRITE_SECONDS = 5.0
_KNOWN = (
    "the verbs are pause, resume, sleep (with tiers: gpu, cpu), wake, clear, update-weights (with weights_id), explain "
    "(with request_id), explain-last (with num_requests) and examine; each "
    f"takes timeout_seconds, above 0 and up to {MAX_SECONDS:.0f}"
)

Tier = Literal["gpu", "cpu"]


class Control(Protocol):
    """What the verbs do; one call at a time. See `launch.engine_control.EngineControl`."""

    @property
    def status(self) -> str: ...

    def pause(self, timeout_seconds: float) -> None: ...
    def resume(self, timeout_seconds: float) -> None: ...
    def sleep(self, timeout_seconds: float, tiers: Collection[Tier]) -> None: ...
    def wake(self, timeout_seconds: float) -> None: ...
    def clear(self, timeout_seconds: float) -> None: ...
    def update_weights(self, timeout_seconds: float, weights_id: str | None) -> None: ...
    def explain(self, request_id: str) -> Sequence[Explanation]: ...
    def explain_last(self, num_requests: int) -> Sequence[Explanation]: ...
    def examine(self) -> Sequence[Finding]: ...


class _Verb(msgspec.Struct, tag_field="verb", forbid_unknown_fields=True):
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 30.0


class _Pause(_Verb, tag="pause"):
    def apply(self, control: Control) -> None:
        control.pause(self.timeout_seconds)


class _Resume(_Verb, tag="resume"):
    def apply(self, control: Control) -> None:
        control.resume(self.timeout_seconds)


class _Sleep(_Verb, tag="sleep"):
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(min_length=1)] = ("gpu", "cpu")

    def apply(self, control: Control) -> None:
        control.sleep(self.timeout_seconds, self.tiers)


class _Wake(_Verb, tag="wake"):
    def apply(self, control: Control) -> None:
        control.wake(self.timeout_seconds)


class _Clear(_Verb, tag="clear"):
    def apply(self, control: Control) -> None:
        control.clear(self.timeout_seconds)


class _UpdateWeights(_Verb, tag="update-weights"):
    weights_id: str | None = None

    def apply(self, control: Control) -> None:
        control.update_weights(self.timeout_seconds, self.weights_id)


class _Explain(_Verb, tag="explain", kw_only=True):
    request_id: str

    def apply(self, control: Control) -> list[dict[str, Any]]:
        return [{**each.as_dict(), "text": str(each)} for each in control.explain(self.request_id)]


class _ExplainLast(_Verb, tag="explain-last"):
    num_requests: Annotated[int, msgspec.Meta(ge=1, le=100)] = 10

    def apply(self, control: Control) -> list[dict[str, Any]]:
        return [{**each.as_dict(), "text": str(each)} for each in control.explain_last(self.num_requests)]


class _Examine(_Verb, tag="examine"):
    def apply(self, control: Control) -> list[dict[str, Any]]:
        return [{**dataclasses.asdict(each), "text": str(each)} for each in control.examine()]


_Request = _Examine | _Explain | _ExplainLast | _Pause | _Resume | _Sleep | _Wake | _Clear | _UpdateWeights


class ControlServer:
    """Answers at a private socket, one request at a time; `start` and `stop` by one thread."""

    def __init__(self, path: Path) -> None:
        """Listen; who connects waits until `start`.

        Raises:
            LaunchError: see `PrivateListener`.
        """
        self._listener = PrivateListener(path)
        self._thread: threading.Thread | None = None

    def start(self, control: Control) -> None:
        """Answer with what `control` does."""
        self._thread = threading.Thread(target=self._serve, args=(control,), name="control")
        self._thread.start()

    def stop(self) -> None:
        """Take the socket away; waits until the request that is being answered is, so for its time at most."""
        self._listener.end()
        if self._thread is not None:
            self._thread.join()
        self._listener.close()

    def _serve(self, control: Control) -> None:
        try:
            while (connection := self._listener.accept()) is not None:
                with connection:
                    self._answer(connection, control)
        finally:
            self._listener.close()

    def _answer(self, connection: socket.socket, control: Control) -> None:
        try:
            _check_user(peer_uid(connection))
            line = receive_line(connection, _READ_SECONDS, _MAX_REQUEST_BYTES)
            if line is None:  # somebody who looks whether we live
                return
            request = msgspec.json.decode(line, type=_Request)
            if _has_gone(connection):
                logger.info("event=control_dropped request=%r reason=its_sender_has_gone", line)
                return
            logger.info("event=control request=%r", line)
            found = request.apply(control)
            answer = {"status": control.status} if found is None else {"status": control.status, "found": found}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            answer = {"error": f"{error}; {_KNOWN}"}
        except (CacheError, OSError) as error:
            answer = {"error": str(error)}
        except Exception as error:  # a server that nobody can resume any more would be worse
            logger.exception("event=control_failed")
            answer = {"error": f"{type(error).__name__}: {error}; see the server's log"}
        logger.info("event=control_answer answer=%s", answer.get("error", answer.get("status")))
        _send(connection, answer)


def _check_user(uid: int) -> None:
    if uid != os.geteuid():
        raise LaunchError(f"user {uid} asks, but the server is of user {os.geteuid()}; ask as that one")


def _has_gone(connection: socket.socket) -> bool:
    """Whether the peer has closed: what it asked for while others were served is no longer wanted."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has gone, or does not read
        connection.settimeout(_WRITE_SECONDS)
        connection.sendall(msgspec.json.encode(answer) + b"\n")
