"""Which blocks the file store takes: writes wear a disk out, and most prompts never come again. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MIN_REMEMBERED = 1024


class Admission:
    """One of the filters of `StorageConfig.admission`. One thread."""

    def __init__(self, kind: str, min_priority: float, num_slots: int) -> None:
        self._kind = kind
        self._min_priority = min_priority
        self._num_remembered = max(4 * num_slots, MIN_REMEMBERED)
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self.num_declined = 0

    def admit(self, hashes: Sequence[bytes], priority: float | None) -> int:
        """How many of a chain's missing blocks to write, from the first on: behind a hole they would be of no use."""
        num = len(hashes)
        if self._kind == "priority" and (priority is None or priority < self._min_priority):
            num = 0
        elif self._kind == "second_use":
            num = next((i for i, block_hash in enumerate(hashes) if block_hash not in self._remembered), num)
            self._remember(hashes)
        self.num_declined += len(hashes) - num
        return num

    def _remember(self, hashes: Sequence[bytes]) -> None:
        for block_hash in reversed(hashes):  # the chain's end is forgotten before its beginning
            self._remembered[block_hash] = None
            self._remembered.move_to_end(block_hash)
        while len(self._remembered) > self._num_remembered:
            self._remembered.popitem(last=False)

    def written(self, hashes: Iterable[bytes]) -> None:
        """These are there now; after an eviction they begin anew."""
        for block_hash in hashes:
            self._remembered.pop(block_hash, None)
