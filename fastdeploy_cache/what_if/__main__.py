"""`python -P -m fastdeploy_cache.what_if`: started by an engine's process, ends with it."""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
import threading

from fastdeploy_cache.insight.what_if.setup import ResultBoard, WhatIfSetup
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
    end_with_engine(setup.engine_pid)
    estimator, records = Estimator(setup), Records()
    while data := os.read(fd, _PIECE_BYTES):
        for reference in records.feed(data):
            estimator.feed(reference)
        board.write(estimator.result())
    return 0


def end_with_engine(engine_pid: int) -> None:
    """End this process when the engine does, whatever it works on then.

    A thread waits for the engine's end, by its pid descriptor. The end of standard input would come late, behind what
    is in the pipe, and not at all where the engine has forked: its child has the other end, too, and lives on. The
    kernel's signal at a parent's end, which ranks use, comes when the spawning thread ends, and that is any of a
    user's here.
    """
    try:
        engine = os.pidfd_open(engine_pid)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != engine_pid:  # it had gone before, and its pid is another one's
        os._exit(0)

    def watch() -> None:
        poll = select.poll()
        poll.register(engine, select.POLLIN)
        poll.poll()
        os._exit(0)  # not sys.exit: the main thread is at work

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


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
