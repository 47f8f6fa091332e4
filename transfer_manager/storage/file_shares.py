"""Which of a file store's objects make room for whom, where namespaces have a share of its slots. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from fastdeploy_cache.transfer_manager.storage.keys import MARK_AT, MARK_BYTES

_REST = 0  # whose names have no mark, or that of somebody without a share


class SlotShare(NamedTuple):
    """What a namespace keeps from others, and what it has at most, as parts of 1; `owner` is its mark."""

    owner: bytes
    guaranteed: float
    most: float


class SlotShares:
    """The objects of each, the least recently used first. As long as somebody has no more than is guaranteed to it,
    none of its objects goes for another's; nothing is reserved. One thread at a time."""

    def __init__(self, shares: Sequence[SlotShare], num_slots: int) -> None:
        self._shares = shares
        self._numbers = {share.owner: 1 + place for place, share in enumerate(shares)}
        self._orders: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(1 + len(shares))]
        self._last = 0  # use: of all objects together
        self.fit(num_slots)

    def fit(self, num_slots: int) -> None:
        """Shares are of so many slots: a full disk may have fewer than there should be."""
        self._least = [0, *[int(share.guaranteed * num_slots) for share in self._shares]]
        self._most = [num_slots, *[int(share.most * num_slots) for share in self._shares]]

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

    def room(self, num: int, kept: Collection[bytes], owner: bytes) -> tuple[int, list[bytes]]:
        """How many of so many objects more somebody may have, and which of its own go for that: the least recently used
        ones, but none that is kept."""
        number = self._numbers.get(owner, _REST)
        num_over = len(self._orders[number]) + num - self._most[number] if number != _REST else 0
        if num_over <= 0:
            return num, []
        gone = list(islice(self._own(number, kept), min(num, num_over)))
        return max(0, num - num_over + len(gone)), gone

    def _own(self, number: int, kept: Collection[bytes]) -> Iterator[bytes]:
        return (name for name in self._orders[number] if name not in kept)

    def victims(self, num: int, num_needed: int, kept: Collection[bytes], owner: bytes) -> list[bytes]:
        """Up to so many objects that may make room for somebody: the least recently used of those who have more than is
        guaranteed to them. As far as these are less than what is needed, then its own, of which no guarantee holds
        against itself. None that is kept."""
        walks = [self._own(number, kept) for number in range(len(self._orders))]
        to_give = [len(order) - least for order, least in zip(self._orders, self._least, strict=True)]
        heads: list[tuple[int, int, bytes]] = []

        def look_on(number: int) -> None:
            name = next(walks[number], None) if to_give[number] > 0 else None
            if name is not None:
                heapq.heappush(heads, (self._orders[number][name], number, name))

        for number in range(len(walks)):
            look_on(number)
        found = list[bytes]()
        while heads and len(found) < num:
            _, number, name = heapq.heappop(heads)
            found.append(name)
            to_give[number] -= 1
            look_on(number)
        if len(found) < num_needed:
            taken = {*found, *kept}
            found += islice(self._own(self._numbers.get(owner, _REST), taken), num_needed - len(found))
        return found
