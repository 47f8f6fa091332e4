"""A process that owns memory and lets others read it over a link.

Arguments: link kind, its options as JSON, seed, then the segments' sizes in bytes. Segment i holds `content` of it.
Says its endpoint in hexadecimal on a line of its own; then each line of standard input is a verb, answered by `done`:
`release` gives the pages of segment 0 back, `drop` closes the descriptors, `become` makes it another incarnation.
It ends with standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.peer import open_link
from fastdeploy_cache.transfer_manager.peer.link import INCARNATION_BYTES, Bytes
from fastdeploy_cache.transfer_manager.peer.link_address import AddressLink
from tests.rigs.stopping import stopped

SECONDS = 30.0


def content(seed: int, segment: int, num_bytes: int) -> Bytes:
    """Bytes by which every place of a segment is known."""
    return np.random.default_rng((seed, segment)).integers(0, 256, num_bytes, np.uint8)


class LinkPeer:
    """The process, from outside."""

    def __init__(self, kind: str, sizes: list[int], seed: int = 1, **options: str) -> None:
        self.seed, self.sizes = seed, sizes
        arguments = [kind, json.dumps(options), str(seed), *map(str, sizes)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.link_peer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = bytes.fromhex(self._line())

    def content(self, segment: int) -> Bytes:
        """What it has written there."""
        return content(self.seed, segment, self.sizes[segment])

    def do(self, verb: str) -> None:
        """See the module; it has happened on return."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb}\n".encode())
        self.process.stdin.flush()
        assert self._line() == "done"

    def pause(self) -> None:
        """It hangs, as a host that swaps."""
        stopped(self.process.pid)

    def resume(self) -> None:
        """It goes on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone at once, whatever it was doing."""
        self.process.kill()
        self.process.wait(SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        assert line, f"the peer ended with {self.process.poll()}"
        return line


def main(kind: str, options: str, seed: str, *sizes: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries greet on standard output
    segments = [SharedArray.create(f"source {index}", int(size)) for index, size in enumerate(sizes)]
    for index, segment in enumerate(segments):
        if segment.num_bytes:
            segment.view(np.uint8, (segment.num_bytes,))[:] = content(int(seed), index, segment.num_bytes)
    link = open_link(kind, json.loads(options))
    link.register(segments)
    print(link.endpoint().hex(), file=answers, flush=True)
    for line in sys.stdin:
        verb = line.strip()
        if verb == "release":
            segments[0].release()
        elif verb == "drop":
            for segment in segments:
                segment.close()
        elif verb == "become":
            assert isinstance(link, AddressLink)
            link._page[:INCARNATION_BYTES] ^= 255
        print("done", file=answers, flush=True)
    os._exit(0)  # what libraries do at a regular end is not what is tested here


if __name__ == "__main__":
    main(*sys.argv[1:])
