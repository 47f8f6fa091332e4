"""Asks a running cache over its private socket."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import ControlError, IPCError
from fastdeploy_cache.insight.control.messages import MAX_SECONDS
from fastdeploy_cache.insight.control.server import MAX_ANSWER_BYTES
from fastdeploy_cache.ipc.private_socket import connected, peer_uid, receive_line

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0  # beside the verb's own time


def ask(path: Path, verb: str, timeout_seconds: float, **fields: Any) -> str:
    """The cache's status after `verb`; `fields` are those that the verb takes, see `messages`.

    Raises what `look` raises.
    """
    return str(_answer(path, verb, timeout_seconds, fields)["status"])


def look(path: Path, verb: str, timeout_seconds: float, **fields: Any) -> Any:
    """What was found, for a verb that finds something: lists and objects of JSON.

    Raises:
        FileNotFoundError, ConnectionRefusedError: nobody listens at `path`.
        ControlError: it refuses, has failed, does not answer in time or not whole, or is another user's.
    """
    answer = _answer(path, verb, timeout_seconds, fields)
    if "found" not in answer:
        raise ControlError(f"{verb}: the answer of the cache at {path} has nothing found in it; is it of this version?")
    return answer["found"]


def _answer(path: Path, verb: str, timeout_seconds: float, fields: dict[str, Any]) -> dict[str, Any]:
    request = {"verb": verb, "timeout_seconds": timeout_seconds, **fields}
    seconds = min(MAX_SECONDS, timeout_seconds) + _ANSWER_SECONDS
    try:
        with connected(path, _CONNECT_SECONDS) as connection:
            if (uid := peer_uid(connection)) != os.geteuid():
                raise ControlError(f"{verb}: the socket {path} is of user {uid}, not of yours; ask one of your own")
            with contextlib.suppress(BrokenPipeError):  # it refuses before it has read: its answer says why
                connection.sendall(json.dumps(request).encode() + b"\n")
            line = receive_line(connection, seconds, MAX_ANSWER_BYTES)
    except (FileNotFoundError, ConnectionRefusedError):
        raise
    except (OSError, IPCError) as error:
        raise ControlError(f"{verb}: the cache at {path} does not answer: {error}") from error
    try:
        answer = json.loads(line or b"{}")
    except ValueError as error:
        raise ControlError(f"{verb}: the answer of {path} is no JSON: {error}") from error
    if not isinstance(answer, dict) or "status" not in answer:
        told = answer.get("error") if isinstance(answer, dict) else None
        raise ControlError(str(told or f"{verb}: the cache at {path} ended without an answer"))
    return answer
