"""A check of a running cache, and what it has and has not looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy_cache.books.block_pool import RUN
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.errors import ControlError

MAX_VERIFIED_BLOCKS = 5_000_000
_CHECKED = (
    "Each block of each pool has one owner, and the counts of all owners add up.",
    "The prefix tree is whole: its tokens, keys, computed hashes, tiers, pins and requests agree.",
)
_UNCHECKED = "The bytes of blocks on the GPU and in the CPU tier: no checksums are kept for them."
_IN_STORAGE = "The objects in storage: each has a checksum, which is compared whenever it is read."


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a check has found. `problem`: the first broken promise; None: all hold. `checked` and `not_checked` say in
    sentences what was looked at and what was not."""

    problem: str | None
    seconds: float
    checked: tuple[str, ...]
    not_checked: tuple[str, ...]


def verified(books: Books, check: Callable[[], None], *, checksums: bool) -> Verified:
    """See `Control.verify`. `check` raises `AssertionError` where the books do not add up. Not in a turn."""
    with books:
        books.check_open()
        num_blocks = sum(pool.count(RUN) for pool in books.pools)
    if num_blocks > MAX_VERIFIED_BLOCKS:
        raise ControlError(
            f"{num_blocks} blocks are cached; a check of more than {MAX_VERIFIED_BLOCKS} would hold the cache up for "
            "too long, so none is made: look at a smaller cache of the same settings"
        )
    started, problem = books.clock.now(), None
    try:
        check()
    except AssertionError as error:
        problem = str(error) or "a promise without words is broken; see check_invariants"
    seconds, unchecked = books.clock.now() - started, (_UNCHECKED, _IN_STORAGE) if checksums else (_UNCHECKED,)
    return Verified(problem=problem, seconds=seconds, checked=_CHECKED, not_checked=unchecked)
