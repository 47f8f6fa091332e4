"""Mooncake's transfer engine as a link's engine, without a master: peers find each other by host and port."""

from __future__ import annotations

import importlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.transfer_manager.peer.link import Bytes, Endpoint, Int64Array, LinkError
from fastdeploy_cache.transfer_manager.peer.link_address import wait_until

_OK = 0
_NOT_BEGUN = 0
_DONE = 1
_MAX_TRANSFERS = 32  # at a time, of a read. With more than 2048 to a peer Mooncake loses some: neither done nor failed
_ENDED = (_DONE, -1)  # -1: failed. Else 0, or -2 for late by Mooncake's own clock, which stops nothing


class MooncakeEngine:
    """See `ReadEngine`.

    Each piece is a transfer of its own. A batch is waited for by a call that spins on a core for up to 30 s and comes
    back at its first failure, others still arriving; of single transfers each one's end is known.

    Mooncake listens on all of a host's addresses, whatever its `hostname`, and whoever connects may read and write
    registered memory.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """See `open_link`."""
        self._hostname = options.get("hostname", "127.0.0.1")
        protocol = options.get("protocol", "tcp")
        self._engine: Any = _new_engine()
        code = self._engine.initialize(self._hostname, "P2PHANDSHAKE", protocol, options.get("device_name", ""))
        if code != _OK:
            raise LinkError(f"Mooncake does not start on {self._hostname} with {protocol}: {code}", "failed")
        self._registered: list[int] = []
        self._met: dict[str, bytes] = {}  # incarnations, by name

    def register(self, memory: Bytes) -> None:
        """See `ReadEngine`."""
        code = self._engine.register_memory(memory.ctypes.data, memory.nbytes)
        if code != _OK:
            raise LinkError(f"Mooncake does not register {memory.nbytes} bytes: {code}", "failed")
        self._registered.append(memory.ctypes.data)

    def contact(self) -> bytes:
        """See `ReadEngine`: host and port."""
        return f"{self._hostname}:{self._engine.get_rpc_port()}".encode()

    def reach(self, there: Endpoint, deadline: float) -> None:
        """See `ReadEngine`."""
        name, engine = _name(there), self._engine
        if self._met.setdefault(name, there.incarnation) != there.incarnation:
            # Its segments would be looked for where the other process had them.
            raise LinkError(f"Mooncake has met another process at {name} and cannot forget it: open a link", "refused")
        is_there = _within(
            lambda: engine.send_probe(name) == _OK and bool(engine.get_first_buffer_address(name)), deadline
        )
        if is_there is None:
            raise LinkError(f"the {there} does not answer in time at {name}", "late")
        if not is_there:
            raise LinkError(f"the {there} is gone: nobody answers at {name}", "gone")

    def fetch(
        self, there: Endpoint, local: Int64Array, remote: Int64Array, num_bytes: Int64Array, deadline: float
    ) -> None:
        """See `ReadEngine`."""
        name, engine = _name(there), self._engine
        pieces = list(zip(local.tolist(), remote.tolist(), num_bytes.tolist(), strict=True))
        is_done = _transfer(engine, name, pieces, deadline)
        if is_done is None:
            raise LinkError(f"the {there} does not answer in time at {name}", "late", may_write_later=True)
        if not is_done:
            what = f"Mooncake's read of {len(pieces)} pieces from the {there} at {name} failed"
            if _within(lambda: engine.send_probe(name) == _OK, deadline):
                raise LinkError(what, "failed")
            raise LinkError(f"{what}: nobody answers there", "gone")

    def leave(self, there: Endpoint) -> None:
        """See `ReadEngine`. Mooncake keeps what it knows of a peer and has no call to forget it."""

    def close(self) -> None:
        """See `ReadEngine`."""
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._registered, self._engine = [], None


def _transfer(engine: Any, name: str, pieces: Sequence[tuple[int, int, int]], deadline: float) -> bool | None:
    """Whether all pieces have arrived, once all that were begun have ended; None: some had not by the deadline."""
    running: deque[int] = deque()
    has_failed = False
    for local, remote, num_bytes in pieces:
        if len(running) == _MAX_TRANSFERS:
            code = _end(engine, running.popleft(), deadline)
            if code is None:
                return None
            has_failed = code != _DONE
        if has_failed:
            break
        transfer = engine.batch_transfer_async_read(name, [local], [remote], [num_bytes])
        if transfer == _NOT_BEGUN:
            has_failed = True
            break
        running.append(transfer)
    codes = [_end(engine, transfer, deadline) for transfer in running]
    return None if None in codes else not has_failed and all(code == _DONE for code in codes)


def _end(engine: Any, transfer: int, deadline: float) -> int | None:
    """How a transfer ended; None: it did not before the deadline. One that has ended must not be asked for again."""
    codes: list[int] = []

    def has_ended() -> bool:
        codes.append(engine.transfer_check_status(transfer))
        return codes[-1] in _ENDED

    return codes[-1] if wait_until(has_ended, deadline) else None


def _within(call: Callable[[], bool], deadline: float) -> bool | None:
    """What the call returns, or None if not before the deadline: then its thread goes on until Mooncake lets it go.

    For calls that ask a peer for an answer, which Mooncake awaits as long as TCP does.
    """
    answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), name="mooncake-call", daemon=True).start()
    try:
        return answer.get(timeout=max(0.0, deadline - SYSTEM_CLOCK.now()))
    except queue.Empty:
        return None


def _name(there: Endpoint) -> str:
    return there.contact.decode(errors="replace")


def _new_engine() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise LinkError(
            "link kind 'mooncake' needs pip install mooncake-transfer-engine-non-cuda (or the CUDA build), "
            f"and apt-get install libibverbs1: {error}",
            "refused",
        ) from error
