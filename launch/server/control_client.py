"""Asks a running server to pause, sleep and so on."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.server.control_socket import MAX_SECONDS, connected, receive_line

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0  # beside the verb's own time
_MAX_ANSWER_BYTES = 2**20


def ask(path: Path, verb: str, timeout_seconds: float, **fields: Any) -> str:
    """The server's status after `verb`; `fields` are those that the verb takes, see the module `control`.

    Raises what `look` raises.
    """
    return str(_answer(path, verb, timeout_seconds, fields)["status"])


def look(path: Path, verb: str, timeout_seconds: float, **fields: Any) -> list[dict[str, Any]]:
    """What the server has found, for a verb that changes nothing.

    Raises:
        FileNotFoundError, ConnectionRefusedError: no server listens at `path`.
        LaunchError: it refuses, has failed, or does not answer in time.
    """
    return list(_answer(path, verb, timeout_seconds, fields)["found"])


def _answer(path: Path, verb: str, timeout_seconds: float, fields: dict[str, Any]) -> dict[str, Any]:
    request = {"verb": verb, "timeout_seconds": timeout_seconds, **fields}
    try:
        with connected(path, _CONNECT_SECONDS) as connection:
            with contextlib.suppress(BrokenPipeError):  # it refuses before it has read: its answer says why
                connection.sendall(json.dumps(request).encode() + b"\n")
            seconds = min(MAX_SECONDS, timeout_seconds) + _ANSWER_SECONDS
            line = receive_line(connection, seconds, _MAX_ANSWER_BYTES)
    except (FileNotFoundError, ConnectionRefusedError):
        raise
    except OSError as error:
        raise LaunchError(f"{verb}: the server at {path} does not answer: {error}") from error
    answer: dict[str, Any] = json.loads(line or b"{}")
    if "status" not in answer:
        raise LaunchError(answer.get("error", f"{verb}: the server ended without an answer"))
    return answer
