"""Random nodes offloaded, looked up and loaded through a linker, on a CPU tier that is too small for them all."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from tests.rigs.linked_engine import WINDOW_PAGES, Linked

_DEPTH, _WIDTH = 6, 2


class LinkedWalk:
    """Prompts are paths of a tree of pages; what SGLang has on its device is drawn anew each time."""

    def __init__(self, kind: str, seed: int, folder: Path | None = None) -> None:
        """`folder`: of storage below."""
        self._draw, self._kind, self._folder = random.Random(seed), kind, folder
        self.linked, self._is_down = self._new(), False
        self.num_looked = self.num_loaded = self.num_stored = self.num_pages = self.num_failed = 0

    def _new(self) -> Linked:
        transfer = {"restart_backoff_seconds": 0.0, "max_restarts": 10_000}
        stored = {"folder": str(self._folder), "capacity_bytes": "16MiB", "slab_bytes": "1MiB"}
        options = {"storage": stored} if self._folder is not None else {}
        return Linked(self._kind, num_pages=40, cpu_memory_bytes=80_000, transfer=transfer, **options)

    def _path(self) -> list[str]:
        """Hashes of the pages of a prompt, each of which is of all in front of it, too."""
        places = [self._draw.randrange(_WIDTH) for _ in range(self._draw.randint(1, _DEPTH))]
        return [hashlib.sha256(str(places[: end + 1]).encode()).hexdigest() for end in range(len(places))]

    def run(self, num_steps: int) -> None:
        num_down = 0  # steps since a kill: more of them without ranks would show nothing
        for _ in range(num_steps):
            num_down = num_down + 1 if self._is_down else 0
            if num_down > 2:
                self.linked.wait_ready()
                self._is_down, num_down = False, 0
            draw = self._draw.random()
            if draw < 0.45:
                self._store()
            elif draw < 0.95:
                self._load()
            elif draw < 0.98:
                self.linked.kill()
                self._is_down = True
            elif self._folder is not None and self._draw.random() < 0.5:
                self.linked.linker.close()
                self.linked = self._new()
            else:
                self.linked.linker.reset()
            self.linked.check()
        self.linked.linker.close()

    def _store(self) -> None:
        """A node: the end of a path, or a part of it."""
        path = self._path()
        first = self._draw.choice([0, self._draw.randrange(len(path))])
        keys = path[first : self._draw.randint(first + 1, len(path))]
        others = {}
        if "swa" in self.linked.pools and self._draw.random() < 0.8:
            window = keys[-self._draw.randint(1, 3) :]
            others["swa"] = window, range(1, 1 + len(window))
        if "mamba" in self.linked.pools and self._draw.random() < 0.8:
            others["mamba"] = keys[-1:], [1]
        self.num_stored += self.linked.store(keys, range(1, 1 + len(keys)), **others)

    def _load(self) -> None:
        """What is there of one or two prompts, behind what the device has of them: in one batch."""
        wanted = list[tuple[list[str], dict[str, list[int]]]]()
        for number in range(self._draw.randint(1, 2)):
            path = self._path()
            on_device = self._draw.choice([0, self._draw.randrange(len(path))])
            tail, rid = path[on_device:], f"r{self.num_looked}"
            self.num_looked += 1
            found = self.linked.lookup(tail, rid)
            assert found == sorted(set(found)) and all(0 < each <= len(tail) for each in found)
            if not found:
                continue
            while self._draw.random() < 0.3:
                self._store()
            keys, first = tail[: self._draw.choice(found)], 12 + 12 * number
            pages = {
                "kv": list(range(first, first + len(keys))),
                "swa": [8 + 2 * number, 9 + 2 * number][: min(WINDOW_PAGES, len(keys))],
                "mamba": [5 + number],
            }
            assert self.linked.load(keys, pages, rid), "what was just promised is not there"
            wanted.append((keys, pages))
        if not wanted:
            return
        if self._draw.random() < 0.05:
            self.linked.kill()
            self._is_down = True
        if not self.linked.run():
            self.num_failed += 1
            return
        for keys, pages in wanted:
            self.num_loaded += 1
            self.num_pages += len(keys)
            self._check(keys, pages)

    def _check(self, keys: list[str], pages: dict[str, list[int]]) -> None:
        of_pool = {"kv": keys, "swa": keys[-WINDOW_PAGES:], "mamba": keys[-1:]}
        for name in self.linked.pools:
            found = self.linked.content(name, pages[name])
            spare = {"kv": range(1, 11), "swa": range(1, 4), "mamba": range(1, 2)}[name][: len(of_pool[name])]
            assert found == self.linked.expected(name, of_pool[name], spare), f"other bytes in {name}"
