"""The protocol of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from transfer_manager.task import Direction, Int32Array


class Device(Protocol):
    """One rank's KV arrays and CPU blocks. Used by one thread at a time, in the rank (or inline in the engine)."""

    def swap(
        self,
        direction: Direction,
        gpu_block_ids: Int32Array,
        cpu_block_ids: Int32Array,
        on_layer: Callable[[int], None],
    ) -> int:
        """Copy block `gpu_block_ids[i]` to (SWAP_OUT) or from (SWAP_IN) CPU block `cpu_block_ids[i]`, layer by layer.

        Calls `on_layer(n)` when the first n layers are in place. Returns the bytes moved; all are in place then.

        Raises:
            DeviceError: lists of different length or an id outside its pool; nothing was copied.
        """
        ...
