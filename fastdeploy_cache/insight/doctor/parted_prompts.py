"""Prompts that part in one block and go on alike behind it, so that nothing behind it can be shared."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from fastdeploy_cache.books.block_marks import MARK_BYTES, block_marks
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import Run

_MAX_LOOKED = 500  # runs in the tree, and as many of those that are remembered
_NUM_COMPARED = 4  # blocks behind the one in which they part: what changes may reach over two

_Marks = tuple[bytes, ...]  # of the first blocks from where a prompt parts from others


@dataclass(frozen=True, kw_only=True)
class PartedPrompts:
    """Some prompts that part at one place. `block`: it; None: it is not known."""

    num_looked: int
    num_alike: int  # that have a block behind that place in common with another one
    block: int | None


def parted_prompts(books: Books) -> PartedPrompts:
    """The place at which the most prompts part and go on alike; the first block where none do. Takes the lock once.

    Of prompts that are cached no more there are marks. A small pool holds a few prompts only, and these say where the
    others parted.
    """
    with books:
        places = _cached(books)
        lost = {_first_marks(marks) for marks in books.residency.lost.newest(_MAX_LOOKED) if len(marks) > MARK_BYTES}
    found = [_best(block, marks, lost) for block, marks in places.items()]
    most = max(found, key=lambda each: each.num_alike, default=PartedPrompts(num_looked=0, num_alike=0, block=0))
    return most if most.num_alike else _best(None, set(), lost) if lost else most


def _cached(books: Books) -> dict[int, set[_Marks]]:
    """The runs that begin at each place, of every namespace, as far as they have two blocks."""
    tree, places = books.tree, dict[int, set[_Marks]]()
    size = tree.block_bytes
    parents: deque[tuple[Run, int]] = deque([(root, 0) for root in islice(tree.roots.values(), _MAX_LOOKED)])
    num_left = _MAX_LOOKED
    while parents and num_left > 0:
        parent, block = parents.popleft()
        for run in islice(parent.children.values(), num_left):
            num_left -= 1
            if run.num_blocks > 1:
                marks = block_marks(run.tokens, 0, min(run.num_blocks, 1 + _NUM_COMPARED), size)
                places.setdefault(block, set()).add(_first_marks(marks))
            if run.children:
                parents.append((run, block + run.num_blocks))
    return places


def _best(block: int | None, cached: set[_Marks], lost: set[_Marks]) -> PartedPrompts:
    """What these prompts have in common at one of the blocks behind the first: where it is the most."""
    found = [_compare(block, cached, lost, behind) for behind in range(1, 1 + _NUM_COMPARED)]
    return max(found, key=lambda each: each.num_alike)


def _compare(block: int | None, cached: set[_Marks], lost: set[_Marks], behind: int) -> PartedPrompts:
    pairs = {(marks[0], marks[behind]) for marks in cached if len(marks) > behind}
    known = {mark for _, mark in pairs}
    pairs |= {
        (marks[0], marks[behind]) for marks in lost if len(marks) > behind and (block is None or marks[behind] in known)
    }
    num_distinct = len({mark for _, mark in pairs})
    return PartedPrompts(num_looked=max(len(pairs), len(cached)), num_alike=len(pairs) - num_distinct, block=block)


def _first_marks(marks: bytes) -> _Marks:
    end = min(len(marks), (1 + _NUM_COMPARED) * MARK_BYTES)
    return tuple([marks[at : at + MARK_BYTES] for at in range(0, end, MARK_BYTES)])
