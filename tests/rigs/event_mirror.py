"""What listeners would know, told from notes alone, beside what is in the tree."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher, root_hash
from fastdeploy_cache.books.checkpoint import chain_of
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.events.feed.tap import EventTap
from fastdeploy_cache.events.index import BlockIndex
from fastdeploy_cache.events.journal import decode_records, encode_notes
from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.events.wire import MEDIA, BlockRemoved, BlockStored, Event
from fastdeploy_cache.transfer_manager.kv.groups import Row

Media = dict[bytes, frozenset[str]]


class EventMirror:
    """Follows a tree by its notes, as the publisher does, and by the publisher's events, as listeners do.

    Every few looks all is told anew, a run or two at a time while the tree changes; and between, notes lie for some
    steps before anybody takes them.
    """

    def __init__(self, tree: PrefixTree, rows: Sequence[Row] = (), *, every: int = 1) -> None:
        """`every`: of how many looks one compares."""
        self._tree, self._rows, self._every = tree, tuple(rows), every
        self._scheme = NameScheme(block_size=tree.block_size)
        self.tap = EventTap(tree, lambda: None)
        self.tap.hang()
        self.tap.begin()
        self.told, self.index = ToldTree(self._scheme, rows), BlockIndex()
        self._hasher = BlockHasher(tree.block_size)
        self.num_looks = self.num_compared = self.num_events = 0

    def check(self) -> None:
        """Raise `AssertionError` where listeners would know anything else than what is there."""
        self.num_looks += 1
        if self.num_looks % 97 == 0:
            self.tap.begin()
        self.tap.note_forgotten()
        self.tap.walk(1 + self.num_looks % 2, 2**20)
        if self.num_looks % 3 == 0:
            self.take()
        if self.num_looks % self._every == 0 and self.num_looks % 97 > 20:
            while self.tap.is_walking:
                self.tap.walk(1, 2**20)
            self.take()
            self._compare()

    def take(self) -> None:
        """Take in what was noted."""
        while notes := self.tap.take(64):
            for record in decode_records(encode_notes(notes)):
                self.told.apply(record)
        for event in self.told.take():
            self._look_at(event)
            self.index.apply(event)

    def _look_at(self, event: Event) -> None:
        """An event says something new, names no block twice, and comes behind its parent."""
        self.num_events += 1
        if not isinstance(event, BlockStored | BlockRemoved):
            return
        names = event.block_hashes
        assert len(set(names)) == len(names) and names
        known, bit, group = self.index._media, 1 << MEDIA.index(event.medium or ""), event.group_idx
        for name in names:
            there = self.index._units.get((group, name), 0) if group else known.get(name, 0)
            assert bool(there & bit) == isinstance(event, BlockRemoved), "told what was known already"
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == len(names) * event.block_size
            parent = event.parent_block_hash
            assert parent is None or parent in known, "a block is told before its parent"

    def _compare(self) -> None:
        self.num_compared += 1
        media, units = self._expected()
        assert dict(self.index.items()) == media, "listeners know other blocks than the tree has"
        assert self.index.units() == units, "listeners know other units than the tree has"
        fresh = BlockIndex()
        for part in self.told.freeze():
            for event in self.told.stored(part):
                fresh.apply(event)
        assert (dict(fresh.items()), fresh.units()) == (media, units), "a snapshot tells something else"

    def _expected(self) -> tuple[Media, dict[tuple[int, bytes], frozenset[str]]]:
        media, units = Media(), dict[tuple[int, bytes], frozenset[str]]()
        stack = [(run, root_hash(name, self._tree.block_size), b"") for name, root in self._tree.roots.items()
                 for run in root.children.values()]  # fmt: skip
        while stack:
            run, parent, before = stack.pop()
            joined = self._hasher.extend(parent, run.tokens, 0, run.num_blocks, run.extras)
            digests = [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]
            for place, digest in enumerate(digests):
                is_in = ("GPU", place < run.num_gpu), ("CPU", run.cpu_start <= place < run.cpu_end)
                media[digest] = frozenset([medium for medium, there in is_in if there])
            whole = before + joined
            self._add_units(run, whole, units)
            stack.extend((child, digests[-1], whole) for child in run.children.values())
        return media, units

    def _add_units(self, run: Run, whole: bytes, units: dict[tuple[int, bytes], frozenset[str]]) -> None:
        for checkpoint in chain_of(run):
            there = [m for m, packed in (("GPU", checkpoint.units), ("CPU", checkpoint.pages)) if packed is not None]
            for number, row in enumerate(self._rows, start=1):
                for block in range(row.first_block(checkpoint.boundary), checkpoint.boundary):
                    key = number, whole[block * HASH_BYTES : (block + 1) * HASH_BYTES]
                    units[key] = units.get(key, frozenset()) | frozenset(there)
