"""How a new process is told what it is: a message in a memory file that it inherits."""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, TypeVar

import msgspec

from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.transfer_manager.process.wire import EXIT_ENGINE_GONE

S = TypeVar("S", bound="ProcessSetup")
_SETUP_FD = struct.Struct("<i")


class ProcessSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What every process is told before anything else; the descriptors are inherited."""

    rank: int
    incarnation: int
    engine_pid: int
    queue_fds: tuple[int, ...]  # its end of each lane
    signal_fd: int
    heartbeat_seconds: float
    variables: dict[str, str] = {}  # of its environment, beside what it has from the engine


def memory_of(setup: ProcessSetup) -> int:
    """Engine side: a descriptor of memory with the set-up, which the process inherits.

    A set-up that is larger than a pipe would hold the engine's thread in its write until the process reads.
    """
    data = memoryview(encode(setup))
    fd = os.memfd_create("setup", os.MFD_CLOEXEC)
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def say_setup(pipe: BinaryIO, setup_fd: int) -> None:
    """Engine side: tell a process where its set-up is, by its standard input, which stays open while the engine
    lives. A few bytes always fit into a new pipe."""
    pipe.write(_SETUP_FD.pack(setup_fd))
    pipe.flush()


def read_setup(lifeline: int, setup_type: type[S]) -> S:
    """Process side of `say_setup`; where the engine is gone already, the process ends."""
    (setup_fd,) = _SETUP_FD.unpack(_read_exactly(lifeline, _SETUP_FD.size))
    with os.fdopen(setup_fd, "rb") as memory:
        memory.seek(0)
        setup: S = decode(memory.read(), setup_type)
    return setup


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = os.read(fd, num_bytes - len(data))
        if not piece:
            os._exit(EXIT_ENGINE_GONE)
        data += piece
    return data
