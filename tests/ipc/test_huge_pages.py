"""Shared memory in huge pages: as any other, but for where it begins and how it is backed."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import NotEnoughMemoryError
from fastdeploy_cache.ipc import huge_pages
from fastdeploy_cache.ipc.shared_array import SharedArray

HUGE = 2 << 20
ODD_BYTES = 2 * HUGE + 5000


@pytest.fixture(autouse=True)
def _small_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MiB, also where the machine's are larger or where it has none."""
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: HUGE)


def bytes_of(array: SharedArray) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """All of it."""
    return array.view(np.uint8, (array.num_bytes,))


def ranges_of(name: str) -> list[str]:
    """Mappings of this process by the name of a segment."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_a_large_segment_begins_at_a_multiple_of_a_huge_page_and_has_every_byte() -> None:
    """Zeros, of just the asked size, all of it backed; a view past the end is refused though more is mapped."""
    array = SharedArray.create("large", ODD_BYTES)
    view = bytes_of(array)
    assert view.ctypes.data % HUGE == 0 and not view.any()
    assert os.fstat(array.fd).st_size == ODD_BYTES and os.fstat(array.fd).st_blocks * 512 >= ODD_BYTES
    for shape, offset in (((ODD_BYTES + 1,), 0), ((1,), ODD_BYTES)):
        with pytest.raises(ValueError):
            array.view(np.uint8, shape, offset)
    view[-1] = 7
    assert array.view(np.uint8, (1,), ODD_BYTES - 1)[0] == 7
    array.close()


def test_two_mappings_show_the_same_bytes_and_go_with_their_last_view() -> None:
    """What one writes the other reads; both mappings, and the room around them, are gone when the views are."""
    array = SharedArray.create("seen-twice", ODD_BYTES)
    other = SharedArray(os.dup(array.fd), ODD_BYTES)
    mine, theirs = bytes_of(array), bytes_of(other)
    theirs[:] = np.arange(ODD_BYTES, dtype=np.uint32) * 7
    assert theirs.ctypes.data % HUGE == 0 and np.array_equal(mine, theirs)
    array.close()
    other.close()
    assert len(ranges_of("seen-twice")) == 2 and mine[HUGE + 1] == (HUGE + 1) * 7 % 256
    del mine, theirs
    gc.collect()
    assert not ranges_of("seen-twice")


def test_pages_are_huge_where_the_kernel_puts_them_together() -> None:
    """What of the segment is whole huge pages is backed by such."""
    array = SharedArray.create("put-together", ODD_BYTES)
    bytes_of(array)[::4096] = 1
    text = Path("/proc/self/smaps").read_text()
    array.close()
    own = text[text.index("put-together") :]
    found = int(own[own.index("ShmemPmdMapped:") :].split()[1]) * 1024
    if not found:
        pytest.skip("this kernel knows no MADV_COLLAPSE, or it may not use it for shared memory, or has no free page")
    assert found == 2 * HUGE


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_without_huge_pages_there_are_small_ones(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """An older kernel, or one that has none left: every byte is there all the same."""
    refused = []

    class Refusing(mmap.mmap):
        def madvise(self, option: int, *where: int) -> None:
            refused.append(option)
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(huge_pages.mmap, "mmap", Refusing)
    array = SharedArray.create("small-pages", ODD_BYTES)
    assert os.fstat(array.fd).st_blocks * 512 >= ODD_BYTES and not bytes_of(array).any() and refused
    array.close()


def test_where_no_address_can_be_chosen_it_is_mapped_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that refuses the call: the file is mapped as small ones are."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "not allowed")

    monkeypatch.setattr(huge_pages, "_map_over", refuse)
    array = SharedArray.create("anywhere", ODD_BYTES)
    bytes_of(array)[-1] = 3
    other = SharedArray(os.dup(array.fd), ODD_BYTES)
    assert bytes_of(other)[-1] == 3 and not bytes_of(other)[:-1].any()
    array.close()
    other.close()


def test_a_machine_without_huge_pages_maps_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel tells no size."""
    monkeypatch.undo()
    monkeypatch.setattr(huge_pages, "_SIZE_FILE", Path("/nowhere"))
    huge_pages.huge_page_bytes.cache_clear()
    try:
        assert huge_pages.huge_page_bytes() == 0
        array = SharedArray.create("as-ever", ODD_BYTES)
        assert bytes_of(array).shape == (ODD_BYTES,)
        array.close()
    finally:
        huge_pages.huge_page_bytes.cache_clear()


def test_what_was_released_comes_back_huge_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back, the kernel holds nothing; where it cannot be had again, it holds nothing either; then it is zeros."""
    array = SharedArray.create("come-and-go", ODD_BYTES)
    bytes_of(array)[:] = 9
    assert array.release() == ODD_BYTES and os.fstat(array.fd).st_blocks == 0

    fallocate = os.posix_fallocate

    def short(fd: int, offset: int, num_bytes: int) -> None:
        if num_bytes == ODD_BYTES:
            raise OSError(errno.ENOSPC, "no room")
        fallocate(fd, offset, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", short)
        with pytest.raises(NotEnoughMemoryError):
            array.retake()
    assert os.fstat(array.fd).st_blocks == 0 and array.is_released
    array.retake()
    assert os.fstat(array.fd).st_blocks * 512 >= ODD_BYTES and not bytes_of(array).any()
    array.close()
