"""Shared memory in huge pages, of 2 MiB on most machines: one entry of the page table instead of 512.

Copies of scattered blocks look up two pages for every 4 KiB otherwise, and each process that maps a segment takes a
page fault and eight bytes of page table for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from pathlib import Path

_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_COLLAPSE = 25  # Linux 6.1; asm-generic/mman-common.h
_MAP_FIXED = 0x10  # the same file


@functools.cache
def huge_page_bytes() -> int:
    """Size of the huge pages of this machine; 0: it has none."""
    try:
        return int(_SIZE_FILE.read_text())
    except (OSError, ValueError):
        return 0


def map_shared(fd: int, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Map the first bytes of a file; the mapping, and the place in it where they begin.

    A large file begins at a multiple of the size of huge pages, without which the kernel enters small ones. Python
    cannot ask for an address. So a larger piece of memory is mapped, which is never touched, and the file over it: both
    go together with the last view.
    """
    huge = huge_page_bytes()
    if not huge or num_bytes < huge:
        return mmap.mmap(fd, max(num_bytes, 1)), 0
    try:
        room = mmap.mmap(-1, num_bytes + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(room))
        start = -address % huge
        _map_over(address + start, num_bytes, fd)
    except OSError:  # no address space left for more than the file itself, or a sandbox that allows no such call
        return mmap.mmap(fd, num_bytes), 0
    return room, start


def _map_over(address: int, num_bytes: int, fd: int) -> None:
    """Put a file in the place of what is mapped there. Raises OSError. Source: mmap(2)."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if call(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "a file cannot be mapped over reserved memory")


def take_huge_pages(fd: int, mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    """Back an empty file, mapped by `map_shared`, with huge pages as far as there are any.

    MADV_COLLAPSE puts one page together from small ones and needs no setting of the machine's, unlike MADV_HUGEPAGE.
    It passes by what has no page at all, and clears what is missing beside one: so each gets one first, which costs a
    quarter of what taking all the small ones would. Where the kernel has no such call, no free huge page or too little
    memory, the rest is left to the caller.
    """
    huge = huge_page_bytes()
    end = num_bytes // huge * huge if huge else 0
    if end:
        with contextlib.suppress(OSError):
            for first in range(0, end, huge):
                os.posix_fallocate(fd, first, 1)
            mapping.madvise(_MADV_COLLAPSE, start, end)
