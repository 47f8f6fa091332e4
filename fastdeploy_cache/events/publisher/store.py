"""Which blocks are in a store below the CPU tier: what its ranks say of names, and what runs say of tokens, together.

A store knows names alone, and an event has the tokens. So a block is told where both are known, and its tokens are kept
as long as some rank has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.journal import StoreTold
from fastdeploy_cache.events.names import NameScheme, OwnNames
from fastdeploy_cache.events.publisher.images import ImageChange, Parts, ToldImages
from fastdeploy_cache.events.publisher.node import Node
from fastdeploy_cache.events.publisher.stretch import Stretch, joined
from fastdeploy_cache.transfer_manager.storage.keys import is_page, owned, owner_mark, page_names

_MOST_LATELY = 16_384  # blocks that have left the tree, whose tokens are kept even so
_MOST_EARLY = 128  # answers of a rank that come before another one


class _Block(NamedTuple):
    """A block by itself, our own hash of it, and what the store calls it."""

    stretch: Stretch
    own: bytes
    name: bytes


@dataclass
class _Rank:
    """What one process of a store has said: `number` comes next, and what came before its turn is `early`."""

    opened_ns: int
    number: int = 0
    early: dict[int, StoreTold] = field(default_factory=dict)


class ToldStore:
    """Blocks by digest, which is what they are called outside. One thread.

    A block is told when every rank has it, and the one before it is in the tree or was told. It is told as gone when a
    rank has it no more. What becomes of the one before it changes nothing then.
    """

    def __init__(self, scheme: NameScheme) -> None:
        self._hasher = OwnNames(scheme.block_size)
        self._is_own = scheme.kind == "own"
        self._blocks: dict[bytes, _Block] = {}  # that are in the tree, or that a rank has
        self._in_tree: set[bytes] = set()
        self._lately: OrderedDict[bytes, None] = OrderedDict()  # that were in the tree
        self._digests: dict[bytes, bytes] = {}  # by the store's name, where that is another one
        self._ranks: dict[int, _Rank] = {}
        self._all = 0  # ranks, as bits
        self._holders: dict[bytes, int] = {}  # of each name, the ranks that have it
        self._told: dict[bytes, None] = {}
        self._orphans: dict[bytes, dict[bytes, None]] = {}  # what every rank has, by the unknown digest before it
        self._changes: list[bytes | Stretch | ImageChange] = []  # that were not taken: gone, come, and images
        self.images = ToldImages(self._is_known, self._is_whole, self._holders.__contains__, self._note_image)
        self.is_open = False  # a store has said something

    def take(self) -> Iterator[bytes | Stretch | ImageChange]:
        """What has changed, in its order: joined digests of blocks that went, blocks in a row that came, and images."""
        changes, self._changes = self._changes, []
        gone, run = list[bytes](), list[Stretch]()
        for change in changes:
            if gone and not isinstance(change, bytes):
                yield b"".join(gone)
                gone = []
            if run and not (isinstance(change, Stretch) and change.before == run[-1].digests):
                yield joined(run)
                run = []
            if isinstance(change, bytes):
                gone.append(change)
            elif isinstance(change, Stretch):
                run.append(change)
            else:
                yield change
        if gone:
            yield b"".join(gone)
        if run:
            yield joined(run)

    def stretches(self) -> Iterator[Stretch]:
        """All that is told, parents first."""
        run, done = list[Stretch](), set[bytes]()
        for digest in self._told:
            chain, above = list[bytes](), digest
            while above in self._told and above not in done:
                done.add(above)
                chain.append(above)
                above = self._blocks[above].stretch.before
            for each in reversed(chain):
                stretch = self._blocks[each].stretch
                if run and stretch.before != run[-1].digests:
                    yield joined(run)
                    run = []
                run.append(stretch)
        if run:
            yield joined(run)

    # -- the tree

    def learn(self, node: Node, first: int) -> None:
        """The blocks of a run, from this one on, are in the tree."""
        if not self.is_open or first >= node.num_blocks:
            return
        namespace = _namespace_of(node)
        mark = owner_mark(namespace)
        for stretch in node.blocks(first):
            digest = stretch.digests
            self._in_tree.add(digest)
            self._lately.pop(digest, None)
            if digest not in self._blocks:
                own = digest if self._is_own else self._own(stretch, namespace)
                self._blocks[digest] = block = _Block(stretch, own, owned(own, mark))
                if block.name != digest:
                    self._digests[block.name] = digest
            self._settle(digest)

    def _own(self, stretch: Stretch, namespace: str) -> bytes:
        parent = self._blocks[stretch.before].own if stretch.before else self._hasher.root(namespace)
        return self._hasher.extend(parent, stretch.tokens, stretch.extras, stretch.salt)

    def leave(self, digests: bytes | bytearray) -> None:
        """These blocks are in the tree no more."""
        for digest in _each(digests) if self.is_open else ():
            self._in_tree.discard(digest)
            self._lately[digest] = None  # it may be on its way to the store, and come there yet
            if len(self._lately) > _MOST_LATELY:
                oldest, _ = self._lately.popitem(last=False)
                self._drop_unknown(oldest)

    def forget_tree(self) -> None:
        """Nothing is in the tree any more, and listeners were told that nothing is anywhere: tell all anew."""
        self._told, self._orphans, self._changes = {}, {}, []
        self.leave(b"".join(self._in_tree))
        for digest in list(self._blocks):
            self._drop_unknown(digest)
        for digest in list(self._blocks):
            self._settle(digest)
        self.images.forget_tree()

    def _drop_unknown(self, digest: bytes) -> None:
        block = self._blocks.get(digest)
        is_kept = digest in self._in_tree or digest in self._lately
        if block is not None and not is_kept and block.name not in self._holders:
            del self._blocks[digest]
            self._digests.pop(block.name, None)
            before = block.stretch.before
            if (waiting := self._orphans.get(before)) is not None:
                waiting.pop(digest, None)
                if not waiting:
                    del self._orphans[before]

    def anchor(self, node: Node, place: int, parts: Parts) -> None:
        """A checkpoint behind a block of a run is in a tier more."""
        if self.is_open:
            self.images.anchor(self._page_of(node, place), parts)

    def lift(self, node: Node, place: int) -> None:
        """It is in a tier less."""
        if self.is_open:
            self.images.lift(self._page_of(node, place))

    def _note_image(self, change: ImageChange) -> None:
        self._changes.append(change)

    def _page_of(self, node: Node, place: int) -> bytes:
        digest = bytes(node.digests[(place - 1) * HASH_BYTES : place * HASH_BYTES])
        (page,) = page_names(self._blocks[digest].own, 1)
        return owned(page, owner_mark(_namespace_of(node)))

    def _is_whole(self, name: bytes) -> bool:
        return self._all > 0 and self._holders.get(name) == self._all

    # -- the store

    def open(self, tops: Iterable[Node]) -> list[Node]:
        """A store says something for the first time: learn what is in the tree. Returns all runs."""
        self.is_open, nodes = True, list(tops)
        for node in nodes:  # they grow meanwhile
            nodes.extend(node.children.values())
            self.learn(node, 0)
        return nodes

    def close(self) -> None:
        """No store is attached any more."""
        for name in list(self._holders):
            self._change(name, 0)
        self._ranks = {}

    def take_in(self, told: StoreTold) -> None:
        """A rank has said something. Answers overtake each other, and each rank is taken in by its own order.

        Raises `CodecError`: one of them never came.
        """
        self._all, bit, rank = (1 << told.num_ranks) - 1, 1 << told.rank, self._ranks.get(told.rank)
        if rank is None or told.opened_ns > rank.opened_ns:  # another process, which tells all anew
            rank = self._ranks[told.rank] = _Rank(told.opened_ns)
            for name, holders in list(self._holders.items()):
                self._change(name, holders & ~bit)
        if told.opened_ns != rank.opened_ns:
            return
        rank.early[told.number] = told
        if len(rank.early) > _MOST_EARLY:
            raise CodecError(f"news {rank.number} of rank {told.rank}'s store never came")
        while (following := rank.early.pop(rank.number, None)) is not None:
            rank.number += 1
            for name in _each(following.gone):
                self._change(name, self._holders.get(name, 0) & ~bit)
            for name in _each(following.came):
                self._change(name, self._holders.get(name, 0) | bit)

    def _change(self, name: bytes, holders: int) -> None:
        """These ranks have an object now."""
        digest = self._digests.get(name, name)
        if holders:
            self._holders[name] = holders
        else:
            self._holders.pop(name, None)
        if is_page(name):
            self.images.change(name)
            return
        if holders == self._all:
            self._settle(digest)
            return
        if digest in self._told:
            del self._told[digest]
            self._changes.append(digest)
        if not holders:
            self._drop_unknown(digest)

    # -- telling

    def _settle(self, digest: bytes) -> None:
        """Tell a block, if that can be, and where it is known then, those that have waited for it, and so on."""
        stack = [digest]
        while stack:
            digest = stack.pop()
            self._try(digest)
            if self._is_known(digest):
                stack.extend(self._orphans.pop(digest, ()))

    def _is_known(self, digest: bytes) -> bool:
        return digest in self._in_tree or digest in self._told

    def _try(self, digest: bytes) -> None:
        block = self._blocks.get(digest)
        if block is None or digest in self._told or self._holders.get(block.name) != self._all:
            return
        before = block.stretch.before
        if before and not self._is_known(before):
            self._orphans.setdefault(before, {})[digest] = None
        else:
            self._told[digest] = None
            self._changes.append(block.stretch)


def _namespace_of(node: Node) -> str:
    while node.parent is not None:
        node = node.parent
    return node.namespace


def _each(digests: bytes | bytearray) -> Sequence[bytes]:
    return [bytes(digests[at : at + HASH_BYTES]) for at in range(0, len(digests), HASH_BYTES)]
