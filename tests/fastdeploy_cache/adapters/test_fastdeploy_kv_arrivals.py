"""How the KV arrays of FastDeploy's workers come to the cache: from a worker's one line to blocks that are copied."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_cache.adapters.fastdeploy.kv_arrivals import KVArrivals, send_kv
from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.adapters.fastdeploy.worker import hand_over_kv, layout_of
from fastdeploy_cache.errors import IPCError, LayoutError
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory
from fastdeploy_cache.transfer_manager.kv.tensors import ArrayPlace
from tests.rigs.fake_cuda import FakeDriver, install
from tests.rigs.fastdeploy_engine import PROMPT, SUFFIX, Kernel, Task, launch, new_config, push_out, serve_v1

PORT = f"kv{SUFFIX}"


class Attached(logging.Handler):
    """Waits for the line of the log that says what became of a message."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.seen.set()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Attached:
    handler, logger = Attached(), logging.getLogger("fastdeploy_cache.adapters.fastdeploy.kv_arrivals")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    return handler


@pytest.mark.processes
def test_a_worker_that_comes_before_the_launch_is_attached_by_it(log: Attached) -> None:
    """Its arrays are sent when the manager is there, as in FastDeploy's start; after the launch blocks go to the CPU
    tier from them, and come back."""
    config = new_config(8, 8, transfer={"kv_owner": "worker"})
    config.parallel_config.local_engine_worker_queue_port = PORT
    manager = PrefixCacheManager(config, 1, schedules_ahead=False)
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", heads_first=True).for_rank(1, 4)
    with closing(KVMemory.create(layout, 8)) as arrays:
        send_kv(PORT, 0, arrays.handle())
        launch(manager, PORT)
        assert log.seen.wait(30) and "event=kv_attached" in log.lines[0], log.lines
        kernel = Kernel(manager)
        assert serve_v1(manager, Task("a", PROMPT), [1], kernel) == 0
        push_out(manager)
        assert serve_v1(manager, Task("b", PROMPT), [1], kernel) == 20
        manager.close()


def test_what_is_no_message_is_refused_and_the_next_is_taken(log: Attached) -> None:
    """A sender that ends early, or sends something else, costs a line of the log."""
    got: list[int] = []
    arrivals = KVArrivals(PORT)
    handle = KVHandle((), ())
    for data in (b"", b"\0\0\0\0no handle"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0fastdeploy-cache-kv.{PORT}")
            connection.sendall(data)
    send_kv(PORT, 3, handle)
    done = threading.Event()

    def attach(rank: int, received: KVHandle) -> None:
        assert received == handle
        got.append(rank)
        done.set()

    arrivals.start(attach)
    assert done.wait(30) and got == [3]
    assert ["event=kv_refused" in line for line in log.lines[:2]] == [True, True]
    arrivals.close()
    arrivals.close()


def test_a_shortage_of_descriptors_passes(log: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that comes meanwhile is heard afterwards, and so are later ones."""
    got: list[int] = []
    arrivals, errors, accept = KVArrivals(PORT), [errno.EMFILE, errno.ENFILE], socket.socket.accept

    def short_of_descriptors(self: socket.socket) -> object:
        if errors:
            raise OSError(errors.pop(), "too many")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", short_of_descriptors)
    arrivals.start(lambda rank, _: got.append(rank))
    for rank in (3, 4):
        log.seen.clear()
        send_kv(PORT, rank, KVHandle((), ()))
        assert log.seen.wait(30)
    arrivals.close()
    assert got == [3, 4] and not errors


def test_one_engine_listens_under_a_port_and_nobody_means_an_error() -> None:
    """A second engine with that port is refused; a worker whose engine is another manager's learns of it."""
    arrivals = KVArrivals(PORT)
    with pytest.raises(IPCError, match="does another engine use it"):
        KVArrivals(PORT)
    arrivals.close()
    with pytest.raises(IPCError, match="no engine takes the KV arrays"):
        send_kv(PORT, 0, KVHandle((), ()))


def test_no_socket_where_no_worker_hands_anything_over() -> None:
    """An engine whose workers keep their arrays listens to nobody."""
    config = new_config(8, 8)
    config.parallel_config.local_engine_worker_queue_port = PORT
    manager = PrefixCacheManager(config, 1)
    with pytest.raises(IPCError):
        send_kv(PORT, 0, KVHandle((), ()))
    manager.close()


def test_the_line_in_the_worker_makes_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key and value tensors of each layer, over a driver that is none: the engine gets where they are."""
    install(monkeypatch, FakeDriver())
    shape, received = (6, 2, 4, 8), []
    strides = (2 * 2 * 4 * 8, 2 * 4 * 8, 2 * 8, 2)

    def place(tensor: SimpleNamespace) -> ArrayPlace:
        where = {"device": "cuda", "device_id": 0}
        return ArrayPlace(address=tensor.address, shape=shape, strides_bytes=strides, item_bytes=2, **where)

    monkeypatch.setattr(ArrayPlace, "of", staticmethod(place))
    cuda = Cuda(0)
    addresses = [int(cuda.call("cuMemAlloc", 6 * strides[0])) for _ in range(4)]
    tensors = [SimpleNamespace(shape=list(shape), dtype="paddle.bfloat16", address=each) for each in addresses]
    arrivals, done = KVArrivals(PORT), threading.Event()
    hand_over_kv(tensors, 2, 1, PORT)
    arrivals.start(lambda rank, handle: (received.append((rank, handle)), done.set())[1])  # type: ignore[func-returns-value]
    assert done.wait(30)
    [(rank, handle)] = received
    assert rank == 1 and len(handle.segments) == 4
    assert [each.num_blocks for layer in handle.places for each in layer] == [6] * 4
    arrivals.close()


def test_other_tensors_are_refused_by_name() -> None:
    """Latent caches, scales and unlike shapes have no line: the error says what it takes."""
    key = np.zeros((6, 2, 4, 8), np.float16)
    assert layout_of([key] * 6, 3) == KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, heads_first=True)
    for caches in ([key], [key, key[:, :1]], [key[0], key[0]], [key] * 4):
        with pytest.raises(LayoutError, match="takes a key and a value of one shape for each layer"):
            layout_of(caches, 1)
