"""A linker over device pools as SGLang drives it: pages are written, offloaded, looked up and loaded."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from tests.rigs.stand_in_linker import (
    Component,
    attention_pool,
    load_linker,
    params_of,
    states_pool,
    transfer,
    windows_pool,
)

LINKER = load_linker()
SETTINGS = sys.modules["fastdeploy_cache.adapters.sglang_linker.settings"]
PAGE, WINDOW_PAGES, SECONDS = 4, 2, 20.0
OPTIONS: dict[str, Any] = {"weights_id": "w", "cpu_memory_bytes": "1MiB", "load_seconds": 10.0}
KINDS = ["uniform", "windows", "states"]
PAGES = {"kv": [10, 11, 12, 13, 14], "swa": [7, 8], "mamba": [9]}  # to load five pages to


class Linked:
    """`kind`: uniform, windows or states (which have windows, too)."""

    def __init__(self, kind: str = "uniform", num_pages: int = 24, params: Any = None, **options: Any) -> None:
        self.kind, self.num_pages = kind, num_pages
        kvcache = attention_pool(4, num_pages * PAGE, 1) if kind == "uniform" else windows_pool(num_pages * PAGE)
        states = states_pool(num_pages) if kind == "states" else None
        components = {"uniform": (), "windows": (Component.SWA,), "states": (Component.SWA, Component.MAMBA)}[kind]
        self.linker = LINKER.FastDeployCacheLinker(
            None,
            params or params_of(kvcache, PAGE, states),
            components={Component.FULL, *components},
            extra_config={**OPTIONS, **options},
        )
        self.pools = self.linker.pools
        self._num_requests = 0

    # -- device pages

    def slots(self, name: str, pages: Sequence[int]) -> list[int]:
        size = self.pools[name].page_slots
        return [page * size + place for page in pages for place in range(size)]

    def content(self, name: str, pages: Sequence[int], layer: int | None = None) -> list[bytes]:
        """The bytes of device pages, in all layers or in one of the pool's."""
        arrays = self.pools[name].arrays if layer is None else [self.pools[name].arrays[layer]]
        size = self.pools[name].page_slots
        of_page = [range(page * size, (page + 1) * size) for page in pages]
        return [
            b"".join(tensor.array[list(slots)].tobytes() for parts in arrays for tensor in parts) for slots in of_page
        ]

    def write(self, name: str, pages: Sequence[int], keys: Sequence[str]) -> None:
        """What the model would compute for these keys, which alone decide it."""
        for page, key in zip(pages, keys, strict=True):
            noise = np.random.default_rng(int(key[:15], 16) + len(name))
            for parts in self.pools[name].arrays:
                for tensor in parts:
                    slots = self.slots(name, [page])
                    tensor.array[slots] = noise.random((len(slots), *tensor.shape[1:]))

    def wipe(self, name: str, pages: Sequence[int]) -> None:
        for parts in self.pools[name].arrays:
            for tensor in parts:
                tensor.array[self.slots(name, pages)] = -1.0

    def expected(self, name: str, keys: Sequence[str], spare: Sequence[int]) -> list[bytes]:
        """The bytes that pages of these keys have; the spare ones are written for it."""
        self.write(name, spare, keys)
        return self.content(name, spare)

    # -- what SGLang does

    def transfers(self, keys: Sequence[str], pages: dict[str, list[int]] | None = None) -> list[SimpleNamespace]:
        """Of a prefix of these keys, behind which a window and a state are wanted."""
        wanted = {"kv": list(keys), "swa": list(keys[-WINDOW_PAGES:]), "mamba": list(keys[-1:])}
        return [
            transfer(name, wanted[name], self.slots(name, pages[name]) if pages is not None else None)
            for name in self.pools
        ]

    def store(self, keys: Sequence[str], pages: Sequence[int], **others: tuple[Sequence[str], Sequence[int]]) -> bool:
        """Compute and offload a node; whether it succeeded. `others`: keys and pages of the other pools."""
        given = {"kv": (keys, pages), **others}
        for name, (names, at) in given.items():
            self.write(name, at, names)
        sent = [transfer(name, names, self.slots(name, at)) for name, (names, at) in given.items()]
        if not self.linker.offload(sent):
            return False
        return self.wait_stored()

    def wait_stored(self) -> bool:
        """The end of the oldest offload."""
        deadline = SYSTEM_CLOCK.now() + SECONDS
        while not self.linker.num_completed_offloads():
            assert SYSTEM_CLOCK.now() < deadline, "an offload does not end"
            SYSTEM_CLOCK.sleep(0.001)  # SGLang asks at each of its steps
        return bool(self.linker.pop_completed_offload())

    def lookup(self, keys: Sequence[str], rid: str | None = None) -> list[int]:
        self._num_requests += 1
        return list(self.linker.lookup(rid or f"r{self._num_requests}", self.transfers(keys)))

    def load(self, keys: Sequence[str], pages: dict[str, list[int]], rid: str = "r") -> bool:
        """Queue it."""
        for name in self.pools:
            self.wipe(name, pages[name])
        return bool(self.linker.load(rid, self.transfers(keys, pages)))

    def run(self) -> bool:
        """Compute the batch that was queued, layer by layer; whether all of it came."""
        index = self.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(8):
            self.linker.layer_done_counter.wait_until(layer)
        return bool(self.linker.finish_layer_wise_loading(index))

    # -- processes

    def pids(self) -> list[int]:
        """Of its ranks."""
        caches = self.linker._caches.values()
        found = [status.pid for cache in caches for status in cache.cache._movement.client.statuses()]
        return [pid for pid in found if pid is not None]

    def kill(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_ready(self) -> None:
        for cache in self.linker._caches.values():
            assert cache.cache.ranks.wait_ready(SECONDS)

    def check(self) -> None:
        """The books of each cache."""
        for cache in self.linker._caches.values():
            cache.cache.check_invariants()


NewLinked = Callable[..., Linked]


def store_node(linked: Linked, keys: list[str]) -> bool:
    """A node of these keys, with the window and the state behind it."""
    behind = {"swa": (keys[-2:], [1, 2][: len(keys)]), "mamba": (keys[-1:], [3])}
    others = {name: given for name, given in behind.items() if name in linked.pools}
    return linked.store(keys, range(1, 1 + len(keys)), **others)


def has_come(linked: Linked, keys: list[str]) -> None:
    """The device pages of `PAGES` hold what these keys stand for."""
    wanted = {"kv": keys, "swa": keys[-2:], "mamba": keys[-1:]}
    spare = {"kv": range(17, 22), "swa": [4, 5], "mamba": [6]}
    for name in linked.pools:
        found = linked.content(name, PAGES[name])
        assert found == linked.expected(name, wanted[name], spare[name])
