"""Shared memory by descriptor: views outlive it, another process sees the same bytes, nothing has a name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache.errors import IPCError, NotEnoughMemoryError
from fastdeploy_cache.ipc import memory_limit, shared_array
from fastdeploy_cache.ipc.shared_array import SharedArray
from tests.rigs.leaks import new_shm_files, shm_files

CHILD = """
import sys
import numpy as np
from fastdeploy_cache.ipc.shared_array import SharedArray
array = SharedArray(int(sys.argv[1]), 64)
view = array.view(np.uint8, (64,))
assert view.tolist() == list(range(64)), view
view[:] = view[::-1].copy()
"""


def test_new_segment_is_zeros_of_the_asked_size() -> None:
    """A segment starts as zeros, is writable, and has no byte too many or too few."""
    array = SharedArray.create("zeros", 5000)
    view = array.view(np.uint8, (5000,))
    assert not view.any() and os.fstat(array.fd).st_size == array.num_bytes == 5000
    view[:] = 7
    assert array.view(np.uint8, (5000,)).sum() == 35000
    array.close()


def test_views_are_typed_windows_on_the_same_bytes() -> None:
    """A view has the dtype, shape and offset that were asked for, over the same memory as any other view."""
    array = SharedArray.create("typed", 64)
    array.view(np.uint8, (64,))[:] = np.arange(64)
    window = array.view("<u4", (2, 3), offset_bytes=8)
    assert window.shape == (2, 3) and window.flags.c_contiguous and window.flags.writeable
    assert window.tobytes() == bytes(range(8, 32))
    window[1, 2] = 0xFFFFFFFF
    assert array.view(np.uint8, (64,))[28:33].tolist() == [255, 255, 255, 255, 32]
    array.close()


def test_a_view_past_the_end_is_refused() -> None:
    """No view reaches over the end of the segment."""
    array = SharedArray.create("short", 4096)
    with pytest.raises(ValueError):
        array.view(np.uint8, (4097,))
    with pytest.raises(ValueError):
        array.view(np.uint8, (4096,), offset_bytes=1)
    array.close()


def test_views_stay_valid_after_close() -> None:
    """The memory goes with its last view, not with `close`: other allocations cannot take its place."""
    array = SharedArray.create("outlives", 1 << 20)
    view = array.view(np.uint64, (1 << 17,))
    view[:] = np.arange(1 << 17)
    array.close()
    others = [SharedArray.create("other", 1 << 20) for _ in range(4)]
    for other in others:
        other.view(np.uint64, (1 << 17,))[:] = 2**63
    assert np.array_equal(view, np.arange(1 << 17, dtype=np.uint64))
    view[0] = 42
    assert view[0] == 42
    for other in others:
        other.close()


def test_close_twice_gives_the_descriptor_back_once() -> None:
    """A second close does not close a descriptor that somebody else got in the meantime."""
    array = SharedArray.create("twice", 16)
    array.close()
    stranger = os.memfd_create("stranger")
    array.close()
    assert array.fd == -1 and os.fstat(stranger).st_size == 0
    os.close(stranger)


def test_no_new_view_after_close() -> None:
    """A closed segment refuses views with an error of ours."""
    array = SharedArray.create("closed", 16)
    array.close()
    with pytest.raises(IPCError, match="closed"):
        array.view(np.uint8, (16,))


def test_an_empty_segment_exists_but_has_no_views() -> None:
    """Zero bytes (no CPU tier) are a segment like any other, without a mapping."""
    array = SharedArray.create("empty", 0)
    assert array.num_bytes == 0 and array.fd >= 0
    with pytest.raises(IPCError, match="empty"):
        array.view(np.uint8, (0,))
    array.close()


@pytest.mark.processes
def test_two_processes_share_through_the_descriptor() -> None:
    """What one process writes the other reads, in both directions, through nothing but the inherited descriptor."""
    array = SharedArray.create("shared", 64)
    view = array.view(np.uint8, (64,))
    view[:] = np.arange(64)
    subprocess.run([sys.executable, "-c", CHILD, str(array.fd)], pass_fds=[array.fd], check=True, timeout=30)
    assert view.tolist() == list(range(63, -1, -1))
    array.close()


@pytest.mark.processes
def test_descriptor_is_not_inherited_unasked() -> None:
    """A child process that was not given the descriptor by name does not have it."""
    array = SharedArray.create("private", 64)
    code = f"import os\ntry: print(os.readlink('/proc/self/fd/{array.fd}'))\nexcept OSError: pass"
    done = subprocess.run(
        [sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, check=True, timeout=30
    )
    assert "memfd" not in done.stdout
    array.close()


def test_nothing_has_a_name() -> None:
    """A living segment shows in /proc/self/maps by its name and leaves /dev/shm empty of it."""
    before = shm_files()
    array = SharedArray.create("only-in-maps", 4096)
    assert "only-in-maps" in Path("/proc/self/maps").read_text()
    assert not new_shm_files(before)
    array.close()


def test_too_large_is_refused_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is available raises with both numbers, before a segment exists."""

    def must_not_be_called(*_: object) -> int:
        raise AssertionError("a segment was created")

    monkeypatch.setattr(memory_limit, "available_memory_bytes", lambda: 1000)
    monkeypatch.setattr(shared_array.os, "memfd_create", must_not_be_called)
    with pytest.raises(NotEnoughMemoryError, match=r"'huge' needs 1001 bytes .* 1000 bytes .* available"):
        SharedArray.create("huge", 1001)


def test_exactly_what_is_available_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit itself is not too large."""
    monkeypatch.setattr(memory_limit, "available_memory_bytes", lambda: 1000)
    SharedArray.create("fits", 1000).close()


def test_more_than_this_machine_has_is_refused() -> None:
    """The real limit is asked: an exabyte is refused with an error of ours, not by the kernel."""
    with pytest.raises(NotEnoughMemoryError, match=str(2**60)):
        SharedArray.create("exabyte", 2**60)


def test_attaching_a_segment_that_is_too_small_is_refused() -> None:
    """A reader that expects more than there is gets both numbers instead of a bus error at first touch."""
    array = SharedArray.create("small", 100)
    with pytest.raises(IPCError, match="100 bytes, 101 expected"):
        SharedArray(array.fd, 101)
    array.close()


def test_a_failed_creation_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel refuses the pages it is our error, and the descriptor goes back (the leak fixture counts)."""

    def refuse(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(shared_array.os, "posix_fallocate", refuse)
    with pytest.raises(NotEnoughMemoryError, match="'refused' of 4096 bytes: no space"):
        SharedArray.create("refused", 4096)


def test_released_pages_go_back_and_come_again() -> None:
    """The kernel holds nothing of a released segment; every mapping reads zeros; retaking reserves it anew."""
    array = SharedArray.create("released", 1 << 20)
    other = SharedArray(os.dup(array.fd), 1 << 20)
    view, theirs = (each.view(np.uint8, (1 << 20,)) for each in (array, other))
    view[:] = 7
    assert os.fstat(array.fd).st_blocks * 512 == 1 << 20
    assert array.release() == 1 << 20 and array.release() == 0
    assert os.fstat(array.fd).st_blocks == 0 and not theirs[::4096].any()
    array.retake()
    assert os.fstat(array.fd).st_blocks * 512 == 1 << 20
    array.close()
    other.close()
