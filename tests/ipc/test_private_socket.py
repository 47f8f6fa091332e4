"""The listener of a private socket, where the process runs short of something."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path

import pytest

from fastdeploy_cache.ipc.private_socket import PrivateListener, connected


def test_a_shortage_of_descriptors_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever connects meanwhile is served afterwards; the listener goes on, and ends when it is told to. It says once
    that there is a shortage, and once that it is over; of a client that has gone it says nothing."""
    listener, errors = PrivateListener(tmp_path / "own" / "socket"), [errno.ECONNABORTED, errno.EMFILE, errno.ENFILE]
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
    shortage, over = (record.getMessage() for record in caplog.records)
    assert "event=cannot_accept" in shortage and "fs.file-max" in shortage and "event=accepts_again" in over
    threading.Timer(0.0, listener.end).start()
    assert listener.accept() is None
    listener.close()
