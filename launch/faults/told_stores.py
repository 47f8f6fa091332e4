"""The stores of two ranks in a simulation of listeners: blocks come to them and go, their processes die, and what they
say overtakes itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher, root_hash
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.events.journal import Note, RecordTag
from fastdeploy_cache.events.wire import DISK_MEDIUM, MEDIA, BlockName
from fastdeploy_cache.transfer_manager.kv.groups import Row
from fastdeploy_cache.transfer_manager.storage.keys import owned, owner_mark, page_names
from fastdeploy_cache.transfer_manager.storage.news import NewsLog

UnitKey = tuple[int, BlockName]
Known = tuple[dict[BlockName, int], dict[UnitKey, int]]  # blocks of the full row, and units of others, with their media
_NUM_RANKS = 2
_BIT = 1 << MEDIA.index(DISK_MEDIUM)


class ToldStores:
    """What two ranks have, as names, and what they have yet to say. Under the cache's lock."""

    def __init__(self, tree: PrefixTree, rows: Sequence[Row], chance: random.Random) -> None:
        self._tree, self._rows, self._random = tree, rows, chance
        self._images: dict[bytes, set[UnitKey]] = {}  # by the last page of each that was written, what it holds
        self._there: list[dict[bytes, None]] = [{} for _ in range(_NUM_RANKS)]
        self._logs: list[NewsLog | None] = [None] * _NUM_RANKS
        self._opened = [1] * _NUM_RANKS
        self._listener = 0
        self._coming: list[Note] = []  # answers, in the order in which they were given
        self._names: dict[BlockName, bytes] = {}  # of digests that were written
        self._lasting: set[BlockName] = set()  # was told in the last quiet moment, and has been there since
        self._epoch = tree.epoch  # then
        self.num_told = self.num_lasting = self.num_images = 0

    def begin(self) -> None:
        """Somebody else listens now, to whom all is told."""
        self._listener += 1
        self._coming.clear()
        self._lasting.clear()

    @property
    def is_behind(self) -> bool:
        """Whether something was said that nobody has heard."""
        return bool(self._coming)

    def live(self) -> None:
        """A run is written, some objects go, a process dies, or a task ends."""
        draw = self._random.random()
        if draw < 0.3:
            self._write()
        elif draw < 0.32:
            for rank in range(_NUM_RANKS):
                self._lose(rank, [name for name in self._there[rank] if self._random.random() < 0.1])
        elif draw < 0.324:
            rank = self._random.randrange(_NUM_RANKS)
            self._lose(rank, [name for name in self._there[rank] if self._random.random() < 0.2])  # was not durable
            self._logs[rank] = None
            self._opened[rank] += 1
            self._lasting.clear()
        if self._random.random() < 0.5:
            self._answer(self._random.randrange(_NUM_RANKS))

    def _write(self) -> None:
        runs = list(self._tree.runs())
        if not runs:
            return
        run = self._random.choice(runs)
        digests, mark = _digests_of(self._tree, run)
        named: dict[BlockName, bytes] = {digest: owned(digest, mark) for digest in digests[-run.num_blocks :]}
        pages = list[bytes]()
        for checkpoint in chain_of(run):
            names = [owned(name, mark) for name in page_names(digests[checkpoint.boundary - 1], 2)]
            self._images[names[-1]] = _units_of(checkpoint, digests, self._rows)
            pages += names
        self._names |= named
        for rank in range(_NUM_RANKS):
            if self._random.random() < 0.9:  # or it declines
                for name in (*named.values(), *pages):
                    self._there[rank][name] = None
                    self._note(rank, name, is_there=True)

    def _lose(self, rank: int, names: list[bytes]) -> None:
        for name in names:
            del self._there[rank][name]
            self._note(rank, name, is_there=False)
        lost = set(names)
        self._lasting = {digest for digest in self._lasting if self._names[digest] not in lost}

    def _note(self, rank: int, name: bytes, *, is_there: bool) -> None:
        if (log := self._logs[rank]) is not None:
            log.note(name, is_there=is_there)

    def _answer(self, rank: int) -> None:
        """A task ends: it brings what is new, and may overtake others of its rank."""
        log = self._logs[rank]
        if log is None or log.listener != self._listener:
            log = self._logs[rank] = NewsLog(self._listener, self._there[rank])
        news = log.take()
        if news is not None:
            said = (int(RecordTag.STORE), rank, _NUM_RANKS, self._opened[rank], *news[:-1])
            self._coming.insert(self._random.randrange(max(0, len(self._coming) - 2), len(self._coming) + 1), said)

    def take(self) -> list[Note]:
        """What is heard next."""
        num = self._random.randrange(3)
        taken, self._coming = self._coming[:num], self._coming[num:]
        return taken

    def be_quiet(self) -> None:
        """All is said."""
        for rank in range(_NUM_RANKS):
            self._answer(rank)

    def check(self, expected: Known, known: Known) -> None:
        """Raise `AssertionError` where an index that is `known` has what is not so of the stores. Adds what it has of
        them to what is `expected`."""
        blocks = expected[0]
        self._check_images(expected[1], known[1])
        told = {digest for digest, bits in known[0].items() if bits & _BIT}
        self._names = {d: name for d, name in self._names.items() if any(name in there for there in self._there)}
        whole = {digest for digest, name in self._names.items() if all(name in there for there in self._there)}
        assert told <= whole, "a block is told that is not in every store"
        assert whole & blocks.keys() <= told, "a block is not told that is in the tree and in every store"
        if self._epoch == self._tree.epoch:  # a reset makes orphans, which wait for the block before them
            assert self._lasting <= told, "a block is told no more that has stayed in every store"
        self.num_told, self.num_lasting = self.num_told + len(told), self.num_lasting + len(told - blocks.keys())
        self._lasting, self._epoch = told, self._tree.epoch
        for digest in told:
            blocks[digest] = blocks.get(digest, 0) | _BIT

    def _check_images(self, units: dict[UnitKey, int], known: dict[UnitKey, int]) -> None:
        self._images = {
            name: keys for name, keys in self._images.items() if any(name in there for there in self._there)
        }
        whole = {name: keys for name, keys in self._images.items() if all(name in there for there in self._there)}
        told = {key for key, bits in known.items() if bits & _BIT}
        assert told <= set[UnitKey]().union(*whole.values()), "a unit is told whose image is not in every store"
        for run in self._tree.runs():
            for checkpoint in chain_of(run) if run.epoch == self._tree.epoch else ():
                if checkpoint.units is None and checkpoint.pages is None:  # a load keeps it that could not land
                    continue
                digests, mark = _digests_of(self._tree, run)
                (name,) = page_names(digests[checkpoint.boundary - 1], 1)
                keys = whole.get(owned(name, mark), set())
                assert keys <= told, "a checkpoint is not told that is in the tree and in every store"
                self.num_images += bool(keys)
        for key in told:
            units[key] = units.get(key, 0) | _BIT


def _units_of(checkpoint: Checkpoint, digests: Sequence[bytes], rows: Sequence[Row]) -> set[UnitKey]:
    end = checkpoint.boundary
    return {
        (number, digests[block])
        for number, row in enumerate(rows, start=1)
        for block in range(row.first_block(end), end)
    }


def _digests_of(tree: PrefixTree, run: Run) -> tuple[list[bytes], bytes]:
    """The digests of all blocks down to a run's last one, and whose they are."""
    namespace, hasher, digests = run.root().namespace, BlockHasher(tree.block_size), list[bytes]()
    parent = root_hash(namespace, tree.block_size)
    for each in run.path():
        joined = hasher.extend(parent, each.tokens, 0, each.num_blocks, each.extras)
        digests += [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]
        parent = joined[-HASH_BYTES:]
    return digests, owner_mark(namespace)
