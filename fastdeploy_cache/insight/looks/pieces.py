"""Long looks at the books, in turns that are each over well within a millisecond."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.large_dict import LargeDict
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import Run

_TURN_SECONDS = 0.0003
_PAUSE_SECONDS = 0.0005
_HASHED_AT_ONCE = 64
SomeRuns = Mapping[str, Run] | Mapping[bytes, Run] | LargeDict[str, Run] | LargeDict[bytes, Run]


def run_in_turns(books: Books, steps: Iterator[None]) -> None:
    """Make all of `steps` in turns. Each takes a tenth of a millisecond at most, and relies on nothing that an earlier
    one has seen of the books."""
    clock = books.clock
    while True:
        with books:
            end = clock.now() + _TURN_SECONDS
            for _ in steps:
                if clock.now() >= end:
                    break
            else:
                return
        # Without a pause we would have the lock again before anybody who waits for it has even woken up.
        clock.sleep(_PAUSE_SECONDS)


def runs_in(entries: SomeRuns) -> Iterator[Run]:
    """All runs, also where some come or go between two of them: then one may be missed, or given twice."""
    if isinstance(entries, LargeDict):
        number = 0
        while number < entries.num_pieces:
            yield from list(entries.piece(number).values())
            number += 1
    else:
        yield from list(entries.values())


def is_cached(tree: PrefixTree, run: Run) -> bool:
    """Whether a run that was seen in an earlier turn still hangs in the tree."""
    return run.parent is not None and run.epoch == tree.epoch


def hash_in_pieces(tree: PrefixTree, run: Run) -> Iterator[None]:
    """Compute what is missing of the hashes of a run, and of all that leads to it, as long as it is cached."""
    while is_cached(tree, run) and (lacking := _first_without_hashes(run)) is not None:
        tree.names.add(lacking, _HASHED_AT_ONCE)
        yield


def _first_without_hashes(run: Run) -> Run | None:
    found = None
    while run.parent is not None:
        if len(run.hashes) < run.num_blocks * HASH_BYTES:
            found = run
        run = run.parent
    return found
