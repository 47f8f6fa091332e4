"""Two processes with a link between them: one owns memory, the other reads it, in the same rounds by the link, by the
link's library alone, and (shm) as plain copies: of the owner's memory, which it has mapped, and of its own.

As a program: `own KIND NUM_BYTES`, or `read KIND NUM_BYTES ENDPOINT`; both end with standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.launch.bench.peer_library import open_library
from fastdeploy_cache.transfer_manager.peer import open_link
from fastdeploy_cache.transfer_manager.peer.link import Bytes, LinkError, Pieces, open_endpoint

_SECONDS = 60.0
_REFUSED = "refused: "


class LinkMissingError(LaunchError):
    """A link's library is not installed, or cannot be loaded here."""


class Way(NamedTuple):
    """What is timed, over so many scattered pieces of one size: `link`, `library`; `plain` or `own`, as many bytes in
    one piece; `each`, the same pieces plainly."""

    name: str
    piece_bytes: int
    num_pieces: int


class _Process:
    """A child of this module, and the lines that it says."""

    def __init__(self, *arguments: str) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`; libraries talk a lot
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastdeploy_cache.launch.bench.peer_memory", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,
        )
        self._poll = select.poll()
        assert self._process.stdout is not None
        self._poll.register(self._process.stdout, select.POLLIN)

    def line(self) -> str:
        """The next one. Raises `LinkMissingError` or `LaunchError`."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().decode().strip() if self._poll.poll(_SECONDS * 1000) else ""
        if said.startswith(_REFUSED):
            raise LinkMissingError(said.removeprefix(_REFUSED))
        if not said:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its output ends a moment before it does
                self._process.wait(1)
            self._complaints.seek(0)
            end = self._complaints.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise LaunchError(f"a process of the benchmark does not answer (status {self._process.poll()}): {end}")
        return said

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def close(self) -> None:
        """It is gone on return."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._complaints):
            assert stream is not None
            stream.close()


class LinkedMemory:
    """An owner of `num_bytes` and a reader with as many, from outside. Half of it is read at a time, at most."""

    def __init__(self, kind: str, num_bytes: int) -> None:
        """Raises `LinkMissingError`; `LaunchError` where the link does not start."""
        self._owner = _Process("own", kind, str(num_bytes))
        self._reader: _Process | None = None
        try:
            endpoint = self._owner.line()
            self._reader = _Process("read", kind, str(num_bytes), endpoint)
            self._reader.line()
        except BaseException:
            self.close()
            raise

    def seconds(self, way: Way) -> float:
        """That one read, or copy, takes in the reader."""
        assert self._reader is not None
        self._reader.say(json.dumps(way))
        return float(self._reader.line())

    def close(self) -> None:
        """End both."""
        for process in (self._reader, self._owner):
            if process is not None:
                process.close()


def scattered(pool_bytes: int, piece_bytes: int, num_pieces: int) -> Pieces:
    """Pieces at random places of two segments of `pool_bytes`; hardly any two lie side by side on both."""
    rng = np.random.default_rng(1)
    places = [rng.permutation(pool_bytes // piece_bytes)[:num_pieces].astype(np.int64) for _ in range(2)]
    zeros = np.zeros(num_pieces, np.int64)
    return Pieces(zeros, places[0] * piece_bytes, zeros, places[1] * piece_bytes, np.full(num_pieces, piece_bytes))


class _Reader:
    def __init__(self, kind: str, num_bytes: int, endpoint: bytes) -> None:
        memory = SharedArray.create("reader", num_bytes)
        self._local = memory.view(np.uint8, (num_bytes,))
        self._theirs = _mapped(kind, endpoint) if kind == "shm" else self._local
        self._own = np.ones(num_bytes // 2 if kind == "shm" else 0, np.uint8)
        self._link = open_link(kind, {})
        self._link.register([memory])
        self._peer = self._link.connect(endpoint, _SECONDS)
        self._library = open_library(kind, self._local, endpoint)
        self._ready: dict[Way, Callable[[], object]] = {}

    def seconds(self, way: Way) -> float:
        """The seconds that one read takes. The first of its kind is checked: all bytes have to be there."""
        run = self._ready.get(way)
        if run is None:
            pieces = scattered(len(self._local), way.piece_bytes, way.num_pieces)
            run = self._ready[way] = self._runner(way, pieces)
            if way.name in ("link", "library", "each"):
                self._local[:] = 255
                run()
                _check(self._local, pieces)
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    def _runner(self, way: Way, pieces: Pieces) -> Callable[[], object]:
        if way.name in ("plain", "own"):
            num_bytes, source = way.piece_bytes * way.num_pieces, self._theirs if way.name == "plain" else self._own
            return lambda: np.copyto(self._local[:num_bytes], source[:num_bytes])
        if way.name == "link":
            return lambda: self._link.read(self._peer, pieces, _SECONDS)
        if way.name == "each":
            rows = list(zip(pieces.local_offset.tolist(), pieces.remote_offset.tolist(), strict=True))
            return lambda: self._copy_each(rows, way.piece_bytes)
        return self._library(pieces)

    def _copy_each(self, rows: list[tuple[int, int]], num_bytes: int) -> None:
        local, theirs = self._local, self._theirs
        for start, source in rows:
            local[start : start + num_bytes] = theirs[source : source + num_bytes]


def _mapped(kind: str, endpoint: bytes) -> Bytes:
    """The owner's memory: which pages a copy reads and writes makes a difference of a third."""
    there = open_endpoint(endpoint, kind)
    (num_bytes,), (handle,) = there.segment_bytes, there.handles
    memory = SharedArray(os.open(f"/proc/{there.pid}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC), num_bytes)
    memory.prefault()
    return memory.view(np.uint8, (num_bytes,))


def _pattern(start: int, end: int) -> Bytes:
    """What the owner's bytes [start, end) hold."""
    return np.arange(start // 8, end // 8, dtype=np.uint64).view(np.uint8)


def _check(local: Bytes, pieces: Pieces) -> None:
    for start, source, num_bytes in zip(pieces.local_offset, pieces.remote_offset, pieces.num_bytes, strict=True):
        if not np.array_equal(local[start : start + num_bytes], _pattern(source, source + num_bytes)):
            raise LaunchError(f"the piece of {num_bytes} bytes at {source} did not arrive as it was sent")


def _own(kind: str, num_bytes: str) -> None:
    memory = SharedArray.create("owner", int(num_bytes))
    memory.view(np.uint8, (int(num_bytes),))[:] = _pattern(0, int(num_bytes))
    link = open_link(kind, {})
    link.register([memory])
    _say(link.endpoint().hex())
    sys.stdin.read()


def _read(kind: str, num_bytes: str, endpoint: str) -> None:
    reader = _Reader(kind, int(num_bytes), bytes.fromhex(endpoint))
    _say("ready")
    for line in sys.stdin:
        _say(repr(reader.seconds(Way(*json.loads(line)))))


def _say(line: str) -> None:
    os.write(_ANSWERS, f"{line}\n".encode())


if __name__ == "__main__":
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)  # libraries greet on standard output
    try:
        if sys.argv[1] == "own":
            _own(*sys.argv[2:])
        else:
            _read(*sys.argv[2:])
    except LinkError as error:
        if error.reason != "refused":
            raise
        _say(f"{_REFUSED}{error}")
    os._exit(0)  # what libraries do at a regular end is not what is measured here
