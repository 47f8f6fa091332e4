"""Bare round trips between two processes, which the ranks' queue is compared with. As a program: the far end."""

from __future__ import annotations

import contextlib
import multiprocessing.managers
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import zmq

from fastdeploy_cache.launch.interrupts import kept_from_children

_AUTHORITY = b"benchmark"
_TIMEOUT_MS = 10_000


class _Queues(multiprocessing.managers.BaseManager):
    """Two queues behind a manager process, pickled through a proxy: the way that FastDeploy's ranks are fed."""


@contextlib.contextmanager
def _far_end(kind: str, address: str) -> Iterator[None]:
    command = [sys.executable, "-m", "fastdeploy_cache.launch.bench.ping_pong", kind, address]
    with kept_from_children():
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


@contextlib.contextmanager
def zeromq(message: bytes) -> Iterator[Callable[[], float]]:
    """A ROUTER and a DEALER over an ipc socket; yields a round trip of `message`, in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/ping"
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, _TIMEOUT_MS)
        socket.bind(address)
        try:
            with _far_end("zeromq", address):
                peer, _ = socket.recv_multipart()

                def ping() -> float:
                    started = time.perf_counter()
                    socket.send_multipart([peer, message])
                    socket.recv_multipart()
                    return time.perf_counter() - started

                yield ping
        finally:
            context.destroy(linger=0)


@contextlib.contextmanager
def manager_queue(message: object) -> Iterator[Callable[[], float]]:
    """Two queues of a `multiprocessing` manager; yields a round trip of `message`, pickled four times, in seconds."""
    there: queue.Queue[object] = queue.Queue()
    back: queue.Queue[object] = queue.Queue()
    _Queues.register("there", callable=lambda: there)
    _Queues.register("back", callable=lambda: back)
    with tempfile.TemporaryDirectory() as directory:
        address = f"{directory}/queue"
        manager = _Queues(address=address, authkey=_AUTHORITY)
        manager.start()
        try:
            near_there, near_back = manager.there(), manager.back()  # type: ignore[attr-defined]
            with _far_end("manager", address):
                near_back.get(timeout=_TIMEOUT_MS / 1000)

                def ping() -> float:
                    started = time.perf_counter()
                    near_there.put(message)
                    near_back.get(timeout=_TIMEOUT_MS / 1000)
                    return time.perf_counter() - started

                yield ping
        finally:
            manager.shutdown()


def _echo_zeromq(address: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    socket.send(b"ready")
    while True:
        socket.send(socket.recv())


def _echo_manager(address: str) -> None:
    _Queues.register("there")
    _Queues.register("back")
    manager = _Queues(address=address, authkey=_AUTHORITY)
    manager.connect()
    there, back = manager.there(), manager.back()  # type: ignore[attr-defined]
    back.put("ready")
    while True:
        back.put(there.get())


if __name__ == "__main__":
    {"zeromq": _echo_zeromq, "manager": _echo_manager}[sys.argv[1]](sys.argv[2])
