"""The most used prefixes of a tree of any size, looked for without keeping anybody waiting."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from fastdeploy_cache.books.block_hash import namespace_label
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import chain_of
from fastdeploy_cache.books.run import CPU, Run
from fastdeploy_cache.insight.looks.pieces import hash_in_pieces, is_cached, run_in_turns, runs_in
from fastdeploy_cache.insight.looks.prefix_views import PrefixView, TreeView

_NAME_DIGITS = 16
_Rank = tuple[int, int, int]  # uses, order of the last one, and of those that are alike who was found first


@dataclass(slots=True, eq=False)
class _Found:
    """One of the best so far, unless better ones have come since."""

    run: Run
    depth: int
    is_best: bool = True


@dataclass(slots=True, eq=False)
class _Shown:
    """A view of a run, and what of its children is shown."""

    run: Run
    view: PrefixView
    children: list[_Shown] = field(default_factory=list)

    def whole(self) -> PrefixView:
        """The view with all that is below it."""
        return self.view.with_children(tuple(child.whole() for child in self.children)) if self.children else self.view


class PrefixSearch:
    """One search. Whoever uses a prefix uses what leads to it, so none is used more than its parent: the best are found
    from the roots down, through children of the best alone. Not in a turn; by one thread."""

    def __init__(self, books: Books, num_prefixes: int, max_depth: int) -> None:
        self._books, self._tree = books, books.tree
        self._num_prefixes, self._max_depth = num_prefixes, max_depth
        self._best: list[tuple[_Rank, _Found]] = []  # a heap: the least used of them first
        self._to_open: list[tuple[_Rank, _Found]] = []  # a heap by negative ranks: whose children nobody has looked at
        self._seen: set[Run] = set()  # that were among the best: of an order that changes meanwhile, some come twice
        self._num_found = self._num_top = self._num_namespaces = 0
        self._top: list[_Shown] = []
        self._shown: dict[Run, _Shown] = {}

    def prefixes(self) -> list[PrefixView]:
        """The most used prefixes, the most used first; no children are shown."""
        self._run()
        return [each.view for each in self._shown.values()]

    def tree(self) -> TreeView:
        """The same as a tree."""
        self._run()
        return TreeView(
            block_size=self._tree.block_size,
            num_namespaces=self._num_namespaces,
            num_shown=len(self._shown),
            num_children=max(self._num_top, len(self._top)),
            children=tuple(each.whole() for each in self._top),
        )

    def _run(self) -> None:
        run_in_turns(self._books, self._search())
        best = sorted(self._best, reverse=True)
        run_in_turns(self._books, self._look_at([found.run for _, found in best]))

    # -- which

    def _search(self) -> Iterator[None]:
        for root in runs_in(self._tree.roots):
            self._num_namespaces += 1
            self._num_top += len(root.children)
            yield from self._look_below(root, 1)
            yield
        while self._to_open:
            _, found = heapq.heappop(self._to_open)
            if found.is_best and is_cached(self._tree, found.run):
                yield from self._look_below(found.run, found.depth + 1)
            yield

    def _look_below(self, run: Run, depth: int) -> Iterator[None]:
        best, num_prefixes = self._best, self._num_prefixes
        for child in runs_in(run.children):
            if len(best) < num_prefixes or (child.num_uses, child.last_used) > best[0][0][:2]:
                self._note(child, depth)
            yield

    def _note(self, run: Run, depth: int) -> None:
        if run in self._seen or not is_cached(self._tree, run):
            return
        self._seen.add(run)
        self._num_found += 1
        rank = run.num_uses, run.last_used, -self._num_found
        found = _Found(run, depth)
        heapq.heappush(self._best, (rank, found))
        if len(self._best) > self._num_prefixes:
            heapq.heappop(self._best)[1].is_best = False
        if found.is_best and run.children and depth < self._max_depth:
            heapq.heappush(self._to_open, ((-rank[0], -rank[1], -rank[2]), found))

    # -- what of them

    def _look_at(self, runs: list[Run]) -> Iterator[None]:
        """Parents come before what is below them, so each finds the place where it is shown."""
        now = self._books.clock.now()
        for run in runs:
            yield from hash_in_pieces(self._tree, run)
            if is_cached(self._tree, run):
                shown = self._shown[run] = _Shown(run, self._view(run, now))
                above = run.parent
                while above is not None and above not in self._shown:
                    above = above.parent
                (self._top if above is None else self._shown[above].children).append(shown)
            yield

    def _view(self, run: Run, now: float) -> PrefixView:
        tree, size, num_blocks = self._tree, self._tree.block_size, 0
        root = run
        while root.parent is not None:
            num_blocks += root.num_blocks
            root = root.parent
        used_last = run.used_last or run.gpu_since or run.cpu_since
        return PrefixView(
            name=tree.names.of_last(run).hex()[:_NAME_DIGITS],
            namespace="default" if tree.roots.get("") is root else namespace_label(root.hashes),
            num_tokens=run.num_blocks * size,
            num_prefix_tokens=num_blocks * size,
            num_blocks=run.num_blocks,
            num_gpu_blocks=run.num_gpu,
            num_cpu_blocks=run.num_in(CPU, run.num_blocks),
            num_held_blocks=run.num_held,
            is_pinned=any(pin in self._books.pinned for pin in run.pins),
            num_uses=run.num_uses,
            idle_seconds=max(0.0, now - used_last) if used_last else None,
            num_children=len(run.children),
            checkpoint_tokens=tuple([each.boundary * size for each in chain_of(run)][::-1]),
        )
