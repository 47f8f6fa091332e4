"""`python -P -m fastdeploy_cache.what_if`: started by an engine's process, ends with it."""

from __future__ import annotations

import os
import select
import signal
import struct
import sys

from fastdeploy_cache.insight.what_if_setup import ResultBoard, WhatIfSetup
from fastdeploy_cache.ipc.codec import decode
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shortage import raise_open_files
from fastdeploy_cache.what_if.estimator import Estimator
from fastdeploy_cache.what_if.records import Records

_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 2**20
_NICE = 10  # whoever serves goes first


def main() -> int:
    """Read a set-up, then records until the engine ends; write results behind each piece."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to deal with
    raise_open_files()
    os.nice(_NICE)
    fd = sys.stdin.fileno()
    setup: WhatIfSetup = decode(_exactly(fd, *_LENGTH.unpack(_exactly(fd, _LENGTH.size))), WhatIfSetup)
    board = ResultBoard(SharedArray(setup.result_fd, ResultBoard.num_words(len(setup.plans)) * 8), len(setup.plans))
    try:
        engine = os.pidfd_open(setup.engine_pid)
    except ProcessLookupError:
        return 0
    estimator, records = Estimator(setup), Records()
    while data := _next_piece(fd, engine):
        for reference in records.feed(data):
            estimator.feed(reference)
        board.write(estimator.result())
    return 0


def _next_piece(fd: int, engine: int) -> bytes:
    """What comes next; nothing once the engine, whose pid descriptor this is, has ended.

    The end of standard input alone would not tell: where the engine has forked, its child has the other end, too, and
    lives on.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(engine, select.POLLIN)
    ready = dict(poll.poll())
    return os.read(fd, _PIECE_BYTES) if engine not in ready else b""


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
