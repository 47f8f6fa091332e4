"""Which of a file store's objects make room for whom, where namespaces have a share of its slots. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from fastdeploy_cache.transfer_manager.storage.keys import MARK_AT, MARK_BYTES

_REST = 0  # whose names have no mark, or that of somebody without a share


class SlotShare(NamedTuple):
    """So many slots a namespace keeps from others, and so many it has at most; `owner` is its mark."""

    owner: bytes
    num_guaranteed: int
    num_most: int


class SlotShares:
    """The objects of each, the least recently used first. As long as somebody has no more than is guaranteed to it,
    none of its objects goes for another's; nothing is reserved. One thread at a time."""

    def __init__(self, shares: Sequence[SlotShare]) -> None:
        self._numbers = {share.owner: 1 + place for place, share in enumerate(shares)}
        self._least = [0, *[share.num_guaranteed for share in shares]]
        self._most: list[int | None] = [None, *[share.num_most for share in shares]]
        self._orders: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(1 + len(shares))]
        self._last = 0  # use: of all objects together

    def _number(self, name: bytes) -> int:
        return self._numbers.get(name[MARK_AT : MARK_AT + MARK_BYTES], _REST)

    def touch(self, name: bytes) -> None:
        """An object has come, or was used."""
        order = self._orders[self._number(name)]
        self._last += 1
        order[name] = self._last
        order.move_to_end(name)

    def remove(self, name: bytes) -> None:
        """An object has gone."""
        self._orders[self._number(name)].pop(name, None)

    def num_over(self, owner: bytes, num_more: int) -> int:
        """How many objects somebody would have above its most, with so many more."""
        number = self._numbers.get(owner, _REST)
        most = self._most[number]
        return 0 if most is None else max(0, len(self._orders[number]) + num_more - most)

    def own(self, owner: bytes, num: int, num_kept: int) -> list[bytes]:
        """Up to so many of somebody's own objects, but none of the last `num_kept` that were used."""
        order = self._orders[self._numbers.get(owner, _REST)]
        return [name for name, use in islice(order.items(), num) if use <= self._last - num_kept]

    def victims(self, num: int, num_kept: int, owner: bytes) -> list[bytes]:
        """Up to so many objects that may make room for somebody: the least recently used of those who have more than
        is guaranteed to them; then its own, of which no guarantee holds against itself."""
        walks: list[Iterator[tuple[bytes, int]]] = [iter(order.items()) for order in self._orders]
        to_give = [len(order) - least for order, least in zip(self._orders, self._least, strict=True)]
        heads: list[tuple[int, int, bytes]] = []

        def look_on(number: int) -> None:
            name, use = next(walks[number], (b"", 0)) if to_give[number] > 0 else (b"", 0)
            if name and use <= self._last - num_kept:
                heapq.heappush(heads, (use, number, name))

        for number in range(len(walks)):
            look_on(number)
        found = list[bytes]()
        while heads and len(found) < num:
            _, number, name = heapq.heappop(heads)
            found.append(name)
            to_give[number] -= 1
            look_on(number)
        if len(found) < num:
            taken = set(found)
            own = (name for name in self.own(owner, len(taken) + num, num_kept) if name not in taken)
            found += islice(own, num - len(found))
        return found
