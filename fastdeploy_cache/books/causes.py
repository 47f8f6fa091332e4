"""Why a token of a prompt was not served by the cache: the closed set that metrics, logs and explanations use."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Cause(StrEnum):
    """The reason of a missed token: each has one. `place`: among all reasons, for counts in a list."""

    NEW = "new"  # it was never cached here
    NEW_OR_FORGOTTEN = "new_or_forgotten"  # nothing is remembered of it, and older memories have been dropped
    EVICTED = "evicted"  # it was cached, and made room for something else
    NAMESPACE = "namespace"  # the same tokens are cached under another namespace
    IMAGE = "image"  # the same tokens are cached with another image
    UNCOMMITTED = "uncommitted"  # another request was computing it
    LATE = "late"  # its load was not there in time
    SLOWER = "slower"  # computing it was expected to be faster than loading it
    RANK = "rank"  # a rank was down, or lost it
    ROOM = "room"  # there were no blocks to load it into, or the queue of loads was full
    LIMIT = "limit"  # a configured bound: caching is off, or the load too short or too long
    RESET = "reset"  # it was cached before a reset
    PARTIAL = "partial"  # the tail of a prompt that fills no block, or part of an image
    LAST = "last"  # the last token of a prompt is always computed
    UNANCHORED = "unanchored"  # no checkpoint of a hybrid model was made behind it
    EXPIRED = "expired"  # it was not used for the time to live of its tenant

    place: int

    def __init__(self, _: str) -> None:
        self.place = len(type(self).__members__)


# The detail of `ROOM` where it is the CPU tier that had none.
NO_ROOM_TO_FETCH: Final = "storage has it, and the CPU tier had no room for it"
# The detail of `RESET` where there was a reason for it.
OTHER_WEIGHTS: Final = "the weights had changed"

# What follows "so many tokens were missed:"; `{when}` and `{where}` are of what was lost.
TEXTS: Final = {
    Cause.NEW: "this part of the prompt was never cached here",
    Cause.NEW_OR_FORGOTTEN: (
        "this part is new, or it went so long ago that nothing is remembered of it (lost_blocks_bytes says how much is)"
    ),
    Cause.EVICTED: "this part was evicted from the {where} {when} before, by the policy {policy}",
    Cause.NAMESPACE: "the same tokens are cached under another namespace",
    Cause.IMAGE: "the same tokens are cached with another image",
    Cause.UNCOMMITTED: "another request was computing this part, and had not committed it",
    Cause.LATE: "the load of this part was not there in time",
    Cause.SLOWER: "computing this part was expected to be faster than loading it",
    Cause.RANK: "a rank was down, or the memory that held this part was lost",
    Cause.ROOM: "there were no free blocks to load this part into, or the queue of loads was full",
    Cause.LIMIT: "a setting does not allow this part to be used",
    Cause.RESET: "this part was forgotten by a reset {when} before",
    Cause.PARTIAL: "this part fills no block, or lies in an image that is not cached whole",
    Cause.LAST: "the last token of a prompt is always computed",
    Cause.UNANCHORED: "no checkpoint lies behind this part at which the model could go on",
    Cause.EXPIRED: "this part was dropped {when} before, as it had not been used for its tenant's keep_seconds",
}
ROW_SHORT: Final = "units were short of the row"  # and its name: why a checkpoint has left the GPU
