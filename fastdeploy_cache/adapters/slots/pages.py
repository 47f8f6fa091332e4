"""Slots of tokens and the pages, our blocks, that they are in: block b of page size p is slots b*p to b*p + p - 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.transfer_manager.kv.tensors import torch_tensor

Slots = np.ndarray[Any, np.dtype[np.int32]]
Integers = Sequence[int] | np.ndarray[Any, Any]  # or a CPU tensor
Given = Callable[[Slots], Any]  # slots as an engine is given them: an array, or a tensor


def as_integers(values: Integers) -> np.ndarray[Any, Any]:
    """The values as an array [n]. Raises `RequestError` where it is none of integers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{values!r:.80} is no list, array or CPU tensor of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(f"{array.dtype} {list(array.shape)}; give a flat list, array or CPU tensor of integers")
    return array


def as_array(slots: Slots) -> Slots:
    """The slots as they are: int32."""
    return slots


def as_int32_tensor(slots: Slots) -> Any:
    """A CPU tensor of PyTorch over the same memory. Raises `LayoutError` where PyTorch is missing."""
    return torch_tensor(slots, "int32")


def as_int64_tensor(slots: Slots) -> Any:
    """A CPU tensor of PyTorch. Raises `LayoutError` where PyTorch is missing."""
    return torch_tensor(slots.astype(np.int64), "int64")


def slots_of(page_ids: Integers, page_size: int) -> Slots:
    """The slots of pages, one page after the other: int32 [len(page_ids) * page_size]."""
    slots = np.repeat(np.asarray(page_ids, np.int32) * np.int32(page_size), page_size)
    slots.reshape(-1, page_size)[:] += np.arange(page_size, dtype=np.int32)
    return slots


def pages_of(slots: Integers, page_size: int) -> list[int]:
    """The pages that lie one after the other in `slots`; the last may be there in part.

    Raises:
        RequestError: they do not begin at a page's first slot, or leave one before its last.
    """
    given = as_integers(slots)
    page_ids: list[int] = (given[::page_size] // page_size).tolist()
    if not np.array_equal(given, slots_of(page_ids, page_size)[: len(given)]):
        raise RequestError(f"slots {given!s:.80} are no pages of {page_size}; give each from its first slot on")
    return page_ids
