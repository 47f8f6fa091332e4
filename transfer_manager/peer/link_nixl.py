"""NIXL as a link's engine: RDMA, TCP or shared memory, as its backend (UCX) finds them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.transfer_manager.peer.link import Bytes, Endpoint, Int64Array, LinkError, Reason
from fastdeploy_cache.transfer_manager.peer.link_address import wait_until

_PACKAGES = ("nixl_cu12", "nixl_cu13")  # the same library, by the CUDA version it was built for
# The agent's thread looks at its connections this often where no event wakes it, at 3 % of a core. NIXL's own Python
# class fixes it at 0, and then the thread spins on a core for as long as the agent lives: hence the bindings.
_THREAD_NAP_MICROSECONDS = 1000


class NixlEngine:
    """See `ReadEngine`. What UCX may use (UCX_TLS, UCX_NET_DEVICES) is for the process's environment to say.

    Every agent has a new name, so that none is taken for another. One agent owns what peers read; a thread of its own
    answers them. Another one, without a thread, reads: beside its calls such a thread would spin for the lock, on a
    second core. Over UCX's shared memory a read needs nothing of the peer, not even that it runs.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """See `open_link`."""
        self._nixl, backend = _bindings(), options.get("backend", "UCX")
        # NIXL's errors have no base of their own; pybind11 raises the last for arguments that it cannot convert.
        classes = [v for v in vars(self._nixl).values() if isinstance(v, type) and issubclass(v, Exception)]
        self._errors: tuple[type[Exception], ...] = (*classes, RuntimeError, TypeError)
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _THREAD_NAP_MICROSECONDS
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self._owner: Any = self._nixl.nixlAgent(SYSTEM_CLOCK.random_bytes(16).hex(), config)
            self._owner_backends = [self._owner.createBackend(backend, {})]
            config.useProgThread = False
            self._agent: Any = self._nixl.nixlAgent(SYSTEM_CLOCK.random_bytes(16).hex(), config)
            self._backends = [self._agent.createBackend(backend, {})]
        except self._errors as error:
            raise LinkError(f"NIXL's backend {backend!r} does not start: {error}", "failed") from error
        self._registered: list[Any] = []
        self._names: dict[bytes, str] = {}  # by incarnation
        self._lost: set[bytes] = set()

    def register(self, memory: Bytes) -> None:
        """See `ReadEngine`."""
        descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(memory.ctypes.data, memory.nbytes, 0, "")])
        try:
            self._agent.registerMem(descriptors, self._backends)
            self._owner.registerMem(descriptors, self._owner_backends)
        except self._errors as error:
            raise LinkError(f"NIXL does not register {memory.nbytes} bytes: {error}", "failed") from error
        self._registered.append(descriptors)

    def contact(self) -> bytes:
        """See `ReadEngine`: the owner's name, its connections and what it has registered."""
        return bytes(self._owner.getLocalMD())

    def reach(self, there: Endpoint, deadline: float) -> None:  # noqa: ARG002  the first read connects
        """See `ReadEngine`."""
        try:
            name = self._agent.loadRemoteMD(there.contact)
        except self._errors as error:
            raise LinkError(f"NIXL finds no way to the {there}; has it ended? {error}", "failed") from error
        self._names[there.incarnation] = name.decode()

    def fetch(
        self, there: Endpoint, local: Int64Array, remote: Int64Array, num_bytes: Int64Array, deadline: float
    ) -> None:
        """See `ReadEngine`."""
        if there.incarnation in self._lost:
            raise LinkError(f"the {there} is gone: NIXL has lost it before", "gone")
        sides = self._descriptors(local, num_bytes), self._descriptors(remote, num_bytes)
        name = self._names[there.incarnation]
        try:
            request = self._agent.createXferReq(self._nixl.NIXL_READ, *sides, name, b"", self._backends)
        except self._errors as error:
            raise self._error(there, error, may_write_later=False) from error
        try:
            # On one host UCX may copy here and now; only what goes over a network is left to wait for.
            states = [self._agent.postXferReq(request)]
            self._wait(request, states, deadline)
        except self._errors as error:
            raise self._error(there, error, may_write_later=True) from error
        finally:
            with contextlib.suppress(*self._errors):  # one that cannot be cancelled stays with the agent
                self._agent.releaseXferReq(request)
        if states[-1] == self._nixl.NIXL_IN_PROG:
            raise LinkError(f"the {there} does not answer NIXL in time", "late", may_write_later=True)
        if states[-1] != self._nixl.NIXL_SUCCESS:
            raise LinkError(f"NIXL's read from the {there} came to {states[-1]}", "failed", may_write_later=True)

    def leave(self, there: Endpoint) -> None:
        """See `ReadEngine`."""
        self._lost.discard(there.incarnation)
        with contextlib.suppress(*self._errors):  # NIXL has forgotten those whose end it has seen
            self._agent.invalidateRemoteMD(self._names.pop(there.incarnation))

    def close(self) -> None:
        """See `ReadEngine`."""
        for descriptors in self._registered:
            with contextlib.suppress(*self._errors):  # a read that is late may hold it; the agent's end does not
                self._agent.deregisterMem(descriptors, self._backends)
            with contextlib.suppress(*self._errors):
                self._owner.deregisterMem(descriptors, self._owner_backends)
        self._registered, self._agent, self._owner = [], None, None

    def _wait(self, request: int, states: list[Any], deadline: float) -> None:
        """Add to the states until one is an end, or the deadline is over."""

        def has_ended() -> bool:
            if states[-1] == self._nixl.NIXL_IN_PROG:
                states.append(self._agent.getXferStatus(request))
            return bool(states[-1] != self._nixl.NIXL_IN_PROG)

        wait_until(has_ended, deadline)

    def _descriptors(self, addresses: Int64Array, num_bytes: Int64Array) -> Any:
        rows = np.stack([addresses, num_bytes, np.zeros_like(addresses)], axis=1).astype(np.uint64)
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, rows)

    def _error(self, there: Endpoint, error: Exception, *, may_write_later: bool) -> LinkError:
        reason: Reason = "failed"
        if isinstance(error, self._nixl.nixlRemoteDisconnectError):
            reason = "gone"
            self._lost.add(there.incarnation)
        return LinkError(f"NIXL's read from the {there}: {error}", reason, may_write_later=may_write_later)


def _bindings() -> Any:
    """NIXL's C++ interface, as its package brings it."""
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            raise LinkError(f"link kind 'nixl': package {name} cannot be loaded: {error}", "refused") from error
    raise LinkError("link kind 'nixl' needs pip install --no-deps nixl-cu12 (or nixl-cu13)", "refused")
