"""The listener of a private socket, where the process runs short of something."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path

import pytest

from fastdeploy_cache.ipc.private_socket import PrivateListener, connected


def test_a_shortage_of_descriptors_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects meanwhile is served afterwards; the listener goes on, and ends when it is told to."""
    monkeypatch.setattr("fastdeploy_cache.ipc.private_socket._SHORTAGE_SECONDS", 0.01)
    listener, errors = PrivateListener(tmp_path / "own" / "socket"), [errno.EMFILE, errno.ENFILE]
    accept = socket.socket.accept

    def short_of_descriptors(self: socket.socket) -> object:
        if errors:
            raise OSError(errors.pop(), "too many")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", short_of_descriptors)
    with connected(tmp_path / "own" / "socket", 5):
        served = listener.accept()
        assert served is not None and not errors
        served.close()
    threading.Timer(0.0, listener.end).start()
    assert listener.accept() is None
    listener.close()
