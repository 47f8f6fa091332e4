"""The engine's tree as records tell it, and the events that follow from each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fastdeploy_cache.books.block_hash import HASH_BYTES, TOKEN_BYTES
from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.journal import (
    Began,
    Record,
    RunGone,
    RunParted,
    RunsJoined,
    RunTold,
    StoreGone,
    StoreTold,
    TreeCleared,
)
from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.events.publisher.images import ImageChange
from fastdeploy_cache.events.publisher.node import Node
from fastdeploy_cache.events.publisher.store import ToldStore
from fastdeploy_cache.events.publisher.stretch import Stretch, Teller, stretches
from fastdeploy_cache.events.wire import DISK_MEDIUM, MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, Event
from fastdeploy_cache.transfer_manager.kv.groups import Row

_MOST_REMOVED = 2048  # blocks in one event
_DISK = MEDIA.index(DISK_MEDIUM)
Part = tuple[Stretch, str, int | None]  # with its medium and group


class ToldTree:
    """Applies records; `take` gives the events since the last call. One thread.

    An event names a block only where it changes whether the block is in that medium, so that none is told twice.
    """

    def __init__(self, scheme: NameScheme, rows: Sequence[Row] = ()) -> None:
        """`rows`: of a hybrid model, those behind the full one, in the order of its configuration.

        Raises:
            ConfigError: names of that kind cannot be made.
        """
        self._scheme, self._rows = scheme, tuple(rows)
        self._naming, self._teller, self._store = scheme.names(), Teller(scheme, rows), ToldStore(scheme)
        self._block_bytes = scheme.block_size * TOKEN_BYTES
        self._group = 0 if rows else None
        self._nodes: dict[int, Node] = {}
        self._tops: dict[int, Node] = {}  # those that begin prompts
        self._num_units = Counter[tuple[int, int, bytes]]()  # by row, tier and digest
        self._events: list[Event] = []
        self._has_begun = False
        self._frozen: list[Part] | None = None

    def distrust(self) -> None:
        """Some records are lost: nothing counts before the next `Began`."""
        self._has_begun = False

    def take(self) -> list[Event]:
        """The events that are due."""
        events, self._events = self._events, []
        return events

    def apply(self, record: Record) -> None:
        """Take a record in. Raises `CodecError` where it does not follow from those before it.

        What comes before the first `Began` was meant for another publisher, which has died with it on its way.
        """
        self._frozen = None
        if not self._has_begun and not isinstance(record, Began):
            return
        self._has_begun = True
        if isinstance(record, Began | TreeCleared):
            self._nodes.clear()
            self._tops.clear()
            self._num_units.clear()
            self._events.append(AllBlocksCleared())
            if isinstance(record, Began):
                self._store = ToldStore(self._scheme)
            else:
                self._store.forget_tree()
        else:
            self._take_in(record)
        for change in self._store.take():
            self._tell_of_store(change)

    def _tell_of_store(self, change: bytes | Stretch | ImageChange) -> None:
        if isinstance(change, bytes):
            self._remove(_DISK, self._group, change)
        elif isinstance(change, Stretch):
            self._events.extend(self._teller.stored(change, MEDIA[_DISK], self._group))
        else:
            for row, whole in change.parts:
                self._turn(whole, row, _DISK, 1 if change.is_there else -1)

    def _take_in(self, record: RunTold | RunGone | RunParted | RunsJoined | StoreTold | StoreGone) -> None:
        if isinstance(record, RunTold):
            self._tell(record)
        elif isinstance(record, RunGone):
            self._end(record.number)
        elif isinstance(record, RunParted):
            self._part(record)
        elif isinstance(record, RunsJoined):
            self._join(record)
        elif isinstance(record, StoreTold):
            if not self._store.is_open:
                self._open_store()
            self._store.take_in(record)
        else:
            self._store.close()

    def freeze(self) -> list[Part]:
        """All that there is now, parents first: copies, the same ones until something changes. What is in several media
        comes once for each."""
        if self._frozen is None:
            self._frozen = self._parts()
        return self._frozen

    def thaw(self) -> None:
        """Nobody needs what was frozen."""
        self._frozen = None

    def _parts(self) -> list[Part]:
        found, nodes = list[Part](), list(self._tops.values())
        for node in nodes:  # they grow meanwhile
            nodes.extend(node.children.values())
            for medium, (first, end) in zip(MEDIA, node.spans, strict=False):
                if first < end:
                    found.append((node.stretch(first, end), medium, self._group))
        found.extend(self._frozen_units(nodes) if self._rows else ())
        found.extend((stretch, MEDIA[_DISK], self._group) for stretch in self._store.stretches())
        return found

    def stored(self, part: Part) -> Sequence[BlockStored]:
        """The events that tell of a part."""
        return list(self._teller.stored(*part))

    # -- records

    def _node(self, number: int) -> Node:
        node = self._nodes.get(number)
        if node is None:
            raise CodecError(f"a record of run {number}, of which nothing was told")
        return node

    def _siblings(self, node: Node) -> dict[int, Node]:
        return self._tops if node.parent is None else node.parent.children

    def _tell(self, record: RunTold) -> None:
        """What is there no more goes first, then comes what is new."""
        node = self._nodes.get(record.number)
        if node is None:
            parent = self._node(record.parent) if record.parent else None
            node = self._nodes[record.number] = Node(parent, record.namespace, self._block_bytes)
            self._siblings(node)[record.number] = node
        extras = record.extras or {}
        num_kept = node.num_kept(record.num_blocks, record.first, record.tokens, extras)
        spans = [(0, record.num_gpu), (record.cpu_start, record.cpu_start + record.num_cpu)]
        wanted = [{place: b for place, b, bits in record.anchors if bits & 1 << tier} for tier in range(len(spans))]
        for tier, there in enumerate(node.anchors):
            for place in [place for place in there if place > num_kept or place not in wanted[tier]]:
                self._lift(node, place, tier)
        for tier, (first, end) in enumerate(spans):
            self._keep(node, tier, first, min(end, num_kept))
        self._store.leave(node.digests[num_kept * HASH_BYTES :])
        node.cut(num_kept)
        if record.num_blocks > num_kept:
            new = record.tokens[(num_kept - record.first) * self._block_bytes :]
            node.grow(new, extras, self._naming)
            self._store.learn(node, num_kept)
        for tier, (first, end) in enumerate(spans):
            self._fill(node, tier, first, end)
        for tier, anchors in enumerate(wanted):
            for place, boundary in anchors.items():
                self._anchor(node, place, boundary, tier)

    def _keep(self, node: Node, tier: int, first: int, end: int) -> None:
        """Only blocks [first, end) stay in a tier, of those that are there."""
        start, stop = node.spans[tier]
        first, end = max(first, start), min(end, stop)
        if first >= end:
            gone, node.spans[tier] = [(start, stop)], (0, 0)
        else:
            gone, node.spans[tier] = [(start, first), (end, stop)], (first, end)
        for each in gone:
            if each[0] < each[1]:
                self._remove(tier, self._group, node.digests[each[0] * HASH_BYTES : each[1] * HASH_BYTES])

    def _fill(self, node: Node, tier: int, first: int, end: int) -> None:
        """Blocks [first, end) are in a tier, of which some were already."""
        start, stop = node.spans[tier]
        if first >= end:
            return
        if end > node.num_blocks:
            raise CodecError(f"a run of {node.num_blocks} blocks has blocks {first} to {end} in tier {tier}")
        new = [(first, end)] if start >= stop else [(first, start), (stop, end)]
        node.spans[tier] = first, end
        for each in new:
            if each[0] < each[1]:
                self._events.extend(self._teller.stored(node.stretch(*each), MEDIA[tier], self._group))

    def _remove(self, tier: int, group: int | None, digests: bytes | bytearray) -> None:
        names = self._teller.names(digests)
        for start in range(0, len(names), _MOST_REMOVED):
            some = names[start : start + _MOST_REMOVED]
            self._events.append(BlockRemoved(block_hashes=some, medium=MEDIA[tier], group_idx=group))

    def _end(self, number: int) -> None:
        """A run has gone, with all below it. One that is not known went with the one above it."""
        if (top := self._nodes.get(number)) is None:
            return
        below = [(number, top)]
        for _, node in below:  # it grows meanwhile
            below.extend(node.children.items())
        for each, node in reversed(below):
            self._drop(node)
            del self._nodes[each]
        del self._siblings(top)[number]

    def _drop(self, node: Node) -> None:
        """What a run has is nowhere any more."""
        for tier, there in enumerate(node.anchors):
            for place in list(there):
                self._lift(node, place, tier)
            self._keep(node, tier, 0, 0)
        self._store.leave(node.digests)

    def _part(self, record: RunParted) -> None:
        lower = self._node(record.lower)
        siblings = self._siblings(lower)
        upper = lower.part(record.num_blocks)
        del siblings[record.lower]
        siblings[record.upper] = self._nodes[record.upper] = upper
        upper.children[record.lower] = lower

    def _join(self, record: RunsJoined) -> None:
        """Where fewer blocks of the upper run are known than it had, or others, what the lower one has comes with the
        next record of it: in between it is not told."""
        upper, lower = self._node(record.upper), self._node(record.lower)
        if upper.num_blocks == record.num_above:
            for tier in range(len(upper.spans)):
                if not upper.meets(lower, tier):  # what was told of one is of an earlier moment
                    self._keep(lower, tier, 0, 0)
            upper.join(lower)
        else:
            self._drop(lower)
        upper.adopt(lower.children)
        del self._nodes[record.lower]

    # -- checkpoints

    def _anchor(self, node: Node, place: int, boundary: int, tier: int) -> None:
        there = node.anchors[tier]
        if not 0 < place <= node.num_blocks:
            raise CodecError(f"a checkpoint comes behind block {place} of a run of {node.num_blocks}")
        if place not in there:
            there[place] = boundary
            parts = list(self._units(node, place, boundary))
            for row, whole in parts:
                self._turn(whole, row, tier, 1)
            self._store.anchor(node, place, parts)

    def _lift(self, node: Node, place: int, tier: int) -> None:
        boundary = node.anchors[tier].pop(place)
        self._store.lift(node, place)
        for row, whole in self._units(node, place, boundary):
            self._turn(whole, row, tier, -1)

    def _open_store(self) -> None:
        """A store says something for the first time."""
        nodes = self._store.open(self._tops.values())
        for node in nodes if self._rows else ():
            for there in node.anchors:
                for place, boundary in there.items():
                    self._store.anchor(node, place, list(self._units(node, place, boundary)))

    def _turn(self, whole: Stretch, row: int, tier: int, change: int) -> None:
        """Something holds these units of a tier now (1), or no more (-1): tell those that nothing else holds."""
        for part in self._turned(whole, row, tier, change):
            if change > 0:
                self._events.extend(self._teller.stored(part, MEDIA[tier], row))
            else:
                self._remove(tier, row, part.digests)

    def _units(self, node: Node, place: int, boundary: int) -> Iterator[tuple[int, Stretch]]:
        """For each row, its number and the blocks that are read of it behind a boundary."""
        for number, row in enumerate(self._rows, start=1):
            if count := row.num_units_at(boundary):
                yield number, node.last(place, count)

    def _turned(self, whole: Stretch, row: int, tier: int, change: int) -> Iterator[Stretch]:
        """Count the units of these blocks; those of which this is the first, or the last was taken."""
        turned = []
        for at in range(whole.num_blocks):
            key = row, tier, whole.digests[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            self._num_units[key] += change
            if self._num_units[key] == (change > 0):
                turned.append(at)
            if not self._num_units[key]:
                del self._num_units[key]
        for first, end in stretches(turned):
            yield whole.part(first, end)

    def _frozen_units(self, nodes: Sequence[Node]) -> Iterator[Part]:
        told = set[tuple[int, int, bytes]]()
        held = [
            (tier, row, whole)
            for node in nodes
            for tier, there in enumerate(node.anchors)
            for place, boundary in there.items()
            for row, whole in self._units(node, place, boundary)
        ]
        held += [(_DISK, row, whole) for parts in self._store.images.all() for row, whole in parts]
        for tier, row, whole in held:
            ends = range(HASH_BYTES, len(whole.digests) + 1, HASH_BYTES)
            keys = [(row, tier, whole.digests[end - HASH_BYTES : end]) for end in ends]
            fresh = [at for at, key in enumerate(keys) if key not in told]
            told.update(keys)
            for first, end in stretches(fresh):
                yield whole.part(first, end), MEDIA[tier], row
