"""Where the pages of SGLang's host pools lie: in pieces, whose sizes are the same for every page of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def piece_bytes_of(host: Any) -> tuple[int, ...]:
    """The sizes of a page's pieces; none where its pages lie nowhere. `host` is one of SGLang's host pools.

    Raises whatever SGLang raises for a layout whose pages have no addresses.
    """
    described = host.get_page_buffer_meta(np.arange(_page_size(host)))
    return tuple(map(int, described[1])) if described else ()


def addresses_of_pages(host: Any, num_pages: int, host_indices: Any, piece_bytes: Sequence[int]) -> list[int]:
    """Addresses of the pieces, page by page. `host_indices` has the places of all tokens of these pages.

    Raises:
        ValueError: there are more or fewer places, a page lies outside the pool, or the pieces have other sizes.
    """
    page_size, num_places = _page_size(host), 0 if host_indices is None else len(host_indices)
    if num_places != num_pages * page_size:
        raise ValueError(f"{num_pages} pages of {page_size} tokens have {num_places} places in the host pool")
    num_tokens = host.size // host.page_size * page_size
    for start in host_indices[::page_size].tolist():  # SGLang computes addresses from these, and looks at no bounds
        if not 0 <= start <= num_tokens - page_size:
            raise ValueError(
                f"a page of {page_size} tokens begins at place {start} of a host pool of {num_tokens}; none is moved"
            )
    addresses, sizes = host.get_page_buffer_meta(host_indices)
    if list(sizes) != list(piece_bytes) * num_pages or len(addresses) != len(sizes):
        raise ValueError(f"the host pool names other pieces than before: {len(sizes)} for {num_pages} pages")
    return list(addresses)


def addresses_of_tensors(tensors: Sequence[Any], num_pages: int, page_bytes: int) -> list[int]:
    """Addresses of CPU tensors, one whole page each.

    Raises:
        ValueError: there are more or fewer, or one is no such page.
    """
    if len(tensors) != num_pages or not all(each.nbytes == page_bytes and each.is_contiguous() for each in tensors):
        raise ValueError(f"{num_pages} keys have {len(tensors)} tensors, or one is not {page_bytes} bytes in a row")
    return [each.data_ptr() for each in tensors]


def _page_size(host: Any) -> int:
    """In tokens of the sequence, also where several ranks share a page."""
    return int(getattr(host, "logical_page_size", host.page_size))
