"""Which checkpoints of a hybrid model are in a store: their last pages by name, and what is read behind each."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.events.publisher.stretch import Stretch

Ask = Callable[[bytes], bool]
Parts = Sequence[tuple[int, Stretch]]  # of each row, its number and the blocks that are read of it

_MOST_LATELY = 1024  # checkpoints that have left the tiers, of which this is kept even so


class ImageChange(NamedTuple):
    """An image has come, or has gone."""

    parts: Parts
    is_there: bool


class ToldImages:
    """Images by the name of their last page, by which a look-up knows them. One thread.

    An image is told when every rank has that page, it was told of a tier before, and the blocks before those that it
    holds, and these, are known; else when it comes to a tier again. See `ToldStore`, whose part it is.
    """

    def __init__(self, is_known: Ask, is_whole: Ask, is_held: Ask, note: Callable[[ImageChange], None]) -> None:
        """Whether listeners know a block, by digest; whether every rank has a page, or any; who hears of changes."""
        self._is_known, self._is_whole, self._is_held, self._note = is_known, is_whole, is_held, note
        self._images: dict[bytes, Parts] = {}  # that are in a tier, or that a rank has
        self._num_tiers = Counter[bytes]()
        self._lately: OrderedDict[bytes, None] = OrderedDict()
        self._told: dict[bytes, None] = {}

    def all(self) -> Iterable[Parts]:
        """What is read behind each that is told."""
        return [self._images[name] for name in self._told]

    def anchor(self, name: bytes, parts: Parts) -> None:
        """It is in a tier more."""
        self._num_tiers[name] += 1
        self._lately.pop(name, None)
        self._images[name] = parts
        self._tell(name)

    def lift(self, name: bytes) -> None:
        """It is in a tier less."""
        self._num_tiers[name] -= 1
        if self._num_tiers[name] > 0:
            return
        del self._num_tiers[name]
        self._lately[name] = None  # it may be on its way to the store
        if len(self._lately) > _MOST_LATELY:
            oldest, _ = self._lately.popitem(last=False)
            self._drop_unknown(oldest)

    def change(self, name: bytes) -> None:
        """Its last page has come to a rank's store, or has gone."""
        if self._is_whole(name):
            self._tell(name)
        elif name in self._told:
            del self._told[name]
            self._note(ImageChange(self._images[name], False))
        self._drop_unknown(name)

    def forget_tree(self) -> None:
        """Nothing is in a tier any more, and listeners know of nothing: tell all anew."""
        self._num_tiers.clear()
        self._told = {}
        for name in list(self._images):
            self._drop_unknown(name)
            self._tell(name)

    def _tell(self, name: bytes) -> None:
        parts = self._images.get(name)
        if parts is None or name in self._told or not self._is_whole(name):
            return
        if all(self._is_known(digest) for _, whole in parts for digest in _in_front_of(whole)):
            self._told[name] = None
            self._note(ImageChange(parts, True))

    def _drop_unknown(self, name: bytes) -> None:
        if not self._is_held(name) and name not in self._num_tiers and name not in self._lately:
            self._images.pop(name, None)


def _in_front_of(whole: Stretch) -> list[bytes]:
    """Each block in front of another one of these."""
    ends = range(HASH_BYTES, len(whole.digests), HASH_BYTES)
    return [*([whole.before] if whole.before else []), *[whole.digests[end - HASH_BYTES : end] for end in ends]]
