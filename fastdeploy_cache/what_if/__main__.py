"""`python -P -m fastdeploy_cache.what_if`: started by an engine's process, ends with it."""

from __future__ import annotations

import os
import signal
import struct
import sys

from fastdeploy_cache.insight.what_if_setup import ResultBoard, WhatIfSetup
from fastdeploy_cache.ipc.codec import decode
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.what_if.estimator import Estimator
from fastdeploy_cache.what_if.records import Records

_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 2**20
_NICE = 10  # whoever serves goes first


def main() -> int:
    """Read a set-up, then records until the end of standard input; write results behind each piece."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to deal with
    os.nice(_NICE)
    fd = sys.stdin.fileno()
    setup: WhatIfSetup = decode(_exactly(fd, *_LENGTH.unpack(_exactly(fd, _LENGTH.size))), WhatIfSetup)
    board = ResultBoard(SharedArray(setup.result_fd, ResultBoard.num_words(len(setup.plans)) * 8), len(setup.plans))
    estimator, records = Estimator(setup), Records()
    while data := os.read(fd, _PIECE_BYTES):
        for reference in records.feed(data):
            estimator.feed(reference)
        board.write(estimator.result())
    return 0


def _exactly(fd: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = os.read(fd, num_bytes - len(data))
        if not piece:
            raise SystemExit(0)  # the engine has gone
        data += piece
    return data


if __name__ == "__main__":
    raise SystemExit(main())
