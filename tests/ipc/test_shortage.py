"""What is a shortage, by whatever error it comes, and which limit it is."""

from __future__ import annotations

import errno
import os

import pytest
import zmq

from fastdeploy_cache.errors import IPCError, StorageRefusedError
from fastdeploy_cache.ipc.shortage import is_shortage, limit_of

NUMBERS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)


def raised_from(cause: BaseException, error: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("number", NUMBERS)
def test_a_shortage_by_its_number(number: int) -> None:
    """From the system, from ZeroMQ, from the loader of libraries, which puts it in words, and below errors of ours."""
    loader = ImportError(f"libany.so: cannot open shared object file: {os.strerror(number)}")
    for error in (OSError(number, os.strerror(number)), zmq.ZMQError(number), loader):
        assert is_shortage(error)
        assert is_shortage(raised_from(raised_from(error, IPCError("no luck")), StorageRefusedError("not as set")))


def test_a_shortage_without_a_number() -> None:
    """Of memory and of threads Python tells none; what to do about it is said all the same."""
    no_thread = RuntimeError("can't start new thread")
    assert is_shortage(MemoryError()) and "memory.max" in limit_of(MemoryError())
    assert is_shortage(no_thread) and "RLIMIT_NPROC" in limit_of(no_thread)
    full = ImportError(f"libany.so: {os.strerror(errno.ENFILE)}")
    assert "fs.file-max" in limit_of(full)


def test_what_is_none() -> None:
    """Also an error that names itself as its cause, as nobody would wait for the end of such a chain."""
    error = IPCError("no luck")
    others = (
        raised_from(error, error),
        OSError(errno.EACCES, "no"),
        ImportError("No module named 'any'"),
        RuntimeError(),
    )
    assert not any(map(is_shortage, others))
