"""A server tells whoever has started it that it is ready, and where: as services of systemd's `Type=notify` do."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

logger = logging.getLogger(__name__)

_MAX_BYTES = 4096


def tell_ready(**facts: str) -> None:
    """Say that this process is ready, with facts such as its `url`. Nothing happens where nobody has asked for it.

    The socket is named by the environment variable NOTIFY_SOCKET, as systemd's sd_notify(3) has it.
    """
    words = " ".join(f"{name}={value}" for name, value in facts.items())
    _tell(f"READY=1\nSTATUS={words}")


def tell_status(what: str) -> None:
    """Say in a line what this process does before it is ready: its start may take a minute."""
    _tell(f"STATUS={what}")


def _tell(message: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)  # whoever has started it may have gone, or may not read
        try:
            sender.sendto(message.encode(), address.replace("@", "\0", 1))
        except OSError as error:
            logger.warning("event=readiness_not_told socket=%s error=%r", address, str(error))


class ReadySocket:
    """Where one program that is started here tells that it is ready. One thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` where there can be no socket at `path`."""
        self.path, self.status = path, ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))

    def fileno(self) -> int:
        """A descriptor for `select`: readable when something was told."""
        return self._socket.fileno()

    def take(self) -> dict[str, str] | None:
        """The facts of a program that has become ready; None where it has said nothing, or something else. What it
        does until then is in `status`, which is the last thing that it has said of that."""
        try:
            lines = self._socket.recv(_MAX_BYTES).decode(errors="replace").splitlines()
        except BlockingIOError:
            return None
        status = next((line.removeprefix("STATUS=") for line in lines if line.startswith("STATUS=")), "")
        if "READY=1" not in lines:
            self.status = status or self.status
            return None
        return {name: value for name, _, value in (word.partition("=") for word in status.split())}

    def close(self) -> None:
        """Listen no more. Safe to call twice."""
        self._socket.close()
        self.path.unlink(missing_ok=True)
