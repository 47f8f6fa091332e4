"""A model worker in a process of its own: it makes or opens KV arrays and follows loads. As a program: the far end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory, KVViews
from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress

SECONDS = 30.0


def digest(arrays: Sequence[np.ndarray]) -> str:
    """What tells bytes apart."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def layer_bytes(views: KVViews, layer: int, blocks: Sequence[int]) -> list[np.ndarray]:
    """Copies of some blocks in one layer; what a load writes last is read first."""
    return [array[block].copy() for array in reversed(views[layer].values()) for block in reversed(blocks)]


class KVWorker:
    """The near end: `ask` for a verb of `FarEnd`, or `tell` now and take the `answer` later."""

    def __init__(self, layout: RankLayout, num_gpu_blocks: int) -> None:
        command = [sys.executable, "-m", "tests.rigs.kv_worker", encode(layout).hex(), str(num_gpu_blocks)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def tell(self, verb: str, *values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *values]).encode() + b"\n")

    def answer(self) -> Any:
        stdout = self.process.stdout
        assert stdout is not None and select.select([stdout], [], [], SECONDS)[0], "the worker says nothing"
        return json.loads(stdout.readline())

    def ask(self, verb: str, *values: Any) -> Any:
        self.tell(verb, *values)
        return self.answer()

    def make_kv(self) -> KVHandle:
        """New arrays of the worker's own."""
        return KVHandle.from_bytes(bytes.fromhex(self.ask("make_kv")))

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Safe to call twice."""
        self.process.kill()
        self.process.wait(SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def kv_worker(layout: RankLayout, num_gpu_blocks: int) -> Iterator[KVWorker]:
    """A worker that does not outlive the test."""
    worker = KVWorker(layout, num_gpu_blocks)
    try:
        yield worker
    finally:
        worker.kill()


class FarEnd:
    """The verbs; each returns what goes back as JSON."""

    def __init__(self, layout: RankLayout, num_gpu_blocks: int) -> None:
        self._layout, self._num_gpu_blocks = layout, num_gpu_blocks

    def make_kv(self) -> str:
        self._memory = KVMemory.create(self._layout, self._num_gpu_blocks)
        self._views = self._memory.views()
        return self._memory.handle().to_bytes().hex()

    def open_kv(self, handle: str) -> bool:
        memory = KVMemory.open(self._layout, self._num_gpu_blocks, KVHandle.from_bytes(bytes.fromhex(handle)))
        self._views = memory.views()
        return True

    def open_progress(self, handle: str) -> bool:
        self._progress = LayerProgress.open(bytes.fromhex(handle))
        return True

    def digests(self, blocks: list[int]) -> list[str]:
        """Of these blocks, by layer, as they are now."""
        return [digest(layer_bytes(self._views, layer, blocks)) for layer in range(len(self._views))]

    def write(self, block: int, byte: int) -> bool:
        for layer in self._views:
            for array in layer.values():
                array[block].view(np.uint8)[...] = byte
        return True

    def follow(self, load_id: int, blocks: list[int], seconds: float) -> list[tuple[bool, str]]:
        """Layer after layer: what the wait said, and the blocks' bytes at that moment."""
        seen = []
        for layer in range(len(self._views)):
            came = self._progress.wait_layer((load_id,), layer, seconds)
            seen.append((came, layer_bytes(self._views, layer, blocks)))
        return [(came, digest(arrays)) for came, arrays in seen]

    def wait_all(self, load_id: int, seconds: float) -> list[bool]:
        """A thread waits for each layer; says `waiting` before it."""
        answers = dict[int, bool]()

        def wait(layer: int) -> None:
            answers[layer] = self._progress.wait_layer((load_id,), layer, seconds)

        threads = [threading.Thread(target=wait, args=(layer,)) for layer in range(self._layout.num_layers)]
        for thread in threads:
            thread.start()
        say("waiting")
        for thread in threads:
            thread.join()
        return [answers[layer] for layer in sorted(answers)]


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    far_end = FarEnd(decode(bytes.fromhex(sys.argv[1]), RankLayout), int(sys.argv[2]))
    for line in sys.stdin:
        verb, *values = json.loads(line)
        say(getattr(far_end, verb)(*values))
