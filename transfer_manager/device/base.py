"""The protocol of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from transfer_manager.task import Direction, Int32Array


class Device(Protocol):
    """One rank's KV arrays and CPU blocks. Used by one thread at a time, in the rank (or inline in the engine)."""

    def copy(
        self,
        direction: Direction,
        source_ids: Int32Array,
        destination_ids: Int32Array,
        on_layer: Callable[[int], None],
    ) -> int:
        """Copy block `source_ids[i]` to block `destination_ids[i]`, layer by layer.

        SWAP_OUT: from GPU blocks to CPU blocks; SWAP_IN: the other way; COPY: within the GPU blocks (no id may be both
        source and destination).

        Calls `on_layer(n)` when the first n layers are in place. Returns the bytes moved; all are in place then.

        Raises:
            DeviceError: lists of different length or an id outside its pool; nothing was copied.
        """
        ...
