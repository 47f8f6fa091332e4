"""What is wrong with the simulated machine now; faults set it, and take it back."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, fields


@dataclass
class Trouble:
    """Shares are of calls: 0 is none, 1 is all of them."""

    disk_error_share: float = 0.0  # a call fails with EIO
    disk_slow_share: float = 0.0  # a call takes `disk_slow_seconds`
    disk_slow_seconds: float = 0.0
    disk_flip_share: float = 0.0  # a read gives one bit that was never written
    disk_is_full: bool = False
    disk_lies: bool = False  # a sync makes nothing durable
    copy_seconds: float = 0.0  # each piece of a copy takes so long
    copy_error_share: float = 0.0  # a piece of a copy fails
    message_seconds: float = 0.0  # messages take up to this
    lost_share: float = 0.0  # of messages between instances
    has_no_descriptors: bool = False  # processes get none more than they have
    has_no_threads: bool = False
    has_no_processes: bool = False
    has_no_memory: bool = False  # for segments
    memory_error_share: float = 0.0  # a line that asks for memory by blocks raises
    outside_error_share: float = 0.0  # a call of a policy, or of metrics, raises
    wall_clock_shift: float = 0.0

    def end(self) -> None:
        """All is well again; the wall clock stays where it is."""
        for each in fields(self):
            if each.name != "wall_clock_shift":
                setattr(self, each.name, each.default)

    def fails(self, share: float, chance: random.Random) -> bool:
        """Whether this call is one of that share; draws nothing where it is none."""
        return bool(share) and chance.random() < share


def system_error(number: int) -> OSError:
    """The error, as the system raises it."""
    return OSError(number, os.strerror(number))


def broken() -> OSError:
    """What a disk says that cannot read."""
    return system_error(errno.EIO)
