"""The libraries behind links, used bare: what they reach for the same pieces, told all of them in one call."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.transfer_manager.peer.link import Bytes, Int64Array, Pieces, open_endpoint

_SECONDS = 60.0
Read = Callable[[Pieces], Callable[[], None]]  # prepares a read, which may run again and again


def open_library(kind: str, local: Bytes, endpoint: bytes) -> Read:
    """Reads into `local` out of the one segment behind the endpoint of a link of that kind. `shm` has no library."""
    if kind == "shm":
        return _none
    there = open_endpoint(endpoint, kind)
    opened = {"nixl": _nixl, "mooncake": _mooncake}[kind](local, there.contact)

    def read(pieces: Pieces) -> Callable[[], None]:
        return opened(
            local.ctypes.data + pieces.local_offset, there.handles[0] + pieces.remote_offset, pieces.num_bytes
        )

    return read


def _none(pieces: Pieces) -> Callable[[], None]:
    raise LaunchError(f"{len(pieces.num_bytes)} pieces: shm has no library of its own; its floor is the plain copy")


def _nixl(local: Bytes, contact: bytes) -> Callable[..., Callable[[], None]]:
    """Lists of pieces are made beforehand; a request over them is made, posted and asked for without a pause."""
    name = next(name for name in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name))
    nixl: Any = importlib.import_module(f"{name}._bindings")
    config = nixl.nixlAgentConfig()
    config.useProgThread = False  # asking is what drives it, on this thread
    agent = nixl.nixlAgent("alone", config)
    backends = [agent.createBackend("UCX", {})]
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(local.ctypes.data, local.nbytes, 0, "")]), backends)
    there = agent.loadRemoteMD(contact).decode()

    def prepare(mine: Int64Array, theirs: Int64Array, num_bytes: Int64Array) -> Callable[[], None]:
        rows = [np.stack([each, num_bytes, np.zeros_like(each)], axis=1).astype(np.uint64) for each in (mine, theirs)]
        sides = [nixl.nixlXferDList(nixl.DRAM_SEG, each) for each in rows]

        def run() -> None:
            request = agent.createXferReq(nixl.NIXL_READ, *sides, there, b"", backends)
            state, deadline = agent.postXferReq(request), time.monotonic() + _SECONDS
            while state == nixl.NIXL_IN_PROG and time.monotonic() < deadline:
                state = agent.getXferStatus(request)
            if state != nixl.NIXL_SUCCESS:
                raise LaunchError(f"NIXL alone reads {len(num_bytes)} pieces: {state}")
            agent.releaseXferReq(request)

        return run

    return prepare


def _mooncake(local: Bytes, contact: bytes) -> Callable[..., Callable[[], None]]:
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    codes = [
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
        engine.register_memory(local.ctypes.data, local.nbytes),
    ]
    if any(codes):
        raise LaunchError(f"Mooncake alone does not start: {codes}")

    def prepare(mine: Int64Array, theirs: Int64Array, num_bytes: Int64Array) -> Callable[[], None]:
        lists = mine.tolist(), theirs.tolist(), num_bytes.tolist()

        def run() -> None:
            code = engine.batch_transfer_sync_read(contact.decode(), *lists)
            if code:
                raise LaunchError(f"Mooncake alone reads {len(num_bytes)} pieces: {code}")

        return run

    return prepare
