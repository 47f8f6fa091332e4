"""Which blocks are in which medium, as events tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastdeploy_cache.events.wire import MEDIA, AllBlocksCleared, BlockName, BlockRemoved, BlockStored, Event

_BITS = {medium: 1 << place for place, medium in enumerate(MEDIA)}


@dataclass(frozen=True, kw_only=True)
class PrefixFound:
    """How much of a prompt's begin is cached, in tokens.

    Attributes:
        num_tokens: leading tokens whose blocks are each in some medium. Of a hybrid model: up to the last boundary at
            which a request can go on.
        num_gpu_tokens, num_cpu_tokens, num_disk_tokens: of these, those whose blocks are on the GPU; else in the CPU
            tier; else in storage.
    """

    num_tokens: int = 0
    num_gpu_tokens: int = 0
    num_cpu_tokens: int = 0
    num_disk_tokens: int = 0


class BlockIndex:
    """Blocks by name. One thread at a time.

    Attributes:
        blocks: of the full row, the media that each is in, as bits: 1 GPU, 2 CPU, 4 DISK.
        units: the same of the other groups of a hybrid model, by group and name.
        groups: of such a model, kind and window of each but the full one, by number.
    """

    def __init__(self, groups: Mapping[int, tuple[str, int]] | None = None) -> None:
        """`groups`: of a hybrid model, kind and window of each but the full one, by number."""
        self.blocks: dict[BlockName, int] = {}  # bits, of the full row
        self.units: dict[tuple[int, BlockName], int] = {}  # bits, of the other groups of a hybrid model
        self.groups = dict(groups or {})
        self._num = Counter[tuple[int, str]]()

    def clear(self) -> None:
        """Nothing is known."""
        self.blocks.clear()
        self.units.clear()
        self._num.clear()

    def __len__(self) -> int:
        return len(self.blocks)

    def num_blocks(self, medium: str, group: int = 0) -> int:
        """How many blocks are in a medium."""
        return self._num[group, medium]

    def apply(self, event: Event) -> None:
        """Take an event in. One that says what is known already changes nothing."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
            return
        bit = _BITS.get(event.medium or MEDIA[0])
        if bit is None:  # a medium of somebody else's
            return
        group, medium = event.group_idx or 0, event.medium or MEDIA[0]
        if isinstance(event, BlockStored):
            self._store(event.block_hashes, group, medium, bit)
        else:
            self._remove(event, group, medium, bit)

    def _store(self, names: Sequence[BlockName], group: int, medium: str, bit: int) -> None:
        num_new = 0
        for name in names:
            bits = self.units.get((group, name), 0) if group else self.blocks.get(name, 0)
            num_new += not bits & bit
            if group:
                self.units[group, name] = bits | bit
            else:
                self.blocks[name] = bits | bit
        self._num[group, medium] += num_new

    def _remove(self, event: BlockRemoved, group: int, medium: str, bit: int) -> None:
        for name in event.block_hashes:
            bits = self.units.get((group, name), 0) if group else self.blocks.get(name, 0)
            if not bits & bit:
                continue
            self._num[group, medium] -= 1
            if left := bits & ~bit:
                if group:
                    self.units[group, name] = left
                else:
                    self.blocks[name] = left
            elif group:
                del self.units[group, name]
            else:
                del self.blocks[name]

    def find(self, names: Sequence[BlockName], block_size: int) -> PrefixFound:
        """How many leading blocks of a prompt, called so, are there."""
        bits = list[int]()
        for name in names:
            there = self.blocks.get(name, 0)
            if not there:
                break
            bits.append(there)
        end = self._boundary(names, len(bits), block_size) if self.groups else len(bits)
        in_media = Counter([each & -each for each in bits[:end]])  # the lowest bit: the fastest medium
        gpu, cpu, disk = (in_media[bit] * block_size for bit in _BITS.values())
        return PrefixFound(num_tokens=end * block_size, num_gpu_tokens=gpu, num_cpu_tokens=cpu, num_disk_tokens=disk)

    def _boundary(self, names: Sequence[BlockName], num_blocks: int, block_size: int) -> int:
        """The last boundary at which every group has what is read behind it."""
        for end in range(num_blocks, 0, -1):
            if all(self._has_units(names, end, group, block_size) for group in self.groups):
                return end
        return 0

    def _has_units(self, names: Sequence[BlockName], end: int, group: int, block_size: int) -> bool:
        kind, window = self.groups[group]
        if kind == "mamba":
            first = end - 1
        elif kind == "chunked_local_attention":
            first = end * block_size // window * window // block_size if window else end - 1
        else:
            first = max(0, end * block_size - window + 1) // block_size
        return all(self.units.get((group, names[at]), 0) for at in range(first, end))
