"""What rooms hear of when a turn ends: each change is noted where it happens, by whoever makes it happen.

A room says once what it listens to (`Books.listen`). It hears of a change before the lock is given back, after
everything that was decided in the turn, and in the order in which the rooms were built.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import Pin, Tier
from fastdeploy_cache.transfer_manager.task import StoreNews


@dataclass(slots=True, eq=False)
class Change:
    """Something that has happened. `pin`, where there is one, keeps its run until all have heard of it."""

    pin: Pin | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Matched(Change):
    """The request of that id is matched: what was fetched or received for it is pinned by the request now."""

    request_id: str


@dataclass(slots=True, eq=False, kw_only=True)
class Copied(Change):
    """The run of `pin` has `num_blocks` more blocks in the CPU tier."""

    num_blocks: int


@dataclass(slots=True, eq=False, kw_only=True)
class ImageCopied(Change):
    """A checkpoint has an image in the CPU tier."""

    checkpoint: Checkpoint


@dataclass(slots=True, eq=False, kw_only=True)
class Used(Change):
    """The path down to `pin` was used. `has_uncopied`: the CPU tier has no room for all of it at a time."""

    has_uncopied: bool


@dataclass(slots=True, eq=False, kw_only=True)
class NotCopied(Change):
    """A request went, and so many of its blocks should have been copied down and could not be."""

    num_blocks: int


@dataclass(slots=True, eq=False, kw_only=True)
class RoomCame(Change):
    """More or fewer blocks of a tier can be had than after the last turn, or somebody began to wait for some."""

    tier: Tier


@dataclass(slots=True, eq=False, kw_only=True)
class Forgotten(Change):
    """Nothing that was cached counts any more; what is cached from now on is of `weights_id`, where that is known."""

    weights_id: str | None


@dataclass(slots=True, eq=False, kw_only=True)
class NamespaceForgotten(Change):
    """Nothing that was cached of a namespace counts any more, nor what else is remembered of it."""

    namespace: str


@dataclass(slots=True, eq=False, kw_only=True)
class Soiled(Change):
    """Blocks have been freed whose bytes nobody else may see."""


@dataclass(slots=True, eq=False, kw_only=True)
class StoreHeard(Change):
    """Somebody listens to what a store has from now on, under this number; or still does, and wants to be sure."""

    listener: int


@dataclass(slots=True, eq=False, kw_only=True)
class StoreChanged(Change):
    """One of `num_ranks` says what has come to its store and gone."""

    rank: int
    num_ranks: int
    news: StoreNews


@dataclass(slots=True, eq=False, kw_only=True)
class StoreNewsTaken(Change):
    """Who listens to what a store has is behind with nothing."""


@dataclass(slots=True, eq=False, kw_only=True)
class StoreDetached(Change):
    """There is no store any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class TierLost(Change):
    """The bytes of a tier are gone, as its memory was given back or lost; what has no other place is forgotten."""


@dataclass(slots=True, eq=False, kw_only=True)
class GpuForgotten(Change):
    """A rank's KV arrays have gone or are new ones: nothing that was on the GPU counts any more."""

    rank: int


@dataclass(slots=True, eq=False, kw_only=True)
class PolicyChanged(Change):
    """It is evicted by another policy from now on; this is its name."""

    name: str


@dataclass(slots=True, eq=False, kw_only=True)
class StatusChanged(Change):
    """The cache is paused, asleep, running, or on its way there: see `LifeCycleStatus`, whose value this is."""

    status: str
