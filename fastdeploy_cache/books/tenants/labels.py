"""Whose each block of a pool is, by tenant."""

from __future__ import annotations

from array import array

import numpy as np

from fastdeploy_cache.books.block_pool import FREE, RUN, TASK
from fastdeploy_cache.books.id_table import Ids, IdTable

_SHORT = 12  # ids: fewer are counted one by one sooner than all at once


class LabelledTable:
    """An `IdTable` that also knows the tenant of each block which is not free. One thread at a time.

    A block is the rest's, number 0, until `label` says more, and is nobody's as soon as it is free. So whatever a
    tenant has is counted, whoever owns it: a run, a request, a task or a caller.

    Attributes:
        owners: as the table beneath has them.
        num_used: by tenant, blocks that are not free.
    """

    def __init__(self, table: IdTable, num_tenants: int) -> None:
        """`num_tenants`: with the rest, and with whatever a reset has forgotten, which is the last; below 256."""
        self._table, self.owners = table, table.owners
        self._labels = bytearray(len(table.owners))
        self._view = np.frombuffer(self._labels, np.uint8)
        self.num_used = [0] * num_tenants

    @property
    def num_free(self) -> int:
        """See `IdTable`."""
        return self._table.num_free

    def count(self, owner: int, /) -> int:
        """See `IdTable`."""
        return self._table.count(owner)

    def take(self, num_blocks: int, owner: int, /) -> array[int]:
        """See `IdTable`. They are the rest's."""
        ids = self._table.take(num_blocks, owner)
        self.num_used[0] += num_blocks
        return ids

    def move(self, ids: Ids, giver: int, taker: int, /) -> bool:
        """See `IdTable`."""
        is_good = self._table.move(ids, giver, taker)
        if is_good and giver != taker:
            if taker == FREE:
                self._change(ids, 0)
            elif giver == FREE:
                self.num_used[0] += len(ids)
            elif taker == TASK:  # its owner has given it back: it is nobody's guarantee while it is read, or wiped
                self._change(ids, 0)
                self.num_used[0] += len(ids)
        return is_good

    def label(self, ids: Ids, tenant: int) -> None:
        """These, none of them free, are a tenant's from now on."""
        self._change(ids, tenant)
        self.num_used[tenant] += len(ids)

    def _change(self, ids: Ids, tenant: int) -> None:
        """Note these as another's, and count them no more as those of whom they were. Needs no memory."""
        labels, num_used = self._labels, self.num_used
        if len(ids) >= _SHORT:
            try:
                places = np.frombuffer(ids, np.int32)
                counts = np.bincount(self._view[places])
            except MemoryError:  # one by one they need none
                pass
            else:
                self._view[places] = tenant
                for number, count in enumerate(counts):
                    num_used[number] -= int(count)
                return
        for block in ids:
            num_used[labels[block]] -= 1
            labels[block] = tenant

    def forget_runs(self) -> None:
        """What runs have now is the last tenant's: a reset has forgotten it."""
        self._view[np.frombuffer(self.owners, np.uint8) == RUN] = len(self.num_used) - 1
        self.num_used[:] = self.counted()

    def counted(self) -> list[int]:
        """What `num_used` has to be; a walk over the pool."""
        used = self._view[np.frombuffer(self.owners, np.uint8) != FREE]
        return [int(count) for count in np.bincount(used, minlength=len(self.num_used))]
