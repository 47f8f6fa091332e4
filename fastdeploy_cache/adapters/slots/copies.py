"""What copies the first positions of one slot to another."""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np

from fastdeploy_cache.errors import ConfigError, RequestError
from fastdeploy_cache.manager import PrefixCacheManager

Array = np.ndarray[Any, Any]
_KILL_SECONDS = 2.0  # a rank is killed half a second after its task's deadline


class CopiesSlots(Protocol):
    """What holds the bytes of slots."""

    def check(self, last_slot: int, num_positions: int) -> None:
        """Raise `RequestError` unless it has this slot, and as many positions in it."""

    def copy(self, source_slot: int, target_slot: int, num_positions: int) -> bool:
        """Copy the first positions of a slot to another one; False where the target's bytes are unknown now."""


class ArraySlots:
    """Slots of arrays or tensors [slot, position, layer, ...], and of each the first `num_layers` layers."""

    def __init__(self, arrays: tuple[Array, ...], num_layers: int) -> None:
        self._arrays = arrays
        self._num_layers = num_layers

    def check(self, last_slot: int, num_positions: int) -> None:
        """Raise `RequestError` unless all arrays have this slot, so many positions, and the layers to copy."""
        needed = (last_slot + 1, num_positions, self._num_layers)
        for array in self._arrays:
            if array.ndim < 3 or any(has < needs for has, needs in zip(array.shape, needed, strict=False)):
                raise RequestError(f"KV array of shape {array.shape} for {needed} slots, positions and layers")
        if self._num_layers < 1:
            raise RequestError(f"n_layers is {self._num_layers}; copy 1 or more")

    def copy(self, source_slot: int, target_slot: int, num_positions: int) -> bool:
        """Copy the first positions of a slot in each array, at once: always True."""
        for array in self._arrays:
            part = array[:, :num_positions, : self._num_layers]
            part[target_slot] = part[source_slot]
        return True


class RankSlots:
    """Slots in a manager's GPU blocks: slot s is blocks [s * blocks_per_slot, (s + 1) * blocks_per_slot). Any thread.

    Make it before the manager serves anything, and close it before the manager.
    """

    def __init__(self, manager: PrefixCacheManager, max_slots: int, blocks_per_slot: int) -> None:
        """Take the blocks.

        Raises:
            ConfigError: no slots, or slots of no blocks.
            OutOfBlocksError: the manager has not so many.
            RequestError: they are not its first ones. Nothing was taken.
        """
        self._manager = manager
        if min(max_slots, blocks_per_slot) < 1:
            raise ConfigError(f"{max_slots} slots of {blocks_per_slot} blocks; give 1 or more of both")
        self._blocks_per_slot = blocks_per_slot
        self._ids = manager.blocks.allocate(max_slots * blocks_per_slot)
        if self._ids != list(range(len(self._ids))):
            manager.blocks.free(self._ids)
            raise RequestError("slots need the manager's first blocks, but some are in use; take the slots first")

    def block_ids(self, slot: int) -> range:
        """The blocks of a slot, as in `PrefixCacheManager.kv_views`."""
        self.check(slot, 0)
        return range(slot * self._blocks_per_slot, (slot + 1) * self._blocks_per_slot)

    def check(self, last_slot: int, num_positions: int) -> None:
        """Raise `RequestError` unless there is this slot, with room for so many tokens."""
        num_slots = len(self._ids) // self._blocks_per_slot
        slot_tokens = self._blocks_per_slot * self._manager.config.block_size
        if not 0 <= last_slot < num_slots or num_positions > slot_tokens:
            raise RequestError(
                f"slot {last_slot} for {num_positions} tokens; there are {num_slots} slots of {slot_tokens}"
            )

    def copy(self, source_slot: int, target_slot: int, num_positions: int) -> bool:
        """Copy the first positions of a slot on every rank; False where the target's bytes are unknown now. Waits until
        nothing is being written to the target any more."""
        sources, targets = self.block_ids(source_slot), self.block_ids(target_slot)
        num_full, num_more = divmod(num_positions, self._manager.config.block_size)
        end = num_full + 1
        copied = not num_full or self._manager.blocks.copies.copy(sources[:num_full], targets[:num_full])
        if copied and num_more:
            copied = self._manager.blocks.copies.copy(sources[num_full:end], targets[num_full:end], num_tokens=num_more)
        if not copied:  # a late rank may still write to the target, which its owner is free to fill after this
            self._manager.wait_for_transfers(self._manager.config.transfer.task_timeout_seconds + _KILL_SECONDS)
        return copied

    def close(self) -> None:
        """Give the blocks back. Again: nothing."""
        self._manager.blocks.free(self._ids)  # what is still being copied into is free after that
        self._ids = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
