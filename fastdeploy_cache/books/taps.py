"""Who hears of blocks that come to a tier and leave it, and of runs that are cut and joined. Under the lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import Run, Tier


class Loss(IntEnum):
    """Why blocks leave a tier: to make room on the GPU or in the CPU tier, where what continues them goes with
    them; forgotten by a reset or a caller; with a rank's or a tier's memory; for other weights; as a spare copy of
    what the GPU has, or one checkpoint of too many on a path; and where another run has them now. And `OUTPUT`:
    computed, and never cached, as `cache_outputs` is off. Where there are rows: `UNITS`, to make room for units of
    one; `TRIMMED`, as no checkpoint follows any more. Of a tenant: `EXPIRED`, as it was not used for its time to
    live."""

    GPU = 0
    CPU = 1
    RESET = 2
    RANK = 3
    OUTPUT = 4
    WEIGHTS = 5
    SPARE = 6
    MOVED = 7
    UNITS = 8
    TRIMMED = 9
    EXPIRED = 10


Came = Callable[[Run, Tier, int, int], object]
Left = Callable[[Run, Tier, int, int, Loss], object]
Ended = Callable[[Run, int, Loss], object]
Hidden = Callable[[Run], object]
Shaped = Callable[[Run, Run], object]
Anchored = Callable[[Checkpoint, Tier], object]
Lifted = Callable[[Checkpoint, Tier, Loss], object]


@dataclass(slots=True)
class Taps:
    """Each tap is called with what it is there for, in the order of its tuple; it must not raise, and changes nothing.
    An empty tuple costs nothing.

    From what `came`, `left`, `parted` and `joined` hear, the content of every tier can be told at any time.

    Attributes:
        began: a run has its first blocks in a tier: (run, tier, first, num_blocks).
        came: a run has `num_blocks` more blocks in a tier, from its block `first` on. After `began`.
        left: a run loses these in that tier, and has its tokens yet: (run, tier, first, num_blocks, why).
        left_whole: those of `left` that also hear of a leaf that is evicted whole; to others `ended` says enough.
        ended: a run is about to lose its blocks from `first` on in all tiers, and their tokens: (run, first, why).
        hidden: nobody finds a run any more, whose blocks go when nobody holds them; children first: (run).
        parted: the first blocks of a run are those of a new one above it now: (upper, lower).
        joined: what a run had is at the end of the one above it now, and the lower one is about to go: (upper, lower).
        anchored: a checkpoint has come to a tier: (checkpoint, tier).
        lifted: a checkpoint has left a tier, and still says where it was: (checkpoint, tier, why).
    """

    began: tuple[Came, ...] = ()
    came: tuple[Came, ...] = ()
    left: tuple[Left, ...] = ()
    left_whole: tuple[Left, ...] = ()
    ended: tuple[Ended, ...] = ()
    hidden: tuple[Hidden, ...] = ()
    parted: tuple[Shaped, ...] = ()
    joined: tuple[Shaped, ...] = ()
    anchored: tuple[Anchored, ...] = ()
    lifted: tuple[Lifted, ...] = ()
